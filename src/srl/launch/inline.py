"""The inline launcher: every worker in this process, one after the other. Deterministic, and a debugger works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from srl.core.worker import State, Worker
from srl.experiment import Node
from srl.workers.trainer import TrainerWorker

Feed = Callable[[Worker], None]


def run_inline(nodes: Sequence[Node], feed: Feed, ending: Callable[[], float | None], incarnation: int) -> None:
    """Poll the workers in turn until all trainers are done, a target is reached, or the run is ending.

    ``feed`` gets their metrics.
    """
    workers = [node.build() for node in nodes]
    trainers = [worker for worker in workers if isinstance(worker, TrainerWorker)]

    def peers() -> State | None:
        whole = State()
        for worker in workers:
            state = worker.state()
            if state is None:
                return None
            whole.put(worker.name, state)
        return whole

    started: list[Worker] = []
    try:
        for worker in reversed(workers):  # trainers publish before actors ask
            worker.ending, worker.incarnation = ending, incarnation
            if isinstance(worker, TrainerWorker):
                worker.peers = peers
            worker.start()
            started.append(worker)
        _restore(workers, trainers)
        reported = 0.0
        while ending() is None:
            done = {worker.name for worker in workers if worker.poll(0).done}
            orders = [order for worker in workers for order in worker.metrics.orders]
            for worker in workers if orders else []:
                worker.metrics.orders.clear()
                worker.tell(orders[-1])
            if time.monotonic() - reported > 0.2:
                reported = time.monotonic()
                for worker in workers:
                    feed(worker)
            if all(trainer.name in done for trainer in trainers) or "evaluator" in done:
                break
        for worker in workers:
            worker.stop()
            feed(worker)
    finally:
        for worker in started:
            worker.close()


def _restore(workers: Sequence[Worker], trainers: Sequence[TrainerWorker]) -> None:
    """Put every worker back where the checkpoint found it, if the checkpoint knows."""
    saved = [trainer.restored.under("peers") for trainer in trainers if trainer.restored is not None]
    newest = next((state for state in saved if state.arrays or state.values), None)
    if newest is not None:
        for worker in workers:
            worker.load_state(newest.under(worker.name))
