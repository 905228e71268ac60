"""The trainer: admits samples, trains on batches, publishes versions, saves checkpoints.

Order matters at the start: the (restored) version is published *before* any sample is admitted, so nobody can act
with older weights, and admission counts from this start, so a resumed run admits what a new one would.

A policy may have several trainers (:mod:`srl.workers.group`), each with samples of its own. The first one publishes and
saves for all.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from srl.algorithms.base import Algorithm, Learner
from srl.core.admission import capacity
from srl.core.errors import CheckpointError, TrainingError
from srl.core.memory import keep_freed_memory
from srl.core.seeding import derive
from srl.core.slab import Batch
from srl.core.specs import Arrays, Spaces
from srl.core.worker import Progress, State, Worker
from srl.services.checkpoints import CheckpointStore
from srl.streams.protocols import Full, ParameterStream, SampleStream
from srl.workers.batches import BatchSource
from srl.workers.group import Group, PeersLost
from srl.workers.opponents import PAST

_FIRST_SAVE = 10.0
"""Seconds after which a new run is saved for the first time, so that a crash early on is not a new start."""
_PATIENCE = 1.0
"""Seconds an update may still take once the run is ending; then it is abandoned."""
_TURN = 0.0005
"""Seconds until the thread that prepares batches lets the one that trains go on; Python's own are ten times that."""
_UNTIL_TOLD = 0.01
"""Seconds between two looks of a trainer that is done at whether the run has ended."""


@dataclass(frozen=True)
class TrainerPlan:
    """What a trainer is to do, beside the algorithm."""

    batch: int
    """Blocks per update."""
    steps: int
    """Steps to train on in all."""
    seed: int
    device: str
    threads: int
    prefetch: bool
    """Prepare the next batch in a thread while this one is trained on."""
    checkpoint_seconds: float
    resume: str | None
    """Tag or version to go on from."""
    past_every: int = 0
    """Updates between two versions that are tagged for opponents to play (0: none is)."""
    foreign: bool = False
    """Whether samples of other policies come too: versions of those say nothing about how stale a sample is."""
    nonfinite: str = "stop"
    """What to do about an update that gives NaN or Inf: stop the run, or skip the batch."""
    alone: bool = True
    """Whether no other policy is trained, so that it need not go on for others once it is done."""


