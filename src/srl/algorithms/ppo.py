"""Proximal policy optimisation (Schulman et al. 2017), in one sitting.

Actors write log-probabilities and values of the policy that acted into the block, so a batch arrives ready for
generalised advantage estimation. The learner then passes over it ``epochs`` times in shuffled minibatches, each
gathered straight from the slab. Samples may be ``max_staleness`` versions old; the clipped ratio is taken against the
policy that really acted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from srl.algorithms.base import Algorithm, Interrupted, NetworkOptions, TorchLearner, seeded
from srl.algorithms.returns import gae
from srl.core.errors import ConfigError
from srl.core.slab import Batch
from srl.core.specs import Array, ArraySpec, Spaces

if TYPE_CHECKING:
    from torch import Tensor

    from srl.algorithms.adam import Adam
    from srl.algorithms.team import Team
    from srl.policies.actor_critic import ActorCritic

    Tensors = dict[str, Tensor]


Norm = Sequence[float]
"""Samples of a minibatch, what is taken from their advantages, and what these are multiplied with."""
METRICS = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "grad_norm")


@dataclass(frozen=True)
class PPO(NetworkOptions, Algorithm):
    """Hyper-parameters of PPO."""

    name: ClassVar[str] = "ppo"
    parallel: ClassVar[bool] = True

    lr: float = 3e-4
    """Learning rate of Adam."""
    anneal_steps: int = 0
    """Lower the learning rate linearly to 0 over this many steps (0: keep it)."""
    epochs: int = 4
    """Passes over each batch."""
    minibatch: int = 256
    """Samples per gradient step."""
    gamma: float = 0.99
    """Discount."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation."""
    clip: float = 0.2
    """The probability ratio is clipped to 1 ± this."""
    value_clip: float = 0.0
    """The new value may differ from the old by at most this (0: no clipping)."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    anneal_entropy: bool = False
    """Lower the entropy bonus along with the learning rate."""
    target_kl: float = 0.0
    """Stop an update's passes once the policy moved this far (0: never)."""
    kl_coef: float = 0.0
    """Weight of a penalty on the distance from the policy that ratios are taken against (0: none)."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are shortened."""
    normalize_advantage: bool = True
    """Scale advantages to mean 0 and variance 1 in every minibatch."""
    normalize_obs: bool = False
    """Scale vector observations by their running mean and variance."""
    normalize_return: bool = False
    """Let the value network predict returns scaled by their running mean and variance."""
    log_std: float = 0.0
    """First log standard deviation of continuous actions."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        """See :class:`Algorithm`."""
        super().check(spaces, batch_steps)
        self.check_above("lr", "epochs", "minibatch", "clip", "max_grad_norm")
        self.check_share("gamma", "lam")
        self.check_network(self)
        if self.minibatch > batch_steps:
            raise ConfigError(f"{self.name}.minibatch {self.minibatch} is larger than the batch of {batch_steps} steps")
        if self.memory and self.minibatch % self.chunk:
            name = self.name
            raise ConfigError(f"{name}.minibatch {self.minibatch} must be a multiple of {name}.chunk {self.chunk}")

    def memory_spec(self) -> dict[str, ArraySpec]:
        """See :class:`Algorithm`."""
        return self.memory_fields()

    @property
    def chunk_steps(self) -> int:
        """See :class:`Algorithm`."""
        return self.chunk

    def outputs(self) -> dict[str, ArraySpec]:
        """See :class:`Algorithm`."""
        return {"log_prob": ArraySpec((), "<f4"), "value": ArraySpec((), "<f4")}

    def policy(self, spaces: Spaces) -> ActorCritic:
        """See :class:`Algorithm`."""
        from srl.policies.actor_critic import ActorCritic

        norms = {"normalize_obs": self.normalize_obs, "normalize_return": self.normalize_return}
        return ActorCritic(spaces, self, log_std=self.log_std, **norms)

    def learner(self, spaces: Spaces, seed: int, device: str) -> PPOLearner:
        """See :class:`Algorithm`."""
        with seeded(seed):
            return PPOLearner(self, self.policy(spaces).to(device), seed, device)


@dataclass
class Prepared:
    """A batch with its advantages and returns, in the order of ``batch.positions``."""

    batch: Batch
    known: Array
    """Which entries can be trained on: real transitions whose outcome is in the batch."""
    targets: Array
    """Advantage, return and old value, each of every entry; and the log-probability that ratios are taken against, if
    it is not that of the policy that acted."""


class PPOLearner(TorchLearner):
    """Trains an actor-critic policy with PPO."""

    policy: ActorCritic
    optimizer: Adam

    def __init__(self, config: PPO, policy: ActorCritic, seed: int, device: str) -> None:
        import torch

        from srl.algorithms.adam import Adam

        self.config, self.policy, self.device = config, policy, device
        self.optimizer = Adam(policy, config.lr)
        self.team: Team[ActorCritic] | None = None
        self.generator = torch.Generator().manual_seed(seed)
        self.bonus = config.entropy

    def prepare(self, batch: Batch) -> Prepared:
        """See :class:`Learner`."""
        value, valid, first = (batch.small(name) for name in ("value", "valid", "first"))
        reward, terminated, truncated = (batch.small(name)[:-1] for name in ("reward", "terminated", "truncated"))
        ends, config = (terminated, truncated, valid), self.config
        advantage, known = gae(reward, value, *ends, config.gamma, config.lam, first)
        targets = np.stack([advantage, advantage + value[:-1], value[:-1]])
        return Prepared(batch, known.reshape(-1), targets.reshape(3, -1))

    def train(self, prepared: Prepared, steps: int, interrupted: Interrupted) -> dict[str, float] | None:
        """See :class:`Learner`."""
        import torch

        from srl.algorithms.passes import autograd

        config, batch, known = self.config, prepared.batch, prepared.known
        left = self.anneal(config.lr, config.anneal_steps, steps)
        self.bonus = config.entropy * (left if config.anneal_entropy else 1.0)
        goals, norm = prepared.targets, self.policy.return_norm
        if norm is not None:
            scaled = norm(torch.from_numpy(goals[1:3]).to(self.device)).cpu().numpy()
            goals = np.concatenate([goals[:1], scaled, goals[3:]])
        # What is shuffled: single entries, or with a memory whole chunks of them.
        index = np.flatnonzero(known)
        chunks = batch.chunks() if config.memory else index[None]
        small = self.policy.small() if len(goals) == 3 and not config.kl_coef else None
        given = self.optimizer, config, self.bonus, batch.slab.flat, batch.positions, goals, index, self.peers
        one_pass = small.learner(*given).one_pass if small is not None else autograd(self, prepared, goals, chunks)
        sums, found = np.zeros((2, len(METRICS) + 1))  # the last are the samples
        for _ in range(config.epochs):
            if self.stops(interrupted):
                return None
            order = torch.randperm(chunks.shape[1], generator=self.generator).numpy()
            found[:-1], found[-1] = 0, len(index)
            # Nobody may leave the others in the middle of a pass.
            if not one_pass(order, found[:-1], interrupted if self.peers is None else lambda: False):
                return None
            if self.peers is not None:
                self.peers.sum(torch.from_numpy(found))
            sums += found
            if config.target_kl and sums[METRICS.index("kl")] > config.target_kl * sums[-1]:
                break
        # Afterwards, so that this update's ratios start at exactly 1.
        if config.normalize_obs or config.normalize_return:
            seen = self.gather(batch, index, batch.slab.spec.observations)
            self.policy.observe(seen, torch.from_numpy(prepared.targets[1, index]).to(self.device), self.peers)
        means = dict(zip(METRICS, (sums[:-1] / max(sums[-1], 1)).tolist(), strict=True))
        return {**means, "lr": self.optimizer.param_groups[0]["lr"]}

    def gradient(
        self,
        policy: ActorCritic,
        batch: Tensors,
        state: Tensors,
        keep: Tensor | None,
        goal: Array,
        norm: Sequence[float],
    ) -> Array:
        """Add the gradient of these of ``norm[0]`` samples; the values of METRICS but the last, summed over them."""
        import torch

        config, (count, shift, scale) = self.config, norm
        advantage, returns, old, *other = torch.from_numpy(goal).to(self.device)
        advantage = (advantage - shift) * scale
        log_prob, entropy, value = policy.evaluate(batch, state, keep)
        acted = batch["log_prob"] if keep is None else batch["log_prob"][keep]
        log_ratio = log_prob - (other[0] if other else acted)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        objective = torch.minimum(ratio * advantage, clipped * advantage)
        square = (value - returns).square()
        if config.value_clip:
            near = old + (value - old).clamp(-config.value_clip, config.value_clip)
            square = torch.maximum(square, (near - returns).square())
        moved = ratio - 1 - log_ratio
        loss = 0.5 * config.value_coef * square.sum() - objective.sum() - self.bonus * entropy.sum()
        if config.kl_coef:
            loss = loss + config.kl_coef * moved.sum()
        (loss / count).backward()
        with torch.no_grad():
            metrics = -objective, 0.5 * square, entropy, moved, ratio != clipped
            return np.array([each.sum().item() for each in metrics])
