"""How a block travels between hosts: its fields in few frames, compressed where that is faster.

Fields of less than 64 kB travel together in one frame, larger ones in a frame each: a frame costs each side tens of
microseconds, however short it is. Both sides know the spec, so a block either has exactly these frames or is refused.
The header says which of them are compressed; those are taken apart into exactly the bytes they must have, or refused.

Fields of several megabytes travel ahead of their block in pieces, each a message of its own: one lands while it is in
the cache and the next is on its way. In the block their frames are then empty.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from srl.core.errors import DecodeError
from srl.core.slab import BlockSpec, Slab
from srl.core.specs import Array

LARGE = 2**16
"""Bytes from which on a field has a frame of its own."""
PIECE = 2**20
"""Bytes of a piece."""
_PIECES = 64
"""About as many pieces has a block at most: there is room for a thousand messages on the way."""
_LONGEST = 2**30
"""Bytes of a frame that is compressed at most."""
_WORTH = 0.9
"""A frame that is still longer than this part of itself is sent as it is."""
_RATHER = 0.8
"""Compression must bring as much: what was measured once is not exact."""
_BRIEF = 0.005
"""Seconds below which latency, not the link, is what a block takes."""
_AGAIN = 30.0
"""Seconds until the link is measured again, and what compression would bring."""
_SHARE = 0.02
"""Part of the time that measuring may take: a block is sent as it is to see how long that takes."""

Mode = Literal["auto", "always", "never"]


def sizes(spec: BlockSpec) -> list[int]:
    """Bytes of each frame of a block."""
    places = spec.layout(1).places.values()
    fields = [math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in places]
    small = [size for size in fields if size < LARGE]
    return [*([sum(small)] if small else []), *(size for size in fields if size >= LARGE)]


class Cargo:
    """The blocks of a slab as frames."""

    def __init__(self, slab: Slab) -> None:
        shapes = {name: (slab.blocks, math.prod(array.shape[1:])) for name, array in slab.arrays.items()}
        fields = [slab.arrays[name].reshape(shape).view(np.uint8) for name, shape in shapes.items()]
        self.sizes = sizes(slab.spec)
        self._small = [field for field in fields if field.shape[1] < LARGE]
        self._large = [field for field in fields if field.shape[1] >= LARGE]
        #: which large field each piece belongs to, and from where to where
        size = max(PIECE, -(-sum(self.sizes) // _PIECES))
        self._pieces = [(i, *part) for i, field in enumerate(self._large) for part in _pieces(field.shape[1], size)]
        self.pieces = len(self._pieces)
        #: the frames that are empty if pieces have come
        self._cut = {i + len(self.sizes) - len(self._large) for i, _, _ in self._pieces}
        self._parts: dict[int, list[Array]] = {}
        self._cuts = list(pairwise(np.cumsum([0, *(field.shape[1] for field in self._small)]).tolist()))

    def frames(self, block: int) -> list[Array]:
        """The frames of a block: small fields copied together, large ones where they are."""
        parts = self._parts.get(block) or self._parts.setdefault(block, [field[block] for field in self._small])
        together = [np.concatenate(parts)] if parts else []
        return [*together, *self.large(block)]

    def large(self, block: int) -> list[Array]:
        """Those frames of a block that are where its fields are: the last ones."""
        return [field[block] for field in self._large]

    def cut(self, block: int) -> list[Array]:
        """The pieces of a block, where they are."""
        return [self._large[number][block, begin:end] for number, begin, end in self._pieces]

    def without_pieces(self, frames: Sequence[Any]) -> list[Any]:
        """The frames of a block whose pieces travel by themselves."""
        return [b"" if place in self._cut else frame for place, frame in enumerate(frames)]

    def check(self, frames: Sequence[Any], packed: int) -> list[Array]:
        """The bytes of each frame, none where they travel in pieces. Raises DecodeError if it is not a block's."""
        if len(frames) != len(self.sizes) or packed >> len(frames):
            raise DecodeError(f"{len(frames)} frames where {len(self.sizes)} belong")
        pairs = enumerate(zip(frames, self.sizes, strict=True))
        return [unpack(frame, size) if packed >> i & 1 else self._plain(i, frame, size) for i, (frame, size) in pairs]

    def _plain(self, place: int, frame: Any, size: int) -> Array:
        return plain(frame, 0 if place in self._cut and not memoryview(frame).nbytes else size)

    def land(self, whole: Sequence[Array], block: int) -> None:
        """Write what was checked into a block, whose pieces have landed before."""
        for field, (begin, end) in zip(self._small, self._cuts, strict=True):
            field[block] = whole[0][begin:end]
        for field, frame in zip(self._large, whole[len(whole) - len(self._large) :], strict=True):
            if len(frame):
                field[block] = frame

    def land_piece(self, frames: Sequence[Any], piece: int, block: int) -> None:
        """Write a piece into a block. Raises DecodeError if it is none."""
        if len(frames) != 1 or piece >= self.pieces:
            raise DecodeError(f"{len(frames)} frames for piece {piece} of {self.pieces}")
        number, begin, end = self._pieces[piece]
        self._large[number][block, begin:end] = plain(frames[0], end - begin)


