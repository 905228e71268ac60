"""Replay: the blocks a buffer holds, and how samples are drawn from them.

The blocks stay where the actors put them, in the slab of the sample stream; holding one back is keeping it. A sample is
one step of one row together with what became of it ``n_step`` valid steps later, gathered straight from the slab into
the block that goes to the trainer. Steps are numbered by the order in which their blocks came, not by where the blocks
lie, so a restored replay draws what the lost one would have drawn.
"""

from __future__ import annotations

import numpy as np

from srl.algorithms.base import Replay
from srl.algorithms.returns import transitions
from srl.core.slab import STEP_FIELDS, BlockSpec, Slab
from srl.core.specs import Array, Arrays, ArraySpec
from srl.core.sumtree import SumTree
from srl.core.worker import State

_SAMPLE_FIELDS: dict[str, ArraySpec] = {
    "reward": STEP_FIELDS["reward"],
    "valid": STEP_FIELDS["valid"],
    "version": STEP_FIELDS["version"],
    "discount": ArraySpec((), "<f4"),  # of the value of the observation that follows; 0 if the episode terminated
    "weight": ArraySpec((), "<f4"),  # corrects for samples being drawn more often than others
    "index": ArraySpec((), "<i8"),  # where the sample lies, for the priority that comes back
    "stamp": ArraySpec((), "<i8"),  # which block lay there when it was drawn
    "inserted": ArraySpec((), "<i8"),  # steps that have come into the replay since the sample before this one
}
FEEDBACK_FIELDS: dict[str, ArraySpec] = {
    "index": ArraySpec((), "<i8"),
    "stamp": ArraySpec((), "<i8"),
    "priority": ArraySpec((), "<f4"),
}


def sample_block(spec: BlockSpec, replay: Replay) -> BlockSpec:
    """The blocks a replay sends to the trainer: step 0 is what was seen and done, step 1 what was seen afterwards."""
    kept = {name: spec.fields[name] for name in (*spec.observations, *spec.actions)}
    return BlockSpec({**kept, **_SAMPLE_FIELDS}, 1, replay.batch)


def feedback_block(replay: Replay) -> BlockSpec:
    """The blocks of priorities that the trainer sends back."""
    return BlockSpec(FEEDBACK_FIELDS, 0, replay.batch)


