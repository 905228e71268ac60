"""How a rival's script is started and how it tells what it has done.

    python sb3.py cartpole --config '{"envs": 32}' --seed 1 --warmup 12 --seconds 45 --events FILE

Every finished update becomes one line of JSON in FILE: agent steps trained on so far (a second pass over them counts
nothing), the time, and the mean return of the last 100 training episodes. The script ends by itself, ``seconds`` after
the warm-up or after its first update, whichever is later; with ``--target`` when that return is reached. ``own`` in the
configuration holds numbers of the work that the library has its own of.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import deque
from dataclasses import replace
from typing import Any

from works import WORKS, Work


class Report:
    """Tells of finished updates, and knows when to end."""

    def __init__(self, path: str, warmup: float, seconds: float, target: float | None) -> None:
        self.file = open(path, "a", buffering=1, encoding="utf-8")
        self.begin, self.seconds, self.target = time.time() + warmup, seconds, target
        self.started = False
        self.returns: deque[float] = deque(maxlen=100)

    def update(self, steps: int, mean_return: float | None = None) -> bool:
        """An update has finished, ``steps`` steps were trained on so far; whether the script should end now.

        ``mean_return`` is for libraries that count episodes themselves; otherwise ``returns`` is averaged.
        """
        now = time.time()
        if not self.started:
            self.begin, self.started = max(self.begin, now), True
        if mean_return is None and self.returns:
            mean_return = sum(self.returns) / len(self.returns)
        mean_return = float(mean_return) if mean_return is not None and math.isfinite(mean_return) else None
        self.file.write(json.dumps({"steps": int(steps), "time": now, "return": mean_return}) + "\n")
        reached = self.target is not None and mean_return is not None and mean_return >= self.target
        return reached or now >= self.begin + self.seconds


def begin() -> tuple[Work, dict[str, Any], int, Report]:
    """What the command line asks for: the work, the rival's own configuration, the seed, and where to report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--config", type=json.loads, default={})
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--target", type=float)
    parser.add_argument("--events", default="/dev/stdout")
    said = parser.parse_args()
    report = Report(said.events, said.warmup, said.seconds, said.target)
    work = replace(WORKS[said.work], **said.config.pop("own", {}))
    return work, said.config, said.seed, report
