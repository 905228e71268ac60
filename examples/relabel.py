"""Train on a reward of your own, computed from what was seen: python examples/relabel.py [folder]."""

import sys
import tempfile
from typing import Any

import gymnasium
import numpy as np

import srl
from srl.monitor.sinks import read_metrics


class Drift(gymnasium.Env[Any, Any]):
    """A point on a line that can be pushed about for twenty steps. The environment itself pays nothing."""

    observation_space = gymnasium.spaces.Box(-3.0, 3.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(-1, 1, 1).astype(np.float32), 0
        return self.place, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place, self.steps = np.clip(self.place + 0.2 * (action - 1), -3, 3, dtype=np.float32), self.steps + 1
        return self.place, 0.0, False, self.steps == 20, {"distance": abs(float(self.place[0]))}


def stay_in_the_middle(block: dict[str, Any]) -> None:
    """Changes a block in place. Fields are [horizon + 1, rows, …]; reward[t] is for what was seen at t + 1."""
    block["reward"][:-1] = -np.abs(block["obs"][1:, :, 0]) * block["valid"][:-1]


if __name__ == "__main__":
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    ppo = srl.PPO(relabel="relabel:stay_in_the_middle", lr=3e-3, horizon=32, minibatch=128)
    experiment = srl.Experiment(srl.envs.gym(Drift, info=["distance"]), ppo, actors=srl.Actors(envs=16))
    result = experiment.run(out, steps=30_000, launcher="inline")
    print(f"distance from the middle at the end of an episode: {read_metrics(result.run_dir)[-1]['env/distance']:.2f}")
