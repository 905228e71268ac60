"""Soft actor-critic (Haarnoja et al. 2018) for continuous actions, and for a choice (Christodoulou 2019).

The policy is paid for being random, by a temperature that is learned too: it falls until the policy is as random as it
should be and no more. Two critics learn from a replay what actions are worth, the lesser of their opinions counts, and
the policy follows it. Actors send blocks to a buffer worker; the trainer makes ``minibatches`` gradient steps on what
it draws, then publishes. ``updates_per_step`` says how many gradient steps there are for a step of the environment.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from srl.algorithms.base import Algorithm, Interrupted, NetworkOptions, Replay, TorchLearner, seeded
from srl.core.errors import ConfigError
from srl.core.slab import Batch
from srl.core.specs import Array, ArraySpec, Spaces

if TYPE_CHECKING:
    from torch import Tensor

    from srl.algorithms.adam import Adam
    from srl.policies.soft import SoftActor

    Tensors = dict[str, Tensor]

METRICS = ("q_loss", "q_value", "policy_loss", "entropy")


@dataclass(frozen=True)
class SAC(NetworkOptions, Algorithm):
    """Hyper-parameters of SAC."""

    name: ClassVar[str] = "sac"
    parallel: ClassVar[bool] = True

    horizon: int = 8
    """Steps in a block: what an actor collects before handing over."""
    max_staleness: int = 10**9
    """A replay's samples may be of any age."""
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers."""
    activation: str = "relu"
    """tanh, relu or elu."""
    lr: float = 3e-4
    """Learning rate of Adam, of policy, critics and temperature."""
    gamma: float = 0.99
    """Discount."""
    tau: float = 0.005
    """How much of the critics moves into the target critics with each gradient step."""
    minibatch: int = 256
    """Samples per gradient step."""
    minibatches: int = 8
    """Gradient steps between two versions: as many minibatches are drawn at once."""
    updates_per_step: float = 1.0
    """Gradient steps for a step of the environment; actors and trainer are held to it (0: as it comes)."""
    n_step: int = 1
    """Rewards summed up before the value of what follows is used."""
    temperature: float = 1.0
    """What randomness is worth at first; for good, if it is not learned."""
    learn_temperature: bool = True
    """Whether the temperature follows from ``target_entropy``."""
    target_entropy: float | None = None
    """How random the policy should be (default: minus the number of action values; of a choice, half of all it can)."""
    replay_steps: int = 1_000_000
    """Steps the buffer keeps."""
    warmup: int = 5_000
    """Steps collected before training begins."""
    keep_replay: bool = False
    """Save the buffer's content with the run."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        """See :class:`Algorithm`."""
        super().check(spaces, batch_steps)
        self.check_above("lr", "minibatch", "minibatches", "n_step", "replay_steps", "temperature")
        self.check_share("gamma", "tau")
        self.check_least(warmup=1, updates_per_step=0)
        if self.memory or self.network:
            raise ConfigError("sac has networks of its own without a memory; leave out sac.memory and sac.network")
        self.check_network(self)
        if self.warmup > self.replay_steps:
            raise ConfigError(f"sac.warmup {self.warmup} is more than sac.replay_steps {self.replay_steps} can hold")
        check_action(spaces)

    def outputs(self) -> dict[str, ArraySpec]:
        """See :class:`Algorithm`."""
        return {}

    def replay(self) -> Replay:
        """See :class:`Algorithm`."""
        return Replay(
            capacity=self.replay_steps,
            warmup=self.warmup,
            batch=self.minibatch * self.minibatches,
            samples_per_insert=self.updates_per_step * self.minibatch,
            n_step=self.n_step,
            gamma=self.gamma,
            relabel=self.relabel,
            keep=self.keep_replay,
        )

    def policy(self, spaces: Spaces) -> SoftActor:
        """See :class:`Algorithm`."""
        from srl.policies.soft import SoftActor

        return SoftActor(spaces, self)

    def learner(self, spaces: Spaces, seed: int, device: str) -> SACLearner:
        """See :class:`Algorithm`."""
        with seeded(seed):
            return SACLearner(self, spaces, seed, device)

    def wanted_entropy(self, spaces: Spaces) -> float:
        """How random the policy should be."""
        if self.target_entropy is not None:
            return self.target_entropy
        choices = getattr(spaces.action, "n", None)
        return 0.5 * math.log(choices) if choices else -float(math.prod(spaces.action.shape or ()))


def check_action(spaces: Spaces) -> None:
    """Raise ConfigError if SAC cannot act in such a space."""
    import gymnasium

    kinds = gymnasium.spaces.Box, gymnasium.spaces.Discrete
    if not isinstance(spaces.action, kinds) or spaces.action.dtype.kind not in "fi":
        raise ConfigError(f"sac acts in a Box of real numbers or a Discrete space, not in {spaces.action}")
    if isinstance(spaces.action, kinds[0]) and not spaces.action.is_bounded():
        raise ConfigError(f"sac needs bounded actions, not {spaces.action}")


