"""Replay: the blocks a buffer holds, and how samples are drawn from them.

The blocks stay where the actors put them, in the slab of the sample stream; holding one back is keeping it. A sample is
one step of one row together with what became of it ``n_step`` valid steps later (:class:`Transitions`), or a window of
steps as they were (:class:`Windows`), of one row or of all agents of a copy; it is gathered straight from the slab into
the block that goes to the trainer. Samples are numbered by the order in which their blocks came, not by where the
blocks lie, so a restored replay draws what the lost one would have drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from srl.algorithms.base import Replay
from srl.algorithms.returns import transitions
from srl.core.slab import STEP_FIELDS, BlockSpec, Slab
from srl.core.specs import Array, Arrays, ArraySpec
from srl.core.sumtree import SumTree
from srl.core.worker import State

_TRANSITION_FIELDS: dict[str, ArraySpec] = {
    "reward": STEP_FIELDS["reward"],
    "valid": STEP_FIELDS["valid"],
    "version": STEP_FIELDS["version"],
    "discount": ArraySpec((), "<f4"),  # of the value of the observation that follows; 0 if the episode terminated
}
_DRAWN_FIELDS: dict[str, ArraySpec] = {
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
    """The blocks a replay sends to the trainer: a window of steps and what was seen after them.

    Without windows step 0 is what was seen and done, step 1 what was seen afterwards.
    """
    kept = {name: spec.fields[name] for name in (*spec.observations, *spec.actions)}
    if not replay.window:
        return BlockSpec({**kept, **_TRANSITION_FIELDS, **_DRAWN_FIELDS}, 1, replay.batch)
    kept |= {name: spec.fields[name] for name in (*spec.state, *STEP_FIELDS)}
    rows = replay.batch * _together(spec, replay)
    return BlockSpec({**kept, **_DRAWN_FIELDS}, replay.window, rows, replay.window if spec.state else 0, spec.agents)


def _together(spec: BlockSpec, replay: Replay) -> int:
    return spec.agents if replay.teams else 1


def feedback_block(replay: Replay) -> BlockSpec:
    """The blocks of priorities that the trainer sends back."""
    return BlockSpec(FEEDBACK_FIELDS, 0, replay.batch)


def blocks_kept(spec: BlockSpec, replay: Replay) -> int:
    """How many blocks make up the replay's capacity."""
    return max(1, -(-replay.capacity // (spec.horizon * spec.rows)))


def steps_drawn(spec: BlockSpec, replay: Replay) -> int:
    """How many steps are in a batch, to be learned from."""
    return replay.batch * _together(spec, replay) * max(1, replay.window - replay.burn_in)


def replay_store(slab: Slab, replay: Replay, places: int, seed: int) -> ReplayStore:
    """The replay of this kind."""
    return (Windows if replay.window else Transitions)(slab, replay, places, seed)


class ReplayStore(ABC):
    """The samples of up to ``places`` blocks of a slab, and the weights they are drawn by."""

    kept: tuple[str, ...] = ("counts",)
    """Names of the arrays that say what is known of the samples."""

    def __init__(self, slab: Slab, replay: Replay, places: int, seed: int, shape: tuple[int, int]) -> None:
        """``shape``: how many samples a block has, by the step they begin with and by row."""
        self.slab, self.replay, self.places = slab, replay, places
        self.rng = np.random.default_rng(seed)
        self.shape = (places, *shape)
        self.blocks = np.full(places, -1)  # which block of the slab holds the n-th of the replay
        self.stamps = np.full(places, -1)
        self.counts = np.zeros(places, np.int64)  # samples of it that can be drawn
        self.came = 0
        self.top = 1.0
        """The highest priority ever; a new sample has it too, if nothing is known of it."""
        self.tree = SumTree(int(np.prod(self.shape)))

    def __len__(self) -> int:
        """Samples that can be drawn."""
        return int(self.counts.sum())

    def insert(self, block: int) -> tuple[int, int]:
        """Take in a block of the slab: (steps it brought, the block that had to go for it or -1)."""
        place = self.came % self.places
        gone = int(self.blocks[place])
        fields = self.slab.block(block)
        known, error = self._take_in(place, fields)
        first = place * self.shape[1] * self.shape[2]
        self.tree[np.arange(first, first + known.size)] = (known * self._weight(error)).reshape(-1)
        self.blocks[place], self.stamps[place], self.counts[place] = block, self.came, np.count_nonzero(known)
        self.came += 1
        return int(np.count_nonzero(fields["valid"][:-1])), gone

    @abstractmethod
    def _take_in(self, place: int, fields: Arrays) -> tuple[Array, Array | None]:
        """Which samples of a block can be drawn, and how much is to be learned from each, if that is known."""

    def _weight(self, error: Array | None) -> Array | float:
        if self.replay.kind != "prioritized":
            return 1.0
        if error is None:
            return float(self.top**self.replay.alpha)
        self.top = max(self.top, float(error.max(initial=0.0)))
        return np.asarray(np.maximum(error, 1e-6) ** self.replay.alpha)

    def draw(self, out: Arrays) -> None:
        """Fill a block for the trainer with samples."""
        count, total = self.replay.batch, self.tree.total
        # One draw from each of ``count`` equal shares: as random as independent draws, with less noise.
        leaves = self.tree.find((np.arange(count) + self.rng.random(count)) * (total / count))
        place, step, row = np.unravel_index(leaves, self.shape)
        together = out["weight"].shape[1] // count
        drawn = {"weight": self._weights(leaves), "index": leaves, "stamp": self.stamps[place]}
        for name, values in drawn.items():
            out[name][0] = np.repeat(values, together)
        self._gather(out, place, step, row)

    @abstractmethod
    def _gather(self, out: Arrays, place: Array, step: Array, row: Array) -> None:
        """Copy these samples into a block for the trainer."""

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
        for name in self.kept:
            whole.arrays[name] = getattr(self, name).copy()
        for place in np.flatnonzero(self.blocks >= 0).tolist():
            whole.put(f"block/{place}", State({n: a.copy() for n, a in self.slab.block(self.blocks[place]).items()}))
        return whole

    def load_state(self, state: State, free: list[int]) -> list[int]:
        """Go on where ``state`` was taken; the blocks (of those ``free``) that are in use now."""
        self.came, self.top = state.values["came"], state.values["top"]
        self.rng.bit_generator.state = state.values["rng"]
        self.stamps[:] = state.arrays["stamps"]
        for name in self.kept:
            getattr(self, name)[...] = state.arrays[name]
        self.tree[np.arange(self.tree.capacity)] = state.arrays["weights"]
        held = np.flatnonzero(self.stamps >= 0).tolist()
        for place, block in zip(held, free[: len(held)], strict=True):
            self.blocks[place] = block
            for name, content in state.under(f"block/{place}").arrays.items():
                self.slab.arrays[name][block] = content
        return free[: len(held)]


class Transitions(ReplayStore):
    """Single steps, each with what became of it ``n_step`` valid steps later."""

    kept = ("reward", "discount", "after", "counts")

    def __init__(self, slab: Slab, replay: Replay, places: int, seed: int) -> None:
        super().__init__(slab, replay, places, seed, (slab.spec.horizon, slab.spec.rows))
        self.reward = np.zeros(self.shape, np.float32)
        self.discount = np.zeros(self.shape, np.float32)
        self.after = np.zeros(self.shape, np.int32)

    def _take_in(self, place: int, fields: Arrays) -> tuple[Array, Array | None]:
        ends = {n: fields[n][:-1] for n in ("reward", "terminated", "truncated")}
        flags = {n: fields[n] for n in ("valid", "first")}
        found = transitions(**ends, **flags, gamma=self.replay.gamma, n_step=self.replay.n_step)
        self.reward[place], self.discount[place], self.after[place] = found.reward, found.discount, found.after
        if not self.replay.errors:
            return found.known, None
        best = np.take_along_axis(fields["q_best"], found.after, 0)
        return found.known, np.abs(found.reward + found.discount * best - fields["q_taken"][:-1]) * found.known

    def _gather(self, out: Arrays, place: Array, step: Array, row: Array) -> None:
        start = self.blocks[place] * (self.slab.spec.horizon + 1)
        seen = (start + step) * self.slab.spec.rows + row
        later = (start + self.after[place, step, row]) * self.slab.spec.rows + row
        for name in self.slab.spec.observations:
            np.take(self.slab.flat[name], seen, 0, out=out[name][0], mode="clip")
            np.take(self.slab.flat[name], later, 0, out=out[name][1], mode="clip")
        for name in (*self.slab.spec.actions, "version"):
            np.take(self.slab.flat[name], seen, 0, out=out[name][0], mode="clip")
        out["reward"][0], out["discount"][0] = self.reward[place, step, row], self.discount[place, step, row]
        out["valid"][0] = True


class Windows(ReplayStore):
    """Windows of steps as they were, of one row or of all agents of a copy."""

    def __init__(self, slab: Slab, replay: Replay, places: int, seed: int) -> None:
        spec = slab.spec
        self.together = _together(spec, replay)
        starts = (spec.horizon - replay.window) // replay.stride + 1
        super().__init__(slab, replay, places, seed, (starts, spec.rows // self.together))

    def _take_in(self, place: int, fields: Arrays) -> tuple[Array, Array | None]:
        replay, (_, starts, teams) = self.replay, self.shape
        acts: Array = np.any(fields["valid"].reshape(-1, teams, self.together), -1)
        learns = range(replay.burn_in, replay.burn_in + starts * replay.stride, replay.stride)
        return np.stack([acts[t : t + replay.window - replay.burn_in].any(0) for t in learns]), None

    def _gather(self, out: Arrays, place: Array, step: Array, row: Array) -> None:
        spec, window = self.slab.spec, self.replay.window
        rows = (row[:, None] * self.together + np.arange(self.together)).reshape(-1)
        block, start = (np.repeat(each, self.together) for each in (self.blocks[place], step * self.replay.stride))
        where = (block * (spec.horizon + 1) + start + np.arange(window + 1)[:, None]) * spec.rows + rows
        for name in (*spec.observations, *spec.actions, *STEP_FIELDS):
            np.take(self.slab.flat[name], where, 0, out=out[name], mode="clip")
        for name in spec.state:
            chunk = block * (spec.horizon // spec.chunk) + start // spec.chunk
            np.take(self.slab.flat[name], chunk * spec.rows + rows, 0, out=out[name][0], mode="clip")
