"""Workers on one machine are killed, stopped, and fail while a run goes on. ``benchmarks/faults.py`` does it longer."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

import srl
from running import eventually
from srl.bench.faults import kill, local, prepared, processes_of
from srl.core.errors import WorkerError
from srl.experiment import wire
from srl.launch.local import LocalLauncher
from srl.plan import check
from srl.recipes import recipe
from srl.workers.trainer import TrainerWorker

KINDS = ("actor", "policy", "trainer")
CHECKPOINT = 1.0
"""Seconds between checkpoints."""
WORKERS = ("actor-0", "actor-1", "policy-default-0", "trainer-default")


def experiment(**changes):
    return replace(
        recipe("cartpole"),
        actors=srl.Actors(count=2, envs=8, inference="remote"),
        trainer=srl.Trainer(checkpoint_seconds=CHECKPOINT),
        steps=10**9,
        **{"restarts": 100, **changes},
    )


@pytest.fixture
def started(tmp_path):
    """Starts a recorded run; in the end nothing was trained on twice, and no version has gone backwards."""
    runs = []
    short = Path(tempfile.mkdtemp(prefix="t"))  # a socket's path has room for a hundred letters, pytest's take most

    def start(x):
        context = local(prepared(x, tmp_path / "run"), tmp_path / "run", short)
        runs.append((context, run := context.__enter__()))
        run.working(WORKERS)
        return run

    yield start
    for context, run in runs:
        try:
            assert run.stop() == 0, run.tail()
            trained = run.trained()
            assert trained.batches and trained.twice == trained.backwards == 0
            eventually(lambda: not processes_of(tmp_path / "run"), 8, "the end of all processes")
        finally:
            context.__exit__(None, None, None)
    shutil.rmtree(short)


def since_checkpoint(run):
    """Seconds since the newest one was saved."""
    return time.time() - max(path.stat().st_mtime for path in (run.run_dir / "checkpoints").glob("*/v*"))


def test_every_kind_of_worker_is_back_after_it_was_killed_and_the_trainer_loses_one_interval_at_most(started):
    run = started(experiment())
    run.wait(lambda: any((run.run_dir / "checkpoints").glob("*/v*")), 30, "a checkpoint")
    for kind in KINDS:
        life = run.workers(kind)[0]
        run.wait(lambda: 0.3 < since_checkpoint(run) < 0.8 * CHECKPOINT, 30, "the time between two checkpoints")
        at = kill(life)
        assert run.back(life, at) < 15
        run.goes_on("trainer-default", time.monotonic())
    undone, seconds = run.trained().undone(at)
    assert undone > 0, "the trainer went on from where it was, not from a checkpoint"
    assert seconds < 3 * CHECKPOINT


def test_a_worker_that_is_stopped_for_a_while_goes_on(started):
    run = started(experiment())
    for kind in KINDS:
        life = run.workers(kind)[0]
        kill(life, signal.SIGSTOP)
        time.sleep(1.5)  # that is the fault
        run.goes_on(life.name, kill(life, signal.SIGCONT), 10)
    assert run.said == []
    assert {life.number for life in run.lives} == {0}


def test_a_worker_that_is_stopped_for_good_is_replaced(started):
    run = started(experiment(stall_seconds=1.5))
    for kind in KINDS:
        life = run.workers(kind)[0]
        run.back(life, kill(life, signal.SIGSTOP), 20)
        said = [text for _, text in run.said if text.startswith(f"{life.name} has not been heard of for ")]
        assert said, run.said
    run.goes_on("trainer-default", time.monotonic())


class FailsOnce(TrainerWorker):
    """Its first life ends in the middle of an update."""

    def _train(self, batch, prepared, taken):
        if not self.restarted and self.updates == 3:
            raise ValueError("the card has fallen off the bus")
        return super()._train(batch, prepared, taken)


class FailsAlways(TrainerWorker):
    """Fails at its first update, in every life."""

    def _train(self, batch, prepared, taken):
        raise ValueError("no card at all")


def with_trainer(x, run_dir, kind):
    """The graph of ``x`` with trainers of another kind."""
    nodes = wire(x, check(x), run_dir, None)
    return [replace(node, worker=kind) if node.worker is TrainerWorker else node for node in nodes]


def test_a_trainer_that_fails_costs_one_restart_and_not_those_of_the_actors_whose_stream_it_closed(tmp_path):
    x = experiment(restarts=1)
    nodes = with_trainer(x, tmp_path, FailsOnce)
    said, updates, deadline = [], [0.0], time.monotonic() + 60

    def feed(name, kind, report):
        if kind == "trainer":
            updates.append(report["counters"].get("updates", 0.0))

    def ending():
        assert time.monotonic() < deadline, said
        return time.monotonic() if updates[-1] > 20 else None

    LocalLauncher(nodes, feed, tmp_path / "logs", x.restarts, 0, said.append).run(ending)
    cause = "trainer-default ValueError: the card has fallen off the bus; started again (1 of 1 restarts used)"
    assert said == [cause]


def test_a_trainer_that_fails_again_and_again_ends_the_run_with_its_own_cause(tmp_path):
    x = experiment(restarts=1)
    nodes = with_trainer(x, tmp_path, FailsAlways)
    launcher = LocalLauncher(nodes, lambda *_: None, tmp_path / "logs", x.restarts, 0, lambda _: None)
    deadline = time.monotonic() + 60
    with pytest.raises(WorkerError, match="trainer-default failed after 1 restarts: ValueError: no card at all"):
        launcher.run(lambda: deadline if time.monotonic() > deadline else None)
