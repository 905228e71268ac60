"""Recurrent Q-learning from a replay (R2D2, Kapturowski et al. 2019).

The replay keeps windows of steps with what the policy remembered before the first of them. That memory is of an older
policy; so the first ``burn_in`` steps of a window only serve to bring it up to date, and the next ``chunk`` steps are
learned from: double Q-learning over ``n_step`` steps, on values that are squeezed so that rewards need no clipping.
Windows are drawn by a mix of the largest and the mean error of their steps. Every row explores with a probability of
its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from srl.algorithms.base import Replay, seeded
from srl.algorithms.dqn import DQN, DQNLearner
from srl.algorithms.returns import transitions
from srl.core.errors import ConfigError
from srl.core.slab import Batch
from srl.core.specs import Array, Arrays, ArraySpec, Spaces

if TYPE_CHECKING:
    from torch import Tensor

    from srl.policies.q_network import QNetwork

    Tensors = dict[str, Tensor]

_LINEAR = 1e-3
"""Of squeezed values: the part that is not squeezed."""
_OF_TEAMS = "team/"
"""What names of fields begin with that have one entry a sample, however many agents there are in it."""


@dataclass(frozen=True)
class R2D2(DQN):
    """Hyper-parameters of R2D2."""

    name: ClassVar[str] = "r2d2"

    horizon: int = 80
    """Steps in a block: what an actor collects before handing over."""
    memory: str = "lstm"
    """Recurrent layer after the encoder: lstm, gru, or none."""
    chunk: int = 20
    """Steps of a window that are learned from; the memory is kept as often."""
    burn_in: int = 10
    """Steps of a window before those, which only bring the memory up to date."""
    minibatch: int = 32
    """Windows per gradient step."""
    minibatches: int = 4
    """Gradient steps between two versions: as many minibatches are drawn at once."""
    squeeze: bool = True
    """Learn sign(v) (sqrt(|v| + 1) - 1) instead of a value v: large ones then differ less."""
    eta: float = 0.9
    """What the largest error of a window counts for in its priority; the mean error counts for the rest."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        """See :class:`Algorithm`."""
        super().check(spaces, batch_steps)
        self.check_least(burn_in=0, chunk=1)
        self.check_share("eta")
        if self.actor_priorities:
            raise ConfigError(f"{self.name} has priorities of windows; leave out {self.name}.actor_priorities")
        if self.burn_in + self.chunk > self.horizon:
            name, length = self.name, self.burn_in + self.chunk
            raise ConfigError(f"a window of {length} steps ({name}.burn_in + chunk) is longer than {name}.horizon")

    def memory_spec(self) -> dict[str, ArraySpec]:
        """See :class:`Algorithm`."""
        return self.memory_fields()

    @property
    def chunk_steps(self) -> int:
        """See :class:`Algorithm`."""
        return self.chunk

    def replay(self) -> Replay:
        """See :class:`Algorithm`."""
        return replace(super().replay(), window=self.burn_in + self.chunk, stride=self.chunk, burn_in=self.burn_in)

    def learner(self, spaces: Spaces, seed: int, device: str) -> R2D2Learner:
        """See :class:`Algorithm`."""
        with seeded(seed):
            return R2D2Learner(self, self.policy(spaces).to(device), seed, device)


class R2D2Learner(DQNLearner):
    """Trains a recurrent Q-network on windows drawn from a replay."""

    config: R2D2
    agents = 1
    """Rows of a sample."""

    def prepare(self, batch: Batch) -> Arrays:
        """See :class:`Learner`: views of the batch, and what became of every step that is learned from."""
        (block,) = batch.blocks
        fields, config = batch.slab.block(block), self.config
        later = {name: fields[name][config.burn_in :] for name in ("valid", "first")}
        ends = {name: fields[name][config.burn_in : -1] for name in ("reward", "terminated", "truncated")}
        ends, later, alive = teams(ends, later, self.agents)
        found = transitions(**ends, **later, gamma=config.gamma, n_step=config.n_step)
        named = {"reward": found.reward, "after": found.after, "discount": found.discount, "known": found.known}
        named["weight"] = fields["weight"][:1, :: self.agents]
        return {**fields, "alive": alive, **{_OF_TEAMS + name: each for name, each in named.items()}}

    def _part(self, fields: Tensors, samples: Tensor) -> Tensors:
        import torch

        rows = (samples[:, None] * self.agents + torch.arange(self.agents)).reshape(-1)
        return {name: each[:, samples if name.startswith(_OF_TEAMS) else rows] for name, each in fields.items()}

    def _step(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """See :class:`DQNLearner`."""
        import torch

        burn_in = self.config.burn_in
        values = self._values(self.policy, batch)
        with torch.no_grad():
            judged = self._values(self.target, batch)
            learned = {name: each[burn_in:] for name, each in batch.items() if name == "mask"}
            best = self.policy.best(values.detach() if self.config.double else judged, learned)
            follows = self._joined(judged.gather(-1, best.unsqueeze(-1)).squeeze(-1), batch, target=True)
            follows = self._grown(follows.gather(0, batch["team/after"].long()))
            goal = self._squeezed(self._paid(batch["team/reward"]) + batch["team/discount"] * follows)
        chosen = (batch["action"][burn_in:-1].long() - self.policy.start).unsqueeze(-1)
        value = self._joined(values[:-1].gather(-1, chosen).squeeze(-1), batch, target=False)
        known = batch["team/known"].float()
        each = torch.nn.functional.smooth_l1_loss(value, goal, reduction="none") * known * batch["team/weight"]
        error = ((goal - value).detach() * known).abs()
        mean = error.sum(0) / known.sum(0).clamp(min=1)
        priority = self.config.eta * error.amax(0) + (1 - self.config.eta) * mean
        return priority, self._descend(each.sum() / known.sum().clamp(min=1), self._grown(value.detach()))

    def _values(self, network: QNetwork, batch: Tensors) -> Tensor:
        """Values ``[chunk + 1, rows, actions]`` of what was seen after the burn-in."""
        import torch

        burn_in, steps = self.config.burn_in, self.config.chunk + 1
        state = {name: each[0] for name, each in batch.items() if name.startswith("state/")}
        inputs = {name: each for name, each in batch.items() if name.split("/")[0] in ("obs", "first", "valid")}
        if burn_in and state:
            with torch.no_grad():
                before = {name: each[:burn_in].flatten(0, 1) for name, each in inputs.items()}
                _, state = network.trunk.unroll(before, state)
        features, _ = network.trunk.unroll({name: each[burn_in:].flatten(0, 1) for name, each in inputs.items()}, state)
        values = network.values(features)
        return values.reshape(steps, -1, values.shape[-1])

    def _joined(self, values: Tensor, batch: Tensors, *, target: bool) -> Tensor:
        """What the rows of a sample are worth together: here there is one."""
        return values

    def _paid(self, reward: Tensor) -> Tensor:
        """What a reward counts for."""
        return reward

    def _squeezed(self, value: Tensor) -> Tensor:
        if not self.config.squeeze:
            return value
        return value.sign() * ((value.abs() + 1).sqrt() - 1) + _LINEAR * value

    def _grown(self, value: Tensor) -> Tensor:
        """The values that :meth:`_squeezed` makes ``value`` of."""
        if not self.config.squeeze:
            return value
        root = (1 + 4 * _LINEAR * (value.abs() + 1 + _LINEAR)).sqrt()
        return value.sign() * (((root - 1) / (2 * _LINEAR)).square() - 1)


def teams(ends: Arrays, flags: Arrays, agents: int) -> tuple[Arrays, Arrays, Array]:
    """Rewards and ends of whole teams, their flags, and which rows take part, of steps ``[T, teams * agents]``.

    A team's reward is the mean of its agents'. Its episode is over when all agents that were still there have ended;
    it is terminated if one of those was.
    """
    by_team = {name: each.reshape(len(each), -1, agents) for name, each in {**ends, **flags}.items()}
    valid, ended = by_team["valid"], by_team["terminated"] | by_team["truncated"]
    acts: Array = np.any(valid, -1)
    over: Array = np.any(ended, -1) & np.all(ended | ~valid[:-1], -1)
    terminated: Array = over & np.any(by_team["terminated"], -1)
    found = {"reward": by_team["reward"].mean(-1), "terminated": terminated, "truncated": over & ~terminated}
    alive = valid.copy()
    for t in range(1, len(alive)):  # what is seen after the end is worth something to those who saw the end
        alive[t] = np.where(acts[t, :, None], alive[t], alive[t - 1])
    return found, {"valid": acts, "first": np.any(by_team["first"], -1)}, alive.reshape(len(alive), -1)
