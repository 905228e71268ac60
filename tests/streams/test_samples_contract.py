"""What a sample stream promises, over every transport: admission, order, and that a death costs no more than the dead's
own unfinished block."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from stream_peers import (
    SPEC,
    TRANSPORTS,
    Consumer,
    Producer,
    eventually,
    every_moment,
    never,
    number_of,
    write,
)

from srl.core.errors import StreamClosed, StreamError
from srl.core.memory import Doorbell
from srl.core.slab import STEP_FIELDS, BlockSpec, Slab
from srl.core.specs import ArraySpec
from srl.streams import cargo, tcp_samples
from srl.streams import frames as codec
from srl.streams import samples as samples_module
from srl.streams.cargo import Cargo
from srl.streams.frames import Header
from srl.streams.samples import SampleBoard
from srl.streams.tcp_samples import STAGING, TcpSamples

STREAM = codec.stream_id("samples")


def encode(header, arrays=()):
    return codec.encode(header, arrays, STREAM)


def decode(frames):
    return codec.decode(frames, STREAM)


TCP = pytest.mark.parametrize("transport", ["tcp"], indirect=True)
INLINE = pytest.mark.parametrize("transport", ["inline"], indirect=True)
BOARDS = pytest.mark.parametrize("transport", ["inline", "shm"], indirect=True)
TINY = BlockSpec({"action": ArraySpec((), "<i8")}, 1, 1)
LARGE = BlockSpec({"obs": ArraySpec((512, 1024), "|u1"), "action": ArraySpec((), "<i8"), **STEP_FIELDS}, 7, 1)
ACROSS = pytest.mark.parametrize("transport", ["shm", "tcp"], indirect=True)


NO_LZ4 = pytest.mark.skipif(cargo.codec() is None, reason="needs the package lz4")


@pytest.fixture(params=[*TRANSPORTS, pytest.param("tcp with lz4", marks=NO_LZ4)])
def transport(request):
    return request.param.split(" with ")[0]


def meet(consumer, *producers):
    """Have producers ask until the consumer knows of them all; nothing has been granted yet."""

    def met():
        assert not any(producer.acquire() for producer in producers)
        return consumer.board.present.sum() == len(producers)

    eventually(met)


def granted(consumer, count, version=0):
    """Grant ``count`` blocks, as soon as producers are there to have them and memory is free."""
    done = 0

    def grant():
        nonlocal done
        done += consumer.grant(count - done, version)
        return done == count

    eventually(grant, 2)


def collected(consumer, count, grants=1):
    """The next ``count`` full blocks as (name, number), while granting as many again."""
    found = []

    def more():
        if grants:
            consumer.grant(grants, 0)
        found.extend(consumer.drain())
        return len(found) >= count

    eventually(more)
    return found


def numbers(found):
    return [number for _, number in found]


# Blocks, in order and whole


def test_blocks_arrive_whole_and_in_order_of_each_producer(samples, ends):
    stream = samples(blocks=4, producers=2)
    consumer = ends.near(Consumer, stream)
    producers = [ends.far(Producer, stream, index, 7 + index) for index in range(2)]
    sent = [list(range(100 * index, 100 * index + 12)) for index in range(2)]
    for producer, mine in zip(producers, sent, strict=True):
        if hasattr(producer, "tell"):
            producer.tell("produce_all", mine)
    found = []

    def more():
        consumer.grant(4, 0)
        for producer, mine in zip(producers, sent, strict=True):
            if not hasattr(producer, "tell") and mine and producer.produce(mine[0]):
                mine.pop(0)
        found.extend(consumer.drain())
        return len(found) == 24

    eventually(more)
    for index in range(2):
        own = [(full, number) for full, number in found if full.producer == index]
        assert numbers(own) == list(range(100 * index, 100 * index + 12))
        assert [full.sequence for full, _ in own] == list(range(12))
        assert {full.incarnation for full, _ in own} == {7 + index}


def test_take_gives_the_oldest_blocks_all_or_none(samples, ends):
    stream = samples(blocks=4)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    granted(consumer, 4)
    for number in range(3):
        eventually(lambda number=number: producer.produce(number))
    eventually(lambda: consumer.levels() == (1, 3))
    assert consumer.take(4) is None
    assert [number_of(consumer.slab, full.block) for full in consumer.take(2)] == [0, 1]
    assert consumer.take(2) is None
    assert [number_of(consumer.slab, full.block) for full in consumer.take(1)] == [2]
    assert consumer.levels() == (1, 0)


def test_a_held_block_is_not_written_until_it_is_released(samples, ends):
    stream = samples(blocks=2)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    granted(consumer, 1)
    eventually(lambda: producer.produce(1))
    held, _ = eventually(consumer.next)
    for number in (2, 3, 4):
        granted(consumer, 1)
        eventually(lambda number=number: producer.produce(number))
        assert numbers(eventually(consumer.drain)) == [number]
        assert number_of(consumer.slab, held.block) == 1
    consumer.release([held])
    granted(consumer, 2)


# Admission and back-pressure


def test_a_producer_gets_only_what_was_granted_and_none_not_a_block(samples, ends):
    stream = samples(blocks=4)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    assert never(producer.acquire)
    granted(consumer, 2, version=5)
    first, second = eventually(producer.acquire), eventually(producer.acquire)
    assert first.block != second.block
    assert (first.version, second.version) == (5, 5)
    assert never(producer.acquire)
    granted(consumer, 1, version=6)
    assert eventually(producer.acquire).version == 6
    assert never(producer.acquire)


def test_committing_a_block_that_was_not_granted_is_an_error(samples, ends):
    stream = samples(blocks=3)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    with pytest.raises(StreamError):
        producer.commit(0)
    granted(consumer, 1)
    block = eventually(lambda: producer.produce(1)).block
    with pytest.raises(StreamError):
        producer.commit(block)
    assert numbers(collected(consumer, 1, grants=0)) == [1]
    assert never(consumer.next)


def test_never_more_blocks_are_out_than_the_stream_holds(samples, ends):
    stream = samples(blocks=5, producers=3)
    consumer = ends.near(Consumer, stream)
    producers = [ends.far(Producer, stream, index) for index in range(3)]
    meet(consumer, *producers)
    granted(consumer, 5)
    assert consumer.grant(100, 0) == 0
    out = []

    def acquire():
        out.extend(grant for producer in producers if (grant := producer.acquire()))
        return len(out) > 5

    assert never(acquire)
    assert len(out) == 5
    assert consumer.levels() == (5, 0)


def test_memory_of_full_and_held_blocks_is_not_granted(samples, ends):
    stream = samples(blocks=3)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    granted(consumer, 3)
    for number in range(3):
        eventually(lambda number=number: producer.produce(number))
    eventually(lambda: consumer.levels() == (0, 3))
    held = consumer.take(2)
    assert consumer.grant(3, 0) == 0
    assert never(producer.acquire)
    consumer.release(held)
    assert consumer.grant(3, 0) == 2


def test_grants_are_shared_out_evenly(samples, ends):
    stream = samples(blocks=9, producers=3)
    consumer = ends.near(Consumer, stream)
    producers = [ends.far(Producer, stream, index) for index in range(3)]
    meet(consumer, *producers)
    for count in (3, 1, 1, 1, 3):
        assert consumer.grant(count, 0) == count
    got = Counter()

    def acquire():
        got.update(index for index, producer in enumerate(producers) if producer.acquire())
        return got.total() == 9

    eventually(acquire)
    assert got == {0: 3, 1: 3, 2: 3}


def test_a_grant_costs_no_more_where_a_replay_holds_many_blocks():
    def seconds(blocks):
        board = SampleBoard(TINY, blocks, [Doorbell()], shared=False)
        consumer, producer = board.consumer(), board.producer(0, 1)
        consumer.hold(range(4, blocks))
        taken = []
        for _ in range(20):
            begin = time.perf_counter()
            assert consumer.grant(1, 0) == 1
            taken.append(time.perf_counter() - begin)
            producer.commit(producer.acquire().block)
            consumer.release(consumer.take(1))
        return sorted(taken)[10]

    # A look at every block in Python takes some 50 ns each: 5 ms. One by numpy takes a hundredth of that.
    assert seconds(100_000) - seconds(100) < 2e-3


def test_a_producer_that_does_not_commit_starves_nobody(samples, ends):
    stream = samples(blocks=4, producers=2)
    consumer = ends.near(Consumer, stream)
    stuck, busy = (ends.far(Producer, stream, index) for index in range(2))
    meet(consumer, stuck, busy)
    for number in range(10):
        granted(consumer, 2 if number == 0 else 1)
        eventually(lambda number=number: busy.produce(number))
        assert numbers(eventually(consumer.drain)) == [number]


# Waiting


def test_waiting_ends_in_time_when_nothing_comes(samples, ends):
    stream = samples()
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    meet(consumer, producer)
    for end in (consumer, producer):
        end.wait(0.01)  # announcements of the start
        begin = time.monotonic()
        for timeout in (0.05, 0.0, 0.1):
            slept, _ = end.wait(timeout)
            assert slept < timeout + 0.5
        assert time.monotonic() - begin < 1.5


def test_calls_return_at_once_when_there_is_nothing(samples, ends):
    stream = samples()
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    begin = time.monotonic()
    for _ in range(20):
        assert producer.acquire() is None
        assert consumer.take(1) is None
        assert consumer.levels() == (0, 0)
    assert time.monotonic() - begin < 1


def test_a_grant_wakes_the_producer_and_a_commit_the_consumer(samples, ends):
    stream = samples(blocks=4)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    granted(consumer, 1)
    eventually(lambda: producer.produce(1))
    eventually(lambda: consumer.levels()[1])
    while consumer.wait(0.02)[1] or producer.wait(0.02)[1]:
        producer.acquire()
    granted(consumer, 1)
    slept, woken = producer.wait(3)
    assert woken and slept < 2
    eventually(lambda: producer.produce(2))
    slept, woken = consumer.wait(3)
    assert woken and slept < 2


def test_who_waits_for_several_blocks_is_woken_when_all_are_there(samples, ends):
    stream = samples(blocks=4)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    granted(consumer, 4)
    assert consumer.take(1, 3) is None
    while consumer.wait(0.02)[1]:
        pass
    for number in range(1, 3):
        eventually(lambda number=number: producer.produce(number))
    eventually(lambda: consumer.levels()[1] == 2)
    assert not consumer.wait(0.05)[1]
    eventually(lambda: producer.produce(3))
    slept, woken = consumer.wait(3)
    assert woken and slept < 2
    assert len(consumer.take(3)) == 3


def test_who_took_a_batch_is_woken_for_the_next_one_or_for_less_if_it_asks(samples, ends):
    stream = samples(blocks=8)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    granted(consumer, 8)
    for number in range(2):
        eventually(lambda number=number: producer.produce(number))
    eventually(lambda: consumer.take(2))
    while consumer.wait(0.02)[1]:
        pass
    eventually(lambda: producer.produce(2))
    eventually(lambda: consumer.levels()[1] == 1)
    assert not consumer.wait(0.05)[1]
    eventually(lambda: producer.produce(3))
    assert consumer.wait(3)[1]
    assert len(consumer.take(2)) == 2
    assert consumer.take(1) is None
    while consumer.wait(0.02)[1]:
        assert consumer.take(1) is None
    eventually(lambda: producer.produce(4))
    assert consumer.wait(3)[1]
    assert len(consumer.take(1)) == 1


# Closing


def test_closing_the_consumer_tells_the_producer(samples, ends):
    stream = samples()
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    granted(consumer, 1)
    eventually(producer.acquire)
    consumer.close()
    assert producer.wait(3)[1]
    with pytest.raises(StreamClosed):
        assert never(producer.acquire, 2)


@pytest.mark.parametrize("spec", [SPEC, LARGE], ids=["small", "large"])
def test_a_closing_producer_loses_no_committed_block(samples, ends, spec):
    stream = samples(blocks=4, spec=spec)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    granted(consumer, 3)
    blocks = [eventually(producer.acquire).block for _ in range(3)]
    for number, block in enumerate(blocks):
        producer.fill(block, number)
    producer.commit_and_close(blocks)
    eventually(lambda: consumer.levels()[1] == 3, 2)
    assert numbers(consumer.drain()) == [0, 1, 2]


def test_a_closing_producer_gives_its_blocks_back(samples, ends):
    stream = samples(blocks=4, producers=2)
    consumer = ends.near(Consumer, stream)
    leaving, staying = (ends.far(Producer, stream, index) for index in range(2))
    meet(consumer, leaving, staying)
    granted(consumer, 4)
    assert eventually(leaving.acquire)
    leaving.close()
    eventually(lambda: consumer.levels() == (2, 0), 2)
    assert consumer.grant(4, 0) == 2
    got = [eventually(staying.acquire) for _ in range(3)]  # what a remote producer can hold at once
    assert len({grant.block for grant in got}) == 3


# Death


def test_killed_producer_loses_no_committed_block(samples, ends, transport):
    stream = samples(blocks=4)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream, 0, 1)
    granted(consumer, 3)
    for number in (1, 2):
        eventually(lambda number=number: producer.produce(number))
    producer.half_fill(eventually(producer.acquire).block)
    if transport == "tcp":  # what the dead had not sent yet is gone with it
        eventually(lambda: consumer.levels() == (1, 2))
    ends.kill(producer)
    assert numbers(collected(consumer, 2, grants=0)) == [1, 2]
    assert consumer.levels() == (1, 0)


def test_what_a_killed_producer_had_not_committed_goes_to_its_successor(samples, ends):
    stream = samples(blocks=4)
    consumer, producer = ends.near(Consumer, stream), ends.far(Producer, stream, 0, 1)
    granted(consumer, 4)
    eventually(lambda: producer.produce(1))
    producer.half_fill(eventually(producer.acquire).block)
    eventually(lambda: consumer.levels() == (3, 1))
    ends.kill(producer)
    successor = ends.far(Producer, stream, 0, 2)
    assert successor.acquire() is None  # the grants were not made to it
    eventually(lambda: consumer.levels() == (0, 1))
    granted(consumer, 3)
    found = []
    for number in (2, 3, 4):
        eventually(lambda number=number: successor.produce(number))
        found += collected(consumer, 1, grants=0)
    found += [] if len(found) == 4 else collected(consumer, 4 - len(found), grants=0)
    assert [(full.incarnation, full.sequence, number) for full, number in found] == [
        (1, 0, 1),
        (2, 0, 2),
        (2, 1, 3),
        (2, 2, 4),
    ]


@ACROSS
def test_producers_killed_at_any_moment_leave_a_working_stream(samples, ends):
    stream = samples(blocks=4)
    consumer = ends.near(Consumer, stream)
    found = []
    for incarnation in range(1, 5):
        producer = ends.far(Producer, stream, 0, incarnation)
        producer.tell("produce_all", range(1000 * incarnation, 1000 * incarnation + 900))
        found += collected(consumer, 5 * incarnation, grants=4)
        ends.kill(producer)
    found += consumer.drain()
    for incarnation in range(1, 5):
        own = [(full.sequence, number) for full, number in found if full.incarnation == incarnation]
        assert own == [(i, 1000 * incarnation + i) for i in range(len(own))]
        assert len(own) >= 5 * incarnation or incarnation > 1
    names = [tuple(full[1:]) for full, _ in found]
    assert len(set(names)) == len(names)
    ends.far(Producer, stream, 0, 9)
    eventually(lambda: consumer.levels() == (0, 0))
    granted(consumer, 4)


@BOARDS
def test_grants_to_the_dead_are_never_taken_for_ones_own(samples):
    board = samples(blocks=3)
    consumer = board.consumer()
    for incarnation in range(1, 6):  # each dies without a look at what it was granted
        producer = board.producer(0, incarnation)
        assert consumer.levels() == (0, 0)
        assert consumer.grant(3, incarnation) == 3
    got = list(iter(producer.acquire, None))
    assert sorted(grant.block for grant in got) == [0, 1, 2]
    assert {grant.version for grant in got} == {5}


def test_an_older_incarnation_is_ignored(samples, ends):
    stream = samples(blocks=6)
    consumer = ends.near(Consumer, stream)
    old = ends.far(Producer, stream, 0, 1)
    granted(consumer, 2)
    block = eventually(old.acquire).block
    new = ends.far(Producer, stream, 0, 2)
    eventually(lambda: consumer.levels() == (0, 0))
    granted(consumer, 2)
    old.fill(block, 1)
    for belated in (lambda: old.commit(block), old.acquire, old.acquire):
        with contextlib.suppress(StreamError):  # to be told so is fine too
            belated()
    for number in (2, 3):
        eventually(lambda number=number: new.produce(number), 2)
    assert numbers(collected(consumer, 2, grants=0)) == [2, 3]
    assert never(consumer.next)


def test_a_new_consumer_repeats_nothing_of_the_killed_one(samples, ends):
    stream = samples(blocks=4)
    first, producer = ends.far(Consumer, stream), ends.near(Producer, stream)
    eventually(lambda: producer.acquire() or first.grant(3, 0))
    for number in (1, 2):
        eventually(lambda number=number: producer.produce(number))
    before = [eventually(first.next), eventually(first.next)]
    first.release([before[0][0]])
    ends.kill(first)
    second, after, sent = ends.near(Consumer, stream), [], iter(range(3, 10**6))

    def more():
        second.grant(4, 1)
        if (grant := producer.acquire()) is not None:
            producer.fill(grant.block, next(sent))
            producer.commit(grant.block)
        after.extend(second.drain())
        return len(after) >= 6

    eventually(more)
    assert numbers(before) == [1, 2]
    assert numbers(after) == sorted(set(numbers(after)))
    assert min(numbers(after)) >= 3
    names = [tuple(full[1:]) for full, _ in before + after]
    assert len(set(names)) == len(names), "two blocks have the same name"


def test_a_new_consumer_has_the_memory_that_the_killed_one_held(samples, ends):
    stream = samples(blocks=4)
    first, producer = ends.far(Consumer, stream), ends.near(Producer, stream)
    eventually(lambda: producer.acquire() or first.grant(3, 0))
    for number in (1, 2):
        eventually(lambda number=number: producer.produce(number))
    eventually(first.next)
    eventually(lambda: first.levels() == (1, 1))
    ends.kill(first)
    second = ends.near(Consumer, stream)

    def all_granted():
        producer.acquire()
        second.grant(4, 1)
        return second.levels() == (4, 0)

    eventually(all_granted, 2)


def die_as_consumer(method):
    def prepare(board, consumer, producers):
        for number, producer in enumerate(producers):
            assert producer.produce(number)
        if method == "release":
            held = consumer.take(1)
            return lambda: consumer.release(held)
        return {
            "grant": lambda: consumer.grant(3, 1),
            "take": lambda: consumer.take(2),
            "levels": consumer.levels,
            "start": board.consumer,
        }[method]

    return prepare


@INLINE
@pytest.mark.parametrize("method", ["grant", "take", "release", "levels", "start"])
def test_a_consumer_killed_at_any_instruction_costs_no_memory(samples, method):
    def scenario(kill):
        board = samples(blocks=4, producers=2, spec=TINY)
        producers = [Producer(board, index) for index in range(2)]
        first = Consumer(board)
        assert first.grant(3, 0) == 3
        kill(die_as_consumer(method)(board, first, producers))
        second, found = Consumer(board), []
        for number in range(10, 12):  # everybody finishes what was granted, twice
            for producer in producers:
                while producer.produce(number):
                    pass
            found += second.drain()
        names = [tuple(full[1:]) for full, _ in found]
        assert len(set(names)) == len(names)
        assert second.grant(9, 2) == 4, "a block is lost"
        got = [grant.block for producer in producers for grant in iter(producer.acquire, None)]
        assert sorted(got) == [0, 1, 2, 3]

    every_moment(samples_module, scenario)


@INLINE
@pytest.mark.parametrize("method", ["acquire", "commit", "start", "close"])
def test_a_producer_killed_at_any_instruction_costs_no_memory_and_no_committed_block(samples, method):
    def scenario(kill):
        board = samples(blocks=3, spec=TINY)
        consumer, producer = Consumer(board), Producer(board, 0, 1)
        assert consumer.grant(3, 0) == 3
        assert producer.produce(1)
        block = producer.acquire().block
        producer.fill(block, 2)
        kill(
            {
                "acquire": producer.acquire,
                "commit": lambda: producer.commit(block),
                "start": lambda: Producer(board, 0, 2),
                "close": producer.close,
            }[method]
        )
        successor = Producer(board, 0, 3)
        found = numbers(consumer.drain())
        assert found in ([1], [1, 2]) if method == "commit" else found == [1]
        assert consumer.levels() == (0, 0)
        assert consumer.grant(9, 1) == 3
        assert sorted(grant.block for grant in iter(successor.acquire, None)) == [0, 1, 2]

    every_moment(samples_module, scenario)


CONSUMER_CALLS, PRODUCER_CALLS = ("grant", "take", "levels"), ("acquire", "commit", "start", "close")
CALLS = {
    "grant": lambda run: run.consumer.grant(9, 1),
    "take": lambda run: run.found.extend(run.consumer.drain()),
    "levels": lambda run: run.consumer.levels(),
    "acquire": lambda run: run.acquire(1),
    "commit": lambda run: run.commit(1),
    "start": lambda run: run.start(1),
    "close": lambda run: run.close(1),
}
PAIRS = [*itertools.product(CONSUMER_CALLS, PRODUCER_CALLS), *itertools.product(PRODUCER_CALLS, CONSUMER_CALLS)]


class Interleaved:
    """A board with two producers and everything that was sent and found on it. Producer 1 holds a block to commit."""

    def __init__(self, board):
        self.board, self.consumer = board, Consumer(board)
        self.producers = {index: board.producer(index, 1) for index in range(2)}
        self.open, self.sent, self.found = {0: [], 1: []}, [], []
        assert self.consumer.grant(3, 0) == 3
        for index in range(2):
            self.acquire(index)
        self.commit(0)

    def acquire(self, index):
        if (grant := self.producers[index].acquire()) is not None:
            self.open[index].append(grant.block)

    def commit(self, index):
        if self.open[index]:
            number = len(self.sent)
            self.sent.append(number)
            write(self.board.slab, self.open[index][0], number)
            self.producers[index].commit(self.open[index].pop(0))

    def start(self, index):
        self.open[index].clear()
        self.producers[index] = self.board.producer(index, 2)

    def close(self, index):
        self.open[index].clear()
        self.producers.pop(index).close()

    def finish(self):
        """Everybody fills what is granted; then all memory is free again."""
        self.found += self.consumer.drain()
        self.consumer.grant(9, 1)
        for index, _ in itertools.product(self.producers, range(4)):
            self.acquire(index)
        held = [block for blocks in self.open.values() for block in blocks]
        assert len(set(held)) == len(held), "a block was given twice"
        for index, _ in itertools.product(self.producers, range(4)):
            self.commit(index)
        self.found += self.consumer.drain()
        assert sorted(numbers(self.found)) == self.sent
        assert len({tuple(full[1:]) for full, _ in self.found}) == len(self.sent)
        assert self.consumer.grant(9, 2) == 4
        got = [grant.block for producer in self.producers.values() for grant in iter(producer.acquire, None)]
        assert sorted(got) == [0, 1, 2, 3]


@INLINE
@pytest.mark.parametrize(("call", "meanwhile"), PAIRS)
def test_whatever_happens_in_the_middle_of_a_call_no_block_is_lost_or_given_twice(samples, call, meanwhile):
    """What one process can do at any instruction of another."""

    def scenario(interrupt):
        run = Interleaved(samples(blocks=4, producers=2, spec=TINY))
        interrupt(lambda: CALLS[call](run), lambda: CALLS[meanwhile](run))
        run.finish()

    every_moment(samples_module, scenario)


# A run that goes on


@BOARDS
def test_a_stream_goes_on_where_its_state_was_taken(samples):
    board = samples(blocks=5, producers=2)
    producers, consumer = [Producer(board, index) for index in range(2)], Consumer(board)
    assert consumer.grant(5, 0) == 5
    for number, producer in enumerate([*producers, producers[0]]):
        assert producer.produce(number)
        assert consumer.levels() == (4 - number, 1 + number)
    consumer.release(consumer.take(1))
    saved = consumer.state()

    board = samples(blocks=5, producers=2)
    producers, consumer = [Producer(board, index) for index in range(2)], Consumer(board)
    consumer.load_state(saved, 9)
    assert consumer.levels() == (2, 2)
    got = [grant for producer in producers for grant in iter(producer.acquire, None)]
    assert [grant.version for grant in got] == [9, 9]
    assert numbers(consumer.drain()) == [1, 2]
    assert consumer.grant(9, 9) == 3


# TCP: the same stream over a bad network


def block_frames(number, sender=0, incarnation=1, sequence=0, spec=SPEC):
    return encode(Header("block", sender, incarnation, sequence), whole(number, spec))


def whole(number, spec=SPEC):
    """The frames of a block."""
    slab = Slab(spec, 1, shared=False)
    write(slab, 0, number)
    return Cargo(slab).frames(0)


def credit(stranger):
    """The last credit a stranger was given: how many blocks it may have sent so far."""
    found = None
    while (message := stranger.hear()) is not None:
        header, _ = decode(message)
        assert header.kind == "credit"
        found = header.number
    return found


@TCP
def test_a_block_sent_twice_is_delivered_once(samples, ends, stranger):
    consumer = ends.near(Consumer, samples(blocks=4))
    sender = stranger("samples")
    sender.say("hello", incarnation=1)
    granted(consumer, 3)
    eventually(lambda: credit(sender) == 3)
    sender.send(*block_frames(1))
    sender.send(*block_frames(1))
    sender.send(*block_frames(2, sequence=1))
    sender.send(*block_frames(1))
    eventually(lambda: consumer.duplicates == 2)
    assert numbers(collected(consumer, 2, grants=0)) == [1, 2]
    assert never(consumer.next)


@TCP
def test_a_block_lost_on_the_way_gives_its_credit_back(samples, ends, stranger):
    consumer = ends.near(Consumer, samples(blocks=4))
    sender = stranger("samples")
    sender.say("hello", incarnation=1)
    granted(consumer, 2)
    eventually(lambda: credit(sender) == 2)
    sender.send(*block_frames(2, sequence=1))  # number 0 was lost
    eventually(lambda: credit(sender) == 3)
    sender.send(*block_frames(3, sequence=2))
    assert numbers(collected(consumer, 2, grants=0)) == [2, 3]
    assert consumer.levels() == (0, 0)


@TCP
def test_a_block_beyond_the_credit_is_refused(samples, ends, stranger):
    consumer = ends.near(Consumer, samples(blocks=4))
    sender = stranger("samples")
    sender.say("hello", incarnation=1)
    granted(consumer, 1)
    eventually(lambda: credit(sender) == 1)
    for number in range(3):
        sender.send(*block_frames(number, sequence=number))
    eventually(lambda: consumer.rejected == 2)
    assert numbers(consumer.drain()) == [0]


@TCP
def test_blocks_of_an_older_incarnation_are_ignored(samples, ends, stranger):
    consumer = ends.near(Consumer, samples(blocks=4))
    old, new = stranger("samples"), stranger("samples")
    new.say("hello", incarnation=5)
    granted(consumer, 3)
    eventually(lambda: credit(new) == 3)
    old.say("hello", incarnation=4)
    old.send(*block_frames(1, incarnation=4))
    old.say("nonsense")
    eventually(lambda: consumer.rejected == 1)  # so all of the above has been seen
    assert credit(old) is None
    new.send(*block_frames(2, incarnation=5))
    assert numbers(collected(consumer, 1, grants=0)) == [2]
    assert consumer.levels() == (2, 0)


@pytest.fixture
def soon_gone(monkeypatch):
    """A producer that is away is given up at once."""
    monkeypatch.setattr(tcp_samples, "_GONE", 0.2)
    monkeypatch.setattr(tcp_samples, "_PROBE", 0.05)


@TCP
def test_the_blocks_of_a_producer_that_is_gone_for_good_go_to_the_others(samples, ends, soon_gone):
    stream = samples(blocks=4, producers=2)
    consumer = ends.near(Consumer, stream)
    dead, alive = ends.far(Producer, stream, 0, 1), ends.far(Producer, stream, 1, 1)
    meet(consumer, dead, alive)
    granted(consumer, 4)
    eventually(dead.acquire)
    ends.kill(dead)
    eventually(lambda: consumer.levels() == (2, 0))
    granted(consumer, 2)
    alive.produce_all([1, 2, 3])
    assert numbers(collected(consumer, 3, grants=0)) == [1, 2, 3]


@TCP
def test_a_producer_that_was_given_up_may_come_back(samples, ends, stranger, soon_gone):
    consumer = ends.near(Consumer, samples(blocks=4))
    before = stranger("samples")
    before.say("hello", incarnation=1)
    granted(consumer, 2)
    eventually(lambda: credit(before) == 2)
    before.send(*block_frames(1))
    eventually(lambda: consumer.levels() == (1, 1))
    before.socket.close()
    eventually(lambda: consumer.levels() == (0, 1))
    after = stranger("samples")
    after.send(*block_frames(2, sequence=1))  # its leave to send that was taken back
    after.say("hello", incarnation=1, sequence=2)
    granted(consumer, 1)
    eventually(lambda: credit(after) == 3)
    after.send(*block_frames(3, sequence=2))
    assert numbers(collected(consumer, 2, grants=0)) == [1, 3]
    assert consumer.rejected == 0


@TCP
def test_a_producer_finds_its_consumer_on_another_port(samples, ends, names):
    stream = samples(blocks=4)
    first, producer = ends.near(Consumer, stream), ends.far(Producer, stream)
    granted(first, 2)
    eventually(lambda: producer.produce(1))
    assert numbers(eventually(first.drain)) == [1]
    endpoint = names.resolve("samples")
    first.end._remotes.clear()  # so that it goes without a word: no close message
    first.close()
    second = ends.near(Consumer, stream)
    assert names.resolve("samples") != endpoint
    arrived = []

    def found():
        """What is committed under a grant of the first consumer may be lost; what comes after must arrive."""
        second.grant(4, 1)
        producer.produce(2)
        arrived.extend(second.drain() or [])
        return arrived

    eventually(found, 20.0)
    assert set(numbers(arrived)) == {2}


@TCP
def test_a_consumer_may_start_after_its_producers(samples, ends):
    stream = samples(blocks=2)
    producer = ends.far(Producer, stream)
    assert producer.acquire() is None
    assert producer.wait(0.01)[1] is False
    consumer = ends.near(Consumer, stream)
    meet(consumer, producer)
    granted(consumer, 1)
    eventually(lambda: producer.produce(1))
    assert numbers(eventually(consumer.drain)) == [1]


def test_a_block_is_not_written_again_before_it_has_left(ends, names, fake_server):
    """A slow network must not let the next block's contents into the last one's."""
    server = fake_server("samples", RCVHWM=1, RCVBUF=4096)
    producer = ends.near(TcpSamples("samples", names, LARGE, 8, 1).producer, 0, 1)
    eventually(lambda: producer.acquire() or server.socket.poll(0))
    identity, *_ = server.hear()
    server.send(identity, *encode(Header("credit", number=100, version=0)))
    sent = 0

    def fill():
        nonlocal sent
        grant = producer.acquire() if sent < 5 else None
        if grant is not None:
            for field in producer.slab.block(grant.block).values():
                field[...] = sent % 2 if field.dtype == bool else sent
            producer.commit(grant.block)
            sent += 1
        return sent == 5

    never(fill, 0.3)
    seen, came = 0, 0
    while seen < 5:
        _, first, *frames = eventually(lambda: (fill() and None) or server.hear())
        kind = decode([first])[0].kind
        if kind == "piece":
            camera = np.frombuffer(frames[0], np.uint8)
            assert camera.min() == camera.max() == seen, f"block {seen} was overwritten on its way"
            came += len(camera)
        elif kind == "block":
            assert came == 8 * 512 * 1024 and not len(frames[1])
            assert sent - seen <= STAGING, "a block was filled again before it was known to have come"
            seen, came = seen + 1, 0
            server.send(identity, *encode(Header("credit", sequence=seen, number=100, version=0)))


FAULTS = """
import resource, sys, pathlib
from srl.core.slab import STEP_FIELDS, BlockSpec
from srl.core.specs import ArraySpec
from srl.services.names import FileNames
from srl.streams.tcp_samples import TcpSamples
from srl.streams.wait import wait

