"""ZeroMQ sockets as SRL uses them: bounded, never blocking, and clients that find their server again.

Where they listen and whom they let in is the network's business (:mod:`srl.services.network`). A client asks the name
service where its server is and asks again whenever the server has been silent for a while: a restarted server listens
on another port.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from srl.core.errors import ConfigError, DecodeError
from srl.core.memory import Doorbell
from srl.services.names import Names
from srl.services.network import Network
from srl.streams.frames import Header, decode, encode, stream_id

SILENCE = 1.0
"""Seconds without a word from the server after which a client asks again."""


_HEARTBEAT, _LOST = 2000, 6000
"""Milliseconds between signs of life, and without one until a connection is made anew: a cut network may not say so."""
_READABLE, _AT_ONCE = int(zmq.POLLIN), int(zmq.NOBLOCK)
_TRY = 2000
"""Milliseconds a connection may take to be made before the next try: by itself TCP tries ever more rarely."""


def listen(names: Names, name: str, port: int, max_bytes: int) -> zmq.Socket[bytes]:
    """A server socket, entered in the name service. Frames above ``max_bytes`` cut the peer's connection."""
    socket = bind(names.network, name, port, max_bytes)
    names.add(name, socket.getsockopt_string(zmq.LAST_ENDPOINT))
    return socket


def bind(network: Network, name: str, port: int, max_bytes: int) -> zmq.Socket[bytes]:
    """A server socket of ``network``. Sending to a peer that is away is an error."""
    socket = _socket(network, zmq.ROUTER, max_bytes)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    network.protect_server(socket)
    try:
        socket.bind(f"tcp://{network.address}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(
            f"cannot listen on {network.address}, TCP port {port or '(any)'}, for {name}: {error}; choose another port"
        ) from error
    return socket


def connect(network: Network, endpoint: str, max_bytes: int) -> zmq.Socket[bytes]:
    """A client's socket to a server of ``network``."""
    socket = _socket(network, zmq.DEALER, max_bytes)
    network.protect_client(socket)
    socket.connect(endpoint)
    return socket


def _socket(network: Network, kind: int, max_bytes: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max(max_bytes, 1024) + network.overhead)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _LOST)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _TRY)
    return socket


def receive(socket: zmq.Socket[bytes], limit: int = 1024, ready: bool = False) -> Iterator[list[Any]]:
    """Messages that are already there, as lists of frames; at most ``limit`` of them. ``ready``: there is one."""
    for _ in range(limit):
        if not ready and not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:  # a third of what an exception takes
            return
        ready = False
        try:
            frame = socket.recv(_AT_ONCE, copy=False)
        except zmq.Again:  # it was from somebody who has left meanwhile, or may not speak
            return
        frames = [frame.buffer]
        while frame.more:  # all of a message are there when one is
            frame = socket.recv(_AT_ONCE, copy=False)
            frames.append(frame.buffer)
        yield frames


class ServerThread:
    """Owns a server socket: handles what arrives, then does what its owner has rung for."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        name: str,
        handle: Callable[[bytes, Header, Any], None],
        after: Callable[[], None],
        farewell: Callable[[], None] = lambda: None,
    ) -> None:
        """``handle`` gets a peer's identity, header and payload; ``after`` runs whenever the thread was woken."""
        self.socket, self.stream, self.bell, self.rejected = socket, stream_id(name), Doorbell(), 0
        self.error: BaseException | None = None
        self._handle, self._after, self._farewell = handle, after, farewell
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def send(self, identity: bytes, header: Header, *frames: Any) -> bool:
        """Send without waiting, from the thread itself; False if the peer is away (it will ask again)."""
        try:
            message = [identity, *encode(header, stream=self.stream), *frames]
            self.socket.send_multipart(message, zmq.NOBLOCK, copy=not frames)
        except zmq.ZMQError:
            return False
        return True

    def check(self) -> None:
        """Raise what ended the thread, if something did."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Say farewell and end."""
        self._closing.set()
        self.bell.ring()
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        poller, bell = zmq.Poller(), self.bell.fileno()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(bell, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                ready = dict(poller.poll(200))
                if bell in ready:
                    self.bell.clear()
                for frames in receive(self.socket, ready=True) if self.socket in ready else ():
                    try:
                        self._handle(bytes(frames[0]), *decode(frames[1:], self.stream))
                    except DecodeError:
                        self.rejected += 1
                self._after()
            self._farewell()
        except BaseException as error:  # raised in the owner's own thread by check()
            self.error = error
        finally:
            self.socket.close(linger=200)


class ServerLink:
    """A client's connection to the server of a given name."""

    def __init__(self, names: Names, name: str, max_bytes: int) -> None:
        self.names, self.name, self.stream, self.max_bytes = names, name, stream_id(name), max_bytes
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
            self.socket = connect(self.names.network, endpoint, self.max_bytes)
        return self.socket is not None

    def heard(self) -> bool:
        """Whether the server has answered since it was last asked."""
        return self._heard >= self._asked

    def send(self, header: Header, arrays: Any = ()) -> None:
        """Send without waiting."""
        if self.socket is None:
            return
        # The bounded queue to a server that is away may be full; what is lost is asked for again.
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(encode(header, arrays, self.stream), zmq.NOBLOCK)

    def receive(self) -> Iterator[tuple[Header, Any]]:
        """What the server has sent, checked."""
        if self.socket is None:
            return
        for frames in receive(self.socket):
            try:
                found = decode(frames, self.stream)
            except DecodeError:
                self.rejected += 1
                continue
            self._heard = time.monotonic()
            yield found

    def close(self, linger: int = 0) -> None:
        """Disconnect, sending what is still to be sent for up to ``linger`` milliseconds, in the background."""
        if self.socket is not None:
            self.socket.close(linger)
            self.socket = None
