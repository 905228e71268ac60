"""Resumed runs start at once: the four ways in which other systems stand still after a resume, each with a test."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

import srl
from srl.experiment import wire
from srl.launch.run import resume
from srl.plan import check, checkpoint_store
from srl.recipes import recipe
from srl.workers.trainer import TrainerWorker

LATE = 10**6
"""The version of a run that has gone on for months."""
AT_ONCE = 10.0
"""Seconds from the command to the first step that is trained on."""


def small(**changes):
    base = replace(recipe("cartpole"), actors=srl.Actors(count=2, envs=8), algorithm=srl.PPO(horizon=16, minibatch=128))
    return replace(base, **changes)


def aged(x, run_dir, version=LATE):
    """A run that was trained a little, saved as if it had had so many updates."""
    replace(x, steps=512, launcher="inline", transport="auto").run(run_dir, quiet=True)
    (plan,) = check(x)
    store = checkpoint_store(run_dir, plan)
    state = store.load()
    state.values.update(version=version, updates=version)
    for name in [name for name in state.values if name.startswith("peers/")]:
        del state.values[name]
    state.arrays = {name: array for name, array in state.arrays.items() if not name.startswith("peers/")}
    store.save(version, plan.policy, state)


class First:
    """When the first step was trained on, and all versions that were seen."""

    def __init__(self, after):
        self.after, self.at, self.versions, self.dropped = after, None, [], 0.0

    def write(self, row):
        if self.at is None and row.values["steps"] > self.after:
            self.at = time.monotonic()
        self.versions.append(row.values.get("version", 0))
        self.dropped = row.values.get("dropped", 0.0)

    def say(self, text):
        pass

    def close(self):
        pass


def seconds_to_first_step(run_dir, **changes):
    first, begin = First(after=512), time.monotonic()
    result = resume(run_dir, sinks=[first], steps=8192, **changes)
    assert result.steps >= 8192 and not result.interrupted
    assert all(version >= LATE for version in first.versions if version)
    return first.at - begin, first


LAYOUTS = {
    "inline, shm": {},
    "remote, shm": {"actors": srl.Actors(count=2, envs=8, inference="remote")},
    "remote, tcp": {"actors": srl.Actors(count=2, envs=8, inference="remote"), "transport": "tcp"},
}


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumed_at_a_late_version_trains_at_once(tmp_path, layout, staleness):
    """Neither is every sample judged stale, nor do policy workers wait for weights that would need samples first."""
    x = small(**LAYOUTS[layout])
    x = replace(x, algorithm=replace(x.algorithms["default"], max_staleness=staleness))
    aged(x, tmp_path / "run")
    took, first = seconds_to_first_step(tmp_path / "run", launcher="local", transport=x.transport)
    assert took < AT_ONCE
    # Two actors that take turns badly bring a block too late now and then: up to 7 of 67 in runs that were not resumed.
    assert first.dropped < 20, "a third of the 60 blocks it takes"


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_resumed_trainer_admits_no_more_than_a_new_one(tmp_path, staleness):
    """Admission counts from the start of this trainer, not by version times batch."""
    x = small(launcher="inline")
    x = replace(x, algorithm=replace(x.algorithms["default"], max_staleness=staleness))
    aged(x, tmp_path / "run")
    admitted = []
    for tag in (None, "latest"):
        nodes = wire(x, check(x), tmp_path / "run", tag)
        workers = [node.build() for node in nodes]
        for worker in reversed(workers):
            worker.start()
        trainer = next(worker for worker in workers if isinstance(worker, TrainerWorker))
        trainer.poll(0)
        admitted.append(trainer.consumer.levels()[0])
        for worker in workers:
            worker.close()
    assert admitted[0] == admitted[1] > 0


def test_actors_that_waited_when_a_run_ended_act_again_when_it_is_resumed(tmp_path, srl_command, trained_some):
    """Nothing remembers that it was told to wait."""
    run_dir = tmp_path / "run"
    slow = ["--ppo.epochs", "40", "--ppo.max-staleness", "0", "--actors", "1"]  # actors wait most of the time
    command = srl_command("train", "cartpole", "--out", run_dir, "--steps", 10**8, *slow)
    trained_some(run_dir)
    command.process.terminate()
    code, out, err = command.finish()
    assert code == 130, err
    done = int(out.split("interrupted at ")[1].split()[0].replace(",", ""))
    first, begin = First(after=done), time.monotonic()
    result = resume(run_dir, sinks=[first], steps=done + 8192)
    assert result.steps >= done + 8192
    assert first.at - begin < AT_ONCE
