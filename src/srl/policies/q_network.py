"""The policy of value-based algorithms: the worth of every action, and now and then a random one."""

from __future__ import annotations

import gymnasium
import torch
from torch import Tensor, nn

from srl.algorithms.base import NetworkOptions
from srl.core.errors import ConfigError
from srl.core.specs import Spaces
from srl.policies.networks import head
from srl.policies.trunk import Trunk


class QNetwork(nn.Module):
    """Values of all actions of a Discrete space; with ``dueling`` as a state's value plus advantages.

    With ``errors`` it also says what it thought of the action it took and of the best, for a replay's first priorities.
    ``epsilon`` is a buffer, so it travels from the trainer with the weights. Rows explore differently: the row of rank
    r (0 to 1) acts at random with probability epsilon^(1 + spread · r).
    """

    epsilon: Tensor

    def __init__(
        self, spaces: Spaces, options: NetworkOptions, *, dueling: bool, spread: float, errors: bool = False
    ) -> None:
        super().__init__()
        if not isinstance(spaces.action, gymnasium.spaces.Discrete):
            raise ConfigError(f"only a Discrete action space has a value for each action, not {spaces.action}")
        self.start, self.spread, self.errors = int(spaces.action.start), spread, errors
        self.trunk = Trunk(spaces, options)
        self.advantage = head(self.trunk.out_features, int(spaces.action.n), 0.01)
        self.value = head(self.trunk.out_features, 1, 1.0) if dueling else None
        self.register_buffer("epsilon", torch.ones(()))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Values ``[rows, actions]``."""
        return self.values(self.trunk(inputs)[0])

    def values(self, features: Tensor) -> Tensor:
        """Values ``[rows, actions]`` from features."""
        values: Tensor = self.advantage(features)
        return values if self.value is None else self.value(features) + values - values.mean(-1, keepdim=True)

    def best(self, values: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Index of the best allowed action."""
        allowed = inputs.get("mask")
        if allowed is not None:
            values = values.masked_fill(~(allowed | ~allowed.any(-1, keepdim=True)), -torch.inf)
        return values.argmax(-1)

    def act(self, inputs: dict[str, Tensor], generator: torch.Generator | None) -> dict[str, Tensor]:
        """The best actions; with a generator some are random."""
        features, state = self.trunk(inputs)
        values = self.values(features)
        chosen = best = self.best(values, inputs)
        if generator is not None:
            noise = torch.empty_like(values).uniform_(generator=generator)
            luck = torch.empty(len(values)).uniform_(generator=generator)
            bold = luck < self.epsilon ** (1 + self.spread * inputs["rank"])
            chosen = torch.where(bold, self.best(noise, inputs), chosen)
        found = {"action": chosen + self.start, **state}
        if self.errors:
            found |= {"q_taken": _of(values, chosen), "q_best": _of(values, best)}
        return found


def _of(values: Tensor, chosen: Tensor) -> Tensor:
    return values.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
