"""Action distributions: one head per leaf of the action space, their log-probabilities added up.

A head turns features into the parameters of its distribution (one tensor), and everything else is a function of
that tensor: sampling, the most likely action, log-probability and entropy.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from srl.core.errors import ConfigError
from srl.core.specs import leaves
from srl.policies.networks import head

_LOG_2PI = math.log(2 * math.pi)


class Discrete(nn.Module):
    """A choice between ``n`` actions."""

    def __init__(self, features: int, space: gymnasium.spaces.Discrete[Any], _: float) -> None:
        super().__init__()
        self.start = int(space.start)
        self.logits = head(features, int(space.n), 0.01)

    def forward(self, features: Tensor) -> Tensor:
        """Log-probabilities ``[rows, n]``."""
        return torch.log_softmax(self.logits(features), -1)

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """Random actions: the first of n exponential races to finish."""
        race = torch.empty_like(params).exponential_(generator=generator)
        return (params.exp() / race).argmax(-1) + self.start

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest actions."""
        return params.argmax(-1) + self.start

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-probability of ``action``, ``[rows]``."""
        return params.gather(-1, (action - self.start).unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy, ``[rows]``."""
        return -(params.exp() * params).sum(-1)


class Gaussian(nn.Module):
    """Independent normal distributions with a learned spread that does not depend on the observation.

    Actions are stored as drawn; the environment adapter clips them to the space's bounds.
    """

    def __init__(self, features: int, space: gymnasium.spaces.Box, log_std: float) -> None:
        super().__init__()
        self.shape = space.shape
        width = math.prod(space.shape)
        self.mean = head(features, width, 0.01)
        self.log_std = nn.Parameter(torch.full((width,), log_std))

    def forward(self, features: Tensor) -> Tensor:
        """Means and log standard deviations side by side, ``[rows, 2 * width]``."""
        mean = self.mean(features)
        return torch.cat([mean, self.log_std.expand_as(mean)], -1)

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """Random actions."""
        mean, log_std = params.chunk(2, -1)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return (mean + log_std.exp() * noise).reshape(-1, *self.shape)

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest actions."""
        return params.chunk(2, -1)[0].reshape(-1, *self.shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-density of ``action``, ``[rows]``."""
        mean, log_std = params.chunk(2, -1)
        scaled = (action.reshape(len(action), -1) - mean) * (-log_std).exp()
        return (-0.5 * (scaled.square() + _LOG_2PI) - log_std).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Differential entropy, ``[rows]``."""
        return (params.chunk(2, -1)[1] + 0.5 * (1 + _LOG_2PI)).sum(-1)


_HEADS: dict[type[gymnasium.Space[Any]], Any] = {
    gymnasium.spaces.Discrete: Discrete,
    gymnasium.spaces.Box: Gaussian,
}


class ActionHead(nn.Module):
    """The distribution over a whole action space."""

    def __init__(self, features: int, space: gymnasium.Space[Any], log_std: float) -> None:
        super().__init__()
        self.names: list[str] = []
        heads = []
        for name, leaf, _ in leaves("action", space):
            if type(leaf) not in _HEADS:
                known = ", ".join(kind.__name__ for kind in _HEADS)
                raise ConfigError(f"no distribution for the action space {leaf} at {name!r}; supported: {known}")
            self.names.append(name)
            heads.append(_HEADS[type(leaf)](features, leaf, log_std))
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Tensor) -> list[Tensor]:
        """The parameters of every leaf's distribution."""
        return [each(features) for each in self.heads]

    def draw(self, params: list[Tensor], generator: torch.Generator | None) -> dict[str, Tensor]:
        """Actions by name: random ones, or the likeliest without a generator."""
        found = {}
        for name, each, part in zip(self.names, self._heads(), params, strict=True):
            found[name] = each.mode(part) if generator is None else each.sample(part, generator)
        return found

    def log_prob(self, params: list[Tensor], actions: dict[str, Tensor]) -> Tensor:
        """Log-probability of the whole action, ``[rows]``."""
        parts = zip(self.names, self._heads(), params, strict=True)
        return _total([each.log_prob(part, actions[name]) for name, each, part in parts])

    def entropy(self, params: list[Tensor]) -> Tensor:
        """Entropy of the whole action, ``[rows]``."""
        return _total([each.entropy(part) for each, part in zip(self._heads(), params, strict=True)])

    def _heads(self) -> list[Any]:
        return list(self.heads)


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
