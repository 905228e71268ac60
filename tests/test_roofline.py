"""``srl bench roofline``: its parts are measured, its limit is the one it says, its shares add up."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from srl.bench import parts, roofline
from srl.bench.roofline import Halts, RooflineOptions, Round, one_round
from srl.bench.throughput import BenchOptions, experiment
from srl.cli import main

COSTS = {"env, SRL": 8.0, "env, EnvPool": 5.0, "forward": 3.0, "train": 2.0, "copy": 0.5}


class Told:
    """Meters that know what they find; each time a microsecond more for training."""

    def __init__(self, _):
        self.processes, self.times = [], 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def measure(self):
        self.times += 1
        return {**COSTS, "train": self.times - 1.0}


def ran(rows, interrupted=False):
    """A run that says this, second by second."""

    def run(x, folder, *, sinks, enough):
        for row in rows:
            if enough():
                break
            sinks[0].write(SimpleNamespace(values=row))
        return SimpleNamespace(interrupted=interrupted)

    return run


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.setattr(roofline, "Meters", Told)
    monkeypatch.setattr(roofline, "descendants", lambda _: set())
    monkeypatch.setattr(roofline, "cores", lambda: 2)


def test_every_part_of_a_workload_costs_something(monkeypatch):
    monkeypatch.setattr(parts, "SECONDS", 0.02)
    monkeypatch.setattr(parts, "REPEATS", 2)
    monkeypatch.setattr(parts, "_BEGINNING", 20)
    found = parts.Bench(experiment("cartpole", BenchOptions())).measure()
    assert {"env, SRL", "forward", "train", "copy"} <= set(found)
    assert all(0 < cost < 1000 for cost in found.values())


def test_games_do_not_go_round_in_circles():
    x = experiment("cartpole", BenchOptions())
    drawn = parts._actions(x.algorithms["default"], x.env.make(1).spaces("agent"), 8)
    assert len({each["action"].tobytes() for each in drawn}) > 200


def test_the_limit_is_what_the_cores_could_do_in_perfect_balance(simulated, monkeypatch):
    rows = [{"time": t, "steps": 1000.0 * t, "busy/actor": 0.5, "busy/trainer": 1.0} for t in range(100)]
    monkeypatch.setattr(roofline, "run", ran(rows))
    found = one_round(experiment("cartpole", BenchOptions()), RooflineOptions())
    assert found.parts["train"] == 2  # the mean of five halts
    assert found.rate == pytest.approx(1000, rel=1e-3)
    assert found.limit == pytest.approx(2e6 / (5 + 3 + 4 * 2))  # the fastest environment, four passes
    assert found.efficiency == pytest.approx(found.rate / found.limit)
    assert found.workers["actor"]["wait"] == pytest.approx(0.5)
    assert found.workers["trainer"]["train"] == pytest.approx(4 * 2.0 * 1000 / 1e6, rel=1e-3)
    assert all(sum(shares.values()) == pytest.approx(1) for shares in found.workers.values())


def test_a_roofline_that_is_interrupted_ends(simulated, monkeypatch):
    monkeypatch.setattr(roofline, "run", ran([], interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        one_round(experiment("cartpole", BenchOptions()), RooflineOptions())


def test_workers_are_halted_while_parts_are_measured_and_halts_do_not_count(monkeypatch):
    def state():
        return Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    clock = deque([100.0, 107.0])
    monkeypatch.setattr(roofline, "time", SimpleNamespace(monotonic=clock.popleft))
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        monkeypatch.setattr(roofline, "descendants", lambda _: {worker.pid, 1})
        seen = []

        def measured():
            deadline = time.monotonic() + 10
            while state() != "T" and time.monotonic() < deadline:
                pass  # a signal has been sent when kill() returns, and arrives a moment later
            seen.append(state())
            return COSTS

        halts = Halts(measured, {1}, RooflineOptions(warmup=2, seconds=10, halts=1))
        halts.write(SimpleNamespace(values={"time": 2.5, "steps": 1}))
        assert seen == ["T"]
        assert state() != "T"
        halts.write(SimpleNamespace(values={"time": 10.0, "steps": 5}))  # of which 7 seconds were a halt
        assert [(row["time"], row["steps"]) for row in halts.rows] == [(3.0, 5)]
        assert not halts.calm and not halts.over()
    finally:
        worker.kill()
        worker.wait()


def test_the_command_prints_a_table_and_writes_numbers_and_a_picture(monkeypatch, tmp_path, capsys):
    shares = {"actor": {"env": 0.5, "wait": 0.4, "other": 0.1}, "trainer": {"train": 0.9, "other": 0.1}}
    costs = {"env, SRL": 8.0, "forward": 3.0, "train": 2.0, "copy": 0.5}
    monkeypatch.setattr(roofline, "one_round", lambda *_: Round(costs, 90_000.0, 100_000.0, shares))
    numbers, picture = tmp_path / "roofline.json", tmp_path / "roofline.png"
    arguments = ["bench", "roofline", "cartpole", "--rounds", "2", "--json", str(numbers), "--picture", str(picture)]
    monkeypatch.setattr("sys.argv", ["srl", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "0.90" in capsys.readouterr().out
    assert json.loads(numbers.read_text())["rounds"]["cartpole"][1]["efficiency"] == pytest.approx(0.9)
    assert picture.stat().st_size > 5_000
