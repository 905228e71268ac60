"""The names of a run that spans hosts: kept by its controller, asked for over the run's network.

Nobody waits for the hub. A worker that asks where a server is gets what it knows already and, soon after, what the hub
says; a controller that cannot be reached for a while costs nothing as long as no server moves. What a worker has told
the hub it tells again every second: a word may be lost with its connection, or a late one of a worker that was given up
may have taken its place.
"""

from __future__ import annotations

import atexit
import functools
import socket as sockets
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import zmq

from srl.core.errors import DecodeError, Unreachable
from srl.services.network import Keys, Network
from srl.streams.frames import Header, decode, encode, stream_id
from srl.streams.sockets import ServerThread, bind, connect, receive

_NAME = "hub"
_LONGEST = 1024
"""Bytes of a name or an endpoint."""
FAN_OUT = 3
"""Relays that get a stream from one relay. The trainer has a single one to send to, whatever the number of hosts."""
_PATIENCE = 0.25
"""Seconds to wait for the answer to the first question about a name."""
_COUNTED = 60.0
"""Seconds to wait for a number, which is asked for again and again."""
UNHEARD = 64
"""How much further a number may be than the hub knows: who counted was cut off from it."""
_AGAIN = 1.0
"""Seconds after which a worker tells the hub again where it listens."""


class Hub:
    """The controller's end: knows where everybody listens."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.where: dict[str, str] = {}
        self.numbers: dict[str, int] = {}
        socket = bind(network, _NAME, 0, _LONGEST)
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._server = ServerThread(socket, _NAME, self._handle, lambda: None)
        self._server.start()

    def names(self) -> HubNames:
        """What workers get to know it by."""
        return HubNames(self.endpoint, self.network.keys)

    @property
    def rejected(self) -> int:
        """Messages that made no sense."""
        return self._server.rejected

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.close()

    def _handle(self, identity: bytes, header: Header, frames: Any) -> None:
        texts = [_text(frame) for frame in frames]
        if header.kind == "name" and len(texts) == 2:
            self.where[texts[0]] = texts[1]
        elif header.kind == "where" and len(texts) == 1:
            self._answer(identity, Header("name"), texts[0], self._place(texts[0]))
        elif header.kind == "number" and len(texts) == 1:
            self.numbers[texts[0]] = max(header.number, self.numbers.get(texts[0], -1))
        elif header.kind == "count" and len(texts) == 1:
            self._answer(identity, Header("number", number=self.numbers.get(texts[0], -1)), texts[0])
        else:
            raise DecodeError(f"{header.kind!r} with {len(texts)} texts")

    def _place(self, name: str) -> str:
        """Where ``name`` is; ``stream^address``: where the relay there gets the stream from."""
        stream, relay, address = name.partition("^")
        if not relay:
            return self.where.get(name, "")
        relays = [each for each in self.where if each.startswith(f"{stream}@")]  # in the order in which they came
        mine = f"{stream}@{address}"
        first = mine not in relays or mine == relays[0]
        return self.where.get(stream if first else relays[(relays.index(mine) - 1) // FAN_OUT], "")

    def _answer(self, identity: bytes, header: Header, *texts: str) -> None:
        self._server.send(identity, header, *(text.encode() for text in texts))


@dataclass(frozen=True)
class HubNames:
    """The names of a run, asked for at its hub. See :class:`~srl.services.names.Names`."""

    endpoint: str
    keys: Keys | None = field(repr=False)

    @property
    def network(self) -> Network:
        """Servers listen where this host meets the hub's."""
        return Network(_own_address(self.endpoint), self.keys)

    def add(self, name: str, endpoint: str) -> None:
        """See :class:`~srl.services.names.Names`."""
        _link(self).tell(Header("name"), name, endpoint)

    def resolve(self, name: str) -> str | None:
        """See :class:`~srl.services.names.Names`."""
        return _link(self).resolve(name) or None

    def counter(self, name: str) -> Counter:
        """See :class:`~srl.services.names.Names`."""
        return Counter(self, name)


