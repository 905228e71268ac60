"""How good the automatic layout is: measured in turn with layouts made by hand for the same number of copies.

For every work of ``srl bench throughput`` and every layout the training throughput, then what auto reached as a share
of the best one made by hand. Every round calibrates anew. ``python benchmarks/tuning.py --help``.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from srl.bench.machine import machine
from srl.bench.throughput import BenchOptions, Work, experiment, measure
from srl.experiment import Experiment, trainer_threads
from srl.launch import share_the_machine
from srl.plan import check, divided
from srl.tune import tuned

AUTO = "auto"


@dataclass(frozen=True)
class Options:
    """Measure the automatic layout against layouts made by hand."""

    work: tyro.conf.Positional[tuple[Work, ...]] = ("cartpole", "halfcheetah", "pong", "pong-4")
    """What to train."""
    rounds: int = 3
    """Measurements of each layout, taken in turn."""
    seconds: float = 20.0
    """Length of one measurement."""
    warmup: float = 12.0
    """Seconds from the start that do not count."""
    json: Path = Path("benchmarks/results/tuning.json")
    """Where to write the numbers."""


@dataclass
class Found:
    """What was measured of one work."""

    chosen: list[str]
    """What auto said, in every round."""
    rates: dict[str, list[float]]
    """Steps per second of every layout, in every round."""

    @property
    def best(self) -> str:
        """The best layout made by hand."""
        return max((name for name in self.rates if name != AUTO), key=lambda name: median(self.rates[name]))

    @property
    def share(self) -> float:
        """What auto reached of it."""
        return median(self.rates[AUTO]) / median(self.rates[self.best])


def by_hand(x: Experiment) -> dict[str, Experiment]:
    """Layouts a person would try."""
    found = {f"{count} × {x.actors.envs // count}": divided(x, count) for count in (1, 2, 4)}
    remote = replace(x, actors=replace(x.actors, ring=2, inference="remote"))
    for count in (1, 2):
        each = divided(remote, count)
        found[f"{count} × 2 × {each.actors.envs}, remote"] = each
    threads = 3 - min(trainer_threads(x, check(x)), 2)  # the other choice, on two cores
    other = replace(x, trainer=replace(x.trainer, threads=threads))
    found[f"2 × {x.actors.envs // 2}, trainer on {threads}"] = divided(other, 2)
    return found


def one_round(work: Work, options: Options, found: Found, console: Console) -> None:
    """Measure every layout of one work once."""
    x = experiment(work, BenchOptions())
    with tempfile.TemporaryDirectory(prefix="srl-cache-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        found.chosen.append(tuned(x, check(x))[1])
        for name, layout in {AUTO: x, **by_hand(x)}.items():
            rate = measure(layout, options.warmup, options.seconds)
            found.rates.setdefault(name, []).append(rate)
            console.print(f"{work:12} {name:24} {rate:>9,.0f} steps/s")


def table(found: dict[Work, Found]) -> Table:
    """Every layout of every work, medians, and auto's share of the best."""
    shown = Table("work", "layout", "steps/s", "", box=None, header_style="bold")
    for work, each in found.items():
        for name, rates in each.rates.items():
            note = f"{each.share:.2f} of the best" if name == AUTO else "best" if name == each.best else ""
            shown.add_row(work, name, f"{median(rates):,.0f}", note)
    return shown


def main() -> None:
    """Measure, write the numbers, print a table."""
    options = tyro.cli(Options)
    share_the_machine()
    console = Console(highlight=False, soft_wrap=True)
    found: dict[Work, Found] = {work: Found([], {}) for work in options.work}
    for number in range(options.rounds):
        console.print(f"round {number + 1} of {options.rounds}")
        for work in options.work:
            one_round(work, options, found[work], console)
            console.print(f"{work:12} {found[work].chosen[-1]}")
            done = {name: {**asdict(each), "share": each.share} for name, each in found.items() if each.rates}
            whole: dict[str, Any] = {"machine": machine(), "options": {**vars(options), "json": ""}, "works": done}
            options.json.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")  # it may be cut short
    console.print(table(found))


if __name__ == "__main__":
    main()
