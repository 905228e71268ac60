"""The parameter stream between hosts: a reader says which version it has, and hears when there is a newer one.

Weights arrive as the very bytes of the writer's board and go into a board on the reader's host. Nothing is sent to a
reader that has the newest version, and a reader that was busy gets the newest one only, not those between.

Where a host has a relay (:mod:`srl.streams.relay`) its readers share the relay's board and are told of new versions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from srl.core.errors import DecodeError, SrlError, StreamError
from srl.core.specs import Arrays
from srl.services.names import Names
from srl.streams.frames import Header
from srl.streams.parameters import BoardReader, BoardWriter, ParameterBoard
from srl.streams.sockets import ServerLink, ServerThread, listen

MAX_BYTES = 2**33
"""Largest set of weights a reader takes."""
_BYTES, _WORD = 0, 1
"""What a reader wants to hear of a new version: all of it, or only that there is one."""
_SOON, _LATER = 1.0, 30.0
"""Seconds between two looks for a relay on this host: there is one, or has not been for long."""
_HANDLES = re.compile(r"/proc/\d+/fd/\d+ /proc/\d+/fd/\d+")


class TcpParameters:
    """A parameter stream over TCP."""

    def __init__(self, name: str, names: Names, port: int = 0) -> None:
        self.name, self.names, self.port = name, names, port

    def writer(self) -> TcpWriter:
        """See :class:`~srl.streams.protocols.ParameterStream`."""
        return TcpWriter(self)

    def reader(self) -> HostReader:
        """See :class:`~srl.streams.protocols.ParameterStream`."""
        return HostReader(self)


class Outlet:
    """Passes what is on a board on to whoever asks; a thread does the sending."""

    def __init__(self, board: ParameterBoard, stream: TcpParameters, announced: str, port: int = 0) -> None:
        self.board = board
        socket = listen(stream.names, announced, port, 1024)
        self.server = ServerThread(socket, stream.name, self._handle, self._answer)
        self._waiting: dict[bytes, tuple[int, int]] = {}
        self._snapshot: tuple[int, bytes] = (-1, b"")
        self.server.start()

    def _handle(self, identity: bytes, header: Header, _: Any) -> None:
        if header.kind != "have":
            raise DecodeError(f"a reader does not send {header.kind!r}")
        self._waiting[identity] = header.version, header.number
        if header.version >= self.board.newest():  # a sign of life
            self.server.send(identity, Header("hello", version=self.board.newest()))

    def _answer(self) -> None:
        newest = self.board.newest()
        behind = [(identity, wish) for identity, (have, wish) in self._waiting.items() if have < newest]
        for identity, wish in behind:
            del self._waiting[identity]
            if wish == _WORD:
                self.server.send(identity, Header("hello", version=newest))
            else:
                version, whole = self._copy()
                self.server.send(
                    identity, Header("parameters", number=int(self.board.shape[0]), version=version), whole
                )

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


class TcpWriter(BoardWriter):
    """The trainer's end: publishing costs one copy."""

    def __init__(self, stream: TcpParameters) -> None:
        super().__init__(ParameterBoard(shared=False))
        # The board dies with this process, and readers keep what it published: its successor must go on above that.
        self._mark = stream.names.counter(stream.name)
        self._version = int(self._mark[0])
        self._server = Outlet(self.board, stream, stream.name, stream.port).server

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


class TcpReader(BoardReader):
    """A reader that gets all weights over the network, into ``board``."""

    def __init__(self, stream: TcpParameters, names: Names, board: ParameterBoard) -> None:
        super().__init__(board)
        self._into = BoardWriter(self.board)
        self._link = ServerLink(names, stream.name, MAX_BYTES)

    def newest(self) -> int:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        for header, frames in self._link.receive():
            if header.kind == "hello":
                continue
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
        self._link.send(Header("have", version=super().newest(), number=_BYTES))


class SharedReader(BoardReader):
    """A reader that sees the board of its host's relay, which tells it of new versions."""

    def __init__(self, stream: TcpParameters, handles: str) -> None:
        header, data = handles.split()
        super().__init__(ParameterBoard.attached(header, data))
        self.handles = handles
        self._link = ServerLink(Beside(stream.names), stream.name, 1024)
        self._told = -1

    def gone(self) -> bool:
        """Whether the relay has ended."""
        return not Path(self.handles.split()[0]).exists()

    def newest(self) -> int:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        newest = super().newest()
        for _ in self._link.receive():
            pass  # the board says more
        if self._link.silent() or self._told != newest:
            self._told = newest
            self._link.send(Header("have", version=newest, number=_WORD))
        return newest

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        return self._link.socket

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        self._link.close()


class HostReader:
    """Any worker's end: reads what its host's relay has, or what comes over the network where there is no relay."""

    def __init__(self, stream: TcpParameters) -> None:
        self.stream = stream
        self._inner: TcpReader | SharedReader = TcpReader(stream, stream.names, ParameterBoard(shared=False))
        self._beside = Beside(stream.names)
        self._looked, self._interval = 0.0, _SOON

    def newest(self) -> int:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        now = time.monotonic()
        if now - self._looked > self._interval:
            self._looked = now
            self._choose()
        return self._inner.newest()

    def _choose(self) -> None:
        """Use the relay's board if there is one."""
        inner, handles = self._inner, self._beside.resolve(f"{self.stream.name}!")
        self._interval = _SOON if handles else min(2 * self._interval, _LATER)
        if isinstance(inner, SharedReader) and (handles != inner.handles or inner.gone()):
            inner.close()
            self._inner = inner = TcpReader(self.stream, self.stream.names, ParameterBoard(shared=False))
        if isinstance(inner, TcpReader) and handles and _HANDLES.fullmatch(handles):
            try:
                self._inner = SharedReader(self.stream, handles)
            except (OSError, SrlError):  # it has just ended
                return
            inner.close()

    def read(self, like: Arrays, load: Callable[[Arrays], None]) -> int:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        return self._inner.read(like, load)

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        return self._inner.pollable()

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.ParameterReader`."""
        self._inner.close()


class Beside:
    """The names of what is on the same host as whoever asks."""

    def __init__(self, names: Names) -> None:
        self.names, self.network = names, names.network

    def add(self, name: str, endpoint: str) -> None:
        """See :class:`~srl.services.names.Names`."""
        self.names.add(f"{name}@{self.network.address}", endpoint)

    def resolve(self, name: str) -> str | None:
        """See :class:`~srl.services.names.Names`."""
        return self.names.resolve(f"{name}@{self.network.address}")

    def counter(self, name: str) -> Any:
        """See :class:`~srl.services.names.Names`."""
        return self.names.counter(name)
