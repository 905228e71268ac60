"""``srl bench roofline``: how close training comes to the limit of the machine.

In every round the raw parts are measured alone (see :mod:`srl.bench.parts`), before and after a real training run::

    limit = cores / (env + forward + passes * train)      in agent steps per second
    efficiency = steps per second of the run / limit

The limit is what the cores could do if they did nothing but that all the time, in perfect balance. The environment is
stepped in the fastest way there is on the machine, and forward pass and training step are SRL's own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from srl.bench.machine import machine
from srl.bench.parts import Parts, measure_parts
from srl.bench.throughput import BenchOptions, Work, experiment, slope
from srl.experiment import Experiment, cores
from srl.launch.run import run
from srl.monitor.sinks import read_metrics
from srl.plan import check
from srl.tune import tuned

ENV, FORWARD, TRAIN, COPY, WAIT, OTHER = "env", "forward", "train", "copy", "wait", "other"
COLOURS = {ENV: "#4c72b0", FORWARD: "#55a868", TRAIN: "#c44e52", COPY: "#8172b2", OTHER: "#ccb974", WAIT: "#dddddd"}


@dataclass(frozen=True)
class RooflineOptions:
    """Measure how close training comes to the limit of this machine."""

    work: tyro.conf.Positional[tuple[Work, ...]] = ("cartpole", "halfcheetah", "pong", "pong-4")
    """What to train. pong: one pass over each batch, pong-4: four."""
    rounds: int = 3
    """Rounds of parts, run and parts, one work after the other."""
    seconds: float = 30.0
    """Length of one run."""
    warmup: float = 8.0
    """Seconds of it that do not count."""
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
    console = Console(highlight=False)
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
    """Measure the parts, train, and measure the parts again: machines change their speed."""
    x, _ = tuned(x, check(x))
    before = measure_parts(x)
    with tempfile.TemporaryDirectory(prefix="srl-bench-") as folder:
        result = run(replace(x, steps=10**12), Path(folder) / "run", seconds=options.warmup + options.seconds)
        if result.interrupted:  # see throughput.measure
            raise KeyboardInterrupt
        rows = [row for row in read_metrics(Path(folder) / "run") if row["time"] >= options.warmup]
    after = measure_parts(x)
    parts = {name: (cost + after[name]) / 2 for name, cost in before.items()}
    passes = int(getattr(next(iter(x.algorithms.values())), "epochs", 1))
    fastest = min(cost for name, cost in parts.items() if name.startswith("env"))
    needed = fastest + parts["forward"] + passes * parts["train"]
    rate = slope([(row["time"], row["steps"]) for row in rows])
    return Round(parts, rate, cores() / needed * 1e6, _shares(x, parts, passes, rate, rows))


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
