"""Train with a network of your own: python examples/own_network.py [folder]."""

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

import srl


class Residual(nn.Module):
    """Turns observations into features: three layers, each added to what it was given."""

    def __init__(self, spaces: Any) -> None:
        super().__init__()
        self.out_features = 64  # what the heads for actions and value are built on
        self.enter = nn.Linear(spaces.observation.shape[0], 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x: Tensor = self.enter(inputs["obs"].float())  # a Dict space has a field for each entry: inputs["obs/camera"]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


if __name__ == "__main__":
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    ppo = srl.PPO(network="own_network:Residual", lr=1e-3, horizon=64)  # module:Class, as workers import it
    experiment = srl.Experiment(srl.envs.gym("CartPole-v1"), ppo, actors=srl.Actors(envs=16))
    result = experiment.run(out, steps=12_000)
    print(f"return {srl.evaluate(result.run_dir, episodes=10).return_mean:.1f}")
