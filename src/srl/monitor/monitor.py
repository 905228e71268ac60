"""Turns what workers report into one row of numbers a second, and hands it to whoever shows or keeps it.

``docs/metrics.md`` explains every number.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from srl.core.worker import WAITS

WINDOW = 100
"""Episodes that ``return_mean`` and ``length_mean`` average over."""

_IDLE = 0.05
"""A stage less busy than this is not the one that others wait for."""
_MEANINGFUL = 0.2
"""Seconds of a worker's life below which its waits say nothing."""

_WAITER = {
    "inference": "actor",
    "parameters": "actor",
    "requests": "policy",
    "samples": "trainer",
    "trainers": "trainer",
}
_WAITER |= {"buffer": "buffer", "versions": "evaluator"}
_STAGES = ("actor", "policy", "buffer", "trainer")
"""Kinds of workers that others wait for."""


@dataclass
class Row:
    """The state of the run at one moment."""

    values: dict[str, float]
    bottleneck: str
    """Which stage keeps the others waiting, in words."""
    opponents: dict[str, dict[int, tuple[int, float]]] = field(default_factory=dict)
    """Games and mean return of every version of every opponent."""


class Sink(Protocol):
    """Shows or keeps rows."""

    def write(self, row: Row) -> None:
        """Take one row."""

    def say(self, text: str) -> None:
        """Take one sentence for the user."""

    def close(self) -> None:
        """No more rows will come."""


@dataclass
class _Worker:
    kind: str
    counters: dict[str, float] = field(default_factory=dict)
    delta: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)

    def update(self, report: dict[str, Any]) -> None:
        """Add what was counted since the last report; a counter that fell belongs to a restarted worker."""
        for name, value in report["counters"].items():
            before = self.counters.get(name, 0.0)
            self.delta[name] = self.delta.get(name, 0.0) + (value - before if value >= before else value)
            self.counters[name] = value
        self.gauges.update(report["gauges"])