spec = BlockSpec({"obs": ArraySpec((4096, 1024), "|u1"), "action": ArraySpec((), "<i8"), **STEP_FIELDS}, 7, 1)
stream = TcpSamples("samples", FileNames(pathlib.Path(sys.argv[1])), spec, 2, 1)
consumer, producer = stream.consumer(), stream.producer(0, 1)
for slab in (consumer.slab, producer.slab):
    slab.arrays["obs"][...] = 1  # their own pages are there

def pass_on(count):
    for _ in range(count):
        while (grant := producer.acquire()) is None:
            consumer.grant(1, 0)
            wait([producer.pollable()], 0.01)
        producer.commit(grant.block)
        while (taken := consumer.take(1)) is None:
            wait([consumer.pollable()], 0.01)
        consumer.release(taken)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before = pass_on(8)
print((pass_on(8) - before) * resource.getpagesize() / spec.layout(8).nbytes)
"""


def test_blocks_that_arrive_do_not_take_new_memory_each_time(tmp_path):
    """ZeroMQ allocates every message; memory that comes from the kernel and goes back costs a fault for every page."""
    command = [sys.executable, "-c", FAULTS, str(tmp_path / "names")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=25)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) < 0.75, "of all pages"


def in_pieces(number, sequence=0):
    """The messages of a block that is cut into pieces."""
    slab = Slab(LARGE, 1, shared=False)
    write(slab, 0, number)
    cargo, names = Cargo(slab), {"sender": 0, "incarnation": 1, "sequence": sequence}
    pieces = [encode(Header("piece", **names, number=i), [piece]) for i, piece in enumerate(cargo.cut(0))]
    return [*pieces, [*encode(Header("block", **names)), *cargo.without_pieces(cargo.frames(0))]]


@pytest.fixture
def large(samples, ends, stranger):
    """A consumer of large blocks and somebody with leave to send three of them."""
    consumer, sender = ends.near(Consumer, samples(blocks=4, spec=LARGE)), stranger("samples")
    sender.say("hello", incarnation=1)
    granted(consumer, 3)
    eventually(lambda: credit(sender) == 3)
    return consumer, sender


@TCP
def test_pieces_become_their_block(large):
    consumer, sender = large
    for number in range(3):
        for message in in_pieces(number, number):
            sender.send(*message)
    assert numbers(collected(consumer, 3, grants=0)) == [0, 1, 2]


@TCP
@pytest.mark.parametrize("lost", range(4))
def test_a_piece_lost_on_the_way_takes_its_block_with_it_and_gives_its_credit_back(large, lost):
    consumer, sender = large
    for i, message in enumerate(in_pieces(1)):
        if i != lost:
            sender.send(*message)
    eventually(lambda: credit(sender) == 4)
    for message in in_pieces(2, sequence=1):
        sender.send(*message)
    assert numbers(collected(consumer, 1, grants=0)) == [2]
    assert consumer.levels() == (2, 0)


@TCP
def test_pieces_sent_twice_change_nothing(large):
    consumer, sender = large
    first, second = in_pieces(1), in_pieces(2, sequence=1)
    for message in (*first, *first, *second[:2], *second[:2], first[0], *second[2:]):
        sender.send(*message)
    assert numbers(collected(consumer, 2, grants=0)) == [1, 2]
    assert consumer.duplicates == 1 and consumer.rejected == 0


@TCP
def test_a_large_block_may_come_whole(large):
    consumer, sender = large
    sender.send(*block_frames(1, spec=LARGE))
    assert numbers(collected(consumer, 1, grants=0)) == [1]


def test_a_block_has_few_pieces_however_large_it_is():
    """What is on its way must find room, or blocks are lost."""
    camera = ArraySpec((100, 1024, 1024), "|u1")
    cargo = Cargo(Slab(BlockSpec({f"obs/{i}": camera for i in range(5)}, 0, 1), 1, shared=False))
    assert cargo.pieces == len(cargo.cut(0)) < 75
    assert sum(piece.nbytes for piece in cargo.cut(0)) == 5 * 100 * 2**20


NO_PIECES = {
    "too short": {"number": 0, "frames": [b"short"]},
    "empty": {"number": 0, "frames": [b""]},
    "too long": {"number": 0, "frames": [bytes(2**20 + 1)]},
    "without a frame": {"number": 0, "frames": []},
    "with two frames": {"number": 0, "frames": [bytes(2**20), b"more"]},
}


@TCP
@pytest.mark.parametrize("given", NO_PIECES.values(), ids=NO_PIECES)
def test_what_is_no_piece_is_refused_and_the_block_can_still_come(large, given):
    consumer, sender = large
    sender.say("piece", *given["frames"], incarnation=1, number=given["number"])
    eventually(lambda: consumer.rejected == 1)
    for message in in_pieces(1):
        sender.send(*message)
    assert numbers(collected(consumer, 1, grants=0)) == [1]


@TCP
def test_pieces_beyond_those_of_a_block_or_of_its_credit_are_refused(large):
    consumer, sender = large
    messages = in_pieces(1)
    for message in messages[:-1]:
        sender.send(*message)
    sender.say("piece", b"more", incarnation=1, number=len(messages) - 1)
    eventually(lambda: consumer.rejected == 1)
    sender.send(*messages[-1])
    for sequence in (1, 2, 3):
        for message in in_pieces(sequence, sequence):
            sender.send(*message)
    eventually(lambda: consumer.rejected == 1 + len(messages))
    assert numbers(consumer.drain()) == [1, 1, 2]


@TCP
def test_a_small_block_has_no_pieces(samples, ends, stranger):
    consumer, sender = ends.near(Consumer, samples(blocks=4)), stranger("samples")
    sender.say("hello", incarnation=1)
    granted(consumer, 1)
    eventually(lambda: credit(sender) == 1)
    sender.say("piece", b"piece", incarnation=1)
    header, *frames = block_frames(1)
    sender.send(header, *frames[:-1], b"")
    eventually(lambda: consumer.rejected == 2)
    sender.send(header, *frames)
    assert numbers(collected(consumer, 1, grants=0)) == [1]


HELLO = Header("hello", 0, 1)
BLOCK = block_frames(1, sequence=1)
GARBAGE = {
    "nothing": [b""],
    "no header": [b"hello"],
    "wrong magic": [b"SRL9" + encode(HELLO)[0][4:]],
    "magic only": [b"SRL1"],
    "truncated header": [encode(HELLO)[0][:-2]],
    "header of another type": [b"SRL1\x93\x01\x02\x03"],
    "map for a header": [b"SRL1\x81\xa4kind\xa5hello"],
    "text that is no UTF-8": [b"SRL1\x91\xa5\xffello"],
    "bytes after the header": [encode(HELLO)[0] + b"\x00"],
    "huge header": [encode(HELLO)[0] + b"\x00" * 1000],
    "unknown kind": encode(Header("explode")),
    "kind of another stream": encode(Header("request")),
    "sender too large": encode(Header("hello", 2, 1)),
    "sender negative": encode(Header("hello", -1, 1)),
    "sender enormous": encode(Header("hello", 2**63, 1)),
    "block without frames": encode(Header("block", 0, 1, 1)),
    "block with a frame too many": [*BLOCK, b"more"],
    "block with its frame twice": [*BLOCK, BLOCK[-1]],
    "block with a short frame": [*BLOCK[:-1], b"short"],
    "block with a frame shorter by a byte": [*BLOCK[:-1], BLOCK[-1][:-1]],
    "block that is said to be compressed": encode(Header("block", 0, 1, 1, number=1), [*BLOCK[1:]]),
    "block with more compressed frames than it has": encode(Header("block", 0, 1, 1, number=2), BLOCK[1:]),
}


@TCP
@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_and_the_stream_goes_on(samples, ends, stranger, frames):
    stream = samples(blocks=4, producers=2)
    consumer, producer = ends.near(Consumer, stream), ends.near(Producer, stream, 0, 1)
    granted(consumer, 1)
    eventually(lambda: producer.produce(1))
    stranger("samples").send(*frames)
    eventually(lambda: consumer.rejected == 1, 2)
    granted(consumer, 1)
    eventually(lambda: producer.produce(2))
    assert numbers(collected(consumer, 2, grants=0)) == [1, 2]


@TCP
@pytest.mark.parametrize("field", ["incarnation", "sequence", "number", "version"])
@pytest.mark.parametrize("value", [2**63, 2**64 - 1, -(2**63)])
@pytest.mark.parametrize("kind", ["hello", "block"])
def test_no_number_in_a_header_stops_the_stream(samples, ends, stranger, kind, field, value):
    stream = samples(blocks=6, producers=2)
    consumer, producer = ends.near(Consumer, stream), ends.near(Producer, stream, 0, 1)
    meet(consumer, producer)
    other = stranger("samples")
    if kind == "block":
        other.say("hello", sender=1, incarnation=1)
    other.say("hello", **{"sender": 1, "incarnation": 1, field: value})
    eventually(lambda: consumer.rejected or consumer.board.present[1])
    if kind == "block":
        granted(consumer, 2)
        other.say("block", *whole(5), **{"sender": 1, "incarnation": 1, field: value})
    for number in range(3):
        granted(consumer, 1)
        eventually(lambda number=number: producer.produce(number), 2)
        eventually(lambda: [full for full, _ in consumer.drain() if full.producer == 0], 2)


@TCP
def test_an_oversize_frame_costs_its_sender_the_connection_and_nobody_else(samples, ends, stranger):
    stream = samples(blocks=4)
    consumer, producer = ends.near(Consumer, stream), ends.near(Producer, stream)
    header, *arrays = block_frames(1)
    stranger("samples").send(header, *arrays[:-1], b"\x00" * 10**6)
    granted(consumer, 1)
    eventually(lambda: producer.produce(2))
    assert numbers(collected(consumer, 1, grants=0)) == [2]


@TCP
def test_pickled_bytes_are_never_unpickled(samples, ends, stranger, bomb):
    stream = samples(blocks=4)
    consumer, producer = ends.near(Consumer, stream), ends.near(Producer, stream)
    for frames in ([bomb], [b"SRL1" + bomb], [encode(HELLO)[0] + bomb], [*BLOCK[:-1], bomb]):
        stranger("samples").send(*frames)
    eventually(lambda: consumer.rejected == 4)
    granted(consumer, 1)
    eventually(lambda: producer.produce(2))
    assert numbers(eventually(consumer.drain)) == [2]


@TCP
def test_bytes_that_are_not_zeromq_are_refused_and_the_stream_goes_on(samples, ends, names, bomb):
    stream = samples(blocks=4)
    consumer, producer = ends.near(Consumer, stream), ends.near(Producer, stream)
    host, port = names.resolve("samples").removeprefix("tcp://").split(":")
    for raw in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, struct.pack(">Q", 2**63) * 16, bomb):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(raw)
    granted(consumer, 1)
    eventually(lambda: producer.produce(1))
    assert numbers(eventually(consumer.drain)) == [1]


def test_a_producer_ignores_garbage_from_its_server(ends, names, fake_server):
    server = fake_server("samples")
    producer = ends.near(Producer, TcpSamples("samples", names, SPEC, 4, 1))
    eventually(lambda: producer.acquire() or server.socket.poll(0))
    identity, *hello = server.hear()
    assert decode(hello)[0] == HELLO
    for frames in ([b"garbage"], encode(Header("explode")), encode(Header("block")), [b"SRL1" + b"\xc1"]):
        server.send(identity, *frames)
    assert never(producer.acquire)
    server.send(identity, *encode(Header("credit", number=1, version=3)))
    assert eventually(lambda: producer.produce(4)).version == 3
    message = eventually(lambda: next((m for m in iter(server.hear, None) if decode(m[1:])[0].kind == "block"), None))
    landed = Slab(SPEC, 1, shared=False)
    into = Cargo(landed)
    into.land(into.check(message[2:], decode(message[1:])[0].number), 0)
    assert number_of(landed, 0) == 4


def test_known_contents_differ_from_block_to_block():
    """The other tests rest on this."""
    slab = Slab(SPEC, 2, shared=False)
    write(slab, 0, 1)
    write(slab, 1, 2)
    assert [number_of(slab, 0), number_of(slab, 1)] == [1, 2]
    slab.arrays["obs/mask"][0, 1, 1, 2] ^= True
    with pytest.raises(AssertionError):
        number_of(slab, 0)
