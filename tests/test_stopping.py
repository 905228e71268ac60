"""However a run ends, what it learned is saved and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time

import pytest

from running import eventually, group_of
from srl.config import load
from srl.plan import check, checkpoint_store

LAYOUTS = {
    "inline": ["--launcher", "inline", "--trainer.threads", "1"],
    "local": [],
    "local remote shm": ["--actors.inference", "remote", "--actors.ring", "2"],
    "local remote tcp": ["--actors.inference", "remote", "--transport", "tcp"],
}


def saved(run_dir):
    return checkpoint_store(run_dir, check(load(run_dir))[0]).load("latest").values


def begin(srl_command, trained_some, run_dir, layout, *more):
    """A CartPole run that would go on for hours, once it is training."""
    command = srl_command("train", "cartpole", "--steps", 10**9, "--out", run_dir, *LAYOUTS[layout], *more)
    trained_some(run_dir, 5000)
    return command


def assert_nothing_left(command):
    eventually(lambda: not group_of(command.pid), 8, f"the end of {group_of(command.pid)}")
    assert command.litter() == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_normal_end_leaves_nothing_behind(srl_command, tmp_path, layout):
    command = srl_command("train", "cartpole", "--steps", 5000, "--out", tmp_path / "run", "--quiet", *LAYOUTS[layout])
    code, out, err = command.finish()
    assert (code, err) == (0, "")
    assert "evaluation: return" in out
    assert not (tmp_path / "run" / "names").exists()
    assert_nothing_left(command)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_saves_and_exits_within_5_seconds(srl_command, trained_some, tmp_path, layout, number):
    command = begin(srl_command, trained_some, tmp_path / "run", layout)
    sent = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(command.pid, number)  # as a terminal does it: every process of the group gets it
    else:
        os.kill(command.pid, number)
    code, out, err = command.finish(20)
    assert time.monotonic() - sent < 5
    assert (code, err) == (130, "")
    assert "srl resume" in out
    assert saved(tmp_path / "run")["steps"] >= 5000
    assert_nothing_left(command)


def test_second_interrupt_ends_at_once(srl_command, trained_some, tmp_path):
    slow = ["--ppo.epochs", "100000"]  # an update that takes minutes
    run_dir = tmp_path / "run"
    command = srl_command("train", "cartpole", "--steps", 10**9, "--out", run_dir, *slow)
    eventually(lambda: len(group_of(command.pid)) >= 4 and (run_dir / "metrics.jsonl").exists(), 60)
    os.kill(command.pid, signal.SIGINT)
    time.sleep(0.3)  # a person's finger, not a synchronisation
    sent = time.monotonic()
    os.kill(command.pid, signal.SIGINT)
    command.process.wait(20)
    assert time.monotonic() - sent < 1.5
    code, _, err = command.finish(20)
    assert (code, err) == (130, "")
    assert_nothing_left(command)


@pytest.mark.parametrize("layout", ["local", "local remote shm", "local remote tcp"])
def test_killed_controller_takes_everything_with_it(srl_command, trained_some, tmp_path, layout):
    command = begin(srl_command, trained_some, tmp_path / "run", layout)
    os.kill(command.pid, signal.SIGKILL)
    command.process.wait(10)
    assert_nothing_left(command)
    assert saved(tmp_path / "run")["steps"] >= 5000  # the trainer saw its controller go, and saved


def test_interrupted_run_resumes_where_it_was(srl_command, trained_some, tmp_path):
    run_dir = tmp_path / "run"
    command = begin(srl_command, trained_some, run_dir, "local")
    os.kill(command.pid, signal.SIGINT)
    command.finish(20)
    was = saved(run_dir)
    again = srl_command("resume", run_dir, "--steps", was["steps"] + 5000, "--quiet")
    code, _, err = again.finish()
    assert (code, err) == (0, "")
    now = saved(run_dir)
    assert now["version"] > was["version"]
    assert was["steps"] + 5000 <= now["steps"] < was["steps"] + 5000 + 64 * 64  # an update's steps