class SACLearner(TorchLearner):
    """Trains a soft actor and its critics on samples drawn from a replay."""

    networks: ClassVar[tuple[str, ...]] = ("policy", "critics", "target", "heat")
    optimizers: ClassVar[tuple[str, ...]] = ("optimizer", "critics_optimizer", "heat_optimizer")
    policy: SoftActor
    optimizer: Adam

    def __init__(self, config: SAC, spaces: Spaces, seed: int, device: str) -> None:
        import torch

        from srl.algorithms.adam import Adam
        from srl.policies.soft import Critics

        self.config, self.device, self.wanted = config, device, config.wanted_entropy(spaces)
        self.policy = config.policy(spaces).to(device)
        self.critics = Critics(spaces, config).to(device)
        self.heat = torch.nn.ParameterList([torch.tensor([math.log(config.temperature)], device=device)])
        parts = self.policy, self.critics, self.heat
        self.optimizer, self.critics_optimizer, self.heat_optimizer = (Adam(each, config.lr, 1e-8) for each in parts)
        self.target: Critics = deepcopy(self.critics).requires_grad_(False)
        self.generator = torch.Generator().manual_seed(seed)

    def prepare(self, batch: Batch) -> dict[str, Array]:
        """See :class:`Learner`: views of the batch, step 0 and step 1 of every field."""
        (block,) = batch.blocks
        return batch.slab.block(block)

    def train(self, prepared: dict[str, Array], steps: int, interrupted: Interrupted) -> dict[str, float] | None:
        """See :class:`Learner`."""
        import torch

        config = self.config
        if self.stops(interrupted):
            return None
        fields = {name: torch.from_numpy(array).to(self.device) for name, array in prepared.items()}
        parts = torch.randperm(config.minibatch * config.minibatches, generator=self.generator)
        sums = torch.zeros(len(METRICS), device=self.device)
        for rows in parts.split(config.minibatch):  # type: ignore[no-untyped-call]
            if self.peers is None and interrupted():  # nobody leaves the others in the middle of an update
                return None
            sums += self._step({name: field[:, rows] for name, field in fields.items()})
        sums = sums.cpu()
        if self.peers is not None:
            self.peers.sum(sums.div_(self.peers.size))
        means = dict(zip(METRICS, (sums / config.minibatches).tolist(), strict=True))
        return {**means, "temperature": math.exp(self.heat[0].item())}

    def _step(self, batch: Tensors) -> Tensor:
        """One gradient step of everything; the METRICS of it."""
        import torch

        now, later = ({name: field[i] for name, field in batch.items()} for i in (0, 1))
        heat = self.heat[0].detach().exp()
        taken = self.policy.taken(now)
        with torch.no_grad():
            goal = now["reward"] + now["discount"] * self._worth(later, heat)
        worth = self.critics(now) if self.critics.discrete else self.critics(now, taken)
        if self.critics.discrete:
            worth = worth.gather(-1, taken.expand(2, -1, 1)).squeeze(-1)
        q_loss = 0.5 * (worth - goal).square().sum(0).mean()
        self._descend(q_loss, self.critics_optimizer)
        self.critics.requires_grad_(False)
        loss, entropy = self._policy_loss(now, heat)
        self._descend(loss, self.optimizer)
        self.critics.requires_grad_(True)
        if self.config.learn_temperature:
            self._descend((self.heat[0] * (entropy.detach() - self.wanted)).sum(), self.heat_optimizer)
        old: list[Tensor] = list(self.target.parameters())
        new: list[Tensor] = list(self.critics.parameters())
        with torch.no_grad():
            torch._foreach_lerp_(old, new, self.config.tau)
        return torch.stack([q_loss.detach(), worth.detach().mean(), loss.detach(), entropy.detach()])

    def _worth(self, seen: Tensors, heat: Tensor) -> Tensor:
        """What it is worth to be where ``seen`` was seen, randomness included."""
        policy = self.policy
        features, _ = policy.trunk(seen)
        if policy.box is not None:
            action, density = policy.box.draw(features, self.generator)
            found: Tensor = self.target(seen, action).amin(0) - heat * density
            return found
        assert policy.choice is not None
        log_prob = _finite(policy.choice(features, seen.get("mask")))
        found = (log_prob.exp() * (self.target(seen).amin(0) - heat * log_prob)).sum(-1)
        return found

    def _policy_loss(self, seen: Tensors, heat: Tensor) -> tuple[Tensor, Tensor]:
        """How far the policy is from the best it could do, and how random it is, both on average."""
        policy = self.policy
        features, _ = policy.trunk(seen)
        if policy.box is not None:
            action, density = policy.box.draw(features, self.generator)
            return (heat * density - self.critics(seen, action).amin(0)).mean(), -density.mean()
        assert policy.choice is not None
        log_prob = _finite(policy.choice(features, seen.get("mask")))
        chances = log_prob.exp()
        loss = (chances * (heat * log_prob - self.critics(seen).amin(0))).sum(-1).mean()
        return loss, -(chances * log_prob).sum(-1).mean()

    def _descend(self, loss: Tensor, optimizer: Adam) -> None:
        """One step of an optimiser; minibatches are as large in all trainers."""
        optimizer.zero_grad()
        (loss if self.peers is None else loss / self.peers.size).backward()  # type: ignore[no-untyped-call]
        if self.peers is not None:
            self.peers.sum(optimizer.grad)
        optimizer.step()


def _finite(log_prob: Tensor) -> Tensor:
    """Log-probabilities of which none is minus infinity: what is masked out still has none to speak of."""
    import torch

    return log_prob.clamp(min=torch.finfo(log_prob.dtype).min / 4)
