"""How fast simple spread is as a native vector, beside mpe2's: python benchmarks/spread.py (needs mpe2)."""

from __future__ import annotations

import time

import numpy as np

from srl import envs
from srl.envs.base import StepViews

COPIES, SECONDS = 32, 1.5


def rate(config: envs.EnvConfig) -> float:
    """Agent steps a second, with random actions."""
    env = config.make(COPIES)
    env.bind([env.agents])
    rows = COPIES * len(env.agents)
    views = StepViews.zeros(env.spaces(env.agents[0]), rows)
    env.reset(0, [views.after])
    actions = np.random.default_rng(0).integers(0, 5, (64, rows))
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        views.valid[:] = views.after.acts
        env.step([{"action": actions[steps % 64]}], [views])
        steps += 1
    return rows * steps / (time.perf_counter() - begin)


if __name__ == "__main__":
    pairs = [
        (rate(envs.spread(state=True)), rate(envs.pettingzoo("mpe2.simple_spread_v3", state=True))) for _ in range(3)
    ]
    for ours, theirs in pairs:
        print(f"{ours:,.0f} agent steps/s, mpe2 {theirs:,.0f}: {ours / theirs:.0f} times")
