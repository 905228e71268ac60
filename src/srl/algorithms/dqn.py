"""Deep Q-learning (Mnih et al. 2015) with what has made it better since: double, dueling, n-step, prioritized replay.

Actors send blocks to a buffer worker, which keeps them and draws samples; each sample is one step with its n-step
return and the observation that followed. The trainer makes ``minibatches`` gradient steps on each batch drawn, then
publishes. Priorities (the size of the error) go back to the buffer. Every row explores with a probability of its own,
as in Ape-X (Horgan et al. 2018).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from srl.algorithms.base import Algorithm, Interrupted, NetworkOptions, Replay, TorchLearner, seeded
from srl.core.errors import ConfigError
from srl.core.slab import Batch
from srl.core.specs import Array, ArraySpec, Spaces
from srl.core.worker import State

if TYPE_CHECKING:
    from torch import Tensor

    from srl.algorithms.adam import Adam
    from srl.policies.q_network import QNetwork


@dataclass(frozen=True)
class DQN(NetworkOptions, Algorithm):
    """Hyper-parameters of DQN."""

    name: ClassVar[str] = "dqn"
    parallel: ClassVar[bool] = True

    horizon: int = 32
    """Steps in a block: what an actor collects before handing over."""
    max_staleness: int = 10**9
    """A replay's samples may be of any age."""
    lr: float = 5e-4
    """Learning rate of Adam."""
    anneal_steps: int = 0
    """Lower the learning rate linearly to 0 over this many steps (0: keep it)."""
    gamma: float = 0.99
    """Discount."""
    minibatch: int = 128
    """Samples per gradient step."""
    minibatches: int = 8
    """Gradient steps between two versions: as many minibatches are drawn at once."""
    n_step: int = 3
    """Rewards summed up before the value of what follows is used."""
    double: bool = True
    """Let the network being trained choose the action whose value the target network tells."""
    dueling: bool = True
    """Learn an observation's value apart from the advantages of actions."""
    target_every: int = 100
    """Gradient steps between two copies of the network into the target network."""
    prioritized: bool = True
    """Draw samples with large errors more often."""
    alpha: float = 0.6
    """A sample is drawn with a probability proportional to its error to this power."""
    beta: float = 0.4
    """How much of the bias of that is corrected (1: all)."""
    actor_priorities: bool = False
    """Let actors say how wrong they were, so that new samples do not all have the highest priority (Ape-X)."""
    replay_steps: int = 50_000
    """Steps the buffer keeps."""
    warmup: int = 2_000
    """Steps collected before training begins."""
    samples_per_insert: float = 4.0
    """How often a step is drawn, on average; actors and trainer are held to it (0: as it comes)."""
    keep_replay: bool = False
    """Save the buffer's content with the run."""
    epsilon: float = 0.1
    """Probability of a random action, in the end."""
    epsilon_steps: int = 10_000
    """Steps over which that probability falls from 1."""
    epsilon_spread: float = 3.0
    """The last row explores with epsilon^(1 + this), those between accordingly (0: all rows alike)."""
    max_grad_norm: float = 10.0
    """Gradients longer than this are shortened."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        """See :class:`Algorithm`."""
        super().check(spaces, batch_steps)
        self.check_above("lr", "minibatch", "minibatches", "n_step", "target_every", "replay_steps", "max_grad_norm")
        self.check_share("gamma", "alpha", "beta", "epsilon")
        self.check_least(warmup=1, samples_per_insert=0, epsilon_steps=0, epsilon_spread=0)
        self.check_network(self)
        name = self.name
        if self.memory and not self.memory_spec():
            raise ConfigError(f"{name} has no memory; leave out {name}.memory, or take r2d2")
        if self.warmup > self.replay_steps:
            raise ConfigError(
                f"{name}.warmup {self.warmup} is more than {name}.replay_steps {self.replay_steps} can hold"
            )
        if self.actor_priorities and not self.prioritized:
            raise ConfigError(f"{name}.actor_priorities are for a prioritized replay; set {name}.prioritized")

    def outputs(self) -> dict[str, ArraySpec]:
        """See :class:`Algorithm`."""
        return {name: ArraySpec((), "<f4") for name in ("q_taken", "q_best") if self.actor_priorities}

    def replay(self) -> Replay:
        """See :class:`Algorithm`."""
        return Replay(
            kind="prioritized" if self.prioritized else "uniform",
            capacity=self.replay_steps,
            warmup=self.warmup,
            batch=self.minibatch * self.minibatches,
            samples_per_insert=self.samples_per_insert,
            n_step=self.n_step,
            gamma=self.gamma,
            alpha=self.alpha,
            beta=self.beta,
            errors=self.actor_priorities,
            relabel=self.relabel,
            keep=self.keep_replay,
        )

    def policy(self, spaces: Spaces) -> QNetwork:
        """See :class:`Algorithm`."""
        from srl.policies.q_network import QNetwork

        spread, errors = self.epsilon_spread, self.actor_priorities
        return QNetwork(spaces, self, dueling=self.dueling, spread=spread, errors=errors)

    def learner(self, spaces: Spaces, seed: int, device: str) -> DQNLearner:
        """See :class:`Algorithm`."""
        with seeded(seed):
            return DQNLearner(self, self.policy(spaces).to(device), seed, device)


class DQNLearner(TorchLearner):
    """Trains a Q-network on samples drawn from a replay."""

    networks: ClassVar[tuple[str, ...]] = ("policy", "target")
    policy: QNetwork
    optimizer: Adam

    def __init__(self, config: DQN, policy: QNetwork, seed: int, device: str) -> None:
        import torch

        from srl.algorithms.adam import Adam

        self.config, self.policy, self.device = config, policy, device
        self.target: QNetwork = deepcopy(policy).requires_grad_(False)
        self.optimizer = Adam(policy, config.lr)
        self.generator = torch.Generator().manual_seed(seed)
        self.gradient_steps = 0

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
        self.anneal(config.lr, config.anneal_steps, steps)
        fields = {name: torch.from_numpy(array).to(self.device) for name, array in prepared.items()}
        # Spread over the shares the batch was drawn from, so that every minibatch is like the whole.
        parts = torch.randperm(config.minibatch * config.minibatches, generator=self.generator)
        sums, errors = torch.zeros(3), torch.empty(len(parts))
        for rows in parts.split(config.minibatch):  # type: ignore[no-untyped-call]
            if self.peers is None and interrupted():  # nobody leaves the others in the middle of an update
                return None
            if self.gradient_steps % config.target_every == 0:
                self._renew_target()
            error, found = self._step(self._part(fields, rows))
            errors[rows], sums = error.abs().cpu(), sums + found.cpu()
            self.gradient_steps += 1
        if self.peers is not None:
            self.peers.sum(sums.div_(self.peers.size))
        self.priorities = errors.numpy()
        share = min(1.0, steps / config.epsilon_steps) if config.epsilon_steps else 1.0
        self.policy.epsilon.fill_(1 + share * (config.epsilon - 1))
        means = dict(zip(("q_loss", "q_value", "grad_norm"), (sums / config.minibatches).tolist(), strict=True))
        return {**means, "epsilon": float(self.policy.epsilon)}

    def _renew_target(self) -> None:
        self.target.load_state_dict(self.policy.state_dict())

    def _part(self, fields: dict[str, Tensor], samples: Tensor) -> dict[str, Tensor]:
        """These samples of a batch."""
        return {name: field[:, samples] for name, field in fields.items()}

    def _step(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """One gradient step: errors of the samples; loss, mean value and length of the gradient."""
        import torch

        now, later = ({name: field[i] for name, field in batch.items()} for i in (0, 1))
        chosen = (now["action"].long() - self.policy.start).unsqueeze(-1)
        value = self.policy(now).gather(-1, chosen).squeeze(-1)
        with torch.no_grad():
            judged = self.target(later)
            best = self.policy.best(self.policy(later) if self.config.double else judged, later).unsqueeze(-1)
            goal = now["reward"] + now["discount"] * judged.gather(-1, best).squeeze(-1)
        each = torch.nn.functional.smooth_l1_loss(value, goal, reduction="none")
        return (goal - value).detach(), self._descend((each * now["weight"]).mean(), value)

    def _descend(self, loss: Tensor, value: Tensor) -> Tensor:
        """One step along the gradient: loss, mean value and length of the gradient."""
        import torch

        self.optimizer.zero_grad()
        if self.peers is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:  # minibatches are as large everywhere
            (loss / self.peers.size).backward()  # type: ignore[no-untyped-call]
            self.peers.sum(self.optimizer.grad)
        length = self.optimizer.clip(self.config.max_grad_norm)
        self.optimizer.step()
        return torch.tensor([loss.item(), value.mean().item(), length])

    def state(self) -> State:
        """See :class:`Learner`."""
        state = super().state()
        state.arrays["gradient_steps"] = np.array(self.gradient_steps)
        return state

    def load_state(self, state: State) -> None:
        """See :class:`Learner`."""
        super().load_state(state)
        self.gradient_steps = int(state.arrays["gradient_steps"])
