"""From reports to rows: rates, waits, the bottleneck, and what is shown."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from srl.core.worker import Metrics
from srl.monitor.console import LiveDisplay, PlainDisplay
from srl.monitor.monitor import Monitor, Row
from srl.monitor.sinks import JsonLines, TensorBoard, draw_curve, read_metrics


class Keep:
    def __init__(self):
        self.rows, self.said = [], []

    def write(self, row):
        self.rows.append(row)

    def say(self, text):
        self.said.append(text)

    def close(self):
        pass


def report(episodes=(), gauges=None, measured=(), notes=(), **counters):
    """A report as ``Metrics.report`` makes it."""
    metrics = Metrics()
    metrics.gauges.update(gauges or {})
    metrics.episodes.extend(episodes)
    metrics.measured.extend(measured)
    metrics.notes.extend(notes)
    made = metrics.report()
    made["counters"] = {k.replace("_", "/"): v for k, v in counters.items()}
    return made


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("srl.monitor.monitor.time.monotonic", lambda: now[0])
    return now


def test_the_busiest_stage_is_the_bottleneck_and_waits_are_shares_of_time(clock):
    keep = Keep()
    monitor = Monitor([keep])
    clock[0] += 1
    monitor.feed("actor-0", "actor", report(alive=1.0, wait_parameters=0.0))
    clock[0] += 1
    monitor.feed("actor-0", "actor", report(alive=2.0, wait_parameters=0.75))
    monitor.feed("trainer-default", "trainer", report(alive=1.0, wait_samples=0.1, steps=500))
    row = keep.rows[-1]
    assert len(keep.rows) == 3 and row.values["steps"] == 500  # the first update does not wait for the second's end
    assert row.values["wait/samples"] == pytest.approx(0.1)
    assert row.bottleneck == "trainer (90% busy)"
    assert keep.rows[1].values["wait/parameters"] == pytest.approx(0.75)
    assert keep.rows[1].bottleneck == "actor (25% busy)"


def test_counters_of_a_restarted_worker_start_again_without_negative_waits(clock):
    keep = Keep()
    monitor = Monitor([keep])
    clock[0] += 1
    monitor.feed("actor-0", "actor", report(alive=100.0, wait_inference=50.0))
    clock[0] += 1
    monitor.feed("actor-0", "actor", report(alive=1.0, wait_inference=0.5))
    assert keep.rows[-1].values["wait/inference"] == pytest.approx(0.5)


def test_return_is_the_mean_of_the_last_hundred_episodes(clock):
    monitor = Monitor([Keep()])
    clock[0] += 1
    monitor.feed("actor-0", "actor", report(episodes=[("default", float(i), 10, 0) for i in range(150)], alive=1.0))
    assert monitor.row.values["return_mean"] == pytest.approx(sum(range(50, 150)) / 100)
    assert monitor.row.values["episodes"] == 150


def test_policies_are_told_apart(clock):
    monitor = Monitor([Keep()])
    monitor.feed("trainer-a", "trainer", report(alive=1.0, steps=10, gauges={"version": 3}))
    monitor.feed("trainer-b", "trainer", report(alive=1.0, steps=20, gauges={"version": 5}))
    clock[0] += 1
    monitor.feed("actor-0", "actor", report(episodes=[("a", 1.0, 1, 3), ("b", 2.0, 1, 5)], alive=1.0))
    values = monitor.row.values
    assert (values["steps"], values["version/a"], values["version/b"]) == (10, 3, 5)
    assert (values["return_mean/a"], values["return_mean/b"]) == (1.0, 2.0)


def test_results_of_opponents_are_told_apart_by_version(clock):
    monitor = Monitor([Keep()], opponents=("past",))
    clock[0] += 1
    games = [("past", 1.0, 5, 2), ("past", -1.0, 5, 2), ("past", 1.0, 5, 7), ("default", -1.0, 5, 9)]
    monitor.feed("actor-0", "actor", report(episodes=games, alive=1.0))
    assert monitor.row.opponents == {"past": {2: (2, 0.0), 7: (1, 1.0)}}


def test_what_environments_measure_is_averaged_and_what_they_say_is_said(clock):
    keep = Keep()
    monitor = Monitor([keep])
    clock[0] += 1
    spoken = report(measured=[("score", 1.0), ("score", 3.0), ("lives", 5.0)], notes=["copy 3 failed"], alive=1.0)
    monitor.feed("actor-0", "actor", spoken)
    assert (monitor.row.values["env/score"], monitor.row.values["env/lives"]) == (2.0, 5.0)
    assert keep.said == ["copy 3 failed"]


def test_resumed_run_starts_at_its_steps(clock):
    keep = Keep()
    monitor = Monitor([keep], elapsed=60, steps=5000)
    clock[0] += 1
    monitor.tick()
    assert keep.rows[0].values["steps"] == 5000
    assert keep.rows[0].values["time"] == pytest.approx(61)


ROW = Row(
    {
        "time": 3.0,
        "steps": 500.0,
        "steps_per_second": 100.0,
        "return_mean": 12.5,
        "length_mean": 20.0,
        "wait/samples": 0.5,
    },
    "trainer (50% busy)",
)


@pytest.mark.parametrize("kind", [LiveDisplay, PlainDisplay])
def test_displays_show_what_matters(kind):
    file = io.StringIO()
    console = Console(file=file, force_terminal=kind is LiveDisplay, width=150)
    shown = kind(console, "ppo on CartPole-v1", 1000)
    shown.write(ROW)
    shown.say("actor-0 was started again")
    shown.close()
    text = file.getvalue()
    for part in ("ppo on CartPole-v1", "12.5", "0:00:05", "50%", "trainer (50% busy)", "actor-0 was started again"):
        assert part in text, part


def test_rows_are_kept_and_drawn(tmp_path):
    sinks = [JsonLines(tmp_path), TensorBoard(tmp_path)]
    for steps in (100.0, 200.0):
        for sink in sinks:
            sink.write(Row({**ROW.values, "steps": steps}, ROW.bottleneck))
    for sink in sinks:
        sink.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"steps": 30')  # cut off by a crash
    rows = read_metrics(tmp_path)
    assert [row["steps"] for row in rows] == [100.0, 200.0]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["bottleneck"] == ROW.bottleneck
    assert draw_curve(tmp_path, "a title").stat().st_size > 5000
    events = list(tmp_path.glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert b"return_mean" in events[0].read_bytes()
