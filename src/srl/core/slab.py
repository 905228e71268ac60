"""The slab: trajectories in preallocated blocks.

A slab holds ``blocks`` blocks of ``horizon`` steps for ``rows`` rows. Each field is one array of shape
``[blocks, horizon + 1, rows, …]``, so a block is a view, and any set of (block, step, row) is one gather from the
field's flat view ``[blocks * (horizon + 1) * rows, …]``. What travels between workers is a block's index. The memory of
a recurrent policy (fields ``state/…``) is kept at the start of every chunk of ``chunk`` steps only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from srl.core.memory import Segment
from srl.core.specs import Array, Arrays, ArraySpec, Spec

_ALIGN = 64

STEP_FIELDS: dict[str, ArraySpec] = {
    "reward": ArraySpec((), "<f4"),
    "terminated": ArraySpec((), "|b1"),
    "truncated": ArraySpec((), "|b1"),
    # False where the step is no transition: the reset that follows an episode's end, or an agent not on turn.
    "valid": ArraySpec((), "|b1"),
    # True where the observation is the first of an episode: a policy's memory begins anew there.
    "first": ArraySpec((), "|b1"),
    "version": ArraySpec((), "<i8"),
}


PLAIN, KEEP, PEEK = range(3)
"""What a step is to a policy with memory: any; one before which the memory is kept in the block; the one after the last
step of a block, which comes again as the next block's first, so the memory does not move on."""


@dataclass(frozen=True)
class Layout:
    """Where arrays lie in one run of bytes."""

    places: Mapping[str, tuple[int, tuple[int, ...], str]]
    nbytes: int

    @classmethod
    def of(cls, arrays: Mapping[str, tuple[tuple[int, ...], str]]) -> Layout:
        """Lay the named (shape, dtype) pairs one after the other, each on its own cache line."""
        places, offset = {}, 0
        for name, (shape, dtype) in arrays.items():
            places[name] = (offset, shape, dtype)
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            offset += -(-nbytes // _ALIGN) * _ALIGN
        return cls(places, offset)

    def views(self, segment: Segment) -> Arrays:
        """The arrays, as views of ``segment``."""
        return {name: segment.array(*place) for name, place in self.places.items()}


@dataclass(frozen=True)
class BlockSpec:
    """The shape of a block: its fields (one row each), steps and rows."""

    fields: Spec
    horizon: int
    rows: int
    chunk: int = 0
    """Steps between two states of a recurrent policy."""
    agents: int = 1
    """Rows of one copy of the environment; they stand side by side."""

    @cached_property
    def observations(self) -> tuple[str, ...]:
        """Names of the observation's fields, action masks among them."""
        return tuple(name for name in self.fields if name.split("/")[0] in ("obs", "mask"))

    @cached_property
    def state(self) -> tuple[str, ...]:
        """Names of the fields that hold a recurrent policy's memory."""
        return tuple(name for name in self.fields if name.startswith("state/") and self.chunk)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the fields a policy reads."""
        return (*self.observations, "first", "valid") if self.state else self.observations

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the fields a policy writes at every step (its action among them)."""
        fixed = {*self.observations, *self.state, *STEP_FIELDS}
        # Whether its memory began anew is for the policy to say: it may have lost it.
        return (*(name for name in self.fields if name not in fixed), *(("first",) if self.state else ()))

    @cached_property
    def actions(self) -> tuple[str, ...]:
        """Names of the action's fields."""
        return tuple(name for name in self.fields if name.split("/")[0] == "action")

    @cached_property
    def kinds(self) -> Array:
        """What each of a block's steps is to a policy with memory."""
        found = np.full(self.horizon + 1, PLAIN)
        if self.chunk:
            found[:: self.chunk] = KEEP
        found[self.horizon] = PEEK
        return found

    def layout(self, blocks: int) -> Layout:
        """Layout of ``blocks`` blocks."""
        length = dict.fromkeys(self.state, self.horizon // max(self.chunk, 1))
        return Layout.of(
            {
                name: ((blocks, length.get(name, self.horizon + 1), self.rows, *spec.shape), spec.dtype)
                for name, spec in self.fields.items()
            }
        )


class Slab:
    """``blocks`` blocks of one :class:`BlockSpec` in private or shared memory."""

    def __init__(self, spec: BlockSpec, blocks: int, *, shared: bool) -> None:
        self.spec, self.blocks = spec, blocks
        self.segment = Segment(spec.layout(blocks).nbytes, shared=shared)
        self._map()

    def _map(self) -> None:
        steps = self.blocks * (self.spec.horizon + 1)
        self.arrays = self.spec.layout(self.blocks).views(self.segment)
        stepwise = {n: a for n, a in self.arrays.items() if n not in self.spec.state}
        #: one entry per (block, step): what an inference request refers to
        self.steps = {n: a.reshape(steps, *a.shape[2:]) for n, a in stepwise.items()}
        #: one entry per (block, step, row), or (block, chunk, row) of a state: what a minibatch is gathered from
        self.flat = {n: a.reshape(-1, *a.shape[3:]) for n, a in self.arrays.items()}

    def block(self, index: int) -> Arrays:
        """The fields of one block, each ``[horizon + 1, rows, …]``."""
        return {name: array[index] for name, array in self.arrays.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "blocks": self.blocks, "segment": self.segment}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


@dataclass
class Batch:
    """Some blocks of a slab, as a trainer sees them. Nothing is copied until a field is asked for."""

    slab: Slab
    blocks: list[int]

    @cached_property
    def positions(self) -> Array:
        """Slab position of every (step < horizon, block, row), in that order: the order of :meth:`small`."""
        spec = self.slab.spec
        starts = np.asarray(self.blocks, np.int64)[None, :, None] * (spec.horizon + 1) * spec.rows
        steps = np.arange(spec.horizon)[:, None, None] * spec.rows
        return np.asarray(starts + steps + np.arange(spec.rows)).reshape(-1)

    @property
    def wide(self) -> int:
        """Rows of all blocks: so many entries of :attr:`positions` make up a step."""
        return len(self.blocks) * self.slab.spec.rows

    @cached_property
    def chunk_starts(self) -> Array:
        """Slab position, among the states, of every (chunk, block, row), in that order."""
        spec = self.slab.spec
        chunks = spec.horizon // spec.chunk
        starts = np.asarray(self.blocks, np.int64)[None, :, None] * chunks + np.arange(chunks)[:, None, None]
        return np.asarray(starts * spec.rows + np.arange(spec.rows)).reshape(-1)

    def chunks(self) -> Array:
        """Entries of :attr:`positions` that make up every chunk, ``[steps of a chunk, chunks * blocks * rows]``."""
        spec = self.slab.spec
        entries = np.arange(spec.horizon * self.wide).reshape(-1, spec.chunk, self.wide)
        return np.ascontiguousarray(entries.swapaxes(0, 1)).reshape(spec.chunk, -1)

    def small(self, name: str) -> Array:
        """A copy of one small per-step field as ``[horizon + 1, blocks * rows]`` (time first)."""
        picked = self.slab.arrays[name][self.blocks]
        return np.ascontiguousarray(picked.swapaxes(0, 1)).reshape(picked.shape[1], -1)
