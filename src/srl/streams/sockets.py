"""ZeroMQ sockets as SRL uses them: bounded, never blocking, on loopback only, and clients that find their server again.

A client asks the name service where its server is and asks again whenever the server has been silent for a while: a
restarted server listens on another port.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from srl.core.errors import ConfigError, DecodeError
from srl.core.memory import Doorbell
from srl.services.names import FileNames
from srl.streams.frames import Header, decode, encode

ADDRESS = "127.0.0.1"
SILENCE = 1.0
"""Seconds without a word from the server after which a client asks again."""


def listen(names: FileNames, name: str, port: int, max_bytes: int) -> zmq.Socket[bytes]:
    """A server socket, entered in the name service. Frames above ``max_bytes`` cut the peer's connection."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max(max_bytes, 1024))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
    try:
        socket.bind(f"tcp://{ADDRESS}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot listen on TCP port {port} for {name}: {error}; choose another port") from error
    names.add(name, socket.getsockopt_string(zmq.LAST_ENDPOINT))
    return socket


def receive(socket: zmq.Socket[bytes], limit: int = 1024) -> Iterator[list[Any]]:
    """Messages that are already there, as lists of frames; at most ``limit`` of them."""
    for _ in range(limit):
        try:
            yield [frame.buffer for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return


class ServerThread:
    """Owns a server socket: handles what arrives, then does what its owner has rung for."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        handle: Callable[[bytes, Header, Any], None],
        after: Callable[[], None],
        farewell: Callable[[], None] = lambda: None,
    ) -> None:
        """``handle`` gets a peer's identity, header and payload; ``after`` runs whenever the thread was woken."""
        self.socket, self.bell, self.rejected = socket, Doorbell(), 0
        self._handle, self._after, self._farewell = handle, after, farewell
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Say farewell and end."""
        self._closing.set()
        self.bell.ring()
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.bell.fileno(), zmq.POLLIN)
        while not self._closing.is_set():
            poller.poll(200)
            self.bell.clear()
            for frames in receive(self.socket):
                try:
                    self._handle(bytes(frames[0]), *decode(frames[1:]))
                except DecodeError:
                    self.rejected += 1
            self._after()
        self._farewell()
        self.socket.close(linger=200)


class ServerLink:
    """A client's connection to the server of a given name."""

    def __init__(self, names: FileNames, name: str, max_bytes: int) -> None:
        self.names, self.name, self.max_bytes = names, name, max_bytes
        self.socket: zmq.Socket[bytes] | None = None
        self.rejected = 0
        self._endpoint: str | None = None
        self._heard = self._asked = 0.0

    def silent(self) -> bool:
        """True, at most once a :data:`SILENCE`, if the server has been silent: time to connect and ask (again)."""
        now = time.monotonic()
        if now - max(self._heard, self._asked) < SILENCE:
            return False
        self._asked = now
        endpoint = self.names.resolve(self.name)
        if endpoint is not None and endpoint != self._endpoint:
            self.close()
            self._endpoint = endpoint
            self.socket = zmq.Context.instance().socket(zmq.DEALER)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, max(self.max_bytes, 1024))
            self.socket.connect(endpoint)
        return self.socket is not None

    def send(self, header: Header, arrays: Any = (), *, track: bool = False) -> Any:
        """Send without waiting; with ``track`` the arrays are not copied and the result says when they are free."""
        if self.socket is None:
            return None
        try:
            return self.socket.send_multipart(encode(header, arrays), zmq.NOBLOCK, copy=not track, track=track)
        except zmq.Again:  # the bounded queue to a server that is away is full; what is lost is asked for again
            return None

    def receive(self) -> Iterator[tuple[Header, Any]]:
        """What the server has sent, checked."""
        if self.socket is None:
            return
        for frames in receive(self.socket):
            try:
                found = decode(frames)
            except DecodeError:
                self.rejected += 1
                continue
            self._heard = time.monotonic()
            yield found

    def close(self) -> None:
        """Disconnect."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
