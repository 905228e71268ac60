"""Action distributions: one head per leaf of the action space, their log-probabilities added up.

A head turns features into the parameters of its distribution (one tensor), and everything else is a function of
that tensor: sampling, the most likely action, log-probability and entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from srl.core.errors import ConfigError
from srl.core.specs import Spaces, choices_of, leaves
from srl.policies.networks import head

_LOG_2PI = math.log(2 * math.pi)


class Categorical(nn.Module):
    """One choice, or several at once, each between a number of values: Discrete and MultiDiscrete spaces."""

    start: Tensor | None
    """The least value of each choice, unless all are 0."""

    def __init__(self, features: int, space: gymnasium.Space[Any], _: float) -> None:
        super().__init__()
        self.shape = space.shape or ()
        self.counts = list(choices_of(space))
        start = np.broadcast_to(np.asarray(getattr(space, "start", 0)).reshape(-1), (len(self.counts),))
        self.register_buffer("start", torch.from_numpy(start.astype(np.int64)) if start.any() else None, False)
        self.logits = head(features, sum(self.counts), 0.01)

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Log-probabilities of all values of all choices side by side, ``[rows, sum of counts]``."""
        parts = self._parts(self.logits(features))
        if mask is not None:
            allowed = [part | ~part.any(-1, keepdim=True) for part in self._parts(mask)]
            parts = [part.masked_fill(~may, -torch.inf) for part, may in zip(parts, allowed, strict=True)]
        found = [torch.log_softmax(part, -1) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def _parts(self, values: Tensor) -> Sequence[Tensor]:
        """What belongs to each choice."""
        return [values] if len(self.counts) == 1 else torch.split(values, self.counts, -1)

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """Random actions: in every choice the first of n exponential races to finish."""
        race = torch.empty_like(params).exponential_(generator=generator)
        return self._best(params.exp() / race)

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest actions."""
        return self._best(params)

    def _best(self, scores: Tensor) -> Tensor:
        best = [part.argmax(-1, keepdim=True) for part in self._parts(scores)]
        whole = best[0] if len(best) == 1 else torch.cat(best, -1)
        return (whole if self.start is None else whole + self.start).reshape(-1, *self.shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-probability of ``action``, ``[rows]``."""
        chosen = action.reshape(len(action), -1).long()
        chosen = chosen if self.start is None else chosen - self.start
        if len(self.counts) == 1:
            return params.gather(-1, chosen).squeeze(-1)
        parts = zip(self._parts(params), chosen.split(1, -1), strict=True)  # type: ignore[no-untyped-call]
        return _total([part.gather(-1, index).squeeze(-1) for part, index in parts])

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy, ``[rows]``."""
        return (params.exp() * params.clamp(min=torch.finfo(params.dtype).min)).sum(-1).neg()


class Bernoulli(nn.Module):
    """Independent yes-or-no choices: a MultiBinary space."""

    def __init__(self, features: int, space: gymnasium.spaces.MultiBinary, _: float) -> None:
        super().__init__()
        self.shape = space.shape
        self.logits = head(features, math.prod(space.shape), 0.01)

    def forward(self, features: Tensor, _: Tensor | None) -> Tensor:
        """Log-odds ``[rows, choices]``."""
        found: Tensor = self.logits(features)
        return found

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """Random actions."""
        luck = torch.empty_like(params).uniform_(generator=generator)
        return (luck < params.sigmoid()).reshape(-1, *self.shape)

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest actions."""
        return (params > 0).reshape(-1, *self.shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-probability of ``action``, ``[rows]``."""
        sign = action.reshape(len(action), -1).to(params.dtype) * 2 - 1
        return functional.logsigmoid(sign * params).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy, ``[rows]``."""
        return (functional.softplus(params) - params * params.sigmoid()).sum(-1)


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

    def forward(self, features: Tensor, _: Tensor | None) -> Tensor:
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
    gymnasium.spaces.Discrete: Categorical,
    gymnasium.spaces.MultiDiscrete: Categorical,
    gymnasium.spaces.MultiBinary: Bernoulli,
    gymnasium.spaces.Box: Gaussian,
}


class ActionHead(nn.Module):
    """The distribution over a whole action space."""

    def __init__(self, features: int, spaces: Spaces, log_std: float) -> None:
        super().__init__()
        self.names: list[str] = []
        heads = []
        for name, leaf, _ in leaves("action", spaces.action):
            if type(leaf) not in _HEADS:
                known = ", ".join(kind.__name__ for kind in _HEADS)
                raise ConfigError(f"no distribution for the action space {leaf} at {name!r}; supported: {known}")
            if isinstance(leaf, gymnasium.spaces.Box) and leaf.dtype.kind != "f":
                raise ConfigError(f"no distribution for whole numbers in a Box at {name!r}; use MultiDiscrete")
            self.names.append(name)
            heads.append(_HEADS[type(leaf)](features, leaf, log_std))
        self.heads = nn.ModuleList(heads)
        self.masks = [name.replace("action", "mask", 1) for name in self.names]

    def forward(self, features: Tensor, inputs: dict[str, Tensor]) -> list[Tensor]:
        """The parameters of every leaf's distribution; actions masked out have probability 0."""
        return [each(features, inputs.get(mask)) for each, mask in zip(self.heads, self.masks, strict=True)]

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