class Monitor:
    """Collects reports of all workers; :meth:`tick` makes a row of them once a second."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        elapsed: float = 0.0,
        steps: int = 0,
        every: float = 1.0,
        opponents: Collection[str] = (),
    ) -> None:
        """``elapsed`` seconds and ``steps`` steps of the run were done before, if it is resumed."""
        self.sinks, self.every, self.first, self.opponents = sinks, every, steps, opponents
        self.results: dict[tuple[str, int], tuple[int, float]] = {}
        """Games and sum of returns of every version of every opponent."""
        self.measured: dict[str, deque[float]] = {}
        self.returns: dict[str, deque[float]] = {}
        self.lengths: deque[int] = deque(maxlen=WINDOW)
        self.episodes = 0
        self.row = Row({}, "")
        self._workers: dict[str, _Worker] = {}
        self._begin = time.monotonic() - elapsed
        self._last = time.monotonic()
        self._rates: deque[tuple[float, float]] = deque(maxlen=10)

    def feed(self, name: str, kind: str, report: dict[str, Any]) -> None:
        """Take in one report of one worker."""
        self._workers.setdefault(name, _Worker(kind)).update(report)
        for policy, value, length, version in report["episodes"]:
            self.returns.setdefault(policy, deque(maxlen=WINDOW)).append(value)
            if policy in self.opponents:
                games, total = self.results.get((policy, version), (0, 0.0))
                self.results[policy, version] = games + 1, total + value
            self.lengths.append(length)
            self.episodes += 1
        for key, value in report["measured"]:
            self.measured.setdefault(key, deque(maxlen=WINDOW)).append(value)
        for text in report["notes"]:
            self.say(text)
        self.tick(force=self.row.values.get("steps", -1.0) == self.first)  # the first update is shown at once

    def say(self, text: str) -> None:
        """Tell the user something."""
        for sink in self.sinks:
            sink.say(text)

    def tick(self, *, force: bool = False) -> None:
        """Make and hand out a row, if it is time."""
        now = time.monotonic()
        if now - self._last < self.every and not (force and self._changed()):
            return
        self._last = now
        self.row = self._make(now)
        for worker in self._workers.values():
            worker.delta.clear()
        for sink in self.sinks:
            sink.write(self.row)

    def _changed(self) -> bool:
        """Whether steps were trained on that no row shows yet."""
        steps = [worker.counters.get("steps", 0.0) for worker in self._of("trainer")]
        return not self.row.values or min(steps, default=0.0) != self.row.values["steps"]

    def close(self) -> None:
        """The run is over."""
        for sink in self.sinks:
            sink.close()

    def _of(self, kind: str) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.kind == kind]

    def _make(self, now: float) -> Row:
        steps = min((w.counters.get("steps", 0.0) for w in self._of("trainer")), default=float(self.first))
        if not self._rates or steps != self._rates[-1][1]:
            self._rates.append((now, steps))
        values = {"time": now - self._begin, "steps": steps, "steps_per_second": self._rate()}
        values["episodes"] = float(self.episodes)
        for policy, window in self.returns.items():
            name = "return_mean" if len(self.returns) == 1 else f"return_mean/{policy}"
            values[name] = sum(window) / len(window)
        for key, window in self.measured.items():
            values[f"env/{key}"] = sum(window) / len(window)
        if self.lengths:
            values["length_mean"] = sum(self.lengths) / len(self.lengths)
        busy = self._waits(values)
        trainers = {name: worker for name, worker in self._workers.items() if worker.kind == "trainer"}
        for name, worker in trainers.items():
            counted = {key: worker.counters.get(key, 0.0) for key in ("dropped", "updates", "skipped")}
            suffix = "" if len(trainers) == 1 else f"/{name.removeprefix('trainer-')}"
            known = {key: value for key, value in {**worker.gauges, **counted}.items() if key != "rss"}
            values.update({f"{key}{suffix}": value for key, value in known.items()})
        buffers = {name: worker for name, worker in self._workers.items() if worker.kind == "buffer"}
        for name, worker in buffers.items():
            suffix = "" if len(buffers) == 1 else f"/{name.removeprefix('buffer-')}"
            values.update({f"{key}{suffix}": value for key, value in worker.gauges.items() if key != "rss"})
        for worker in self._of("evaluator"):
            for key, value in worker.gauges.items():
                if key.startswith("eval/"):
                    values[key.rpartition("/")[0] if len(trainers) == 1 else key] = value
        values["memory_mb"] = sum(worker.gauges.get("rss", 0.0) for worker in self._workers.values())
        rows, batches = (sum(w.delta.get(key, 0.0) for w in self._of("policy")) for key in ("rows", "batches"))
        if batches:
            values["inference_batch"] = rows / batches
        found: dict[str, dict[int, tuple[int, float]]] = {}
        for (policy, version), (games, total) in self.results.items():
            found.setdefault(policy, {})[version] = games, total / games
        return Row(values, _bottleneck(busy), found)

    def _rate(self) -> float:
        (begin, first), (end, last) = (self._rates[0], self._rates[-1]) if self._rates else ((0, 0), (0, 0))
        return (last - first) / (end - begin) if end > begin else 0.0

    def _waits(self, values: dict[str, float]) -> dict[str, float]:
        """Put the share of time each stage waited into ``values``; how busy each stage was."""
        busy: dict[str, float] = {}
        for wait in WAITS:
            kind = _WAITER[wait]
            workers = [w for w in self._of(kind) if w.delta.get("alive", 0) > _MEANINGFUL]
            if wait == "trainers":  # most policies have one
                workers = [w for w in workers if "wait/trainers" in w.counters]
            if workers:
                shares = [min(1.0, w.delta.get(f"wait/{wait}", 0.0) / w.delta["alive"]) for w in workers]
                values[f"wait/{wait}"] = sum(shares) / len(shares)
                if kind in _STAGES:
                    busy[kind] = busy.get(kind, 1.0) - values[f"wait/{wait}"]
        values.update({f"busy/{kind}": max(0.0, share) for kind, share in busy.items()})
        return busy


def _bottleneck(busy: dict[str, float]) -> str:
    kind = max(busy, key=lambda name: busy[name], default="")
    if not kind or busy[kind] < _IDLE:  # who is not heard of yet is still starting
        return "starting"
    return f"{kind} ({max(0.0, busy[kind]):.0%} busy)"
