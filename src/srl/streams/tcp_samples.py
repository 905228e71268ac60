"""The sample stream between hosts: blocks filled here land in a board over there.

On the consumer's side a thread stands in for the remote producers: it passes the board's grants on as credit and
copies each block that arrives, a large one piece by piece, into a granted block. Credit is a running total (a producer
may have sent at most ``number`` blocks so far), so a credit message may be lost, repeated or late without harm. Blocks
are numbered; one that comes twice is dropped, and one that was lost with its connection, or a piece of it, just gives
its credit back. A producer whose connection is gone for a while gives all of it back: its host may be gone, and the
others can go on.

Credit also says how many blocks have arrived: their memory on the producer's side is free again. That is told of every
second block, and what the board grants to a producer that has credit enough is told along with it, for each thread that
is woken costs tens of microseconds.

Now and then a producer on another host sends a mark before a block. The consumer answers how many microseconds passed
between the two. So the producer knows what the link carries, and whether its blocks should be compressed
(:class:`~srl.streams.cargo.Packing`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import zmq

from srl.core.errors import DecodeError, StreamClosed, StreamError
from srl.core.memory import Doorbell, keep_freed_memory
from srl.core.slab import BlockSpec, Slab
from srl.services.names import Names
from srl.services.network import LOOPBACK
from srl.streams.cargo import Cargo, Mode, Packing, codec, sizes
from srl.streams.frames import Header, encode
from srl.streams.protocols import Full, Grant
from srl.streams.samples import BoardConsumer, BoardProducer, SampleBoard
from srl.streams.sockets import ServerLink, ServerThread, listen
from srl.streams.wait import wait

_LINGER = 1000
"""Milliseconds a producer that leaves goes on sending what it has committed."""
_PROBE = 1.0
"""Seconds between two messages at least: sending is how it is found out that a producer is away."""
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
_SOON = 0.1
"""Seconds until a producer hears that a single block has arrived; of two it hears at once."""
_GONE = 3.0
"""Seconds a producer may be away before others get the blocks that were granted to it."""
STAGING = 4
"""Blocks a remote producer can hold: one being filled, the others on their way."""


class TcpSamples:
    """A sample stream of ``blocks`` blocks for ``producers`` remote producers; see Packing for ``packing``."""

    def __init__(
        self,
        name: str,
        names: Names,
        spec: BlockSpec,
        blocks: int,
        producers: int,
        port: int = 0,
        packing: Mode = "auto",
    ) -> None:
        self.name, self.names, self.spec, self.blocks = name, names, spec, blocks
        self.producers, self.port, self.packing = producers, port, packing

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
    credit: int = -1
    """What it was last told: how many blocks it may have sent in all,"""
    known: int = 0
    """how many have arrived,"""
    told: int = -1
    """and which version they should be of."""
    tried: float = 0.0
    """When it was last sent something."""
    away: float = 0.0
    """Since when that has not been possible (0: it is)."""
    gone: bool = False
    """Whether it has been away for so long that it must begin anew."""
    marked: tuple[int, float] = (-1, 0.0)
    """Which block comes next, and since when it does."""
    arrived: tuple[int, int] = (-1, 0)
    """Which block comes in pieces, and how many of them have come."""

    @property
    def short(self) -> bool:
        """Whether it will soon have to wait for more credit."""
        return self.credit - self.received < 2


class _Bell:
    """Wakes a consumer's server thread, if somebody is short of what it has to pass on."""

    def __init__(self, bell: Doorbell) -> None:
        self.bell, self.wanted = bell, True

    def ring(self) -> None:
        """See :class:`~srl.core.memory.Doorbell`."""
        if self.wanted:
            self.bell.ring()


