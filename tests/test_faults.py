"""Workers that die: the run goes on within its budget, and beyond it ends with the cause in one line."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from safetensors.numpy import save_file

import srl
from srl import envs
from srl.core.errors import WorkerError
from srl.experiment import wire
from srl.launch.local import LocalLauncher
from srl.launch.run import resume
from srl.plan import check
from srl.recipes import recipe
from srl.services import checkpoints


class Broken(gymnasium.Env):
    """Breaks at its third step."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            raise ValueError("the robot fell apart")
        return np.zeros(1, np.float32), 0.0, False, False, {}


def small(**changes):
    base = replace(
        recipe("cartpole"), actors=srl.Actors(count=1, envs=16), algorithm=srl.PPO(horizon=32, minibatch=128)
    )
    return replace(base, **changes)


def test_crash_loop_ends_with_the_original_cause_and_the_log_to_read(tmp_path):
    x = small(env=envs.gym(Broken), restarts=2)
    with pytest.raises(WorkerError) as caught:
        x.run(tmp_path / "run")
    text = str(caught.value)
    assert "\n" not in text
    assert "actor-0 failed after 2 restarts: ValueError: the robot fell apart" in text
    log = tmp_path / "run" / "logs" / "actor-0.log"
    assert str(log) in text
    assert log.read_text().count("\nValueError: the robot fell apart") >= 3  # some were isolated before
    assert "test_faults.py" in log.read_text()  # the whole traceback is there


def test_no_restart_budget_means_no_restart(tmp_path):
    with pytest.raises(WorkerError, match="actor-0 failed after 0 restarts"):
        small(env=envs.gym(Broken), restarts=0).run(tmp_path / "run")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("victim", ["actor-0", "policy-default-0", "trainer-default"])
def test_killed_worker_is_replaced_and_training_goes_on(tmp_path, victim, transport):
    actors = srl.Actors(count=2, envs=8, ring=2, inference="remote")
    trainer = srl.Trainer(checkpoint_seconds=0.5)
    x = small(actors=actors, transport=transport, trainer=trainer, steps=10**9, restarts=1)
    said, versions, steps = [], [], {"now": 0.0, "at_kill": None, "killed": None}

    def feed(name, kind, report):
        if kind == "trainer":
            steps["now"] = report["counters"].get("updates", 0.0)
            if "version" in report["gauges"]:
                versions.append(report["gauges"]["version"])

    nodes = wire(x, check(x), tmp_path, None)
    launcher = LocalLauncher(nodes, feed, tmp_path / "logs", x.restarts, 0, said.append)
    deadline = time.monotonic() + 90

    def ending():
        assert time.monotonic() < deadline, (
            f"stuck: {steps} {said} {[p.read_text() for p in Path(tmp_path).glob('logs/*')]}"
        )
        child = launcher.children.get(victim)
        if steps["killed"] is None and steps["now"] >= 5:
            steps["killed"], steps["at_kill"] = child.process.pid, steps["now"]
            versions.append(max(versions))
            os.kill(child.process.pid, signal.SIGKILL)
            steps["now"] = 0.0
        elif steps["killed"] and child.process.pid != steps["killed"] and steps["now"] >= steps["at_kill"] + 10:
            return time.monotonic()
        return None

    launcher.run(ending)
    assert said == [f"{victim} killed by SIGKILL; started again (1 of 1 restarts used)"]
    assert versions == sorted(versions)


def test_error_the_user_must_mend_is_not_retried(tmp_path):
    run_dir = tmp_path / "run"
    small(steps=1000, launcher="inline").run(run_dir)
    store = run_dir / "checkpoints" / "default"
    x = small(steps=5000)
    nodes = wire(x, check(x), run_dir, "latest")
    for file in store.glob("v*/arrays.safetensors"):
        file.write_bytes(b"nonsense")
    launcher = LocalLauncher(nodes, lambda *_: None, tmp_path / "logs", 3, 0, lambda _: pytest.fail("restarted"))
    with pytest.raises(WorkerError, match=r"trainer-default failed: checkpoint .* is damaged"):
        launcher.run(lambda: None)


def test_a_last_checkpoint_that_cannot_be_written_is_told(tmp_path):
    run_dir = tmp_path / "run"
    x = small(steps=1000)
    nodes = wire(x, check(x), run_dir, None)
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "default").write_text("a file where a folder should be")
    launcher = LocalLauncher(nodes, lambda *_: None, tmp_path / "logs", 0, 0, lambda _: None)
    with pytest.raises(WorkerError, match="trainer-default failed"):
        launcher.run(lambda: None)


class Ear:
    """Hears what the user is told."""

    def __init__(self):
        self.said = []

    def write(self, row):
        pass

    def say(self, text):
        self.said.append(text)

    def close(self):
        pass


def test_a_full_disk_does_not_end_training_and_the_user_is_told(tmp_path, monkeypatch):
    tries, ear = [], Ear()

    def full_twice(arrays, path):
        tries.append(path)
        if len(tries) <= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(arrays, path)

    monkeypatch.setattr(checkpoints, "save_file", full_twice)
    x = small(steps=20_000, launcher="inline", trainer=srl.Trainer(checkpoint_seconds=0.01))
    result = x.run(tmp_path / "run", quiet=True, sinks=[ear])
    assert result.steps >= 20_000 and len(tries) > 2
    assert len([text for text in ear.said if "No space left on device; training goes on" in text]) == 2
    assert srl.evaluate(tmp_path / "run", episodes=1).version > 0


def test_a_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(tmp_path):
    run_dir, ear = tmp_path / "run", Ear()
    x = small(steps=6000, launcher="inline", trainer=srl.Trainer(checkpoint_seconds=0.01))
    x.run(run_dir, quiet=True)
    *_, before, last = sorted((run_dir / "checkpoints" / "default").glob("v*"))
    arrays = last / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1])
    result = resume(run_dir, steps=12_000, sinks=[ear])
    assert result.steps >= 12_000
    assert any(f"{last} is damaged" in text and f"v{int(before.name[1:])}" in text for text in ear.said)
