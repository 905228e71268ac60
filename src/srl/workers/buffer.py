"""The buffer worker: stands between actors and trainer, keeps samples, draws batches, relabels.

With I steps inserted, S samples drawn and a wanted ratio of r samples per insert, both sides are held to

    −slack  ≤  r · (I − warmup) − S  ≤  slack

once the warm-up is over. Actors get leave for a block only if the right side will hold with all blocks under way, a
batch is drawn only if the left side will hold after it; so whoever is slow slows the other down, and neither can
deadlock because the slack covers one block of every actor and one batch. A ``fifo`` buffer keeps nothing: it passes the
trainer's own admission on to the actors and blocks, relabelled, to the trainer.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable

from srl.algorithms.base import Replay, load_object
from srl.core.seeding import derive
from srl.core.specs import Arrays
from srl.core.worker import Progress, State, Worker
from srl.services.checkpoints import CheckpointStore
from srl.streams.protocols import Full, Grant, SampleConsumer, SampleProducer, SampleStream
from srl.streams.wait import wait
from srl.workers.replay import blocks_kept, replay_store, steps_drawn

Relabel = Callable[[Arrays], None]


class BufferWorker(Worker):
    """What both kinds of buffer have in common."""

    kind = "buffer"

    def __init__(self, name: str, replay: Replay, samples: SampleStream, batches: SampleStream) -> None:
        super().__init__(name)
        self.replay, self.samples, self.batches = replay, samples, batches
        self.consumer: SampleConsumer
        self.producer: SampleProducer

    def start(self) -> None:
        """See :class:`Worker`."""
        relabel = self.replay.relabel
        self.relabel: Relabel | None = load_object(relabel, "the relabel hook") if relabel else None
        self.consumer = self.samples.consumer()
        self.producer = self.batches.producer(0, self.incarnation)

    def poll(self, timeout: float) -> Progress:
        """See :class:`Worker`."""
        work = self._pass()
        if not work and timeout > 0:
            with self.metrics.wait("buffer"):
                wait(self._pollables(), timeout)
        return Progress(work)

    @abstractmethod
    def _pass(self) -> int:
        """Do what can be done; how much that was."""

    def _pollables(self) -> list[object]:
        return [self.consumer.pollable(), self.producer.pollable()]

    def _relabelled(self, full: Full) -> Arrays:
        block = self.consumer.slab.block(full.block)
        if self.relabel is not None:
            self.relabel(block)
        return block

    def close(self) -> None:
        """See :class:`Worker`."""
        self.consumer.close()
        self.producer.close()


class FifoBuffer(BufferWorker):
    """Passes every block on, once."""

    def start(self) -> None:
        """See :class:`Worker`."""
        super().start()
        self.leave: deque[Grant] = deque()

    def _pass(self) -> int:
        while (grant := self.producer.acquire()) is not None:
            self.leave.append(grant)
        filling, waiting = self.consumer.levels()
        room = len(self.leave) - filling - waiting
        if room > 0:
            self.consumer.grant(room, max(grant.version for grant in self.leave))
        work = 0
        while self.leave and (taken := self.consumer.take(1)) is not None:
            target = self.producer.slab.block(self.leave[0].block)
            for name, array in self._relabelled(taken[0]).items():
                target[name][...] = array
            self.producer.commit(self.leave.popleft().block)
            self.consumer.release(taken)
            work += 1
        self.metrics.add("steps", work)
        return work

    def state(self) -> State:
        """See :class:`Worker`: nothing is kept but the blocks that wait."""
        return self.consumer.state()

    def load_state(self, state: State) -> None:
        """See :class:`Worker`."""
        self.consumer.load_state(state, 0)


class ReplayBuffer(BufferWorker):
    """Keeps the newest steps and draws batches from them."""

    def __init__(
        self,
        name: str,
        replay: Replay,
        samples: SampleStream,
        batches: SampleStream,
        priorities: SampleStream | None,
        seed: int,
        actors: int,
        checkpoints: CheckpointStore | None,
        resume: bool,
    ) -> None:
        """``actors`` is the number of vectors that fill blocks at the same time."""
        super().__init__(name, replay, samples, batches)
        self.priorities, self.seed, self.actors = priorities, seed, actors
        self.checkpoints, self.resume = checkpoints, resume

    def start(self) -> None:
        """See :class:`Worker`."""
        super().start()
        spec = self.consumer.slab.spec
        places, self.batch_steps = blocks_kept(spec, self.replay), steps_drawn(spec, self.replay)
        self.store = replay_store(self.consumer.slab, self.replay, places, derive(self.seed, self.name))
        self.feedback = self.priorities.consumer() if self.priorities is not None else None
        self.block_steps = spec.horizon * spec.rows
        self.slack = self.replay.samples_per_insert * self.block_steps * self.actors + self.batch_steps
        self.held: dict[int, Full] = {}
        self.inserted = self.drawn = self.untold = 0
        if self.checkpoints is not None and self.checkpoints.versions() and (self.resume or self.restarted):
            self._load_store(self.checkpoints.load("latest", self.metrics.notes.append))

    def owed(self, blocks: int = 0, batches: int = 0) -> float:
        """Samples that should have been drawn and were not, if so many more blocks had come and batches gone."""
        steps = self.inserted + blocks * self.block_steps - self.replay.warmup
        return self.replay.samples_per_insert * steps - self.drawn - batches * self.batch_steps

    def _pass(self) -> int:
        work = self._reprioritize()
        while (taken := self.consumer.take(1)) is not None:
            work += self._insert(taken[0])
        self._admit()
        while self._may_draw() and (grant := self.producer.acquire()) is not None:
            block = self.producer.slab.block(grant.block)
            self.store.draw(block)
            block["inserted"][0] = 0
            block["inserted"][0, 0], self.untold = self.untold, 0
            self.producer.commit(grant.block)
            self.drawn += self.batch_steps
            work += 1
        self.metrics.counters.update(steps=self.inserted, drawn=self.drawn)
        return work

    def _insert(self, full: Full) -> int:
        self._relabelled(full)
        steps, gone = self.store.insert(full.block)
        self.held[full.block] = full
        if gone >= 0:
            self.consumer.release([self.held.pop(gone)])
        self.inserted += steps
        self.untold += steps
        return steps

    def _admit(self) -> None:
        coming = sum(self.consumer.levels())
        room = self.consumer.slab.blocks - len(self.held) - coming
        if self.replay.samples_per_insert:
            bearable = (self.slack - self.owed(coming)) / (self.replay.samples_per_insert * self.block_steps)
            room = min(room, math.floor(bearable))
        if room > 0:
            self.consumer.grant(room, 0)
        self.metrics.gauges.update({"replay/steps": float(self.inserted), "replay/owed": self.owed()})

    def _may_draw(self) -> bool:
        if self.inserted < self.replay.warmup or self.store.tree.total <= 0:
            return False
        return not self.replay.samples_per_insert or self.owed(batches=1) >= -self.slack

    def _reprioritize(self) -> int:
        work = 0
        while self.feedback is not None and (taken := self.feedback.take(1)) is not None:
            block = self.feedback.slab.block(taken[0].block)
            self.store.reprioritize(*(block[name][0].copy() for name in ("index", "stamp", "priority")))
            self.feedback.release(taken)
            work += 1
        if self.feedback is not None:
            self.feedback.grant(self.feedback.slab.blocks, 0)
        return work

    def _pollables(self) -> list[object]:
        # Leave for a batch that is not drawn yet is not read, and a wait for it would not be one.
        drawing = self.producer.pollable() if self._may_draw() else None
        return [self.consumer.pollable(), drawing, self.feedback.pollable() if self.feedback is not None else None]

    def state(self) -> State:
        """See :class:`Worker`: the replay, the blocks that wait, the counters."""
        whole = State(values={"inserted": self.inserted, "drawn": self.drawn, "untold": self.untold})
        whole.put("store", self.store.state())
        whole.put("samples", self.consumer.state())
        if self.feedback is not None:
            whole.put("feedback", self.feedback.state())
        return whole

    def load_state(self, state: State) -> None:
        """See :class:`Worker`."""
        self.consumer.release(list(self.held.values()))
        self.consumer.load_state(state.under("samples"), 0)
        self._load_store(state)
        if self.feedback is not None:
            self.feedback.load_state(state.under("feedback"), 0)

    def _load_store(self, state: State) -> None:
        self.inserted, self.drawn, self.untold = (state.values[key] for key in ("inserted", "drawn", "untold"))
        used = self.store.load_state(state.under("store"), self.consumer.free())
        self.held = {full.block: full for full in self.consumer.hold(used)}

    def stop(self) -> None:
        """See :class:`Worker`."""
        if self.checkpoints is not None:
            self.checkpoints.save(self.store.came, self.name, self.state())

    def close(self) -> None:
        """See :class:`Worker`."""
        super().close()
        if self.feedback is not None:
            self.feedback.close()
