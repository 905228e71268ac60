"""SRL itself, through the same protocol: the experiment of ``srl bench throughput``, run as ``srl train`` runs it.

A row of its metrics comes with the first update and then about once a second.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from typing import Any

from protocol import Report, begin

from srl.launch import prepare_workers


class Updates:
    """A sink that turns rows into events."""

    def __init__(self, report: Report) -> None:
        self.report, self.steps, self.ending = report, 0, False

    def write(self, row: Any) -> None:
        """Report a row in which the steps changed."""
        steps = int(row.values["steps"])
        if steps != self.steps and not self.ending:
            self.steps = steps
            if self.report.update(steps, row.values.get("return_mean")):
                self.ending = True
                signal.raise_signal(signal.SIGINT)  # as Ctrl-C would

    def say(self, text: str) -> None:
        """Nobody listens."""

    def close(self) -> None:
        """Nothing is open."""


def main() -> None:
    prepare_workers("torch")  # before everything else, as `srl train` does
    from srl.bench.throughput import BenchOptions, experiment
    from srl.launch.run import run

    _, config, seed, report = begin()
    work: Any = sys.argv[1]
    x = replace(experiment(work, BenchOptions(**config)), seed=seed, steps=10**12)
    run(x, "run", sinks=[Updates(report)])


if __name__ == "__main__":
    main()
