"""The trainer: admits samples, trains on batches, publishes versions, saves checkpoints.

Order matters at the start: the (restored) version is published *before* any sample is admitted, so nobody can act
with older weights, and admission counts from this start, so a resumed run admits what a new one would.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from srl.algorithms.base import Algorithm, Learner
from srl.core.admission import capacity
from srl.core.seeding import derive
from srl.core.slab import Batch
from srl.core.specs import Spaces
from srl.core.worker import Metrics, Progress, State, Worker
from srl.services.checkpoints import CheckpointStore
from srl.streams.protocols import Full, ParameterStream, SampleConsumer, SampleStream
from srl.streams.wait import wait

_FIRST_SAVE = 10.0
"""Seconds after which a new run is saved for the first time, so that a crash early on is not a new start."""
_PATIENCE = 1.0
"""Seconds an update may still take once the run is ending; then it is abandoned."""


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
    ) -> None:
        super().__init__(name)
        self.policy, self.algorithm, self.spaces, self.plan = policy, algorithm, spaces, plan
        self.samples, self.parameters, self.checkpoints = samples, parameters, checkpoints
        self.version, self.steps, self.updates = 0, 0, 0
        self.peers: Callable[[], State | None] = lambda: None
        """State of the other workers, where the launcher can have it; saved along for an exact resume."""
        self.restored: State | None = None
        """What the checkpoint held that this run goes on from."""
        self.source: BatchSource
        self.learner: Learner

    def start(self) -> None:
        """See :class:`Worker`."""
        import torch

        torch.set_num_threads(self.plan.threads)
        device = self.plan.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.learner = self.algorithm.learner(self.spaces, derive(self.plan.seed, self.name), device)
        self.consumer = self.samples.consumer()
        self.writer = self.parameters.writer()
        resume = self.plan.resume
        if resume is None and self.restarted and self.checkpoints is not None and self.checkpoints.versions():
            resume = "latest"
        if resume is not None and self.checkpoints is not None:
            self._restore(self.checkpoints.load(resume))
        self.version = max(self.version, self.writer.version + 1)  # versions never go backwards
        self._publish()
        self.before = self.learner.state()
        self._saved = self.version if resume is not None else -1
        self._saved_at = time.monotonic()
        self.metrics.counters.update(steps=self.steps, updates=self.updates)
        self.source = BatchSource(self.consumer, self.learner, self.plan.batch, self._stale, self.metrics)
        if self.plan.prefetch:
            self.source.start()
        self._admit()

    def poll(self, timeout: float) -> Progress:
        """See :class:`Worker`: one update, if there is a batch."""
        if self.steps >= self.plan.steps:
            return Progress(done=True)
        self._admit()
        ready = self.source.get(timeout)
        if ready is None:
            return Progress()
        trained = self._train(*ready)
        due = min(self.plan.checkpoint_seconds, _FIRST_SAVE) if self._saved < 0 else self.plan.checkpoint_seconds
        if time.monotonic() - self._saved_at >= due:
            self.save()
        return Progress(trained, done=self.steps >= self.plan.steps)

    def _train(self, batch: Batch, prepared: Any, taken: list[Full]) -> int:
        steps = int(np.count_nonzero(batch.slab.arrays["valid"][batch.blocks, :-1]))
        for use in range(self.algorithm.reuse):
            staleness = self.version - self._versions(batch.blocks)
            found = self.learner.train(prepared, self.steps, self._abandon)
            if found is None:
                return 0
            self.version += 1
            self.updates += 1
            if use == self.algorithm.reuse - 1:
                self.source.release(taken)
                self.steps += steps
            self._publish()
            self.before = self.learner.state()
            found.update(staleness=float(staleness.mean()), staleness_max=float(staleness.max()))
            self.metrics.gauges.update({f"train/{name}": value for name, value in found.items()})
        self._admit()
        self.metrics.counters.update(steps=self.steps, updates=self.updates)
        return steps

    def _versions(self, blocks: list[int]) -> Any:
        return self.consumer.slab.arrays["version"][blocks, :-1].min(axis=(1, 2))

    def _stale(self, block: int) -> bool:
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

    def _publish(self) -> None:
        from srl.policies.host import arrays_of

        self.writer.publish(arrays_of(self.learner.policy), self.version)
        self.metrics.gauges["version"] = self.version

    def _abandon(self) -> bool:
        since = self.ending()
        return since is not None and time.monotonic() - since > _PATIENCE

    def save(self) -> None:
        """Write a checkpoint of the last whole update."""
        if self.checkpoints is None or self._saved == self.version:
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
        self.writer.close()


class BatchSource:
    """Collects full blocks into batches and prepares them, in a thread of its own once started."""

    def __init__(
        self,
        consumer: SampleConsumer,
        learner: Learner,
        count: int,
        stale: Callable[[int], bool],
        metrics: Metrics,
    ) -> None:
        self.consumer, self.learner, self.count, self.stale, self.metrics = consumer, learner, count, stale, metrics
        self.lock = threading.RLock()
        """Held while the consumer is used: its calls are short, but it has no lock of its own."""
        self.held = 0
        """Blocks taken and not released yet."""
        self.trained = 0
        """Batches trained on since this trainer started."""
        self._fresh: list[Full] = []
        self._ready: queue.Queue[tuple[Batch, Any, list[Full]]] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Prepare batches ahead, in a thread."""
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def get(self, timeout: float) -> tuple[Batch, Any, list[Full]] | None:
        """The next batch, or None if there is none within ``timeout`` seconds."""
        if self._error is not None:
            raise self._error
        with self.metrics.wait("samples"):
            if self._thread is None:
                if timeout > 0 and not self._collect():
                    wait([self.consumer.pollable()], timeout)
            else:
                try:
                    found = self._ready.get(timeout=max(timeout, 1e-4))
                except queue.Empty:
                    return None
                return found if self._still_fresh(found[2]) else None
        return self._next(0)

    def _still_fresh(self, taken: list[Full]) -> bool:
        """Whether a batch prepared ahead may still be trained on; if not, its fresh blocks go into the next one."""
        with self.lock:
            old = [full for full in taken if self.stale(full.block)]
            if old:
                self._drop(old)
                self._fresh[:0] = [full for full in taken if full not in old]
        return not old

    def release(self, blocks: list[Full]) -> None:
        """The batch of ``blocks`` is trained on."""
        with self.lock:
            self.consumer.release(blocks)
            self.held -= len(blocks)
            self.trained += 1

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                found = self._next(0.1)
                while found is not None and not self._closed.is_set():
                    try:
                        self._ready.put(found, timeout=0.1)
                        break
                    except queue.Full:
                        continue
        except BaseException as error:  # shown by the trainer's own thread
            self._error = error

    def _next(self, timeout: float) -> tuple[Batch, Any, list[Full]] | None:
        if not self._collect():
            wait([self.consumer.pollable()], timeout)
            if not self._collect():
                return None
        with self.lock:
            taken, self._fresh = self._fresh[: self.count], self._fresh[self.count :]
        batch = Batch(self.consumer.slab, [full.block for full in taken])
        return batch, self.learner.prepare(batch), taken

    def _collect(self) -> bool:
        """Take full blocks until there are enough for a batch; whether there are."""
        with self.lock:
            while len(self._fresh) < self.count and (found := self.consumer.take(1)) is not None:
                self.held += 1
                if self.stale(found[0].block):
                    self._drop(found)
                else:
                    self._fresh += found
            return len(self._fresh) >= self.count

    def _drop(self, blocks: list[Full]) -> None:
        self.consumer.release(blocks)
        self.held -= len(blocks)
        self.metrics.add("dropped", len(blocks))
