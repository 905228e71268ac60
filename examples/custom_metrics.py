"""Numbers of your own beside SRL's: python examples/custom_metrics.py [folder]."""

import sys
import tempfile
from typing import Any

import gymnasium

import srl
from srl.algorithms.ppo import PPOLearner
from srl.monitor.sinks import read_metrics


class Tilt(gymnasium.Wrapper[Any, Any, Any, Any]):  # CartPole that tells how far the pole is from upright
    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        seen, reward, terminated, truncated, info = self.env.step(action)
        return seen, reward, terminated, truncated, {**info, "tilt": abs(float(seen[2]))}


class Watched(srl.PPO):  # PPO that also reports how large its weights are
    def learner(self, spaces: Any, seed: int, device: str) -> "WatchedLearner":
        return WatchedLearner(self, self.policy(spaces).to(device), seed, device)


class WatchedLearner(PPOLearner):
    def train(self, *given: Any) -> dict[str, float] | None:
        found = super().train(*given)
        size = sum(float(weight.detach().norm()) for weight in self.policy.parameters())
        return found and {**found, "weights": size}  # shown as train/weights


if __name__ == "__main__":
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    experiment = srl.Experiment(srl.envs.gym(Tilt, info=["tilt"]), Watched(horizon=32, minibatch=128))
    row = read_metrics(experiment.run(out, steps=3_000, launcher="inline").run_dir)[-1]
    print(f"env/tilt {row['env/tilt']:.3f}, train/weights {row['train/weights']:.2f}")