def blocks_kept(spec: BlockSpec, replay: Replay) -> int:
    """How many blocks make up the replay's capacity."""
    return max(1, -(-replay.capacity // (spec.horizon * spec.rows)))


class ReplayStore:
    """The steps of up to ``places`` blocks of a slab, and the weights they are drawn by."""

    def __init__(self, slab: Slab, replay: Replay, places: int, seed: int) -> None:
        self.slab, self.replay, self.places = slab, replay, places
        self.rng = np.random.default_rng(seed)
        spec = slab.spec
        self.shape = (places, spec.horizon, spec.rows)
        self.blocks = np.full(places, -1)  # which block of the slab holds the n-th of the replay
        self.stamps = np.full(places, -1)
        self.counts = np.zeros(places, np.int64)  # steps of it that can be drawn
        self.came = 0
        self.top = 1.0
        """The highest priority ever; a new sample has it too."""
        self.tree = SumTree(int(np.prod(self.shape)))
        self.reward = np.zeros(self.shape, np.float32)
        self.discount = np.zeros(self.shape, np.float32)
        self.after = np.zeros(self.shape, np.int32)

    def __len__(self) -> int:
        """Steps that can be drawn."""
        return int(self.counts.sum())

    def insert(self, block: int) -> tuple[int, int]:
        """Take in a block of the slab: (steps it brought, the block that had to go for it or -1)."""
        place = self.came % self.places
        gone = int(self.blocks[place])
        fields = self.slab.block(block)
        ends = {n: fields[n][:-1] for n in ("reward", "terminated", "truncated")}
        flags = {n: fields[n] for n in ("valid", "first")}
        found = transitions(**ends, **flags, gamma=self.replay.gamma, n_step=self.replay.n_step)
        self.reward[place], self.discount[place], self.after[place] = found.reward, found.discount, found.after
        first = place * self.shape[1] * self.shape[2]
        weight = self.top**self.replay.alpha if self.replay.kind == "prioritized" else 1.0
        self.tree[np.arange(first, first + found.known.size)] = found.known.reshape(-1) * weight
        self.blocks[place], self.stamps[place], self.counts[place] = block, self.came, np.count_nonzero(found.known)
        self.came += 1
        return int(np.count_nonzero(fields["valid"][:-1])), gone

    def draw(self, out: Arrays) -> None:
        """Fill a block for the trainer with samples."""
        count, total = self.replay.batch, self.tree.total
        # One draw from each of ``count`` equal shares: as random as independent draws, with less noise.
        leaves = self.tree.find((np.arange(count) + self.rng.random(count)) * (total / count))
        place, step, row = np.unravel_index(leaves, self.shape)
        start = self.blocks[place] * (self.slab.spec.horizon + 1)
        seen = (start + step) * self.slab.spec.rows + row
        later = (start + self.after[place, step, row]) * self.slab.spec.rows + row
        for name in self.slab.spec.observations:
            np.take(self.slab.flat[name], seen, 0, out=out[name][0], mode="clip")
            np.take(self.slab.flat[name], later, 0, out=out[name][1], mode="clip")
        for name in (*self.slab.spec.actions, "version"):
            np.take(self.slab.flat[name], seen, 0, out=out[name][0], mode="clip")
        out["reward"][0], out["discount"][0] = self.reward[place, step, row], self.discount[place, step, row]
        out["weight"][0], out["index"][0], out["stamp"][0] = self._weights(leaves), leaves, self.stamps[place]
        out["valid"][0] = True

    def _weights(self, leaves: Array) -> Array:
        """(N · probability)^-beta, scaled so that the largest is 1."""
        if self.replay.kind != "prioritized":
            return np.ones(len(leaves), np.float32)
        found = (self.tree[leaves] / self.tree.total * len(self)) ** -self.replay.beta
        return np.asarray(found / found.max(), np.float32)

    def reprioritize(self, index: Array, stamp: Array, priority: Array) -> None:
        """New priorities of samples, as far as they are still here."""
        here = self.stamps[index // (self.shape[1] * self.shape[2])] == stamp
        if here.any():
            self.top = max(self.top, float(priority[here].max()))
            self.tree[index[here]] = np.maximum(priority[here], 1e-6) ** self.replay.alpha

    def state(self) -> State:
        """Everything, with the contents of the blocks."""
        weights = self.tree.nodes[self.tree.capacity :].copy()
        whole = State({"weights": weights, "stamps": self.stamps.copy()}, {"came": self.came, "top": self.top})
        whole.values["rng"] = self.rng.bit_generator.state
        for name in ("reward", "discount", "after", "counts"):
            whole.arrays[name] = getattr(self, name).copy()
        for place in np.flatnonzero(self.blocks >= 0).tolist():
            whole.put(f"block/{place}", State({n: a.copy() for n, a in self.slab.block(self.blocks[place]).items()}))
        return whole

    def load_state(self, state: State, free: list[int]) -> list[int]:
        """Go on where ``state`` was taken; the blocks (of those ``free``) that are in use now."""
        self.came, self.top = state.values["came"], state.values["top"]
        self.rng.bit_generator.state = state.values["rng"]
        self.stamps[:] = state.arrays["stamps"]
        for name in ("reward", "discount", "after", "counts"):
            getattr(self, name)[...] = state.arrays[name]
        self.tree[np.arange(self.tree.capacity)] = state.arrays["weights"]
        held = np.flatnonzero(self.stamps >= 0).tolist()
        for place, block in zip(held, free[: len(held)], strict=True):
            self.blocks[place] = block
            for name, content in state.under(f"block/{place}").arrays.items():
                self.slab.arrays[name][block] = content
        return free[: len(held)]
