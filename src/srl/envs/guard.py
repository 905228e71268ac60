"""What is done about environments that fail: isolate the copy, count, tell the user, and give up when it is hopeless.

A copy that raises is made anew, so that one bad episode in millions does not end a run. More than that is a crash
loop: the exception goes on to the worker, which dies of its original cause. NaN and infinity are looked for once per
step of the whole vector, because they spread silently from one observation to all weights.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np

from srl.core.errors import ConfigError, EnvError, SrlError
from srl.core.specs import Array, Arrays

CHOICES = ("stop", "skip")


class Guard:
    """Keeps count of the failures of one vector; ``notes`` is where sentences for the user go."""

    FAILURES: ClassVar[int] = 10
    SHARE: ClassVar[float] = 0.01

    def __init__(self, where: str, nonfinite: str, notes: list[str]) -> None:
        self.where, self.nonfinite, self.notes = where, nonfinite, notes
        self.steps = 0
        """Steps of single copies so far."""
        self.failures = 0

    def failed(self, copy: int, error: Exception, remedy: str = "was made anew") -> None:
        """Count that a copy failed and tell the user, or raise ``error`` if that happens too often."""
        self.failures += 1
        traceback.print_exception(error, file=sys.stderr)
        if self.failures >= self.FAILURES and self.failures > self.SHARE * self.steps:
            raise error
        self.notes.append(f"{self.where}, copy {copy} failed and {remedy}: {described(error)}")

    def remake(self, error: Exception, make: Callable[[], Any]) -> Any:
        """What ``make`` makes; if it fails too, the error that made it necessary is the one to tell."""
        try:
            return make()
        except SrlError:
            raise
        except Exception as again:
            traceback.print_exception(again, file=sys.stderr)
            raise error from again

    def check_actions(self, names: list[str], actions: Arrays, valid: Array, at: Callable[[int], str]) -> None:
        """Refuse actions that are not finite; what rows that do not act are given is of no interest."""
        found = nonfinite_rows([(name, actions[name]) for name in names]) if names else {}
        for row, what in found.items():
            if not valid[row]:
                continue
            raise EnvError(f"{at(row)}: the policy's {what}; look for a loss that is NaN, or a learning rate too high")

    def check_results(self, fields: Iterable[tuple[str, Array]], at: Callable[[int], str]) -> dict[int, EnvError]:
        """The rows that hold NaN or infinity; raises unless such steps are to be skipped."""
        rows = nonfinite_rows(fields)
        if not rows:
            return {}
        found = {row: EnvError(f"{at(row)}: {what}") for row, what in rows.items()}
        for error in found.values():
            if self.nonfinite == "stop":
                raise EnvError(f"{error}; correct the environment, or start such copies anew with nonfinite='skip'")
        return found

    def state(self) -> list[int]:
        """What a resumed run must know."""
        return [self.steps, self.failures]

    def load_state(self, state: list[int]) -> None:
        """Go on counting where ``state`` was taken."""
        self.steps, self.failures = state


def nonfinite_rows(fields: Iterable[tuple[str, Array]]) -> dict[int, str]:
    """Each row that holds NaN or infinity, and the first field where it does."""
    found: dict[int, str] = {}
    for name, values in fields:
        if math.isfinite(np.vdot(values, values)):
            continue  # the sum of squares would not be finite; it can also be too large
        finite = np.isfinite(values)
        if not finite.all():
            for row in np.flatnonzero(~finite.reshape(len(values), -1).all(axis=1)).tolist():
                found.setdefault(row, f"{name} is {'NaN' if np.isnan(values[row]).any() else 'Inf'}")
    return found


def check_choice(nonfinite: str) -> None:
    """Refuse a setting of ``nonfinite`` that does not exist."""
    if nonfinite not in CHOICES:
        raise ConfigError(f"nonfinite={nonfinite!r} is neither 'stop' (the run) nor 'skip' (the step)")


def described(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SrlError) else f"{type(error).__name__}: {text}".removesuffix(": ")
