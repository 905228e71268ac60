"""Streams over every transport, and their other ends in other processes."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import zmq
from stream_peers import SILENCE, SPEC, TRANSPORTS, Peer, eventually

from srl.core.memory import Doorbell
from srl.core.slab import Slab
from srl.services.names import FileNames
from srl.services.network import Keys, Network
from srl.streams import sockets
from srl.streams.frames import Header, encode, stream_id
from srl.streams.inference import InferenceBoard
from srl.streams.parameters import ParameterBoard
from srl.streams.samples import SampleBoard
from srl.streams.tcp_inference import TcpInference
from srl.streams.tcp_parameters import TcpParameters
from srl.streams.tcp_samples import TcpSamples


def pytest_collection_modifyitems(items):
    for item in items:
        if "streams" in item.path.parts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(30))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Clients look for a lost server ten times a second."""
    monkeypatch.setattr(sockets, "SILENCE", SILENCE)


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param.split(" with ")[0]


def way(request):
    """The transport a test was asked to use, in full."""
    return request.node.callspec.params.get("transport", "") if hasattr(request.node, "callspec") else ""


@pytest.fixture
def names(request, tmp_path):
    keys = Keys.make() if way(request) == "tcp with keys" else None
    return FileNames(tmp_path / "names", Network(keys=keys))


@pytest.fixture
def samples(request, transport, names):
    """Makes a sample stream."""
    packing = "always" if way(request) == "tcp with lz4" else "auto"

    def make(blocks=4, producers=1, spec=SPEC):
        if transport == "tcp":
            return TcpSamples("samples", names, spec, blocks, producers, packing=packing)
        return SampleBoard(spec, blocks, [Doorbell() for _ in range(producers)], shared=transport == "shm")

    return make


@pytest.fixture
def inference(transport, names):
    """Makes an inference stream."""

    def make(clients=1, servers=1, blocks=4):
        if transport == "tcp":
            return TcpInference("inference", names, SPEC, clients, servers)
        shared = transport == "shm"
        bells = [Doorbell() for _ in range(clients)]
        return InferenceBoard(Slab(SPEC, blocks, shared=shared), bells, servers, shared=shared)

    return make


@pytest.fixture
def parameters(transport, names):
    """A parameter stream."""
    return TcpParameters("parameters", names) if transport == "tcp" else ParameterBoard(shared=transport == "shm")


@pytest.fixture(scope="session")
def idle_peers():
    """Processes that wait for something to hold: starting one takes longer than most tests."""
    idle = []
    yield idle
    for peer in idle:
        peer.end()


class Ends:
    """Opens ends of streams, here or where the transport would have them, and closes them after the test."""

    def __init__(self, transport, idle, stack):
        self.transport, self.idle, self.stack = transport, idle, stack
        self.peers = set()

    def near(self, make, *arguments):
        """An end in this process."""
        end = make(*arguments)
        if (server := getattr(end, "_server", None)) is not None:
            self.stack.callback(server.socket.close)  # a server thread that dies leaves it open
        self.stack.callback(end.close)
        return end

    def far(self, make, *arguments):
        """An end in another process, unless the stream is inline."""
        if self.transport == "inline":
            return self.near(make, *arguments)
        peer = self.idle.pop() if self.idle else Peer()
        self.peers.add(peer)
        return peer.hold(make, *arguments)

    def kill(self, end):
        """SIGKILL to the process of a far end. An inline end is forgotten, which is all that can happen to it."""
        if isinstance(end, Peer):
            self.peers.remove(end)
            end.kill()

    def close(self):
        for peer in self.peers:
            with contextlib.suppress(Exception):
                peer.close()
            peer.hold(None)
            self.idle.append(peer)


@pytest.fixture
def ends(request, idle_peers):
    transport = request.getfixturevalue("transport") if "transport" in request.fixturenames else "tcp"
    with contextlib.ExitStack() as stack:
        found = Ends(transport, idle_peers, stack)
        stack.callback(found.close)
        yield found


class Stranger:
    """A TCP peer that sends what it likes to the server of a name, and hears what that sends back."""

    def __init__(self, names, name):
        self.name = name
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(eventually(lambda: names.resolve(name)))

    def send(self, *frames):
        self.socket.send_multipart(frames)

    def say(self, kind, *arrays, **header):
        self.send(*encode(Header(kind, **header), arrays, stream_id(self.name)))

    def hear(self):
        """One message that is already there, or None."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self):
        self.socket.close()


@pytest.fixture
def stranger(names, ends):
    """Makes a stranger connected to the server of some name."""
    return lambda name: ends.near(Stranger, names, name)


class FakeServer(Stranger):
    """A server that answers what it likes."""

    def __init__(self, names, name, **options):
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        for option, value in {"LINGER": 0, **options}.items():
            self.socket.setsockopt(getattr(zmq, option), value)
        self.socket.bind("tcp://127.0.0.1:*")
        names.add(name, self.socket.getsockopt_string(zmq.LAST_ENDPOINT))


@pytest.fixture
def fake_server(names, ends):
    """Makes a fake server of some name."""
    return lambda name, **options: ends.near(lambda: FakeServer(names, name, **options))


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def bomb(tmp_path):
    """Pickled bytes that must never be unpickled."""
    marker = tmp_path / "exploded"
    yield pickle.dumps(Bomb(marker))
    assert not marker.exists(), "a peer's bytes were unpickled"