@dataclass(frozen=True)
class Counter:
    """A number that only grows, kept at the hub. Who reads it is told one that nobody has reached."""

    names: HubNames
    name: str

    def __getitem__(self, _: int) -> int:
        known = _link(self.names).count(self.name)
        return known + UNHEARD if known >= 0 else known

    def __setitem__(self, _: int, number: int) -> None:
        _link(self.names).tell(Header("number", number=number), self.name)


class _Link:
    """The connection of one process to the hub, shared by its threads."""

    def __init__(self, names: HubNames) -> None:
        self.stream = stream_id(_NAME)
        self.socket = connect(names.network, names.endpoint, _LONGEST)
        atexit.register(self.socket.close)
        self.lock = threading.Lock()
        self.where: dict[str, str] = {}
        self.numbers: dict[str, int] = {}
        self.told: dict[tuple[str, str], tuple[Header, tuple[str, ...]]] = {}

    def tell(self, header: Header, *texts: str) -> None:
        """Tell the hub something about a name, now and again and again."""
        with self.lock:
            if not self.told:
                threading.Thread(target=self._repeat, name="hub", daemon=True).start()
            self.told[header.kind, texts[0]] = header, texts
            self._send(header, *texts)

    def _repeat(self) -> None:
        while True:
            time.sleep(_AGAIN)
            with self.lock:
                if self.socket.closed:
                    return
                for header, texts in self.told.values():
                    self._send(header, *texts)

    def resolve(self, name: str) -> str:
        """Where a name was last known to be; "" if it is not known."""
        with self.lock:
            self._send(Header("where"), name)
            self._hear(name, self.where, 0 if self.where.get(name) else _PATIENCE)
            return self.where.get(name, "")

    def count(self, name: str) -> int:
        deadline = time.monotonic() + _COUNTED
        while time.monotonic() < deadline:
            with self.lock:
                self.numbers.pop(name, None)
                self._send(Header("count"), name)
                self._hear(name, self.numbers, min(_AGAIN, _COUNTED))
                if name in self.numbers:
                    return self.numbers[name]
        raise Unreachable(f"the controller did not answer within {_COUNTED:.0f} s")

    def _send(self, header: Header, *texts: str) -> None:
        try:
            message = encode(header, stream=self.stream) + [text.encode() for text in texts]
            self.socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:  # a hub that has been away for long; whoever asks asks again
            return

    def _hear(self, name: str, known: dict[str, Any], patience: float) -> None:
        """Take in what the hub has said, and wait for up to ``patience`` seconds for a word about ``name``."""
        deadline = time.monotonic() + patience
        if patience:
            known.pop(name, None)
        while True:
            for frames in receive(self.socket):
                self._take(frames)
            left = deadline - time.monotonic()
            if name in known or left <= 0:
                return
            self.socket.poll(int(left * 1000) + 1)

    def _take(self, frames: Any) -> None:
        try:
            header, payload = decode(frames, self.stream)
            texts = [_text(frame) for frame in payload]
        except DecodeError:
            return
        if header.kind == "name" and len(texts) == 2:
            self.where[texts[0]] = texts[1]
        elif header.kind == "number" and len(texts) == 1:
            self.numbers[texts[0]] = header.number


@functools.cache
def _link(names: HubNames) -> _Link:
    return _Link(names)


@functools.cache
def _own_address(endpoint: str) -> str:
    """The address of this host on the way to ``endpoint``. Nothing is sent."""
    place = urlsplit(endpoint)
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        probe.connect((place.hostname, place.port))
        found: str = probe.getsockname()[0]
        return found


def _text(frame: Any) -> str:
    raw = bytes(frame)
    if len(raw) > _LONGEST:
        raise DecodeError(f"a text of {len(raw)} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"no text: {error}") from error
