"""``srl bench roofline``: how close training comes to the limit of the machine.

In every round a real training run is halted again and again, and meanwhile the raw parts are measured alone (see
:mod:`srl.bench.parts`), because the machine's speed changes within seconds::

    limit = cores / (env + forward + passes * train)      in agent steps per second
    efficiency = steps per second of the run, halts not counted / limit

The limit is what the cores could do if they did nothing but that all the time, in perfect balance. The environment is
stepped in the fastest way there is on the machine, and forward pass and training step are SRL's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import tyro
from rich.table import Table

from srl.bench.machine import machine, report
from srl.bench.parts import Meters, Parts
from srl.bench.throughput import BenchOptions, Work, experiment, slope
from srl.bench.watched import descendants
from srl.core.errors import SrlError
from srl.experiment import Experiment, cores
from srl.launch.run import run
from srl.monitor.monitor import Row
from srl.plan import check
from srl.tune import tuned

ENV, FORWARD, TRAIN, COPY, WAIT, OTHER = "env", "forward", "train", "copy", "wait", "other"
_CALM = 2.5
"""Seconds after a halt in which rows may tell of it."""
COLOURS = {ENV: "#4c72b0", FORWARD: "#55a868", TRAIN: "#c44e52", COPY: "#8172b2", OTHER: "#ccb974", WAIT: "#dddddd"}


@dataclass(frozen=True)
class RooflineOptions:
    """Measure how close training comes to the limit of this machine."""

    work: tyro.conf.Positional[tuple[Work, ...]] = ("cartpole", "halfcheetah", "pong", "pong-4")
    """What to train. pong: one pass over each batch, pong-4: four."""
    rounds: int = 3
    """Rounds of one run of each work, one work after the other."""
    seconds: float = 32.0
    """Length of one run, without the halts in which parts are measured."""
    warmup: float = 8.0
    """Seconds before it that do not count."""
    halts: int = 4
    """Into how many stretches the run is divided; parts are measured before, between and after them."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Also write the numbers to this file."""
    picture: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Also draw where the time went into this file."""


@dataclass(frozen=True)
class Round:
    """What one round found."""

    parts: Parts
    rate: float
    limit: float
    workers: dict[str, dict[str, float]]
    """Share of each kind of worker's time, by what it went into."""

    @property
    def efficiency(self) -> float:
        """Share of the limit that was reached."""
        return self.rate / self.limit


def main(arguments: Sequence[str]) -> int:
    """Entry point of ``srl bench roofline``."""
    from srl.commands.options import parse

    options = parse(RooflineOptions, arguments, "bench roofline")
    console = report()
    found: dict[str, list[Round]] = {work: [] for work in options.work}
    for number in range(options.rounds):
        for work in options.work:
            with console.status(f"{work}, round {number + 1} of {options.rounds} …"):
                found[work].append(one_round(experiment(work, BenchOptions()), options))
            last = found[work][-1]
            reached = f"{last.rate:>8,.0f} of {last.limit:>8,.0f} steps/s ({last.efficiency:.2f})"
            console.print(f"{work:12} round {number + 1}: {reached}")
        if options.json is not None:  # after every round: a long measurement may be cut short
            write(found, options.json)
    console.print(table(found))
    console.print(shares(found))
    if options.picture is not None:
        draw(found, options.picture)
    return 0


def write(found: dict[str, list[Round]], path: Path) -> None:
    """All numbers, as they are."""
    rounds = {work: [{**asdict(r), "efficiency": r.efficiency} for r in rounds] for work, rounds in found.items()}
    path.write_text(json.dumps({"machine": machine(), "cores": cores(), "rounds": rounds}, indent=1) + "\n")


def one_round(x: Experiment, options: RooflineOptions) -> Round:
    """Train, and measure the parts in between."""
    if not Path("/proc/self/stat").exists():
        raise SrlError("the processes of a run are halted meanwhile, and found through /proc: this needs Linux")
    x, _ = tuned(x, check(x))
    with Meters(x) as meters, tempfile.TemporaryDirectory(prefix="srl-bench-") as folder:
        halts = Halts(meters.measure, {process.pid for process in meters.processes}, options)
        result = run(replace(x, steps=10**12), Path(folder) / "run", sinks=[halts], enough=halts.over)
        if result.interrupted:  # see throughput.measure
            raise KeyboardInterrupt
    parts = {name: fmean(each[name] for each in halts.found) for name in halts.found[0]}
    passes = int(getattr(next(iter(x.algorithms.values())), "epochs", 1))
    fastest = min(cost for name, cost in parts.items() if name.startswith("env"))
    needed = fastest + parts["forward"] + passes * parts["train"]
    rate = slope([(row["time"], row["steps"]) for row in halts.rows])
    return Round(parts, rate, cores() / needed * 1e6, _shares(x, parts, passes, rate, halts.calm))