class TrainerWorker(Worker):
    """Trains one policy."""

    kind = "trainer"

    def __init__(
        self,
        name: str,
        policy: str,
        algorithm: Algorithm,
        spaces: Spaces,
        samples: SampleStream,
        parameters: ParameterStream,
        checkpoints: CheckpointStore | None,
        plan: TrainerPlan,
        priorities: SampleStream | None = None,
        group: Group | None = None,
    ) -> None:
        """``priorities`` is where a buffer hears how much is still to be learned from its samples.

        ``group`` are the policy's trainers, if there are several.
        """
        super().__init__(name)
        self.group = group
        self.policy, self.algorithm, self.spaces, self.plan = policy, algorithm, spaces, plan
        self.samples, self.parameters, self.checkpoints = samples, parameters, checkpoints
        self.priorities = priorities
        self.prompt = plan.threads > 1  # they meet after every minibatch
        self.version, self.steps, self.updates = 0, 0, 0
        self.peers: Callable[[], State | None] = lambda: None
        """State of the other workers, where the launcher can have it; saved along for an exact resume."""
        self.restored: State | None = None
        """What the checkpoint held that this run goes on from."""
        self.source: BatchSource
        self.learner: Learner
        self._batch: tuple[Batch, Any, list[Full]] | None = None
        """What is trained on next."""

    def start(self) -> None:
        """See :class:`Worker`."""
        import torch

        torch.set_num_threads(self.plan.threads)
        device = self.plan.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.learner = self.algorithm.learner(self.spaces, derive(self.plan.seed, self.name), device)
        self.consumer = self.samples.consumer()
        self.writer = self.parameters.writer() if self.leads else None
        self.feedback = self.priorities.producer(0, self.incarnation) if self.priorities is not None else None
        resume = self.plan.resume
        if self.checkpoints is not None and self.leads:
            self.checkpoints = self.checkpoints.claimed()
        if self.restarted and self.checkpoints is not None and self.checkpoints.versions():
            resume = "latest"
        if resume is not None and self.checkpoints is not None:
            self._restore(self.checkpoints.load(resume, self.metrics.notes.append))
        if self.writer is not None:
            self.version = max(self.version, self.writer.version + 1)  # versions never go backwards
        self.before = self.learner.state()
        self._saved = self.version if resume is not None else -1
        self._saved_at = time.monotonic()
        self._past_due = self.plan.past_every > 0 and resume is None
        self.metrics.counters.update(steps=self.steps, updates=self.updates)
        self.source = BatchSource(self.consumer, self.learner, self.plan.batch, self._stale, self.metrics)
        if self.plan.prefetch:  # a process of its own
            keep_freed_memory()
            sys.setswitchinterval(_TURN)
            self.source.start()
        if self.group is None:
            self._begin()
        else:
            self.group.join(self.incarnation, "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")

    @property
    def leads(self) -> bool:
        """Whether it is the trainer that publishes and saves."""
        return self.group is None or self.group.rank == 0

    def _begin(self) -> None:
        """Publish what there is, then let samples come."""
        from srl.policies.host import arrays_of

        if self.writer is None or self.writer.version < self.version:
            self._publish(arrays_of(self.learner.policy))
        self._admit()

    def poll(self, timeout: float) -> Progress:
        """See :class:`Worker`: one update, if there is a batch. Who is done goes on if other policies are not."""
        try:
            return self._poll(timeout)
        except PeersLost:
            assert self.group is not None
            self.learner.load_state(self.before)
            self.metrics.notes.append(f"{self.name} lost another trainer; it waits for one in its place")
            self.group.leave()
            return Progress()

    def _poll(self, timeout: float) -> Progress:
        if self.group is not None and not self.group.formed and not self._meet(timeout):
            return Progress()
        if self._past_due:
            self._tag_past()
        if self.plan.alone and self.steps >= self.plan.steps:
            time.sleep(min(timeout, _UNTIL_TOLD))
            return Progress(done=True)
        self._admit()
        self._batch = self._batch or self.source.get(timeout)
        if self._batch is None:
            return Progress(done=self.steps >= self.plan.steps)
        if not self._everybody_ready(self._batch[0], timeout):
            return Progress(done=self.steps >= self.plan.steps)
        trained = self._train(*self._batch)
        self._batch = None
        due = min(self.plan.checkpoint_seconds, _FIRST_SAVE) if self._saved < 0 else self.plan.checkpoint_seconds
        if time.monotonic() - self._saved_at >= due:
            self._try_to_save()
        return Progress(trained, done=self.steps >= self.plan.steps)

    def _meet(self, timeout: float) -> bool:
        """Wait for the other trainers, and go on where the one is that has trained most; whether all are there."""
        import torch

        assert self.group is not None
        with self.metrics.wait("trainers"):
            if not self.group.form(timeout):
                return False
        everybody = self.group.gather(torch.tensor([self.updates, self.version, self.steps]))
        source = int(everybody[:, 0].argmax())
        mine = self.before.arrays if source == self.group.rank else None
        given = self.group.give(mine, source)
        if mine is None:
            own = {"generator": self.before.arrays["generator"]} if "generator" in given else {}  # orders differ
            self.learner.load_state(State({**given, **own}, self.before.values))
            self.before = self.learner.state()
        updates, version, steps = int(everybody[source, 0]), int(everybody[:, 1].max()), int(everybody[source, 2])
        if updates > self.updates and self._batch is not None:  # it was part of what the others have finished
            self.source.release(self._batch[2])
            self._batch = None
        self.updates, self.version, self.steps = updates, version, steps
        self.metrics.counters.update(steps=self.steps, updates=self.updates)
        self.learner.peers = self.group
        self._begin()
        return True

    def _everybody_ready(self, batch: Batch, timeout: float) -> bool:
        """Count the steps of the next update; whether all trainers of the policy have their batch for it."""
        arrays = batch.slab.arrays
        counted = arrays.get("inserted")  # a replay says how many steps are new; else all are
        steps = int(np.sum(arrays["valid"][batch.blocks, :-1] if counted is None else counted[batch.blocks, :-1]))
        if self.group is None:
            self._next_steps = steps
            return True
        with self.metrics.wait("trainers"):
            total = self.group.ready(steps, timeout)
        self._next_steps = total or 0
        return total is not None

    def _train(self, batch: Batch, prepared: Any, taken: list[Full]) -> int:
        from srl.policies.host import arrays_of

        steps = self._next_steps
        for use in range(self.algorithm.reuse):
            staleness = self.version - self._versions(batch.blocks)
            found = self._learn(prepared, taken, use)
            if found is None:
                return 0
            state = self.learner.state()
            weights = state.under("policy").arrays or arrays_of(self.learner.policy)  # to collect them takes a while
            wrong = self._wrong(found, weights)
            if wrong:
                self._undo(wrong)
                self.source.release(taken)
                return 0
            self._prioritize(batch)
            self.version += 1
            self.updates += 1
            if use == self.algorithm.reuse - 1:
                self.source.release(taken)
                self.steps += steps
            self.before = state
            self._publish(weights)
            found.update(staleness=float(staleness.mean()), staleness_max=float(staleness.max()))
            self.metrics.gauges.update({f"train/{name}": value for name, value in found.items()})
            if self.plan.past_every and self.updates % self.plan.past_every == 0:
                self._tag_past()
        self._admit()
        self.metrics.counters.update(steps=self.steps, updates=self.updates)
        return steps

    def _learn(self, prepared: Any, taken: list[Full], use: int) -> dict[str, float] | None:
        self.learner.version = self.version
        try:
            return self.learner.train(prepared, self.steps, self._abandon)
        except PeersLost:
            if use:  # it was trained on before, and would be again
                self.source.release(taken)
                self._batch = None
            raise

    def _prioritize(self, batch: Batch) -> None:
        """Send priorities back to the buffer; if it is behind they are not worth waiting for."""
        if self.feedback is None or self.learner.priorities is None:
            return
        grant = self.feedback.acquire()
        if grant is not None:
            block = self.feedback.slab.block(grant.block)
            block["priority"][0] = self.learner.priorities
            for name in ("index", "stamp"):
                block[name][0] = batch.slab.arrays[name][batch.blocks[0], 0]
            self.feedback.commit(grant.block)

    def _wrong(self, found: dict[str, float], weights: Arrays) -> str:
        """What is not finite after an update: some of its numbers, or weights."""
        bad = [f"{name} is {value}" for name, value in found.items() if not math.isfinite(value)]
        bad += [f"weights {name} are not finite" for name, array in weights.items() if not np.isfinite(array).all()]
        return ", ".join(bad[:3])

    def _undo(self, wrong: str) -> None:
        """Take back an update that went wrong, or end the run."""
        when = f"update {self.updates + 1} (version {self.version}, {self.steps:,} steps)"
        text = f"{self.name}: {when} went wrong: {wrong}"
        if self.plan.nonfinite == "stop":
            raise TrainingError(f"{text}; lower the learning rate, or set trainer.nonfinite to skip such batches")
        self.learner.load_state(self.before)
        self.metrics.notes.append(f"{text}; the batch was skipped")
        self.metrics.add("skipped")

    def _tag_past(self) -> None:
        """Save this version for opponents to play."""
        self._past_due = False
        if self.checkpoints is not None and self.leads:
            self.save()
            self.checkpoints.tag(f"{PAST}{self.version:09d}", self.version)

    def _versions(self, blocks: list[int]) -> Any:
        return self.consumer.slab.arrays["version"][blocks, :-1].min(axis=(1, 2))

    def _stale(self, block: int) -> bool:
        if self.plan.foreign:
            return False
        bound = self.algorithm.max_staleness + self.algorithm.reuse - 1
        return bool(self.version - self._versions([block])[0] > bound)

    def _admit(self) -> None:
        """Let actors start as many blocks as the staleness bound allows."""
        with self.source.lock:
            running, waiting = self.consumer.levels()
            trained = self.source.trained
            room = capacity(
                max_staleness=self.algorithm.max_staleness,
                trained=trained,
                batch=self.plan.batch,
                accepted=trained * self.plan.batch + waiting + self.source.held,
                running=running,
                max_running=self.consumer.slab.blocks,
            )
            if room:
                self.consumer.grant(room, self.version)
        self.metrics.gauges.update({"queue/filling": running, "queue/full": waiting + self.source.held})

    def _publish(self, weights: Arrays) -> None:
        if self.writer is not None:
            self.writer.publish(weights, self.version)
        self.metrics.gauges["version"] = self.version

    def _abandon(self) -> bool:
        since = self.ending()
        return since is not None and time.monotonic() - since > _PATIENCE

    def _try_to_save(self) -> None:
        """Save; if that is not possible now say so and go on: the disk may be full only for a while."""
        try:
            self.save()
        except CheckpointError as error:
            self._saved_at = time.monotonic()
            self.metrics.notes.append(f"{error}; training goes on, the next try is when the next checkpoint is due")
            self.metrics.add("unsaved")

    def save(self) -> None:
        """Write a checkpoint of the last whole update."""
        if self.checkpoints is None or self._saved == self.version or not self.leads:
            return
        whole = State(values={"version": self.version, "steps": self.steps, "updates": self.updates})
        whole.put("learner", self.before)
        peers = self.peers()
        if peers is not None:
            whole.put("peers", peers)
        self.checkpoints.save(self.version, self.policy, whole)
        self._saved, self._saved_at = self.version, time.monotonic()
        self.metrics.gauges["saved"] = self.version

    def _restore(self, whole: State) -> None:
        self.version, self.steps, self.updates = (whole.values[key] for key in ("version", "steps", "updates"))
        self.learner.load_state(whole.under("learner"))
        self.restored = whole

    def state(self) -> State:
        """See :class:`Worker`: the sample stream's state; all else is in the checkpoint itself."""
        return self.consumer.state()

    def load_state(self, state: State) -> None:
        """See :class:`Worker`."""
        self.consumer.load_state(state, self.version)

    def stop(self) -> None:
        """See :class:`Worker`."""
        self.save()

    def close(self) -> None:
        """See :class:`Worker`."""
        self.source.close()
        self.consumer.close()
        if self.writer is not None:
            self.writer.close()
        if self.group is not None:
            self.group.close()
        if self.feedback is not None:
            self.feedback.close()


class PeerTrainer(TrainerWorker):
    """A trainer of a policy that is not its first."""

    kind = "peer"
