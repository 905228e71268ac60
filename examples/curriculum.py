"""Longer corridors as the policy gets better, until the longest is solved: python examples/curriculum.py [folder]."""

import sys
import tempfile
from typing import Any

import gymnasium
import numpy as np

import srl


class Corridor(gymnasium.Env[Any, Any]):
    """Walk right to the end, which pays the corridor's length; every other step costs 0.05. Forty steps at most."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space, length = gymnasium.spaces.Discrete(2), 2

    def configure(self, length: int) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.place, self.steps, self.goal = 0, 0, self.length
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place, self.steps = max(0, self.place + 2 * int(action) - 1), self.steps + 1
        seen, pay = np.array([self.place / 8], np.float32), self.goal if self.place == self.goal else -0.05
        return seen, pay, pay > 0, self.steps == 40, {}


def longer(evaluation: dict[str, Any]) -> dict[str, Any]:  # what configure() is told: one more than was solved
    return {"length": min(8, max(2, round(evaluation["return_mean"]) + 1))}


if __name__ == "__main__":
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    x = srl.Experiment(srl.envs.gym(Corridor), srl.PPO(lr=3e-3, horizon=32), curriculum="curriculum:longer")
    done = x.run(out, until="return>=7.5", evaluator=srl.Evaluator(episodes=5, seconds=0.2), launcher="inline")
    print(f"solved the corridor of length 8 after {done.steps:,} steps, see {done.run_dir}/evaluations.jsonl")