class Halts:
    """Halts the workers of a run every few seconds, calls ``measure`` and lets them go on.

    It is called by the run's controller, which does nothing else meanwhile.
    """

    def __init__(self, measure: Callable[[], Parts], others: Collection[int | None], options: RooflineOptions) -> None:
        """``others`` are processes of this one's that are no workers."""
        self.measure, self.others = measure, others
        self.stretch, self.left, self.due = options.seconds / options.halts, options.halts, options.warmup
        self.found: list[Parts] = []
        self.rows: list[dict[str, float]] = []
        """After the warm-up, with times that leave halts out."""
        self.calm: list[dict[str, float]] = []
        """Those of them that tell of no halt."""
        self._halted, self._last = 0.0, 0.0

    def over(self) -> bool:
        """Whether the last halt is over."""
        return len(self.found) > self.left

    def write(self, row: Row) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        now = row.values["time"] - self._halted
        if self.found and not self.over():
            self.rows.append({**row.values, "time": now})
            if now > self._last + _CALM:
                self.calm.append(row.values)
        if now < self.due or self.over():
            return
        self.due, self._last = now + self.stretch, now
        begin = time.monotonic()
        workers = descendants(os.getpid()) - set(self.others)
        _signal(workers, signal.SIGSTOP)
        try:
            self.found.append(self.measure())
        finally:
            _signal(workers, signal.SIGCONT)
        self._halted += time.monotonic() - begin

    def say(self, text: str) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""

    def close(self) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""


def _signal(processes: Collection[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _shares(x: Experiment, parts: Parts, passes: int, rate: float, rows: list[dict[str, float]]) -> Any:
    """Where each kind of worker's time went: raw parts at the rate reached, what it waited, and the rest."""
    own = parts["env, SRL"]
    inline = x.actors.inference == "inline"
    useful: dict[str, dict[str, float]] = {
        "actor": {ENV: own / x.actors.count, FORWARD: parts["forward"] / x.actors.count if inline else 0.0},
        "trainer": {TRAIN: passes * parts["train"], COPY: passes * parts["copy"]},
    }
    if not inline:
        useful["policy"] = {FORWARD: parts["forward"] / x.policies.count}
    found = {}
    for kind, spent in useful.items():
        busy = [row[f"busy/{kind}"] for row in rows if f"busy/{kind}" in row]
        waited = 1 - sum(busy) / max(len(busy), 1)
        shares = {name: cost * rate / 1e6 for name, cost in spent.items()} | {WAIT: waited}
        found[kind] = {**shares, OTHER: max(0.0, 1 - sum(shares.values()))}
    return found


def table(found: dict[str, list[Round]]) -> Table:
    """The parts, the limit and what was reached, medians over the rounds."""
    columns = ("work", "env µs", "forward µs", "train µs a pass", "limit", "reached", "efficiency", "lowest", "highest")
    shown = Table(*columns, box=None, header_style="bold")
    for work, rounds in found.items():
        env = [min(cost for name, cost in r.parts.items() if name.startswith("env")) for r in rounds]
        parts = [median(env), *(median(r.parts[name] for r in rounds) for name in ("forward", "train"))]
        limit, rate = (median(getattr(r, name) for r in rounds) for name in ("limit", "rate"))
        each = sorted(r.efficiency for r in rounds)
        cells = [f"{limit:,.0f}", f"{rate:,.0f}", f"{median(each):.2f}", f"{each[0]:.2f}", f"{each[-1]:.2f}"]
        shown.add_row(work, *(f"{part:,.1f}" for part in parts), *cells)
    return shown


def shares(found: dict[str, list[Round]]) -> Table:
    """Where the workers' time went, as a table."""
    shown = Table("work", "worker", *COLOURS, box=None, header_style="bold")
    for work, rounds in found.items():
        for kind in rounds[0].workers:
            each = {name: median(r.workers[kind].get(name, 0.0) for r in rounds) for name in COLOURS}
            shown.add_row(work, kind, *(f"{share:.0%}" for share in each.values()))
    return shown


def draw(found: dict[str, list[Round]], path: Path) -> None:
    """Where the workers' time went, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [(f"{work}, {kind}", work, kind) for work, rounds in found.items() for kind in rounds[0].workers]
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.45 * len(bars)))
    left = [0.0] * len(bars)
    for name, colour in COLOURS.items():
        width = [median(r.workers[kind].get(name, 0.0) for r in found[work]) for _, work, kind in bars]
        axes.barh([label for label, _, _ in bars], width, left=left, label=name, color=colour)
        left = [start + more for start, more in zip(left, width, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("share of the worker's time")
    axes.set_xlim(0, max(1.0, *left))
    axes.legend(ncols=len(COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
