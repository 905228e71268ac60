"""Streams made of others: a tee loses nothing and doubles nothing however slow one side is; nobody keeps nothing."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from stream_peers import SPEC, Consumer, contents, eventually, never, number_of, write

from srl.core.errors import ConfigError, StreamClosed
from srl.core.memory import Doorbell
from srl.core.slab import BlockSpec
from srl.streams.combine import NullSamples, TeeSamples
from srl.streams.samples import SampleBoard
from srl.streams.tcp_samples import TcpSamples


@pytest.fixture
def streams(transport, names):
    """Makes sample streams, each of a name of its own."""
    made = 0

    def make(blocks=4, producers=1, spec=SPEC):
        nonlocal made
        made += 1
        if transport == "tcp":
            return TcpSamples(f"samples-{made}", names, spec, blocks, producers)
        return SampleBoard(spec, blocks, [Doorbell() for _ in range(producers)], shared=transport == "shm")

    return make


@pytest.fixture
def tee(streams, ends):
    """A tee over streams of these numbers of blocks: its producer, and the consumers behind it."""

    def make(*blocks):
        behind = [streams(count) for count in blocks]
        consumers = [ends.near(Consumer, stream) for stream in behind]
        producer = ends.near(TeeSamples(behind).producer, 0, 1)

        def known():  # over TCP a producer first has to be heard of
            assert producer.acquire() is None
            return all(consumer.board.present.sum() == 1 for consumer in consumers)

        eventually(known)
        return producer, consumers

    return make


def produce(producer, number):
    """Fill one block with known contents, if that is allowed; whether it was."""
    grant = producer.acquire()
    if grant is None:
        return False
    write(producer.slab, grant.block, number)
    producer.commit(grant.block)
    return True


# A tee


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_block_is_begun_only_with_leave_of_all(tee, order):
    producer, consumers = tee(4, 4)
    first, second = (consumers[i] for i in order)
    assert first.grant(2, 5) == 2
    assert never(producer.acquire)  # asking again and again costs no leave
    assert second.grant(1, 5) == 1
    eventually(lambda: produce(producer, 1))
    assert never(producer.acquire)
    assert second.grant(1, 5) == 1
    eventually(lambda: produce(producer, 2))
    for consumer in consumers:
        assert [eventually(consumer.next)[1] for _ in range(2)] == [1, 2]
        assert consumer.levels() == (0, 0)


def test_a_block_that_was_begun_stays_the_same_until_it_is_handed_over(tee):
    producer, consumers = tee(4, 4)
    for consumer in consumers:
        consumer.grant(3, 5)
    grant = eventually(producer.acquire)
    assert grant.version == 5
    write(producer.slab, grant.block, 8)
    for consumer in consumers:
        assert never(consumer.next)
    producer.commit(grant.block)
    for consumer in consumers:
        assert eventually(consumer.next)[1] == 8
        assert consumer.levels() == (2, 0)


def test_everybody_gets_all_of_a_block_in_memory_of_their_own(tee):
    producer, consumers = tee(2, 2, 2)
    for consumer in consumers:
        consumer.grant(1, 0)
    eventually(lambda: produce(producer, 7))
    taken = [eventually(consumer.next)[0] for consumer in consumers]
    for name, array in consumers[0].slab.block(taken[0].block).items():
        array[...] = 0
        for consumer, full in list(zip(consumers, taken, strict=True))[1:]:
            np.testing.assert_array_equal(consumer.slab.arrays[name][full.block], contents(SPEC, 7)[name])


@pytest.mark.parametrize("slow", [0, 1])
def test_nothing_is_lost_or_doubled_if_one_side_is_slow(tee, slow):
    producer, consumers = tee(3, 5)
    count, made, got = 20, 0, [[], []]
    turn = 0

    def step():
        nonlocal made, turn
        turn += 1
        for i, consumer in enumerate(consumers):
            if i == slow and turn % 5:
                continue
            consumer.grant(1 if i == slow else consumer.slab.blocks, 0)
            full = consumer.next()
            if full is not None:
                got[i].append(full)
                consumer.release([full[0]])
        if made < count and produce(producer, made):
            made += 1
        return all(len(each) == count for each in got)

    eventually(step, 20)
    for each in got:
        assert [number for _, number in each] == list(range(count))
        assert [full.sequence for full, _ in each] == list(range(count))
    assert all(never(consumer.next, 0.05) for consumer in consumers)


def test_a_slow_side_bounds_what_the_other_may_be_ahead(tee):
    producer, consumers = tee(8, 2)
    for consumer in consumers:
        consumer.grant(8, 0)
    for number in range(2):
        eventually(lambda number=number: produce(producer, number))
    for consumer in consumers:
        consumer.grant(8, 0)
    assert never(producer.acquire)
    assert [number for _, number in (eventually(consumers[0].next) for _ in range(2))] == [0, 1]
    full, number = eventually(consumers[1].next)
    assert number == 0
    consumers[1].release([full])
    consumers[1].grant(1, 0)
    eventually(lambda: produce(producer, 2))


def test_two_producers_do_not_share_blocks(streams, ends):
    behind = [streams(4, producers=2) for _ in range(2)]
    consumers = [ends.near(Consumer, stream) for stream in behind]
    producers = [ends.near(TeeSamples(behind).producer, index, 1) for index in range(2)]

    def known():
        assert not any(producer.acquire() for producer in producers)
        return all(consumer.board.present.sum() == 2 for consumer in consumers)

    eventually(known)
    for consumer in consumers:
        assert consumer.grant(2, 0) == 2
    grants = [eventually(producer.acquire) for producer in producers]
    for index, (producer, grant) in enumerate(zip(producers, grants, strict=True)):
        write(producer.slab, grant.block, index)
    for producer, grant in zip(reversed(producers), reversed(grants), strict=True):
        producer.commit(grant.block)
    for consumer in consumers:
        found = {full.producer: number for full, number in (eventually(consumer.next) for _ in range(2))}
        assert found == {0: 0, 1: 1}


def test_what_it_waits_for_is_the_stream_that_gave_no_leave(tee):
    producer, consumers = tee(2, 2)
    ends = [each.pollable() for each in producer.producers]
    consumers[0].grant(1, 0)
    eventually(lambda: (producer.acquire(), producer.pollable() is ends[1])[1])
    consumers[1].grant(1, 0)
    eventually(producer.acquire)
    eventually(lambda: produce(producer, 0))
    assert producer.pollable() is ends[0]


@pytest.mark.parametrize("which", [0, 1])
def test_a_consumer_that_closes_ends_it(tee, which):
    producer, consumers = tee(2, 2)
    consumers[which].close()

    def closed():
        try:
            return producer.acquire()
        except StreamClosed:
            return "closed"

    assert eventually(closed) == "closed"


def test_a_producer_that_leaves_gives_everything_back(tee):
    producer, consumers = tee(2, 2)
    for consumer in consumers:
        consumer.grant(2, 0)
    eventually(producer.acquire)
    producer.close()
    for consumer in consumers:
        eventually(lambda each=consumer: each.levels() == (0, 0) and len(each.free()) == 2)
        assert consumer.next() is None


def test_a_stream_behind_it_may_want_fewer_fields(streams, ends):
    few = BlockSpec({name: SPEC.fields[name] for name in ("obs/clock", "action", "reward")}, SPEC.horizon, SPEC.rows)
    behind = [streams(2), streams(2, spec=few)]
    consumers = [ends.near(Consumer, stream) for stream in behind]
    producer = ends.near(TeeSamples(behind).producer, 0, 1)
    eventually(lambda: (producer.acquire(), all(each.board.present.sum() == 1 for each in consumers))[1])
    for consumer in consumers:
        consumer.grant(1, 0)
    eventually(lambda: produce(producer, 3))
    assert eventually(consumers[0].next)[1] == 3
    (full,) = eventually(lambda: consumers[1].take(1))
    for name in few.fields:
        np.testing.assert_array_equal(consumers[1].slab.arrays[name][full.block], contents(SPEC, 3)[name])


def test_nobody_can_take_from_a_tee_itself(streams):
    with pytest.raises(ConfigError, match="consumer of its own"):
        TeeSamples([streams()]).consumer()


# Nobody


@pytest.mark.parametrize("shared", [False, True])
def test_samples_for_nobody_are_always_welcome_and_each_producer_has_memory_of_its_own(shared):
    stream = NullSamples(SPEC, 3, shared=shared)
    stream = pickle.loads(pickle.dumps(stream)) if shared else stream
    producers = [stream.producer(index, 1) for index in range(3)]
    blocks = set()
    for number in range(5):
        grants = [producer.acquire() for producer in producers]
        assert len({grant.block for grant in grants}) == 3
        for i, (producer, grant) in enumerate(zip(producers, grants, strict=True)):
            write(producer.slab, grant.block, number * 10 + i)
        for i, (producer, grant) in enumerate(zip(producers, grants, strict=True)):
            assert number_of(producer.slab, grant.block) == number * 10 + i
            producer.commit(grant.block)
        blocks |= {grant.block for grant in grants}
    assert len(blocks) == 3  # it takes no more memory, however much is made
    for producer in producers:
        producer.close()


def test_nobody_can_train_on_nothing():
    with pytest.raises(ConfigError, match="null stream"):
        NullSamples(SPEC, 1, shared=False).consumer()