class TcpConsumer(BoardConsumer):
    """The consumer's end: a board, and the thread that fills it from the network."""

    def __init__(self, stream: TcpSamples) -> None:
        keep_freed_memory()  # ZeroMQ has new memory for every block that arrives
        socket = listen(stream.names, stream.name, stream.port, max(sizes(stream.spec)))
        self._server = ServerThread(socket, stream.name, self._handle, self._pass_credit, self._farewell)
        self._bell = _Bell(self._server.bell)
        bells: list[Any] = [self._bell] * stream.producers
        super().__init__(SampleBoard(stream.spec, stream.blocks, bells, shared=False))
        self._granted = -1
        self._cargo = Cargo(self.slab)
        self._remotes: dict[int, _Remote] = {}
        self.duplicates = 0
        self._server.start()

    def take(self, count: int, wake: int = 0) -> list[Full] | None:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        self._server.check()
        return super().take(count, wake)

    def grant(self, count: int, version: int) -> int:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        given = super().grant(count, version)
        if given and version != self._granted:  # all should know, whatever else they have
            self._granted = version
            self._server.bell.ring()
        return given

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
                remote.identity, remote.credit, remote.away = identity, -1, 0.0
                remote.received = max(remote.received, header.sequence)
        elif header.kind == "close":
            if remote is not None and header.incarnation == remote.incarnation:
                remote.producer.close()
                del self._remotes[header.sender]
        elif header.kind not in ("block", "piece", "mark"):
            raise DecodeError(f"a producer does not send {header.kind!r}")
        elif remote is not None and header.incarnation == remote.incarnation and not remote.gone:
            if header.kind == "mark":
                remote.marked = header.sequence, time.monotonic()
            elif header.kind == "piece":
                self._land_piece(remote, header, frames)
            else:
                self._land(remote, header, frames)

    def _land_piece(self, remote: _Remote, header: Header, frames: Any) -> None:
        """Write a piece where its block will be; what comes after one that was lost is of no use."""
        if header.sequence < remote.received:
            return
        if not remote.granted:
            raise DecodeError("a piece of a block that was never granted")
        number = remote.arrived[1] if remote.arrived[0] == header.sequence else 0
        if header.number == number:
            self._cargo.land_piece(frames, number, remote.granted[0].block)
            remote.arrived = header.sequence, number + 1

    def _land(self, remote: _Remote, header: Header, frames: Any) -> None:
        if header.sequence < remote.received:
            self.duplicates += 1
            return
        if remote.marked[0] == header.sequence:
            took = max(1, int(1e6 * (time.monotonic() - remote.marked[1])))
            self._send(remote, Header("mark", number=took))
        whole = self._cargo.check(frames, header.number)
        remote.received = header.sequence + 1
        if not remote.granted:
            raise DecodeError("a block that was never granted")
        if not all(map(len, whole)) and remote.arrived != (header.sequence, self._cargo.pieces):
            return  # a piece was lost, and with it the block
        grant = remote.granted.popleft()
        self._cargo.land(whole, grant.block)
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
            credit, late = remote.received + len(remote.granted), now - remote.tried > _SOON
            dry = remote.short and credit > remote.credit
            news = remote.received - remote.known > (0 if late else 1)
            if dry or news or remote.version != remote.told or now - remote.tried > _PROBE:
                remote.credit, remote.known, remote.told, remote.tried = credit, remote.received, remote.version, now
                number, unpacks = remote.received, int(codec() is not None)
                self._send(remote, Header("credit", 0, unpacks, number, credit, remote.version))
        self._bell.wanted = any(remote.short for remote in self._remotes.values())

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
        self._cargo, self.packing = Cargo(self.slab), Packing(stream.packing)
        self._network = stream.names.network
        self._link = ServerLink(stream.names, stream.name, 1024)
        # Made once: a frame that ZeroMQ lets go of costs a thread that is woken to hear of it.
        self._kept = [[zmq.Frame(each, copy=False) for each in self._cargo.large(i)] for i in range(STAGING)]
        self._pieces = [[zmq.Frame(each, copy=False) for each in self._cargo.cut(i)] for i in range(STAGING)]
        self._free = list(range(STAGING))
        self._open: set[int] = set()
        self._leaving: deque[tuple[int, int]] = deque()
        self._sent, self._credit, self._version = 0, 0, -1
        self._closed = False
        self._known: tuple[zmq.Socket[bytes] | None, bool] = None, False
        """A connection, and whether it leads to another host."""

    def acquire(self) -> Grant | None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        self._hear()
        if self._closed:
            raise StreamClosed("the consumer has closed the sample stream")
        if not self._free or self._sent + len(self._open) >= self._credit:
            return None
        block = self._free.pop()  # the one that was sent last: some of it is still in the cache
        self._open.add(block)
        return Grant(block, self._version)

    def commit(self, block: int) -> None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        if block not in self._open:
            raise StreamError(f"block {block} was not granted to producer {self.index}")
        self._open.remove(block)
        frames: list[Any] = list(self._cargo.frames(block))
        packed = 0
        if self.packing.looks():
            self._link.send(Header("mark", self.index, self.incarnation, self._sent))
        else:
            frames, packed = self.packing.pack(frames)
        kept, pieces = self._kept[block], [] if packed else self._pieces[block]
        for place, same in enumerate(kept, len(frames) - len(kept)):
            frames[place] = frames[place] if packed >> place & 1 else same
        if pieces:
            frames = self._cargo.without_pieces(frames)
        sent = all(self._send("piece", number, [piece]) for number, piece in enumerate(pieces))
        if sent and self._send("block", packed, frames):
            self._leaving.append((self._sent, block))
        else:
            self._free.append(block)
        self._sent += 1

    def _send(self, kind: str, number: int, frames: list[Any]) -> bool:
        """Send a part of a block; False if it is lost, which gives its credit back."""
        socket = self._link.socket
        if socket is None:
            return False
        header = Header(kind, self.index, self.incarnation, self._sent, number)
        try:
            socket.send(encode(header, stream=self._link.stream)[0], _MORE)
            for left, frame in zip(range(len(frames) - 1, -1, -1), frames, strict=True):
                socket.send(frame, _MORE if left else _LAST, copy=not isinstance(frame, zmq.Frame))
        except zmq.Again:  # the bounded queue to a server that is away is full
            return False
        return True

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        return self._link.socket

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        # A connection that is closed while words are on their way to it may take with it what it has sent.
        deadline = time.monotonic() + (_LINGER / 1000 if self._link.heard() else 0)
        while self._leaving and not self._closed and time.monotonic() < deadline:
            wait([self._link.socket], 0.01)
            self._hear()
        self._link.send(Header("close", self.index, self.incarnation, self._sent))
        self._link.close(_LINGER)

    def _hear(self) -> None:
        for header, _ in self._link.receive():
            if header.kind == "credit":
                self._credit, self._version = header.number, header.version
                self.packing.open = bool(header.incarnation) and self._abroad()
                while self._leaving and self._leaving[0][0] < header.sequence:
                    self._free.append(self._leaving.popleft()[1])
            elif header.kind == "mark":
                self.packing.measured(sum(self._cargo.sizes), header.number / 1e6)
            elif header.kind == "close":
                self._closed = True
        if self._link.silent():
            self._link.send(Header("hello", self.index, self.incarnation, self._sent))

    def _abroad(self) -> bool:
        """Whether the consumer is on another host, and compressed blocks can be made here."""
        socket = self._link.socket
        if socket is not self._known[0]:
            there = socket.getsockopt_string(zmq.LAST_ENDPOINT) if socket is not None and codec() is not None else ""
            near = (f"tcp://{LOOPBACK}:", f"tcp://{self._network.address}:")
            self._known = socket, bool(there) and not there.startswith(near)
        return self._known[1]
