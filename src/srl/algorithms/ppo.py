"""Proximal policy optimisation (Schulman et al. 2017), in one sitting.

Actors write log-probabilities and values of the policy that acted into the block, so a batch arrives ready for
generalised advantage estimation. The learner then passes over it ``epochs`` times in shuffled minibatches, each
gathered straight from the slab. Samples may be ``max_staleness`` versions old; the clipped ratio is taken against the
policy that really acted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from srl.algorithms.base import Algorithm, Interrupted, Learner, load_optimizer_state, optimizer_state
from srl.core.errors import ConfigError
from srl.core.slab import Batch
from srl.core.specs import Array, ArraySpec, Spaces
from srl.core.worker import State

if TYPE_CHECKING:
    from torch import Tensor

    from srl.policies.actor_critic import ActorCritic


METRICS = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "grad_norm")


@dataclass(frozen=True)
class PPO(Algorithm):
    """Hyper-parameters of PPO."""

    name: ClassVar[str] = "ppo"

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
    target_kl: float = 0.0
    """Stop an update's passes once the policy moved this far (0: never)."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are shortened."""
    normalize_advantage: bool = True
    """Scale advantages to mean 0 and variance 1 in every minibatch."""
    normalize_obs: bool = False
    """Scale vector observations by their running mean and variance."""
    normalize_return: bool = False
    """Let the value network predict returns scaled by their running mean and variance."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of actor and critic."""
    activation: str = "tanh"
    """tanh, relu or elu."""
    log_std: float = 0.0
    """First log standard deviation of continuous actions."""
    precision: str = "float32"
    """Of the network's encoders: float32, bfloat16, or auto (bfloat16 where the processor is fast at it)."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        """See :class:`Algorithm`."""
        super().check(spaces, batch_steps)
        for field in ("lr", "epochs", "minibatch", "clip", "max_grad_norm"):
            if getattr(self, field) <= 0:
                raise ConfigError(f"ppo.{field} must be greater than 0, got {getattr(self, field)}")
        for field in ("gamma", "lam"):
            if not 0 <= getattr(self, field) <= 1:
                raise ConfigError(f"ppo.{field} must be between 0 and 1, got {getattr(self, field)}")
        choices = {"activation": ("tanh", "relu", "elu"), "precision": ("float32", "bfloat16", "auto")}
        for field, known in choices.items():
            if getattr(self, field) not in known:
                raise ConfigError(f"ppo.{field} must be one of {', '.join(known)}, got {getattr(self, field)!r}")
        if self.minibatch > batch_steps:
            raise ConfigError(f"ppo.minibatch {self.minibatch} is larger than the batch of {batch_steps} steps")

    def outputs(self) -> dict[str, ArraySpec]:
        """See :class:`Algorithm`."""
        return {"log_prob": ArraySpec((), "<f4"), "value": ArraySpec((), "<f4")}

    def policy(self, spaces: Spaces) -> ActorCritic:
        """See :class:`Algorithm`."""
        from srl.policies.actor_critic import ActorCritic

        return ActorCritic(
            spaces,
            hidden=self.hidden,
            activation=self.activation,
            log_std=self.log_std,
            normalize_obs=self.normalize_obs,
            normalize_return=self.normalize_return,
            precision=self.precision,
        )

    def learner(self, spaces: Spaces, seed: int, device: str) -> PPOLearner:
        """See :class:`Algorithm`."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return PPOLearner(self, self.policy(spaces).to(device), seed, device)


@dataclass
class Prepared:
    """A batch with its advantages and returns, in the order of ``batch.positions``."""

    batch: Batch
    index: Array
    """Which entries of ``positions`` are real transitions."""
    advantage: Array
    returns: Array
    value: Array


