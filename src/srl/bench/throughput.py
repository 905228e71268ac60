"""``srl bench throughput``: training throughput of a workload, measured after it has settled.

What is counted is agent steps *trained on* per second of wall-clock time (resets do not count, and a Pong step is four
emulator frames), between the moment the warm-up ends and the moment the run ends.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro
from rich.table import Table

from srl.algorithms.ppo import PPO
from srl.bench.machine import machine, report
from srl.experiment import Experiment
from srl.launch.run import run
from srl.monitor.sinks import read_metrics
from srl.recipes import recipe

Work = Literal["cartpole", "pong", "pong-4", "halfcheetah"]


@dataclass(frozen=True)
class BenchOptions:
    """Measure training throughput in agent steps trained on per second."""

    work: tyro.conf.Positional[tuple[Work, ...]] = ("cartpole", "pong")
    """What to train. pong: one pass over each batch, pong-4: four."""
    rounds: int = 3
    """Measurements of each, taken in turn."""
    seconds: float = 40.0
    """Length of one measurement."""
    warmup: float = 8.0
    """Seconds from the start that do not count."""
    inference: Literal["inline", "remote"] = "inline"
    """Where the policy sits."""
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    """Of the network's encoders."""
    json: Path | None = None
    """Also write the numbers to this file."""


def experiment(work: Work, options: BenchOptions) -> Experiment:
    """The experiment a workload stands for: minibatch 256, float32 unless asked otherwise."""
    base = recipe(work.removesuffix("-4"))
    algorithm = base.algorithms["default"]
    assert isinstance(algorithm, PPO)
    epochs = 1 if work == "pong" else 4
    algorithm = replace(algorithm, epochs=epochs, minibatch=256, anneal_steps=0, precision=options.precision)
    ring = 2 if options.inference == "remote" else 1
    actors = replace(base.actors, inference=options.inference, ring=ring)
    return replace(base, algorithm={"default": algorithm}, actors=actors)


def main(arguments: Sequence[str]) -> int:
    """Entry point of ``srl bench throughput``."""
    from srl.commands.options import parse

    options = parse(BenchOptions, arguments, "bench throughput")
    console = report()
    rates: dict[Work, list[float]] = {work: [] for work in options.work}
    for number in range(options.rounds):
        for work in options.work:
            with console.status(f"{work}, round {number + 1} of {options.rounds} …"):
                rates[work].append(measure(experiment(work, options), options.warmup, options.seconds))
            console.print(f"{work:12} round {number + 1}: {rates[work][-1]:>9,.0f} steps/s")
    table = Table("work", "steps/s (median)", "lowest", "highest", box=None, header_style="bold")
    for work, found in rates.items():
        table.add_row(work, f"{median(found):,.0f}", f"{min(found):,.0f}", f"{max(found):,.0f}")
    console.print(table)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"machine": machine(), "options": _plain(options), "steps/s": rates}, indent=1)
        )
    return 0


def measure(x: Experiment, warmup: float, seconds: float) -> float:
    """Steps trained on per second, after ``warmup`` seconds, over ``seconds`` seconds."""
    with tempfile.TemporaryDirectory(prefix="srl-bench-") as folder:
        result = run(replace(x, steps=10**12), Path(folder) / "run", seconds=warmup + seconds)
        if result.interrupted:  # a run that was cut short says nothing, and whoever did that wants no other
            raise KeyboardInterrupt
        rows = [row for row in read_metrics(Path(folder) / "run") if row["time"] >= warmup]
        return slope([(row["time"], row["steps"]) for row in rows])


def slope(points: list[tuple[float, float]]) -> float:
    """Steps per second between the first and the last update that was seen, so that no part of an update counts."""
    changes = [after for before, after in pairwise(points) if after[1] != before[1]]
    if len(changes) < 2:
        return 0.0
    (begin, first), (end, last) = changes[0], changes[-1]
    return (last - first) / (end - begin)


def _plain(options: BenchOptions) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
