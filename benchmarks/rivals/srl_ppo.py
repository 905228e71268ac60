"""SRL itself, through the same protocol: the experiment of ``srl bench throughput``, run as ``srl train`` runs it.

A row of its metrics comes about once a second, so that an update is reported up to a second late.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from typing import Any

from protocol import Report, begin

from srl.bench.throughput import BenchOptions, experiment
from srl.launch.run import run
from srl.monitor.monitor import Row


class Updates:
    """A sink that turns rows into events."""

    def __init__(self, report: Report) -> None:
        self.report, self.steps, self.ending = report, 0, False

    def write(self, row: Row) -> None:
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
    _, config, seed, report = begin()
    work: Any = sys.argv[1]
    x = replace(experiment(work, BenchOptions(**config)), seed=seed, steps=10**12)
    run(x, "run", sinks=[Updates(report)])


if __name__ == "__main__":
    main()
