"""``srl bench roofline``: its parts are measured, its limit is the one it says, its shares add up."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from srl.bench import parts, roofline
from srl.bench.roofline import RooflineOptions, Round, one_round
from srl.bench.throughput import BenchOptions, experiment
from srl.cli import main


@pytest.fixture
def brief(monkeypatch):
    monkeypatch.setattr(parts, "SECONDS", 0.02)
    monkeypatch.setattr(parts, "REPEATS", 2)
    monkeypatch.setattr(roofline, "measure_parts", parts._measure)  # in this process, so that the above counts


def test_every_part_of_a_workload_costs_something(brief):
    found = parts._measure(experiment("cartpole", BenchOptions()))
    assert {"env, SRL", "forward", "train", "copy"} <= set(found)
    assert all(0 < cost < 1000 for cost in found.values())


def test_the_limit_is_what_the_cores_could_do_in_perfect_balance(brief, monkeypatch):
    costs = {"env, SRL": 8.0, "env, EnvPool": 5.0, "forward": 3.0, "train": 2.0, "copy": 0.5}
    rows = [{"time": t, "steps": 1000.0 * t, "busy/actor": 0.5, "busy/trainer": 1.0} for t in range(9, 20)]
    monkeypatch.setattr(roofline, "measure_parts", lambda x: costs)
    monkeypatch.setattr(roofline, "run", lambda *_, **__: SimpleNamespace(interrupted=False))
    monkeypatch.setattr(roofline, "read_metrics", lambda _: rows)
    monkeypatch.setattr(roofline, "cores", lambda: 2)
    found = one_round(experiment("cartpole", BenchOptions()), RooflineOptions())
    assert found.rate == pytest.approx(1000)
    assert found.limit == pytest.approx(2e6 / (5 + 3 + 4 * 2))  # the fastest environment, four passes
    assert found.efficiency == pytest.approx(found.rate / found.limit)
    assert found.workers["actor"]["wait"] == pytest.approx(0.5)
    assert found.workers["trainer"]["train"] == pytest.approx(4 * 2.0 * 1000 / 1e6)
    assert all(sum(shares.values()) == pytest.approx(1) for shares in found.workers.values())


def test_a_roofline_that_is_interrupted_ends(brief, monkeypatch):
    monkeypatch.setattr(roofline, "measure_parts", lambda x: {})
    monkeypatch.setattr(roofline, "run", lambda *_, **__: SimpleNamespace(interrupted=True))
    monkeypatch.setattr(roofline, "read_metrics", lambda _: [])
    with pytest.raises(KeyboardInterrupt):
        one_round(experiment("cartpole", BenchOptions()), RooflineOptions())


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
