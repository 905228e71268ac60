"""The parameter stream within one host: two copies of the weights in one segment, and which is the newest.

The n-th publication goes into half ``n % 2``; when it is complete the writer says so. A reader that has the newest
version reads one integer and does nothing. Nobody waits for anybody: a reader copies, then checks that the writer had
not begun to overwrite that half meanwhile, and copies again if it had. A writer killed half-way has touched only the
half that nobody reads, and its successor writes it anew.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from srl.core.errors import StreamError
from srl.core.memory import Segment
from srl.core.slab import Layout
from srl.core.specs import Arrays

_HEADER = ("begun", "published", "nbytes", "shape", "version0", "version1")


class ParameterBoard:
    """The newest weights of one policy. Grows to the size of the first version published."""

    def __init__(self, *, shared: bool) -> None:
        self.header_segment = Segment(8 * len(_HEADER), shared=shared)
        self.data = Segment(0, shared=shared)
        self._map()
        self.versions[:] = -1

    def _map(self) -> None:
        header = self.header_segment.array(0, (len(_HEADER),), "<i8")
        self.begun, self.published, self.nbytes, self.shape = (header[i : i + 1] for i in range(4))
        self.versions = header[4:]

    @classmethod
    def attached(cls, header: str, data: str) -> ParameterBoard:
        """The board of another process on this host, by the handles of its segments."""
        board = cls.__new__(cls)
        board.header_segment, board.data = Segment.attached(header, 8 * len(_HEADER)), Segment.attached(data, 0)
        board._map()
        return board

    def newest(self) -> int:
        """The newest version (-1: none)."""
        return int(self.versions[self.published[0] % 2])

    def half(self, publication: int, nbytes: int) -> Any:
        """The bytes of a publication."""
        self.data.resize(2 * nbytes)
        return self.data.array(publication % 2 * nbytes, (nbytes,), "|u1")

    def writer(self) -> BoardWriter:
        """See :class:`~srl.streams.protocols.ParameterStream`."""
        return BoardWriter(self)

    def reader(self) -> BoardReader:
        """See :class:`~srl.streams.protocols.ParameterStream`."""
        return BoardReader(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"header_segment": self.header_segment, "data": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


class Packing:
    """How weights lie in a half; worked out anew only when their names, shapes or dtypes change."""

    def __init__(self) -> None:
        self._known: list[Any] = []
        self._found = Layout.of({}), 0

    def of(self, arrays: Arrays) -> tuple[Layout, int]:
        """The layout of ``arrays``, and a number that tells it from others."""
        known = [(name, array.shape, array.dtype) for name, array in arrays.items()]
        if known != self._known:
            layout = Layout.of({name: (shape, dtype.str) for name, shape, dtype in known})
            self._known = known
            self._found = layout, zlib.crc32(repr(sorted(layout.places.items())).encode())
        return self._found


class BoardWriter:
    """The trainer's end."""

    def __init__(self, board: ParameterBoard) -> None:
        self.board = board
        self._packing = Packing()

    @property
    def version(self) -> int:
        """See :class:`~srl.streams.protocols.ParameterWriter`."""
        return self.board.newest()

    def publish(self, arrays: Arrays, version: int) -> None:
        """See :class:`~srl.streams.protocols.ParameterWriter`."""
        layout, shape = self._packing.of(arrays)
        half = self._begin(layout.nbytes, shape, version)
        for name, (offset, _, _) in layout.places.items():
            value = arrays[name]
            half[offset : offset + value.nbytes].view(value.dtype).reshape(value.shape)[...] = value
        self._end(version)

    def publish_bytes(self, payload: Any, shape: int, version: int) -> None:
        """Publish what another board held, unopened."""
        half = self._begin(len(payload), shape, version)
        half[:] = memoryview(payload)
        self._end(version)

    def _begin(self, nbytes: int, shape: int, version: int) -> Any:
        board = self.board
        if version <= self.version:
            raise StreamError(f"version {version} published after version {self.version}")
        if board.newest() >= 0 and (nbytes, shape) != (board.nbytes[0], board.shape[0]):
            raise StreamError("the published parameters do not have the layout of the versions before")
        board.nbytes[0], board.shape[0] = nbytes, shape
        board.begun[0] = board.published[0] + 1
        return board.half(int(board.begun[0]), nbytes)

    def _end(self, version: int) -> None:
        board = self.board
        board.versions[board.begun[0] % 2] = version
        board.published[0] = board.begun[0]

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.ParameterWriter`."""


class BoardReader:
    """Any other worker's end."""

    def __init__(self, board: ParameterBoard) -> None:
        self.board = board
        self._packing = Packing()

    def newest(self) -> int:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        return self.board.newest()

    def read(self, like: Arrays, load: Callable[[Arrays], None]) -> int:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        layout, shape = self._packing.of(like)
        board = self.board
        if board.newest() < 0:
            raise StreamError("no parameters have been published yet")
        if (layout.nbytes, shape) != (board.nbytes[0], board.shape[0]):
            raise StreamError("the published parameters are not those of this policy's network")
        while True:
            publication = int(board.published[0])
            version = int(board.versions[publication % 2])
            board.half(publication, layout.nbytes)
            start = publication % 2 * layout.nbytes
            load({n: board.data.array(start + o, s, d) for n, (o, s, d) in layout.places.items()})
            if board.begun[0] <= publication + 1:  # this half was not written again meanwhile
                return version

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        return None

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
