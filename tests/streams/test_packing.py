"""When blocks are compressed on their way: where that was found to be faster, and never on the same host."""

from __future__ import annotations

import numpy as np
import pytest
from stream_peers import eventually

from srl.core.slab import STEP_FIELDS, BlockSpec, Slab
from srl.core.specs import ArraySpec
from srl.streams import cargo
from srl.streams.cargo import Cargo, Packing
from srl.streams.tcp_samples import TcpSamples

pytestmark = pytest.mark.skipif(cargo.codec() is None, reason="needs the package lz4")

SPEC = BlockSpec({"obs": ArraySpec((4, 84, 84), "|u1"), "action": ArraySpec((), "<i8"), **STEP_FIELDS}, 7, 4)
SLOW, FAST = 12.5e6, 5e9


class Clock:
    """A clock that moves when it is told to."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def packing(clock):
    found = Packing("auto", clock)
    found.open = True
    return found


def block(noise=False):
    slab = Slab(SPEC, 1, shared=False)
    if noise:
        slab.arrays["obs"][...] = np.random.default_rng(0).integers(0, 256, slab.arrays["obs"].shape, np.uint8)
    return Cargo(slab).frames(0)


def size(frames):
    return sum(memoryview(frame).nbytes for frame in frames)


def found_to_carry(packing, rate):
    packing.measured(size(block()), size(block()) / rate)


def test_blocks_are_compressed_on_a_slow_link(packing):
    found_to_carry(packing, SLOW)
    frames, packed = packing.pack(block())
    assert packed == 0b11
    assert size(frames) < size(block()) / 10
    into = Cargo(Slab(SPEC, 1, shared=False))
    assert all(map(np.array_equal, into.check(frames, packed), block()))


def test_blocks_are_sent_as_they_are_until_the_link_is_known_and_on_a_fast_one(packing):
    assert packing.pack(block())[1] == 0
    found_to_carry(packing, FAST)
    assert packing.pack(block())[1] == 0


def test_what_does_not_get_shorter_is_sent_as_it_is_and_not_tried_every_time(packing, clock, monkeypatch):
    found_to_carry(packing, SLOW)
    tries = []
    monkeypatch.setattr(cargo, "pack", lambda frame: tries.append(frame.nbytes))
    for _ in range(10):
        frames, packed = packing.pack(block(noise=True))
        assert packed == 0 and size(frames) == size(block())
    assert len(tries) == len(block())
    clock.now += 60
    packing.pack(block(noise=True))
    assert len(tries) == 2 * len(block())


def test_a_field_of_noise_goes_as_it_is_beside_others_that_are_compressed():
    packing = Packing("always")
    frames, packed = packing.pack(block(noise=True))
    assert packed == 0b01, "the small fields are zeros, the images noise"
    assert size(frames[1:]) == size(block()[1:])


def test_compression_that_takes_longer_than_the_link_is_not_used(packing, clock, monkeypatch):
    found_to_carry(packing, SLOW)
    honest = cargo.pack

    def slow(frame):
        clock.now += frame.nbytes / SLOW
        return honest(frame)

    monkeypatch.setattr(cargo, "pack", slow)
    assert packing.pack(block())[1] == 0


def test_a_link_that_gets_faster_is_noticed(packing, clock):
    found_to_carry(packing, SLOW)
    assert packing.pack(block())[1]
    assert not packing.looks()
    clock.now += 60
    assert packing.looks(), "a block is sent as it is, to see how long that takes"
    assert not packing.looks(), "only one"
    found_to_carry(packing, FAST)
    assert packing.pack(block())[1] == 0


def test_looking_takes_a_fiftieth_of_the_time_at_most(packing, clock):
    packing.measured(10**9, 100.0)
    clock.now += 4_900
    assert not packing.looks()
    clock.now += 200
    assert packing.looks()


@pytest.mark.parametrize("mode", ["never", "auto"])
def test_without_leave_nothing_is_compressed_or_measured(mode, clock):
    packing = Packing(mode, clock)
    packing.open = mode == "never"
    found_to_carry(packing, SLOW)
    assert not packing.looks()
    assert packing.pack(block())[1] == 0


def exchange(stream, count, done=lambda: True):
    """Send blocks of zeros until they have all come; the producer."""
    consumer, producer = stream.consumer(), stream.producer(0, 1)
    try:
        sent = came = 0

        def step():
            nonlocal sent, came
            consumer.grant(2, 0)
            grant = producer.acquire() if sent < count else None
            if grant is not None:
                producer.commit(grant.block)
                sent += 1
            while (taken := consumer.take(1)) is not None:
                came += 1
                consumer.release(taken)
            return came == count and done()

        eventually(step, 20)
        return producer.packing
    finally:
        producer.close()
        consumer.close()


def test_nothing_is_compressed_on_loopback(names):
    packing = exchange(TcpSamples("samples", names, SPEC, 4, 1), 20)
    assert not packing.open and not packing.link and not packing.used


def test_a_producer_elsewhere_is_told_how_long_its_blocks_take(names, monkeypatch):
    """The consumer's measure passes through the stream; loopback is fast, so nothing is compressed."""
    monkeypatch.setattr("srl.streams.tcp_samples.TcpProducer._abroad", lambda self: True)
    packing = exchange(TcpSamples("samples", names, SPEC, 4, 1), 20)
    assert packing.open and packing.link > SLOW and not packing.used
