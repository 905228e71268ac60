"""Numbers that the user wants to see out of the ``info`` of an environment: the last of each episode is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from srl.core.specs import Array, Arrays
from srl.envs.fields import number, present


class Measures:
    """The last value of each name in each row's running episode; at its end they go to ``reported``."""

    def __init__(self, names: tuple[str, ...], rows: int, reported: list[tuple[str, float]]) -> None:
        self.names, self.reported = names, reported
        self.seen: Array = np.zeros((rows, len(names)), bool)
        self.last: Array = np.zeros((rows, len(names)))

    def see(self, row: int, info: Any, at: Callable[[], str]) -> None:
        """Take note of one row's ``info``."""
        for i, name in enumerate(self.names):
            if name in info:
                self.last[row, i] = number(info[name], f"info[{name!r}]", at)
                self.seen[row, i] = True

    def see_batch(self, info: Any) -> None:
        """Take note of a vector environment's ``info``."""
        for i, name in enumerate(self.names):
            there = present(info, name, len(self.seen))
            if there.any():
                self.last[there, i] = np.asarray(info[name], np.float64)[there]
                self.seen[there, i] = True

    def end(self, row: int) -> None:
        """Report the values of an episode that has ended."""
        for i, name in enumerate(self.names):
            if self.seen[row, i]:
                self.reported.append((name, float(self.last[row, i])))
        self.forget(row)

    def forget(self, row: int | slice) -> None:
        """Drop the values of episodes that are not to be reported."""
        self.seen[row] = False
        self.last[row] = 0

    def state(self) -> Arrays:
        """What a resumed run must know."""
        return {"seen": self.seen.copy(), "last": self.last.copy()}

    def load_state(self, state: Arrays) -> None:
        """Go on where ``state`` was taken."""
        self.seen[:], self.last[:] = state["seen"], state["last"]
