"""The sample stream between hosts: blocks filled here land in a board over there.

On the consumer's side a thread stands in for the remote producers: it passes the board's grants on as credit and
copies each block that arrives into a granted block. Credit is a running total (a producer may have sent at most
``number`` blocks so far), so a credit message may be lost, repeated or late without harm. Blocks are numbered; one
that comes twice is dropped, and one that was lost with its connection just gives its credit back. A producer whose
connection is gone for a while gives all of it back: its host may be gone, and the others can go on.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from srl.core.errors import DecodeError, StreamClosed, StreamError
from srl.core.slab import BlockSpec, Slab
from srl.services.names import Names
from srl.streams.frames import Header, payload
from srl.streams.protocols import Full, Grant
from srl.streams.samples import BoardConsumer, BoardProducer, SampleBoard
from srl.streams.sockets import ServerLink, ServerThread, listen

_LINGER = 1000
"""Milliseconds a producer that leaves goes on sending what it has committed."""
_PROBE = 1.0
"""Seconds between two messages at least: sending is how it is found out that a producer is away."""
_GONE = 3.0
"""Seconds a producer may be away before others get the blocks that were granted to it."""
STAGING = 3
"""Blocks a remote producer can hold: one being filled, the others on their way."""


class TcpSamples:
    """A sample stream of ``blocks`` blocks for ``producers`` remote producers."""

    def __init__(self, name: str, names: Names, spec: BlockSpec, blocks: int, producers: int, port: int = 0) -> None:
        self.name, self.names, self.spec, self.blocks = name, names, spec, blocks
        self.producers, self.port = producers, port

    def producer(self, index: int, incarnation: int) -> TcpProducer:
        """See :class:`~srl.streams.protocols.SampleStream`."""
        return TcpProducer(self, index, incarnation)

    def consumer(self) -> TcpConsumer:
        """See :class:`~srl.streams.protocols.SampleStream`."""
        return TcpConsumer(self)


@dataclass
class _Remote:
    """A remote producer as the consumer's side knows it."""

    identity: bytes
    incarnation: int
    producer: BoardProducer
    received: int
    granted: deque[Grant] = field(default_factory=deque)
    version: int = -1
    told: tuple[int, int] = (-1, -1)
    tried: float = 0.0
    """When it was last sent something."""
    away: float = 0.0
    """Since when that has not been possible (0: it is)."""
    gone: bool = False
    """Whether it has been away for so long that it must begin anew."""


