"""The policy of actor-critic algorithms: an action distribution and a value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from srl.core.specs import Spaces
from srl.policies.distributions import ActionHead
from srl.policies.networks import Encoder, RunningNorm, fast_bfloat16, head


class ActorCritic(nn.Module):
    """Actor and critic: separate for vector observations, with a common trunk where there are images."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        log_std: float = 0.0,
        normalize_obs: bool = False,
        normalize_return: bool = False,
        precision: str = "float32",
    ) -> None:
        """``precision`` is that of the encoders; distributions and values are always computed in float32."""
        super().__init__()
        self.reduced = precision == "bfloat16" or (precision == "auto" and fast_bfloat16())
        spec = spaces.observation_spec()
        self.actor = Encoder(spec, hidden, activation, normalize=normalize_obs)
        self.critic: Encoder | None = None
        if not self.actor.images:
            self.critic = Encoder(spec, hidden, activation, normalize=False)
            self.critic.norm = self.actor.norm
        self.action = ActionHead(self.actor.out_features, spaces.action, log_std)
        self.value = head(self.actor.out_features, 1, 1.0)
        self.return_norm = RunningNorm((), limit=float("inf")) if normalize_return else None

    def forward(self, obs: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """Parameters of the action distribution, and the (normalised) value ``[rows]``."""
        if not self.reduced:
            features, seen = self._encode(obs)
        else:
            with torch.autocast(self.value.weight.device.type, torch.bfloat16):
                features, seen = self._encode(obs)
        return self.action(features.float()), self.value(seen.float()).squeeze(-1)

    def _encode(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        features = self.actor(obs)
        return features, features if self.critic is None else self.critic(obs)

    def act(self, obs: dict[str, Tensor], generator: torch.Generator | None) -> dict[str, Tensor]:
        """Actions (the likeliest ones without a generator), their log-probability, and the value in reward units."""
        params, value = self(obs)
        actions = self.action.draw(params, generator)
        value = value if self.return_norm is None else self.return_norm.inverse(value)
        return {**actions, "log_prob": self.action.log_prob(params, actions), "value": value}

    def evaluate(self, obs: dict[str, Tensor], actions: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of ``actions``, entropy, and the (normalised) value, each ``[rows]``."""
        params, value = self(obs)
        return self.action.log_prob(params, actions), self.action.entropy(params), value

    @torch.no_grad()
    def observe(self, obs: dict[str, Tensor], returns: Tensor) -> None:
        """Update the running normalisers with observations and returns ``[rows]``."""
        if self.actor.norm is not None:
            self.actor.norm.update(self.actor.flatten(obs))
        if self.return_norm is not None:
            self.return_norm.update(returns)
