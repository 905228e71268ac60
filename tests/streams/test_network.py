"""Who may take part in a run's network, and how its members find each other."""

from __future__ import annotations

import contextlib
import socket as plain
import threading
import time

import numpy as np
import pytest
import zmq
from stream_peers import SPEC, eventually, never

from srl.core.errors import ConfigError, StreamError
from srl.core.slab import STEP_FIELDS, BlockSpec
from srl.core.specs import ArraySpec
from srl.services.names import FileNames
from srl.services.network import Keys, Network, Pair
from srl.streams import hub as hubs
from srl.streams.frames import Header, encode, stream_id
from srl.streams.hub import Hub
from srl.streams.tcp_samples import TcpSamples

ANYWHERE = "0.0.0.0"
A_WHILE = 0.5
"""Seconds in which a peer that may come in has come in."""


@pytest.mark.parametrize("address", [ANYWHERE, "192.0.2.1", "::"])
def test_without_keys_nobody_listens_but_on_loopback(address):
    with pytest.raises(ConfigError, match="without keys"):
        Network(address)
    assert Network(address, Keys.make()).address == address


def test_what_is_no_address_is_refused():
    with pytest.raises(ConfigError, match="no address"):
        Network("tomorrow")


def test_keys_are_kept_where_only_their_owner_reads_them(tmp_path):
    path, keys = tmp_path / "keys.json", Keys.make()
    path.write_text("older")
    path.chmod(0o644)
    keys.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Keys.load(path) == keys
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="read by others"):
        Keys.load(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04", b'{"server": 1}'])
def test_a_file_that_holds_no_keys_is_refused(tmp_path, content):
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no keys"):
        Keys.load(path)


def test_secrets_are_not_shown(tmp_path):
    keys = Keys.make()
    names = FileNames(tmp_path, Network(keys=keys))
    shown = [repr(each) for each in (keys, keys.server, names, names.network, hubs.HubNames("tcp://127.0.0.1:1", keys))]
    assert not any(secret in text for text in shown for secret in (keys.server.secret, keys.client.secret))


@pytest.fixture
def keys():
    return Keys.make()


@pytest.fixture
def guarded(tmp_path, keys):
    return FileNames(tmp_path / "names", Network(keys=keys))


def knocking(endpoint, server="", pair=None):
    """A client's socket with these keys."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if pair is not None:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, pair.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, pair.secret)
    socket.connect(endpoint)
    return socket


STRANGERS = {
    "no keys": lambda keys: {},
    "a key of its own": lambda keys: {"server": keys.server.public, "pair": Pair.make()},
    "keys of another run": lambda keys: {"server": Keys.make().server.public, "pair": Keys.make().client},
    "another run's server key": lambda keys: {"server": Keys.make().server.public, "pair": keys.client},
    "the public key without its secret": lambda keys: {
        "server": keys.server.public,
        "pair": Pair(keys.client.public, Pair.make().secret),
    },
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_not_heard(guarded, keys, ends, who):
    consumer = ends.near(TcpSamples("samples", guarded, SPEC, 4, 2).consumer)
    hello = encode(Header("hello", sender=1, incarnation=1), stream=stream_id("samples"))
    # A secret that is not that of the public key may be refused at once; who has been refused can send nothing.
    with contextlib.suppress(zmq.ZMQError):
        stranger = knocking(guarded.resolve("samples"), **STRANGERS[who](keys))
        ends.stack.callback(stranger.close)
        stranger.send_multipart(hello, zmq.NOBLOCK)
    friend = knocking(guarded.resolve("samples"), keys.server.public, keys.client)
    ends.stack.callback(friend.close)
    friend.send_multipart(encode(Header("hello", sender=0, incarnation=1), stream=stream_id("samples")))
    eventually(lambda: consumer.board.present[0])
    assert never(lambda: consumer.board.present[1] or consumer.rejected, A_WHILE)


def test_a_client_talks_to_no_server_but_the_runs(guarded, keys, ends):
    producer = ends.near(TcpSamples("samples", guarded, SPEC, 4, 1).producer, 0, 1)
    other = zmq.Context.instance().socket(zmq.ROUTER)
    ends.stack.callback(other.close, 0)
    Network(keys=Keys.make()).protect_server(other)
    other.bind("tcp://127.0.0.1:*")
    guarded.add("samples", other.getsockopt_string(zmq.LAST_ENDPOINT))
    for _ in range(5):
        assert producer.acquire() is None
        assert not other.poll(100)


class Recorder:
    """Passes bytes on to a server and remembers what its clients sent."""

    def __init__(self, endpoint):
        self.server = endpoint.removeprefix("tcp://").split(":")
        self.listener = plain.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.sent = bytearray()
        self.open = [self.listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def connect(self):
        found = plain.create_connection((self.server[0], int(self.server[1])))
        self.open.append(found)
        return found

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client = self.listener.accept()[0]
                server = self.connect()
                self.open.append(client)
                threading.Thread(target=self._pass, args=(client, server, self.sent), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, bytearray()), daemon=True).start()

    def _pass(self, source, target, record):
        with contextlib.suppress(OSError):
            while found := source.recv(1 << 16):
                record += found
                target.sendall(found)

    def close(self):
        for each in self.open:
            each.close()


def test_what_was_recorded_on_the_wire_cannot_be_sent_again(guarded, ends):
    stream = TcpSamples("samples", guarded, SPEC, 4, 1)
    consumer = ends.near(stream.consumer)
    recorder = ends.near(Recorder, guarded.resolve("samples"))
    guarded.add("samples", recorder.endpoint)
    producer = ends.near(stream.producer, 0, 1)

    def acquired():
        consumer.grant(4, 0)
        return producer.acquire()

    grant = eventually(acquired)
    producer.slab.block(grant.block)["reward"][:] = 7.25
    content = producer.slab.block(grant.block)["reward"].tobytes()
    producer.commit(grant.block)
    eventually(lambda: consumer.take(1))
    assert content not in bytes(recorder.sent), "what was sent could be read"
    again = recorder.connect()
    again.sendall(bytes(recorder.sent))
    assert never(lambda: consumer.take(1) or consumer.duplicates or consumer.rejected, A_WHILE)


def test_names_stay_in_their_folder(tmp_path):
    names = FileNames(tmp_path / "run" / "names")
    names.add("../../outside", "tcp://127.0.0.1:1")
    assert names.resolve("../../outside") == "tcp://127.0.0.1:1"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.fixture(params=["open", "with keys"])
def hub(request):
    found = Hub(Network(keys=Keys.make() if request.param == "with keys" else None))
    yield found
    found.close()


def test_the_hub_says_where_a_server_is(hub):
    names = hub.names()
    assert names.resolve("samples") is None
    names.add("samples", "tcp://127.0.0.1:1")
    assert eventually(lambda: names.resolve("samples")) == "tcp://127.0.0.1:1"


def test_who_asks_again_hears_that_a_server_has_moved(hub):
    names = hub.names()
    names.add("samples", "tcp://127.0.0.1:1")
    eventually(lambda: names.resolve("samples"))
    names.add("samples", "tcp://127.0.0.1:2")
    eventually(lambda: names.resolve("samples") == "tcp://127.0.0.1:2")


def test_what_the_hub_has_not_heard_or_was_told_wrongly_it_is_told_again(hub):
    names = hub.names()
    names.add("samples", "tcp://127.0.0.1:2")
    names.counter("parameters")[0] = 7
    eventually(lambda: hub.where and hub.numbers)
    hub.where["samples"] = "tcp://127.0.0.1:1"  # a late word of one that was given up
    hub.numbers.clear()  # a word that was lost with its connection
    eventually(lambda: hub.where["samples"] == "tcp://127.0.0.1:2" and hub.numbers == {"parameters": 7})


def test_a_hub_that_is_gone_keeps_nobody_waiting(hub):
    names = hub.names()
    names.add("samples", "tcp://127.0.0.1:1")
    eventually(lambda: names.resolve("samples"))
    hub.close()
    begin = time.monotonic()
    assert names.resolve("samples") == "tcp://127.0.0.1:1"
    assert time.monotonic() - begin < 0.1
    assert names.resolve("never heard of") is None
    assert time.monotonic() - begin < 1


def test_numbers_outlive_who_wrote_them_and_only_grow(hub, monkeypatch):
    counter = hub.names().counter("parameters")
    assert counter[0] == -1
    counter[0] = 41
    counter[0] = 17
    assert hub.names().counter("parameters")[0] == 41 + hubs.UNHEARD
    hub.close()
    monkeypatch.setattr(hubs, "_COUNTED", 0.2)
    with pytest.raises(StreamError, match="did not answer"):
        counter[0]


@pytest.mark.parametrize(
    "message",
    [
        [b"\x80\x04."],
        encode(Header("name"), stream=stream_id("hub")),
        [*encode(Header("where"), stream=stream_id("hub")), b"\xff\xfe"],
        [*encode(Header("block"), stream=stream_id("hub")), b"samples"],
    ],
    ids=["pickle", "no texts", "no text", "another kind"],
)
def test_the_hub_refuses_what_makes_no_sense(ends, message):
    hub = ends.near(Hub, Network())
    stranger = knocking(hub.endpoint)
    ends.stack.callback(stranger.close)
    stranger.send_multipart(message)
    eventually(lambda: hub.rejected == 1)
    assert not hub.where and not hub.numbers


def test_servers_listen_where_their_host_meets_the_hubs(hub):
    assert hub.names().network.address == "127.0.0.1"
    assert hub.names().network.keys == hub.network.keys


MANY = {f"obs/{i}": ArraySpec((100,), "<f4") for i in range(40)}
SHAPES = {
    "small fields": BlockSpec({**MANY, **STEP_FIELDS}, 1, 2),
    "small fields, together large": BlockSpec({**MANY, **STEP_FIELDS}, 15, 8),
    "large fields": BlockSpec({"obs": ArraySpec((84, 84), "|u1"), "other": ArraySpec((9999,), "<f4")}, 9, 4),
    "both": BlockSpec({"obs": ArraySpec((84, 84), "|u1"), **MANY, **STEP_FIELDS}, 15, 8),
}


@pytest.mark.parametrize("packing", ["auto", "always"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_block_comes_as_it_was_filled(names, shape, packing):
    """However large its fields are, and again and again from the same few blocks of memory."""
    spec = SHAPES[shape]
    stream = TcpSamples("samples", names, spec, 4, 1, packing=packing)
    consumer, producer = stream.consumer(), stream.producer(0, 1)
    sent, came = 0, []

    def step():
        nonlocal sent
        consumer.grant(4, 0)
        grant = producer.acquire()
        if grant is not None:
            for field in producer.slab.block(grant.block).values():
                field[...] = sent % 2 if field.dtype == bool else sent % 100
            producer.commit(grant.block)
            sent += 1
        while (taken := consumer.take(1)) is not None:
            block = consumer.slab.block(taken[0].block)
            came.append({tuple(np.unique(field).tolist()) for field in block.values() if field.dtype != bool})
            consumer.release(taken)
        return len(came) >= 50

    try:
        eventually(step, 20)
        assert came[:50] == [{(number,)} for number in range(50)]
        assert consumer.rejected == consumer.duplicates == 0
    finally:
        producer.close()
        consumer.close()
