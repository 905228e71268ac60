"""Admission: whatever the order in which blocks come back, nothing too old is trained on and nothing ever stands still.

For small numbers that is checked exhaustively: every state that a trainer and its actors can get into is visited.
"""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest

from srl.core.admission import capacity
from srl.core.memory import Doorbell
from srl.core.slab import STEP_FIELDS, BlockSpec
from srl.core.worker import Metrics
from srl.streams.samples import SampleBoard
from srl.workers.batches import BatchSource

SMALL = list(itertools.product((0, 1, 2, 3), (1, 2, 3), (1, 2, 4, 12)))  # max_staleness, batch, max_running
IDS = [f"staleness={s}-batch={b}-running={r}" for s, b, r in SMALL]


def room(staleness, batch, max_running, queue, running, trained):
    """What the trainer asks: blocks in ``queue`` and all that was trained on count as accepted."""
    return capacity(
        max_staleness=staleness,
        trained=trained,
        batch=batch,
        accepted=trained * batch + queue,
        running=running,
        max_running=max_running,
    )


class Run:
    """A run as a state machine. A state is (ages of blocks being filled, ages of full ones, oldest first).

    The age of a block counts the versions published since it was started; older than too old is all the same.
    """

    def __init__(self, staleness, batch, max_running, in_order):
        self.staleness, self.batch, self.max_running, self.in_order = staleness, batch, max_running, in_order
        self.trained_ages = set()
        self.dropped = 0

    def moves(self, state, trained):
        running, queue = state
        if room(self.staleness, self.batch, self.max_running, len(queue), len(running), trained) > 0:
            yield (*running, 0), queue
        for place in range(1 if self.in_order and running else len(running)):
            yield running[:place] + running[place + 1 :], (*queue, running[place])
        fresh = tuple(age for age in queue if age <= self.staleness)
        self.dropped += len(queue) - len(fresh)
        if len(fresh) >= self.batch:
            self.trained_ages.update(fresh[: self.batch])
            yield self.older(running), self.older(fresh[self.batch :])
        elif fresh != queue:
            yield running, fresh

    def older(self, ages):
        return tuple(min(age + 1, self.staleness + 1) for age in ages)

    def explore(self, trained=0):
        """Every state that can be reached; fails in one that cannot be left."""
        start = ((), ())
        seen, new = {start}, [start]
        while new:
            state = new.pop()
            following = set(self.moves(state, trained))
            assert following, f"nothing can happen any more in {state}"
            if not self.in_order:  # who fills which block does not matter then
                following = {(tuple(sorted(running)), queue) for running, queue in following}
            new += following - seen
            seen |= following
        return seen


@pytest.mark.parametrize(("staleness", "batch", "max_running"), SMALL, ids=IDS)
def test_blocks_that_come_back_in_order_are_never_too_old(staleness, batch, max_running):
    run = Run(staleness, batch, max_running, in_order=True)
    run.explore()
    assert max(run.trained_ages) <= staleness
    assert run.dropped == 0
    if max_running >= (staleness + 1) * batch:
        assert max(run.trained_ages) == staleness, "the bound is tighter than asked for"


@pytest.mark.parametrize(
    ("staleness", "batch", "max_running"), [small for small in SMALL if (small[0] + 1) * small[1] <= 6]
)
def test_blocks_that_come_back_in_any_order_are_trained_on_in_time_or_dropped_and_nothing_stands_still(
    staleness, batch, max_running
):
    run = Run(staleness, batch, max_running, in_order=False)
    states = run.explore()
    assert max(run.trained_ages) <= staleness
    assert all(len(running) <= max_running for running, _ in states)
    assert all(len(running) + len(queue) <= (staleness + 1) * batch for running, queue in states)


@pytest.mark.parametrize("trained", [1, 7, 10**6])
def test_a_run_admits_the_same_at_any_version(trained):
    for (staleness, batch, max_running), queue, running in itertools.product(SMALL, range(9), range(5)):
        arguments = (staleness, batch, max_running, queue, running)
        assert room(*arguments, trained) == room(*arguments, 0)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("version", [0, 10**6])
def test_a_resumed_run_starts_like_a_new_one_and_goes_on(staleness, version):
    """The trainer counts from its own start, whatever the version it was restored at."""
    batch, first = 2, version
    trained, running, queue, started = 0, [], [], []
    for _ in range(50):
        free = room(staleness, batch, 100, len(queue), len(running), trained)
        running += [version] * free
        started.append(free)
        queue += [running.pop(0) for _ in range(min(3, len(running)))]
        while len(queue) >= batch:
            ages = [version - queue.pop(0) for _ in range(batch)]
            assert max(ages) <= staleness
            trained, version = trained + 1, version + 1
    assert started[0] == (staleness + 1) * batch
    assert version - first > 20


def test_the_inequality():
    """accepted + running ≤ (max_staleness + trained + 1) · batch, no more than fit, never less than nothing."""
    numbers = itertools.product(range(3), range(4), range(1, 4), range(12), range(5), range(6))
    for staleness, trained, batch, accepted, running, max_running in numbers:
        found = capacity(
            max_staleness=staleness,
            trained=trained,
            batch=batch,
            accepted=accepted,
            running=running,
            max_running=max_running,
        )

        def allowed(more, bound=(staleness + trained + 1) * batch, now=accepted + running, free=max_running - running):
            return now + more <= bound and more <= free

        assert found >= 0
        assert found == 0 or allowed(found)
        assert not allowed(found + 1), "more could have been started"


def test_free_running_is_bounded_by_memory_alone():
    arguments = {"max_staleness": 10**9, "trained": 0, "batch": 4, "accepted": 5000}
    assert capacity(**arguments, running=3, max_running=16) == 13
    assert capacity(**arguments, running=16, max_running=16) == 0


def test_synchronous_training_starts_one_batch_and_no_more():
    arguments = {"max_staleness": 0, "batch": 4, "max_running": 100}
    assert capacity(**arguments, trained=0, accepted=0, running=0) == 4
    assert capacity(**arguments, trained=0, accepted=1, running=3) == 0
    assert capacity(**arguments, trained=0, accepted=4, running=0) == 0
    assert capacity(**arguments, trained=1, accepted=4, running=0) == 4


def test_a_batch_prepared_ahead_is_not_trained_on_if_it_has_become_too_old():
    """It may be fresh when it is prepared, and the batch before it raises the version."""
    board = SampleBoard(BlockSpec(STEP_FIELDS, 1, 1), 2, [Doorbell()], shared=False)
    consumer, producer, version = board.consumer(), board.producer(0, 1), 1
    learner = SimpleNamespace(prepare=lambda batch: None)
    source = BatchSource(consumer, learner, 1, lambda block: version > 1, Metrics())
    source.start()
    try:
        consumer.grant(1, 0)
        producer.commit(producer.acquire().block)
        deadline = time.monotonic() + 5
        while source.held == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert source.held == 1, "it was not prepared"
        version = 2
        assert source.get(0.2) is None
        assert source.held == 0
    finally:
        source.close()
