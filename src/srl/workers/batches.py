"""From full blocks to batches: collects what is fresh enough and prepares it before it is its turn."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from srl.algorithms.base import Learner
from srl.core.slab import Batch
from srl.core.worker import Metrics
from srl.streams.protocols import Full, SampleConsumer
from srl.streams.wait import wait


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
            while (missing := self.count - len(self._fresh)) > 0 and (found := self.consumer.take(1, missing)):
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
