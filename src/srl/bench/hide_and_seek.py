"""``srl bench hide-and-seek``: our environment against bare MuJoCo, which steps the same models with random forces.

In every round both are measured in turn, on one core. A step is one step of one copy: fifteen steps of MuJoCo, and for
the environment hands, rays, observations, rewards and new layouts besides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
import tyro
from rich.table import Table

from srl.bench.machine import report
from srl.envs.base import StepViews
from srl.envs.hide_and_seek import HideAndSeek
from srl.envs.hide_and_seek.scenario import FRAMES, STRONGEST
from srl.envs.hide_and_seek.vector import CHOICES

Name = Literal["quadrant", "randomwalls"]
DRAWN = 64
"""How many actions are drawn before the clock runs."""


@dataclass(frozen=True)
class HideAndSeekOptions:
    """Measure how much of bare MuJoCo's speed hide and seek keeps."""

    scenario: tyro.conf.Positional[tuple[Name, ...]] = ("quadrant", "randomwalls")
    """What is played."""
    copies: int = 16
    """Copies in one vector."""
    rounds: int = 5
    """Measurements of each, in turn."""
    seconds: float = 2.0
    """Length of one measurement."""


def main(arguments: Sequence[str]) -> int:
    """Entry point of ``srl bench hide-and-seek``."""
    from srl.commands.options import parse

    options = parse(HideAndSeekOptions, arguments, "bench hide-and-seek")
    table = Table("scenario", "steps/s", "bare MuJoCo", "ratio", "lowest", "highest", box=None, header_style="bold")
    for name in options.scenario:
        rates = [measure(name, options.copies, options.seconds, seed) for seed in range(options.rounds)]
        ours, bare = (median(rate) for rate in zip(*rates, strict=True))
        ratios = sorted(one / other for one, other in rates)
        shown = [f"{ratio:.2f}" for ratio in (median(ratios), ratios[0], ratios[-1])]
        table.add_row(name, f"{ours:,.0f}", f"{bare:,.0f}", *shown)
    report().print(table)
    return 0


def measure(name: Name, copies: int, seconds: float, seed: int) -> tuple[float, float]:
    """Steps a second of the environment and of bare MuJoCo, both from the beginning of the same episodes."""
    env = HideAndSeek(name).make(copies)
    env.bind([env.agents])
    views = StepViews.zeros(env.spaces(env.agents[0]), copies * len(env.agents))
    env.reset(seed, [views.after])
    rng = np.random.default_rng(seed)
    actions = [{"action": rng.integers(0, CHOICES, (len(views.valid), len(CHOICES)))} for _ in range(DRAWN)]
    forces = rng.uniform(-STRONGEST, STRONGEST, (DRAWN, env.worlds[0].model.nu))

    def play(turn: int) -> None:
        views.valid[:] = views.after.acts
        env.step([actions[turn % DRAWN]], [views])

    def push(turn: int) -> None:
        if turn % env.scenario.horizon == 0:
            for world in env.worlds:
                world.place(world.layout)
        for number, world in enumerate(env.worlds):
            world.data.ctrl[:] = forces[(turn + number) % DRAWN]
            world.mujoco.mj_step(world.model, world.data, FRAMES)

    return copies * _rate(play, seconds), copies * _rate(push, seconds)


def _rate(call: Callable[[int], None], seconds: float) -> float:
    """Calls in a second of one core's time."""
    call(0)
    begin, count = time.process_time(), 0
    while time.process_time() - begin < seconds:
        count += 1
        call(count)
    return count / (time.process_time() - begin)
