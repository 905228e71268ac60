"""A run that writes down all that is needed to judge it afterwards, whatever happens to it meanwhile.

:data:`COMMAND` with ``RUN_DIR [resume]`` runs the experiment in ``RUN_DIR/config.json``, from its start or from its
newest checkpoint, until it gets SIGTERM. Files grow in the run's folder:

- ``reports.jsonl``: what the controller hears of every worker (its life, process, and how much it has done), and says;
- ``trained.jsonl``: written by the trainer itself: the ids of the blocks of every batch, *before* it is trained on, and
  every version, after it is published. A trainer that replaces another goes on in the same file;
- ``sampled/NAME-LIFE``: a number each: the steps that this life of an actor has made.

Times are those of the system's monotonic clock, so that they can be compared across processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from srl import config
from srl.core.slab import Batch
from srl.core.specs import Arrays
from srl.core.worker import Progress
from srl.experiment import Node, wire
from srl.launch.controller import Controller
from srl.launch.local import LocalLauncher, preload
from srl.plan import check, checkpoint_store
from srl.streams.protocols import Full
from srl.workers.actor import ActorWorker
from srl.workers.trainer import TrainerWorker

COMMAND = [sys.executable, "-c", "import sys; from srl.bench.recorded import main; main(sys.argv[1:])"]
REPORTS, TRAINED, SAMPLED = "reports.jsonl", "trained.jsonl", "sampled"
WORK = {"actor": "steps", "policy": "rows", "buffer": "drawn", "trainer": "updates", "evaluator": "evaluations"}
"""What a worker of each kind counts that gets something done."""


class RecordingTrainer(TrainerWorker):
    """A trainer that writes down what it trains on and publishes."""

    def __init__(self, record: Path, run: int, **given: Any) -> None:
        """``run`` is the process that runs the run: one that is resumed counts versions from its checkpoint."""
        super().__init__(**given)
        self._record, self._run = open(record / TRAINED, "ab", buffering=0), run

    def _note(self, **what: Any) -> None:
        self._record.write(msgspec.json.encode({"t": time.monotonic(), "life": self.incarnation, **what}) + b"\n")

    def _train(self, batch: Batch, prepared: Any, taken: list[Full]) -> int:
        counted = "inserted" if "inserted" in batch.slab.arrays else "valid"  # as the trainer itself counts
        steps = np.sum(batch.slab.arrays[counted][batch.blocks, :-1], axis=(1, 2)).tolist()
        self._note(blocks=[[*full[1:], each] for full, each in zip(taken, steps, strict=True)])
        return super()._train(batch, prepared, taken)

    def _publish(self, weights: Arrays) -> None:
        super()._publish(weights)
        self._note(version=self.version, trained=self.steps, run=self._run)


class RecordingActor(ActorWorker):
    """An actor whose count of steps can be read from outside, also after it was killed."""

    def __init__(self, record: Path, **given: Any) -> None:
        super().__init__(**given)
        self._record = record

    def start(self) -> None:
        """See :class:`~srl.core.worker.Worker`."""
        path = self._record / SAMPLED / f"{self.name}-{self.incarnation}"
        path.parent.mkdir(exist_ok=True)
        self._count = np.memmap(path, "<i8", "w+", shape=(1,))
        super().start()

    def poll(self, timeout: float) -> Progress:
        """See :class:`~srl.core.worker.Worker`."""
        progress = super().poll(timeout)
        self._count[0] += progress.work
        return progress


def recorded(nodes: Sequence[Node], run_dir: Path) -> list[Node]:
    """The same graph, with actors and trainers that write down what they do."""
    trainer, actor = {"record": run_dir, "run": os.getpid()}, {"record": run_dir}
    kinds: dict[Any, Any] = {TrainerWorker: (RecordingTrainer, trainer), ActorWorker: (RecordingActor, actor)}
    found = []
    for node in nodes:
        kind, more = kinds.get(node.worker, (node.worker, {}))
        found.append(replace(node, worker=kind, arguments={**node.arguments, **more}))
    return found


class Reports:
    """Writes down what a controller hears and says."""

    def __init__(self, run_dir: Path) -> None:
        self.file = open(run_dir / REPORTS, "ab", buffering=0)
        self.launcher: Controller

    def feed(self, name: str, kind: str, report: dict[str, Any]) -> None:
        """See :data:`~srl.launch.controller.Feed`."""
        child = self.launcher.children[name]
        for text in report["notes"]:
            self.say(text)
        done = report["counters"].get(WORK[kind], 0.0)
        self._write(name=name, kind=kind, life=child.starts, pid=child.process.pid, done=done)

    def say(self, text: str) -> None:
        """Take a sentence for the user."""
        self._write(said=text)

    def _write(self, **what: Any) -> None:
        self.file.write(msgspec.json.encode({"t": time.monotonic(), **what}) + b"\n")


def main(arguments: Sequence[str]) -> None:
    """Entry point."""
    run_dir, tag = Path(arguments[0]), "latest" if "resume" in arguments[1:] else None
    x = config.load(run_dir)
    plans = check(x)
    reports = Reports(run_dir)
    first = max(checkpoint_store(run_dir, plan).resolve(tag) for plan in plans) if tag else 0
    ended: list[float] = []
    with contextlib.ExitStack() as cleanup:
        hosts = None
        if x.launcher.startswith("ray"):
            from srl.launch.ray import RayLauncher, joined

            hosts = cleanup.enter_context(joined(x.launcher, run_dir))
        signal.signal(signal.SIGTERM, lambda *_: ended.append(time.monotonic()))
        nodes = recorded(wire(x, plans, run_dir, tag, hosts.names if hosts is not None else None), run_dir)
        given = nodes, reports.feed, run_dir / "logs", x.restarts, first, reports.say
        watched: dict[str, Any] = {"stall_seconds": x.stall_seconds, "preload": preload(x)}
        if hosts is None:
            reports.launcher = LocalLauncher(*given, **watched)
        else:
            reports.launcher = RayLauncher(*given, hosts=hosts, experiment=x, **watched)
        reports.launcher.run(lambda: ended[0] if ended else None)