def _pieces(nbytes: int, size: int) -> list[tuple[int, int]]:
    """Where the pieces of a field begin and end; none if it travels as a whole."""
    if nbytes < 2 * size:
        return []
    return [(begin, min(begin + size, nbytes)) for begin in range(0, nbytes, size)]


def plain(frame: Any, size: int) -> Array:
    """The bytes of a frame that must have ``size`` of them."""
    view = memoryview(frame)
    if view.nbytes != size:
        raise DecodeError(f"a frame of {view.nbytes} bytes where {size} belong")
    return np.frombuffer(view, np.uint8)


@functools.cache
def codec() -> Any:
    """The lz4 package, or None."""
    try:
        import lz4.block
    except ImportError:
        return None
    return lz4.block


def pack(frame: Array) -> bytes | None:
    """The frame compressed; None if it would not be much shorter."""
    if not 0 < frame.nbytes <= _LONGEST:
        return None
    packed: bytes = codec().compress(frame, store_size=False)
    return packed if len(packed) <= _WORTH * frame.nbytes else None


def unpack(frame: Any, size: int) -> Array:
    """The ``size`` bytes of a compressed frame, in no more memory than that. Raises DecodeError for anything else."""
    lz4, view = codec(), memoryview(frame)
    if lz4 is None or not 0 < size <= _LONGEST or view.nbytes > size:
        raise DecodeError("a compressed frame, where none belongs")
    try:
        found = lz4.decompress(view, uncompressed_size=size)
    except lz4.LZ4BlockError as error:
        raise DecodeError(f"a compressed frame that is damaged: {error}") from error
    return plain(found, size)


class Packing:
    """Decides for one producer whether its blocks are compressed: if they then arrive sooner.

    How long a block takes on its way the consumer says (see :mod:`srl.streams.tcp_samples`), of a block that is sent as
    it is. How much shorter a block gets, and how long that takes on both sides, is tried on the next one.
    """

    def __init__(self, mode: Mode = "auto", clock: Callable[[], float] = time.monotonic) -> None:
        self.mode, self._clock = mode, clock
        self.open = False
        """Whether there is a consumer on another host, who can take compressed frames apart."""
        self.used = False
        self.link = 0.0
        """Bytes a second that the link to it was found to carry (0: not measured yet)."""
        self._apart = 0.0
        self._next_look = self._next_try = 0.0

    def looks(self) -> bool:
        """Whether it should be measured how long the next block takes; it is then sent as it is."""
        if self.mode != "auto" or not self.open or self._clock() < self._next_look:
            return False
        self._next_look = self._clock() + _AGAIN
        return True

    def measured(self, nbytes: int, seconds: float) -> None:
        """So many bytes have taken so long."""
        self.link = nbytes / max(seconds, 1e-6)
        self._next_look = self._clock() + max(_AGAIN, seconds / _SHARE)

    def pack(self, frames: Sequence[Array]) -> tuple[list[Any], int]:
        """The frames as they are to be sent, and which of them (bit by bit) are compressed."""
        if self.mode == "always":
            return self._packed(frames)
        nbytes = sum(frame.nbytes for frame in frames)
        plainly = nbytes / self.link if self.mode == "auto" and self.open and self.link else 0.0
        if plainly < _BRIEF or (not self.used and self._clock() < self._next_try):
            self.used = False
            return list(frames), 0
        begin = self._clock()
        found, packed = self._packed(frames)
        took = self._clock() - begin
        if not self.used:
            self._next_try, self._apart = begin + _AGAIN, self._time_apart(frames, found, packed) / nbytes
        shorter = sum(memoryview(frame).nbytes for frame in found) / self.link
        self.used = took + shorter + self._apart * nbytes < _RATHER * plainly
        return (found, packed) if self.used else (list(frames), 0)

    def _packed(self, frames: Sequence[Array]) -> tuple[list[Any], int]:
        shorter = [pack(frame) for frame in frames]
        packed = sum(1 << i for i, each in enumerate(shorter) if each is not None)
        return [frame if each is None else each for frame, each in zip(frames, shorter, strict=True)], packed

    def _time_apart(self, frames: Sequence[Array], found: Sequence[Any], packed: int) -> float:
        """Seconds that it takes to take them apart again."""
        begin = self._clock()
        for i, (frame, each) in enumerate(zip(frames, found, strict=True)):
            if packed >> i & 1:
                unpack(each, frame.nbytes)
        return self._clock() - begin
