"""The networks of soft actor-critic: a policy that is random where it may be, and two critics of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from srl.algorithms.base import NetworkOptions
from srl.core.errors import ConfigError
from srl.core.specs import Spaces
from srl.policies.distributions import Categorical
from srl.policies.networks import MLP, Encoder, Twins, head
from srl.policies.trunk import Trunk

_LOG_STD = -5.0, 2.0
"""Between which a log standard deviation is."""


class Squashed(nn.Module):
    """Normal distributions squeezed into the bounds of a Box by the hyperbolic tangent."""

    low: Tensor
    high: Tensor

    def __init__(self, features: int, space: gymnasium.spaces.Box) -> None:
        super().__init__()
        self.shape, self.width = space.shape, math.prod(space.shape)
        self.register_buffer("low", torch.from_numpy(space.low.reshape(-1).astype(np.float32)), False)
        self.register_buffer("high", torch.from_numpy(space.high.reshape(-1).astype(np.float32)), False)
        self.params = head(features, 2 * self.width, 0.01)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations, before the squeeze."""
        mean, raw = self.params(features).chunk(2, -1)
        low, high = _LOG_STD
        return mean, low + 0.5 * (high - low) * (raw.tanh() + 1)

    def draw(self, features: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Actions between -1 and 1 (the middle of the distribution without a generator) and their log-density."""
        mean, log_std = self(features)
        noise = torch.zeros_like(mean)
        if generator is not None:
            noise = torch.empty(mean.shape).normal_(generator=generator).to(mean.device)
        before = mean + log_std.exp() * noise
        squeezed = 2 * (math.log(2) - before - functional.softplus(-2 * before))
        density = -0.5 * (noise.square() + math.log(2 * math.pi)) - log_std - squeezed
        return before.tanh(), density.sum(-1)

    def stretch(self, action: Tensor) -> Tensor:
        """From -1 … 1 to the bounds of the space."""
        inside = self.low + 0.5 * (self.high - self.low) * (action + 1)
        return inside.reshape(-1, *self.shape)

    def shrink(self, action: Tensor) -> Tensor:
        """Back to -1 … 1."""
        flat = action.reshape(len(action), -1)
        return 2 * (flat - self.low) / (self.high - self.low) - 1


class SoftActor(nn.Module):
    """A policy for one Box or one Discrete action."""

    def __init__(self, spaces: Spaces, options: NetworkOptions) -> None:
        super().__init__()
        self.trunk = Trunk(spaces, options)
        width, space = self.trunk.out_features, spaces.action
        self.box = Squashed(width, space) if isinstance(space, gymnasium.spaces.Box) else None
        self.choice = Categorical(width, space, 0.0) if isinstance(space, gymnasium.spaces.Discrete) else None
        if self.box is None and self.choice is None:
            raise ConfigError(f"sac acts in a Box or a Discrete space, not in {space}")

    def act(self, inputs: dict[str, Tensor], generator: torch.Generator | None) -> dict[str, Tensor]:
        """Actions: random ones, or the likeliest without a generator."""
        features, _ = self.trunk(inputs)
        if self.box is not None:
            return {"action": self.box.stretch(self.box.draw(features, generator)[0])}
        assert self.choice is not None
        params = self.choice(features, inputs.get("mask"))
        return {"action": self.choice.mode(params) if generator is None else self.choice.sample(params, generator)}

    def taken(self, inputs: dict[str, Tensor]) -> Tensor:
        """The actions among ``inputs`` as the critics see them: between -1 and 1, or as an index ``[rows, 1]``."""
        action = inputs["action"]
        if self.box is not None:
            return self.box.shrink(action)
        assert self.choice is not None
        index = action.long().reshape(-1, 1)
        return index if self.choice.start is None else index - self.choice.start


class Critics(nn.Module):
    """Two estimates of what an action is worth; the lesser is the one to trust (Fujimoto et al. 2018)."""

    def __init__(self, spaces: Spaces, options: NetworkOptions) -> None:
        super().__init__()
        self.encoder = Encoder(spaces.observation, (), options.activation, normalize=False, twins=False)
        space = spaces.action
        self.discrete = isinstance(space, gymnasium.spaces.Discrete)
        inputs = self.encoder.out_features + (0 if self.discrete else math.prod(space.shape or ()))
        hidden: Sequence[int] = options.hidden
        self.mlp = MLP(inputs, hidden, options.activation, twins=True)
        self.last = Twins(self.mlp.out_features, int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 1)

    def forward(self, inputs: dict[str, Tensor], action: Tensor | None = None) -> Tensor:
        """``[2, rows]`` of these actions between -1 and 1, or ``[2, rows, choices]`` of all choices."""
        seen = self.encoder(inputs)
        worth: Tensor = self.last(self.mlp(seen if action is None else torch.cat([seen, action], -1)))
        return worth if self.discrete else worth.squeeze(-1)
