"""Train with an algorithm of your own, advantage actor-critic: python examples/own_algorithm.py [folder].

An algorithm is a frozen dataclass of hyper-parameters that makes a policy and a learner. Actors fill blocks with what
the policy sees and does; the learner gets batches of them.
"""

import sys
import tempfile
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import srl
from srl.algorithms.base import TorchLearner
from srl.algorithms.returns import gae
from srl.core.slab import Batch
from srl.core.specs import ArraySpec, Spaces


@dataclass(frozen=True)
class A2C(srl.Algorithm):
    """Hyper-parameters. Those every algorithm has (horizon, max_staleness, …) are inherited."""

    name: ClassVar[str] = "a2c"

    horizon: int = 16
    """Steps in a block."""
    lr: float = 3e-3
    """Learning rate of Adam."""
    gamma: float = 0.99
    """Discount."""
    entropy: float = 0.01
    """Weight of the entropy bonus."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        super().check(spaces, batch_steps)
        self.check_above("lr")  # srl: a2c.lr must be greater than 0, got …
        self.check_share("gamma")

    def outputs(self) -> dict[str, ArraySpec]:
        return {"value": ArraySpec((), "<f4")}  # the field that the policy writes beside the action

    def policy(self, spaces: Spaces) -> "Net":
        return Net(spaces)

    def learner(self, spaces: Spaces, seed: int, device: str) -> "A2CLearner":
        torch.manual_seed(seed)
        return A2CLearner(self, self.policy(spaces).to(device), seed, device)


class Net(nn.Module):
    """The policy: a module with ``act``."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(spaces.observation_spec()["obs"].shape[0], 64), nn.Tanh())
        self.logits, self.value = nn.Linear(64, spaces.action.n), nn.Linear(64, 1)  # type: ignore[attr-defined]

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(obs.float())
        return torch.log_softmax(self.logits(features), -1), self.value(features).squeeze(-1)

    def act(self, inputs: dict[str, Tensor], generator: torch.Generator | None) -> dict[str, Tensor]:
        """Random actions, or the likeliest without a generator; and the fields of ``outputs``."""
        log_probs, value = self(inputs["obs"])
        if generator is None:
            return {"action": log_probs.argmax(-1), "value": value}
        return {"action": torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(-1), "value": value}


class A2CLearner(TorchLearner):
    """One gradient step per batch. A TorchLearner saves policy, optimizer and generator."""

    policy: Net

    def __init__(self, config: A2C, policy: Net, seed: int, device: str) -> None:
        self.config, self.policy, self.device = config, policy, device
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr)
        self.generator = torch.Generator().manual_seed(seed)

    def prepare(self, batch: Batch) -> dict[str, Tensor]:
        """Returns and advantages; may run in another thread while the batch before is trained on."""
        value, valid = batch.small("value"), batch.small("valid")  # [horizon + 1, blocks * rows]
        reward, terminated, truncated = (batch.small(name)[:-1] for name in ("reward", "terminated", "truncated"))
        advantage, known = gae(reward, value, terminated, truncated, valid, self.config.gamma, 1.0)
        keep = known.reshape(-1)  # a step counts if it is real and what became of it is in the batch
        found = {name: batch.slab.flat[name][batch.positions[keep]] for name in ("obs", "action")}
        found |= {"advantage": advantage.reshape(-1)[keep], "goal": (advantage + value[:-1]).reshape(-1)[keep]}
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}

    def train(self, prepared: dict[str, Tensor], steps: int, interrupted: Any) -> dict[str, float] | None:
        """One update; what it returns becomes train/…"""
        data = {name: tensor.to(self.device) for name, tensor in prepared.items()}
        log_probs, value = self.policy(data["obs"])
        chosen = log_probs.gather(-1, data["action"].unsqueeze(-1)).squeeze(-1)
        advantage = (data["advantage"] - data["advantage"].mean()) / (data["advantage"].std() + 1e-8)
        policy_loss, value_loss = -(chosen * advantage).mean(), (value - data["goal"]).square().mean()
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        self.optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss - self.config.entropy * entropy).backward()
        length = nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
        self.optimizer.step()
        found = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "grad_norm": length}
        return {name: float(each.detach()) for name, each in found.items()}


if __name__ == "__main__":
    import own_algorithm  # so that the run remembers own_algorithm:A2C, not __main__:A2C

    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    experiment = srl.Experiment(srl.envs.gym("CartPole-v1"), own_algorithm.A2C(), actors=srl.Actors(envs=16))
    result = experiment.run(out, steps=100_000, launcher="inline")
    print(f"return {srl.evaluate(result.run_dir).return_mean:.1f}")
