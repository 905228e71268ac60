"""Relays: one subscriber a host, a tree of them, and what happens when one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from stream_peers import eventually

from srl.services.network import Keys, Network
from srl.streams import tcp_parameters
from srl.streams.hub import FAN_OUT, Hub
from srl.streams.relay import Relay, Relays
from srl.streams.tcp_parameters import SharedReader, TcpParameters, TcpReader

WEIGHTS = {"w": np.arange(1000, dtype=np.float32)}
RELAY = """
import sys
from srl.services.network import Keys
from srl.streams import sockets
from srl.streams.hub import HubNames
from srl.streams.relay import Relays
from srl.streams.tcp_parameters import TcpParameters
import msgspec
sockets.SILENCE = float(sys.argv[2])
names = HubNames(sys.argv[1], msgspec.json.decode(sys.stdin.readline(), type=Keys))
relays = Relays([TcpParameters("parameters/default", names)])
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hub():
    found = Hub(Network(keys=Keys.make()))
    yield found
    found.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tcp_parameters, "_SOON", 0.05)
    monkeypatch.setattr(tcp_parameters, "_LATER", 0.05)


@pytest.fixture
def relay_elsewhere(hub):
    """Starts a relay for this host in another process."""
    import msgspec

    started = []

    def start(silence=0.1):
        command = [sys.executable, "-c", RELAY, hub.endpoint, str(silence)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdin.write(msgspec.json.encode(hub.network.keys) + b"\n")
        process.stdin.flush()
        started.append(process)
        assert process.stdout.readline() == b"started\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def weights(version):
    return {"w": WEIGHTS["w"] + version}


def read(reader):
    """The version and weights a reader has."""
    found = {}
    version = reader.read(WEIGHTS, lambda arrays: found.update(w=arrays["w"].copy()))
    np.testing.assert_array_equal(found["w"], weights(version)["w"])
    return version


def test_a_hosts_readers_share_the_relays_board_and_the_trainer_sends_once(hub, quick, relay_elsewhere, ends):
    stream = TcpParameters("parameters/default", hub.names())
    relay_elsewhere(silence=1.0)  # who hears nothing for that long asks again
    writer = ends.near(stream.writer)
    writer.publish(weights(1), 1)
    readers = [ends.near(stream.reader) for _ in range(5)]
    for reader in readers:
        eventually(lambda reader=reader: reader.newest() == 1 and isinstance(reader._inner, SharedReader))
        assert read(reader) == 1
    sent = []
    send = writer._server.send
    writer._server.send = lambda identity, header, *frames: sent.append(header) or send(identity, header, *frames)
    for version in range(2, 10):
        writer.publish(weights(version), version)
        for reader in readers:
            eventually(lambda reader=reader, version=version: reader.newest() == version)
            assert read(reader) == version
    assert Counter(header.version for header in sent if header.kind == "parameters") == dict.fromkeys(range(2, 10), 1)


def test_a_new_version_wakes_the_readers_of_a_host(hub, quick, relay_elsewhere, ends):
    from srl.streams.wait import wait

    stream = TcpParameters("parameters/default", hub.names())
    relay_elsewhere()
    writer, reader = ends.near(stream.writer), ends.near(stream.reader)
    writer.publish(weights(1), 1)
    eventually(lambda: reader.newest() == 1 and isinstance(reader._inner, SharedReader))
    reader.newest()
    while wait([reader.pollable()], 0.2):  # signs of life
        reader.newest()
    writer.publish(weights(2), 2)
    assert wait([reader.pollable()], 5)
    eventually(lambda: reader.newest() == 2)


def test_a_relay_that_is_killed_costs_its_readers_nothing(hub, quick, relay_elsewhere, ends):
    stream = TcpParameters("parameters/default", hub.names())
    first = relay_elsewhere()
    second = relay_elsewhere()  # the host is taken: it waits
    writer, reader = ends.near(stream.writer), ends.near(stream.reader)
    writer.publish(weights(1), 1)
    eventually(lambda: reader.newest() == 1 and isinstance(reader._inner, SharedReader))
    before = reader._inner.handles
    assert f"/proc/{first.pid}/" in before
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    writer.publish(weights(2), 2)
    eventually(lambda: reader.newest() == 2)
    assert read(reader) == 2
    eventually(lambda: reader.newest() and isinstance(reader._inner, SharedReader) and reader._inner.handles != before)
    assert f"/proc/{second.pid}/" in reader._inner.handles
    os.kill(second.pid, signal.SIGKILL)
    second.wait()
    writer.publish(weights(3), 3)
    eventually(lambda: reader.newest() == 3)
    assert isinstance(reader._inner, TcpReader)  # nobody is left to share with


def test_the_trainer_has_one_relay_to_send_to_and_no_relay_has_more_than_a_few(hub):
    hub.where["parameters/default"] = "trainer"
    for number in range(50):
        hub.where[f"parameters/default@10.0.0.{number}"] = f"relay {number}"
    parents = [hub._place(f"parameters/default^10.0.0.{number}") for number in range(50)]
    assert max(Counter(parents).values()) <= FAN_OUT
    assert parents.count("trainer") == 1
    above = {f"relay {number}": parent for number, parent in enumerate(parents)}
    for relay in above:
        way = [relay]
        while way[-1] != "trainer":
            way.append(above[way[-1]])
        assert len(way) <= 6  # 1 + 3 + 9 + 27 + 10, and the trainer
    assert hub._place("parameters/default^10.9.9.9") == "trainer"


def test_a_relay_whose_parent_is_silent_asks_the_trainer(hub, monkeypatch, ends):
    stream = TcpParameters("parameters/default", hub.names())
    writer = ends.near(stream.writer)
    writer.publish(weights(1), 1)
    monkeypatch.setattr(
        hub, "_place", lambda name, place=hub._place: "tcp://127.0.0.1:9" if "^" in name else place(name)
    )
    relay = ends.near(Relay, stream)
    eventually(lambda: relay.newest() == 1)


def test_a_host_without_streams_has_no_relay():
    relays = Relays([])
    assert not relays.relays
    relays.close()


@pytest.mark.parametrize("handles", ["/etc/passwd /etc/passwd", "/proc/1/fd/../../x /proc/1/fd/1", "x", "/proc/1/fd/0"])
def test_a_reader_opens_nothing_but_segments(hub, quick, ends, handles):
    stream = TcpParameters("parameters/default", hub.names())
    hub.where["parameters/default!@127.0.0.1"] = handles
    writer, reader = ends.near(stream.writer), ends.near(stream.reader)
    writer.publish(weights(1), 1)
    eventually(lambda: reader.newest() == 1)
    assert isinstance(reader._inner, TcpReader)
