"""Where the sockets of a run listen, and the keys their peers must have.

Without keys a socket listens on loopback only. With keys everything is encrypted and both sides prove who they are
(CURVE): a server refuses clients whose key is not on its list (ZAP), a client talks to nobody but the run's servers.
Every start of a run makes keys of its own: one pair for its servers, one for its clients; workers are both.
"""

from __future__ import annotations

import atexit
import functools
import os
import stat
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import msgspec
import zmq

from srl.core.errors import ConfigError

LOOPBACK = "127.0.0.1"
_SEALED = 64
"""CURVE adds a name, a number, a flag and a seal: 33 bytes."""


class Pair(msgspec.Struct, frozen=True):
    """A public key and its secret, as text (Z85)."""

    public: str
    secret: str

    @classmethod
    def make(cls) -> Pair:
        """A new one."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"Pair({self.public!r}, …)"


class Keys(msgspec.Struct, frozen=True):
    """The keys of a run."""

    server: Pair
    client: Pair

    @classmethod
    def make(cls) -> Keys:
        """New ones."""
        return cls(Pair.make(), Pair.make())

    def save(self, path: Path) -> None:
        """Write them where only their owner can read them."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # the file may have been there
            file.write(msgspec.json.encode(self))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read what :meth:`save` wrote; keys that others could read are refused."""
        try:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise ConfigError(f"{path} can be read by others, so its keys are worth nothing; remove it")
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path} holds no keys of a run: {error}") from error


@dataclass(frozen=True)
class Network:
    """How the sockets of one process take part in a run."""

    address: str = LOOPBACK
    """Where servers listen."""
    keys: Keys | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            loopback = ip_address(self.address).is_loopback
        except ValueError as error:
            raise ConfigError(f"{self.address!r} is no address to listen on: {error}") from error
        if not loopback and self.keys is None:
            raise ConfigError(f"SRL does not listen on {self.address} without keys: anybody could send to it")

    @property
    def overhead(self) -> int:
        """Bytes at most by which a frame is longer on its way."""
        return 0 if self.keys is None else _SEALED

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Let nobody in but those who have the run's client key. Call before the socket is bound."""
        if self.keys is None:
            return
        _doorman().allow(self.keys.server.public, self.keys.client.public)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, self.keys.server.public)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.keys.server.secret)

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Talk to nobody but the run's servers. Call before the socket is connected."""
        if self.keys is None:
            return
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, self.keys.server.public)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self.keys.client.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.keys.client.secret)


class _Doorman:
    """Who may talk to the servers in this process: clients by domain, one domain a run."""

    def __init__(self) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # brings asyncio, which clients do without

        self.allowed: dict[str, str] = {}
        self.authenticator = ThreadAuthenticator(zmq.Context.instance())
        self.authenticator.start()
        atexit.register(self.authenticator.stop)  # later it could not be waited for

    def allow(self, domain: str, client: str) -> None:
        self.allowed[domain] = client
        self.authenticator.configure_curve_callback(domain, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """See :meth:`zmq.auth.Authenticator.configure_curve_callback`."""
        return key.decode() == self.allowed.get(domain)


@functools.cache
def _doorman() -> _Doorman:
    return _Doorman()
