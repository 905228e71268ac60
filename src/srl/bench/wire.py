"""A bad wire between two network cards: every packet takes a while longer, and some are lost.

What Linux has for that (netem) is not in every kernel, so this passes packets from card to card itself. They come and
go with the header that says which of their checksums and cuts are still to be made, so that cards which leave those to
each other, as virtual ones do, notice nothing.
"""

from __future__ import annotations

import random
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

COMMAND = [sys.executable, "-c", "import sys; from srl.bench.wire import main; main(sys.argv[1:])"]
"""To be followed by two cards, milliseconds, and percent."""
READY = b"ready\n"
"""What it says once packets pass."""
_ALL = 3
"""Packets of any protocol (ETH_P_ALL)."""
_PACKET, _WITH_HEADER, _NOT_OURS = 263, 15, 23
"""SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING of linux/if_packet.h."""
_LONGEST = 2**17


def _card(name: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    found.setsockopt(_PACKET, _WITH_HEADER, 1)
    found.setsockopt(_PACKET, _NOT_OURS, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**23)
    found.bind((name, _ALL))
    found.setblocking(False)
    return found


class Direction:
    """Packets on their way from one card to the other."""

    def __init__(self, source: socket.socket, target: socket.socket, delay: float, loss: float) -> None:
        self.source, self.target, self.delay, self.loss = source, target, delay, loss
        self.under_way: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Take in what has arrived."""
        due = time.monotonic() + self.delay
        while True:
            try:
                packet = self.source.recv(_LONGEST)
            except BlockingIOError:
                return
            if random.random() >= self.loss:
                self.under_way.append((due, packet))

    def give(self) -> float | None:
        """Hand over what is due; when something is due next."""
        while self.under_way and self.under_way[0][0] <= time.monotonic():
            try:
                self.target.send(self.under_way.popleft()[1])
            except OSError:  # no room, or the card is down: lost
                continue
        return self.under_way[0][0] if self.under_way else None


def main(arguments: Sequence[str]) -> None:
    """Entry point."""
    one, other = (_card(name) for name in arguments[:2])
    delay, loss = float(arguments[2]) / 1000, float(arguments[3]) / 100
    ways = [Direction(one, other, delay, loss), Direction(other, one, delay, loss)]
    selector = selectors.DefaultSelector()
    for way in ways:
        selector.register(way.source, selectors.EVENT_READ, way)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    while True:
        due = [when for way in ways if (when := way.give()) is not None]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        for key, _ in selector.select(timeout):
            key.data.take()