class PPOLearner(Learner):
    """Trains an actor-critic policy with PPO."""

    policy: ActorCritic

    def __init__(self, config: PPO, policy: ActorCritic, seed: int, device: str) -> None:
        import torch

        self.config, self.policy, self.device = config, policy, device
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, eps=1e-5, fused=True)
        self.generator = torch.Generator().manual_seed(seed)

    def prepare(self, batch: Batch) -> Prepared:
        """See :class:`Learner`."""
        value = batch.small("value")
        reward, terminated, truncated, valid = (
            batch.small(name)[:-1] for name in ("reward", "terminated", "truncated", "valid")
        )
        advantage = gae(reward, value, terminated, truncated, self.config.gamma, self.config.lam)
        old, advantage = value[:-1].reshape(-1), advantage.reshape(-1)
        return Prepared(batch, np.flatnonzero(valid), advantage, advantage + old, old)

    def train(self, prepared: Prepared, steps: int, interrupted: Interrupted) -> dict[str, float] | None:
        """See :class:`Learner`."""
        import torch

        config, batch = self.config, prepared.batch
        if config.anneal_steps:
            rate = config.lr * max(0.0, 1 - steps / config.anneal_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        slab = {name: torch.from_numpy(array) for name, array in batch.slab.flat.items()}
        positions = torch.from_numpy(batch.positions)
        targets = torch.from_numpy(np.stack([prepared.advantage, prepared.returns, prepared.value], 1))
        index = torch.from_numpy(prepared.index)
        observed = batch.slab.spec.observations
        wanted = (*observed, *(name for name in batch.slab.spec.outputs if name != "value"))

        def gather(rows: Tensor, fields: tuple[str, ...]) -> dict[str, Tensor]:
            where = positions.index_select(0, rows)
            return {name: slab[name].index_select(0, where).to(self.device) for name in fields}

        sums, done = torch.zeros(len(METRICS), device=self.device), 0
        for _ in range(config.epochs):
            order = index[torch.randperm(len(index), generator=self.generator)]
            for rows in torch.split(order, config.minibatch):
                if interrupted():
                    return None
                advantage, returns, old = targets.index_select(0, rows).to(self.device).unbind(1)
                sums, done = sums + self._step(gather(rows, wanted), advantage, returns, old), done + 1
            if config.target_kl and sums[METRICS.index("kl")] / done > config.target_kl:
                break
        # Afterwards, so that this update's ratios start at exactly 1.
        if config.normalize_obs or config.normalize_return:
            self.policy.observe(gather(index, observed), targets[index, 1].to(self.device))
        means = dict(zip(METRICS, (sums / done).tolist(), strict=True))
        return {**means, "lr": self.optimizer.param_groups[0]["lr"]}

    def _step(self, batch: dict[str, Tensor], advantage: Tensor, returns: Tensor, old: Tensor) -> Tensor:
        """One gradient step; the values of METRICS."""
        import torch

        config, norm = self.config, self.policy.return_norm
        if norm is not None:
            returns, old = norm(returns), norm(old)
        if config.normalize_advantage and len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        log_prob, entropy, value = self.policy.evaluate(batch, batch)
        log_ratio = log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        value_error = (value - returns).square()
        if config.value_clip:
            near = old + (value - old).clamp(-config.value_clip, config.value_clip)
            value_error = torch.max(value_error, (near - returns).square())
        value_loss, bonus = 0.5 * value_error.mean(), entropy.mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy * bonus
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        length = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            kl, outside = (ratio - 1 - log_ratio).mean(), (ratio != clipped).float().mean()
            return torch.stack([policy_loss, value_loss, bonus, kl, outside, length])

    def state(self) -> State:
        """See :class:`Learner`."""
        from srl.policies.host import arrays_of

        state = State({f"policy/{name}": array.copy() for name, array in arrays_of(self.policy).items()})
        state.put("optimizer", State(optimizer_state(self.optimizer)))
        state.arrays["generator"] = self.generator.get_state().numpy().copy()
        return state

    def load_state(self, state: State) -> None:
        """See :class:`Learner`."""
        import torch

        from srl.policies.host import load_arrays

        load_arrays(self.policy, state.under("policy").arrays)
        load_optimizer_state(self.optimizer, state.under("optimizer").arrays)
        self.generator.set_state(torch.from_numpy(state.arrays["generator"].copy()))


def gae(reward: Array, value: Array, terminated: Array, truncated: Array, gamma: float, lam: float) -> Array:
    """Generalised advantage estimates for ``[T, rows]`` rewards and flags and ``[T + 1, rows]`` values.

    A terminated episode is worth nothing afterwards; a truncated one is bootstrapped from the value of its last
    observation, which is ``value[t + 1]`` because the reset takes a step of its own. No estimate crosses an end.
    """
    delta = reward + gamma * value[1:] * ~terminated - value[:-1]
    carry = gamma * lam * ~(terminated | truncated)
    advantage = np.empty_like(delta)
    last = np.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        last = delta[t] + carry[t] * last
        advantage[t] = last
    return advantage
