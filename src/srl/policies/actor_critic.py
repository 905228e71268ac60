"""The policy of actor-critic algorithms: an action distribution and a value."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from srl.algorithms.base import NetworkOptions, Peers
from srl.core.specs import Spaces
from srl.policies.distributions import ActionHead
from srl.policies.eye import Eye, eye
from srl.policies.networks import RunningNorm, head
from srl.policies.small import Small, small
from srl.policies.trunk import Trunk


class ActorCritic(nn.Module):
    """Actor and critic: separate for vector observations, with a common trunk where it is large or remembers."""

    def __init__(
        self,
        spaces: Spaces,
        options: NetworkOptions,
        *,
        log_std: float = 0.0,
        normalize_obs: bool = False,
        normalize_return: bool = False,
        twins: bool = True,
    ) -> None:
        super().__init__()
        self.trunk = Trunk(spaces, options, normalize=normalize_obs, twins=twins)
        self.action = ActionHead(self.trunk.out_features, spaces, log_std)
        self.value = head(self.trunk.out_features, 1, 1.0)
        self.return_norm = RunningNorm((), limit=float("inf")) if normalize_return else None
        self.own_networks = options.own_network
        self.by_hand = not spaces.masked
        """Whether :mod:`srl.policies.small` may be used."""
        self._small: Small | None = None
        self._eye: Eye | Literal[False] | None = False
        """False: it has not been looked at yet."""
        self._looked = -1
        self._anchor = (self.value.weight,)  # a tuple: looking a weight up in a module takes a while

    def act(self, inputs: dict[str, Tensor], generator: torch.Generator | None) -> dict[str, Tensor]:
        """Actions (the likeliest ones without a generator), their log-probability, and the value in reward units."""
        features, state = self.trunk(inputs)
        params, value = self.heads(features, inputs)
        actions = self.action.draw(params, generator)
        found = {"log_prob": self.action.log_prob(params, actions), "value": self.in_rewards(value)}
        return {**actions, **state, **found}

    def in_rewards(self, value: Tensor) -> Tensor:
        """A (normalised) value in units of the reward."""
        return value if self.return_norm is None else self.return_norm.inverse(value)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which look for themselves what can be done in C."""
        return {**self.__dict__, "_small": None, "_eye": False, "_looked": -1}

    def small(self) -> Small | None:
        """The same in C, where that is faster."""
        if not self.by_hand:
            return None
        place = self._anchor[0].data_ptr()
        if self._looked != place:  # the first time, or the weights have moved
            self._small, self._eye, self._looked = small(self), False, place
        return self._small

    def acting(self) -> Small | Eye | None:
        """Acting in C, where that is faster."""
        found = self.small()
        if found is not None or not self.by_hand:
            return found
        if self._eye is False:
            self._eye = eye(self)
        return self._eye

    def evaluate(
        self, inputs: dict[str, Tensor], state: dict[str, Tensor], keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the actions among ``inputs``, entropy, and the (normalised) value, each ``[rows]``.

        With a memory, ``inputs`` are whole chunks, step by step, that begin with ``state``. Only the entries ``keep``
        are returned.
        """
        features, _ = self.trunk.unroll(inputs, state)
        if keep is not None:
            features = features[keep]
            inputs = {name: value[keep] for name, value in inputs.items()}
        params, value = self.heads(features, inputs)
        return self.action.log_prob(params, inputs), self.action.entropy(params), value

    def heads(self, features: Tensor, inputs: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """Parameters of the action distribution, and the (normalised) value."""
        actor, critic = features.unbind(0) if self.trunk.twins else (features, features)
        return self.action(actor, inputs), self.value(critic).squeeze(-1)

    @torch.no_grad()
    def observe(self, obs: dict[str, Tensor], returns: Tensor, peers: Peers | None = None) -> None:
        """Update the running normalisers with observations and returns ``[rows]``, and with those of ``peers``."""
        self.trunk.observe(obs, peers)
        if self.return_norm is not None:
            self.return_norm.update(returns, peers)
