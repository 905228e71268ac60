"""A run that is looked at while it goes on: what its processes cost, and what its workers have counted.

A *script* is a generator that the controller goes on with a few times a second: it waits for things to happen, looks,
and the run is over when it is::

    def script(watched):
        yield from watched.until(lambda: watched.count("trainer", "updates") > 1)
        before = watched.look()
        yield from watched.wait(10)
        after = watched.look()
        ...
        return found
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from srl.core.errors import SrlError
from srl.experiment import Experiment, wire
from srl.launch.local import LocalLauncher, preload
from srl.monitor.monitor import Monitor
from srl.monitor.sinks import JsonLines
from srl.plan import check

T = TypeVar("T")
Script = Generator[None, None, T]

_TICK = os.sysconf("SC_CLK_TCK")
CONTROLLER = "controller"


@dataclass(frozen=True)
class Look:
    """One process at one moment."""

    time: float
    cpu: float
    """Seconds of processor time so far, of all threads."""
    wakes: int
    """How often its threads have gone to sleep so far."""
    rss: float
    """MB it has in memory, what it shares with others included."""
    pss: float
    """The same, what it shares with others divided among them."""
    private: float
    """MB that are its own: not of files, and not shared."""
    files: int
    threads: int


def look(pid: int) -> Look:
    """The process ``pid`` now."""
    folder = Path(f"/proc/{pid}")
    stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
    rollup = _lines(folder / "smaps_rollup")
    wakes = 0
    tasks = list((folder / "task").iterdir())
    for task in tasks:
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            wakes += int(_lines(task / "status")["voluntary_ctxt_switches"])
    return Look(
        time.monotonic(),
        (int(stat[11]) + int(stat[12])) / _TICK,
        wakes,
        _mb(rollup["Rss"]),
        _mb(rollup["Pss"]),
        _mb(_lines(folder / "status")["RssAnon"]),
        len(list((folder / "fd").iterdir())),
        len(tasks),
    )


def _lines(path: Path) -> dict[str, str]:
    return {name: rest.strip() for name, _, rest in (line.partition(":") for line in path.read_text().splitlines())}


def _mb(text: str) -> float:
    return int(text.split()[0]) * 1024 / 1e6


class Watched:
    """The local run of an experiment, as scripts see it."""

    def __init__(self, x: Experiment, run_dir: Path, limit: float) -> None:
        """``limit`` is after how many seconds a run whose script is not over is given up."""
        self.x, self.run_dir, self.limit = x, run_dir, limit
        run_dir.mkdir(parents=True, exist_ok=True)
        self.monitor = Monitor([JsonLines(run_dir)])
        self.reports: dict[str, dict[str, Any]] = {}
        """The last report of every worker."""
        self.kinds: dict[str, str] = {}
        self.heard: dict[str, float] = {}
        """Seconds from the start until every worker's first report."""
        self.said: list[str] = []
        nodes = wire(x, check(x), run_dir, None)
        given = nodes, self._feed, run_dir / "logs", 0, 0, self.said.append
        self.launcher = LocalLauncher(*given, preload=preload(x))
        self.begin = time.monotonic()

    def run(self, script: Callable[[Watched], Script[T]]) -> T:
        """What ``script`` returns, after running it along with the run."""
        steps, found = script(self), []
        self.begin = time.monotonic()

        def ending() -> float | None:
            if self.age > self.limit:
                raise SrlError(f"a measurement was not over after {self.limit:.0f} s; said: {self.said[-3:]}")
            try:
                next(steps)
            except StopIteration as over:
                found.append(over.value)
                return time.monotonic()
            return None

        try:
            self.launcher.run(ending)
        finally:
            self.monitor.close()
        if not found:
            raise SrlError(f"a run ended before it was measured; said: {self.said[-3:]}")
        value: T = found[0]
        return value

    @property
    def age(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begin

    def until(self, condition: Callable[[], Any]) -> Iterator[None]:
        """Wait until something is so."""
        while not condition():
            yield

    def wait(self, seconds: float) -> Iterator[None]:
        """Wait for so long."""
        until = time.monotonic() + seconds
        yield from self.until(lambda: time.monotonic() >= until)

    def count(self, kind: str, counter: str) -> float:
        """The sum of a counter over all workers of a kind."""
        return sum(self._counters(kind, counter))

    def gauge(self, kind: str, gauge: str) -> float:
        """The largest value of a gauge among all workers of a kind."""
        found = [report["gauges"].get(gauge) for name, report in self.reports.items() if self.kinds[name] == kind]
        return max((float(value) for value in found if value is not None), default=float("nan"))

    def having(self, kind: str, counter: str) -> int:
        """How many workers of a kind have counted anything."""
        return sum(value > 0 for value in self._counters(kind, counter))

    def _counters(self, kind: str, counter: str) -> list[float]:
        found = [report["counters"] for name, report in self.reports.items() if self.kinds[name] == kind]
        return [float(counters.get(counter, 0.0)) for counters in found]

    def pids(self) -> dict[str, int]:
        """The processes of all workers, and of the controller, which is this one."""
        found = {name: child.process.pid for name, child in self.launcher.children.items()}
        return {CONTROLLER: os.getpid(), **{name: pid for name, pid in found.items() if pid is not None}}

    def look(self) -> dict[str, Look]:
        """All processes now."""
        return {name: look(pid) for name, pid in self.pids().items()}

    def _feed(self, name: str, kind: str, report: dict[str, Any]) -> None:
        self.reports[name], self.kinds[name] = report, kind
        self.heard.setdefault(name, self.age)
        self.monitor.feed(name, kind, report)


@dataclass(frozen=True)
class Cost:
    """What one kind of worker cost between two looks, a process on average."""

    processes: int
    cpu: float
    """Share of a core."""
    wakes: float
    """Times a second that it went to sleep."""
    rss: float
    pss: float
    rss_most: float
    private: float
    files: float


def cost(before: dict[str, Look], after: dict[str, Look], kind: str) -> Cost:
    """What the workers whose name begins with ``kind`` cost."""
    pairs = [(before[name], after[name]) for name in after if name.startswith(kind) and name in before]

    def mean(of: Callable[[Look, Look], float]) -> float:
        return sum(of(*pair) for pair in pairs) / max(len(pairs), 1)

    return Cost(
        len(pairs),
        mean(lambda a, b: (b.cpu - a.cpu) / (b.time - a.time)),
        mean(lambda a, b: (b.wakes - a.wakes) / (b.time - a.time)),
        mean(lambda a, b: b.rss),
        mean(lambda a, b: b.pss),
        max((b.rss for _, b in pairs), default=0.0),
        mean(lambda a, b: b.private),
        mean(lambda a, b: b.files),
    )
