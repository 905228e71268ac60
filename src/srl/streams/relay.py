"""One subscriber a host: a relay takes weights from the trainer or from another relay, and its host shares its board.

Relays form a tree, so what a version costs the trainer does not grow with the number of hosts: it sends to the first
one, which sends to a few, each of which sends to a few more. Who is whose parent is the hub's to say
(:class:`~srl.streams.hub.Hub`). A relay whose parent does not answer asks the trainer itself.

The first site on a host that can claim it has the relay; when that one ends another takes over.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from srl.services.names import Names
from srl.streams.parameters import ParameterBoard
from srl.streams.tcp_parameters import Beside, Outlet, TcpParameters, TcpReader
from srl.streams.wait import wait

_UNANSWERED = 3
"""Questions to a parent after which the trainer itself is asked,"""
_AROUND = 30.0
"""for so many seconds."""
_CLAIM = 1.0
"""Seconds between two tries to claim a host."""


class Upstream(Beside):
    """Where a relay gets its weights from."""

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self.unanswered, self._around = 0, 0.0

    def resolve(self, name: str) -> str | None:
        """The parent's place, or the trainer's if the parent has not answered. Asked once a second, if at all."""
        now = time.monotonic()
        self.unanswered += 1
        if self.unanswered > _UNANSWERED:
            self.unanswered, self._around = 0, now + _AROUND
        return self.names.resolve(name if now < self._around else f"{name}^{self.network.address}")


class Relay(TcpReader):
    """Fills a board that this host shares with what a stream's trainer publishes, and passes it on to other relays."""

    def __init__(self, stream: TcpParameters) -> None:
        self._upstream = Upstream(stream.names)
        super().__init__(stream, self._upstream, ParameterBoard(shared=True))
        beside = Beside(stream.names)
        self._outlet = Outlet(self.board, stream, f"{stream.name}@{beside.network.address}")
        self.handles = f"{self.board.header_segment.handle} {self.board.data.handle}"
        beside.add(f"{stream.name}!", self.handles)

    def newest(self) -> int:
        """Take in what has come; the newest version."""
        before = super(TcpReader, self).newest()
        found = super().newest()
        if self._link.heard():
            self._upstream.unanswered = 0
        if found > before:
            self._outlet.server.bell.ring()
        return found

    def close(self) -> None:
        """Serve nobody any more."""
        super().close()
        self._outlet.server.close()


class Relays:
    """The relays of a host for all ``streams``, in a thread of their own, as soon as the host is ours."""

    def __init__(self, streams: Sequence[TcpParameters]) -> None:
        self.streams = streams
        self.relays: list[Relay] = []
        self._claim: socket.socket | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relays", daemon=True)
        if streams:
            self._take_host()
            self._thread.start()

    def close(self) -> None:
        """Give the host up."""
        self._closing.set()
        if self.streams:
            self._thread.join(timeout=5)

    def _take_host(self) -> bool:
        """Claim the host, and begin if it was free. A claim ends with its process, however that ends."""
        if sys.platform == "linux":  # names of this kind are seen on this host only, and leave no file
            run = hashlib.sha256(repr(self.streams[0].names).encode()).hexdigest()[:32]
            self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._claim.bind(f"\0srl-relay-{run}")
            except OSError:
                self._claim.close()
                return False
        self.relays = [Relay(stream) for stream in self.streams]
        return True

    def _run(self) -> None:
        while not self.relays and not self._closing.wait(_CLAIM):
            self._take_host()
        while not self._closing.is_set():
            for relay in self.relays:
                relay.newest()
            sockets: list[Any] = [relay.pollable() for relay in self.relays]
            wait([each for each in sockets if each is not None], 0.2)
            if not any(sockets):
                self._closing.wait(0.05)
        for relay in self.relays:
            relay.close()
        if self._claim is not None:
            self._claim.close()