class TcpConsumer(BoardConsumer):
    """The consumer's end: a board, and the thread that fills it from the network."""

    def __init__(self, stream: TcpSamples) -> None:
        layout = stream.spec.layout(1)
        self._shapes = [(shape[1:], dtype) for _, shape, dtype in layout.places.values()]
        self._names = list(layout.places)
        largest = max(spec.nbytes for spec in stream.spec.fields.values())
        limit = largest * (stream.spec.horizon + 1) * stream.spec.rows
        socket = listen(stream.names, stream.name, stream.port, limit)
        self._server = ServerThread(socket, stream.name, self._handle, self._pass_credit, self._farewell)
        bells = [self._server.bell] * stream.producers
        super().__init__(SampleBoard(stream.spec, stream.blocks, bells, shared=False))
        self._remotes: dict[int, _Remote] = {}
        self.duplicates = 0
        self._server.start()

    def take(self, count: int) -> list[Full] | None:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        self._server.check()
        return super().take(count)

    @property
    def rejected(self) -> int:
        """Messages that were no valid frames of this stream."""
        return self._server.rejected

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        super().close()
        self._server.close()

    def _handle(self, identity: bytes, header: Header, frames: Any) -> None:
        if not 0 <= header.sender < self.board.producers:
            raise DecodeError(f"no producer has the number {header.sender}")
        remote = self._remotes.get(header.sender)
        if header.kind == "hello":
            back = remote is not None and remote.gone and header.incarnation == remote.incarnation
            if remote is None or header.incarnation > remote.incarnation or back:
                producer = BoardProducer(self.board, header.sender, header.incarnation)
                remote = _Remote(identity, header.incarnation, producer, header.sequence)
                self._remotes[header.sender] = remote
            if header.incarnation == remote.incarnation:
                remote.identity, remote.told, remote.away = identity, (-1, -1), 0.0
                remote.received = max(remote.received, header.sequence)
        elif header.kind == "close":
            if remote is not None and header.incarnation == remote.incarnation:
                remote.producer.close()
                del self._remotes[header.sender]
        elif header.kind != "block":
            raise DecodeError(f"a producer does not send {header.kind!r}")
        elif remote is not None and header.incarnation == remote.incarnation and not remote.gone:
            self._land(remote, header, frames)

    def _land(self, remote: _Remote, header: Header, frames: Any) -> None:
        if header.sequence < remote.received:
            self.duplicates += 1
            return
        arrays = payload(frames, self._shapes)
        remote.received = header.sequence + 1
        if not remote.granted:
            raise DecodeError("a block that was never granted")
        grant = remote.granted.popleft()
        block = self.slab.block(grant.block)
        for name, array in zip(self._names, arrays, strict=True):
            block[name][...] = array
        remote.producer.commit(grant.block, header.sequence)

    def _pass_credit(self) -> None:
        """Tell remote producers how much the board has granted them since."""
        now = time.monotonic()
        for remote in self._remotes.values():
            if remote.gone:
                continue
            if remote.away and now - remote.away > _GONE:
                remote.gone = True
                remote.producer.close()
                continue
            try:
                while (grant := remote.producer.acquire()) is not None:
                    remote.granted.append(grant)
                    remote.version = grant.version
            except StreamClosed:
                return
            total = remote.received + len(remote.granted), remote.version
            if total != remote.told or now - remote.tried > _PROBE:
                remote.told, remote.tried = total, now
                self._send(remote, Header("credit", number=total[0], version=total[1]))

    def _farewell(self) -> None:
        for remote in self._remotes.values():
            self._send(remote, Header("close"))

    def _send(self, remote: _Remote, header: Header) -> None:
        if self._server.send(remote.identity, header):
            remote.away = 0.0
        else:
            remote.away = remote.away or time.monotonic()  # its next hello says where it is


class TcpProducer:
    """A producer's end: a few private blocks, sent off when full."""

    def __init__(self, stream: TcpSamples, index: int, incarnation: int) -> None:
        self.index, self.incarnation = index, incarnation
        self.slab = Slab(stream.spec, STAGING, shared=False)
        self._link = ServerLink(stream.names, stream.name, 1024)
        self._free = deque(range(STAGING))
        self._open: set[int] = set()
        self._leaving: deque[tuple[Any, int]] = deque()
        self._sent, self._credit, self._version = 0, 0, -1
        self._closed = False

    def acquire(self) -> Grant | None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        self._hear()
        if self._closed:
            raise StreamClosed("the consumer has closed the sample stream")
        if not self._free or self._sent + len(self._open) >= self._credit:
            return None
        block = self._free.popleft()
        self._open.add(block)
        return Grant(block, self._version)

    def commit(self, block: int) -> None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        if block not in self._open:
            raise StreamError(f"block {block} was not granted to producer {self.index}")
        self._open.remove(block)
        header = Header("block", self.index, self.incarnation, self._sent)
        self._sent += 1
        tracker = self._link.send(header, self.slab.block(block).values(), track=True)
        self._leaving.append((tracker, block))

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        return self._link.socket

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        self._link.send(Header("close", self.index, self.incarnation, self._sent))
        self._link.close(_LINGER)

    def _hear(self) -> None:
        while self._leaving and (self._leaving[0][0] is None or self._leaving[0][0].done):
            self._free.append(self._leaving.popleft()[1])
        for header, _ in self._link.receive():
            if header.kind == "credit":
                self._credit, self._version = header.number, header.version
            elif header.kind == "close":
                self._closed = True
        if self._link.silent():
            self._link.send(Header("hello", self.index, self.incarnation, self._sent))
