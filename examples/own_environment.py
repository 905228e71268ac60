"""Train on an environment of your own: python examples/own_environment.py [folder]."""

import sys
import tempfile
from typing import Any

import gymnasium
import numpy as np

import srl


class Corridor(gymnasium.Env[Any, Any]):
    """Five steps to the right pay 1, every other step costs 0.1: at best 0.6. After 50 steps it is over."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.steps = 0
        return np.array([0.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = max(0, self.place + (1 if action == 1 else -1))
        self.steps += 1
        arrived = self.place == 5
        observation = np.array([self.place / 5], np.float32)
        return observation, 1.0 if arrived else -0.1, arrived, self.steps == 50, {}


if __name__ == "__main__":
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    ppo = srl.PPO(lr=3e-3, horizon=32, minibatch=128)
    experiment = srl.Experiment(srl.envs.gym(Corridor), ppo, actors=srl.Actors(envs=16))
    result = experiment.run(out, steps=8_000, launcher="inline")
    print(f"return {srl.evaluate(result.run_dir).return_mean:.2f}, best possible 0.60")
