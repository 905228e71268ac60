"""The parameter stream between hosts: a reader says which version it has, and hears when there is a newer one.

Weights arrive as the very bytes of the writer's board and go into a board on the reader's host. Nothing is sent to a
reader that has the newest version, and a reader that was busy gets the newest one only, not those between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from srl.core.errors import DecodeError, StreamError
from srl.core.specs import Arrays
from srl.services.names import Names
from srl.streams.frames import Header
from srl.streams.parameters import BoardReader, BoardWriter, ParameterBoard
from srl.streams.sockets import ServerLink, ServerThread, listen

MAX_BYTES = 2**33
"""Largest set of weights a reader takes."""


class TcpParameters:
    """A parameter stream over TCP."""

    def __init__(self, name: str, names: Names, port: int = 0) -> None:
        self.name, self.names, self.port = name, names, port

    def writer(self) -> TcpWriter:
        """See :class:`~srl.streams.protocols.ParameterStream`."""
        return TcpWriter(self)

    def reader(self) -> TcpReader:
        """See :class:`~srl.streams.protocols.ParameterStream`."""
        return TcpReader(self)


class TcpWriter(BoardWriter):
    """The trainer's end: publishing costs one copy; a thread does the sending."""

    def __init__(self, stream: TcpParameters) -> None:
        super().__init__(ParameterBoard(shared=False))
        # The board dies with this process, and readers keep what it published: its successor must go on above that.
        self._mark = stream.names.counter(stream.name)
        self._version = int(self._mark[0])
        socket = listen(stream.names, stream.name, stream.port, 1024)
        self._server = ServerThread(socket, stream.name, self._handle, self._answer)
        self._waiting: dict[bytes, int] = {}
        self._snapshot: tuple[int, bytes] = (-1, b"")
        self._server.start()

    @property
    def rejected(self) -> int:
        """Messages that were no valid frames of this stream."""
        return self._server.rejected

    @property
    def version(self) -> int:
        """See :class:`~srl.streams.protocols.ParameterWriter`."""
        return self._version

    def publish(self, arrays: Arrays, version: int) -> None:
        """See :class:`~srl.streams.protocols.ParameterWriter`."""
        self._server.check()
        super().publish(arrays, version)
        self._mark[0] = self._version = version
        self._server.bell.ring()

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.ParameterWriter`."""
        self._server.close()

    def _handle(self, identity: bytes, header: Header, _: Any) -> None:
        if header.kind != "have":
            raise DecodeError(f"a reader does not send {header.kind!r}")
        self._waiting[identity] = header.version

    def _answer(self) -> None:
        behind = [identity for identity, have in self._waiting.items() if have < self.board.newest()]
        if not behind:
            return
        version, whole = self._copy()
        shape = int(self.board.shape[0])
        for identity in behind:
            del self._waiting[identity]
            self._server.send(identity, Header("parameters", number=shape, version=version), whole)

    def _copy(self) -> tuple[int, bytes]:
        """The newest version, whole."""
        board = self.board
        while self._snapshot[0] < board.newest():
            publication = int(board.published[0])
            version = int(board.versions[publication % 2])
            whole = board.half(publication, int(board.nbytes[0])).tobytes()
            if board.begun[0] <= publication + 1:
                self._snapshot = version, whole
        return self._snapshot


class TcpReader(BoardReader):
    """A reader's end: a board of its own that the network fills."""

    def __init__(self, stream: TcpParameters) -> None:
        super().__init__(ParameterBoard(shared=False))
        self._into = BoardWriter(self.board)
        self._link = ServerLink(stream.names, stream.name, MAX_BYTES)

    def newest(self) -> int:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        for header, frames in self._link.receive():
            if header.kind != "parameters" or len(frames) != 1:
                self._link.rejected += 1
            elif header.version > super().newest():
                try:
                    self._into.publish_bytes(frames[0], header.number, header.version)
                except StreamError:  # weights of another size: not those of this policy
                    self._link.rejected += 1
                self._ask()
        if self._link.silent():
            self._ask()
        return super().newest()

    def read(self, like: Arrays, load: Callable[[Arrays], None]) -> int:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        self.newest()
        return super().read(like, load)

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        return self._link.socket

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        self._link.close()

    def _ask(self) -> None:
        self._link.send(Header("have", version=super().newest()))
