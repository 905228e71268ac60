"""What only training sees: a part of the observation that a team's critic or mixer may look at, and nobody else."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import torch
from torch import Tensor, nn

from srl.algorithms.base import NetworkOptions, Peers
from srl.algorithms.mappo import CRITIC
from srl.core.specs import Spaces
from srl.policies.actor_critic import ActorCritic
from srl.policies.networks import Encoder, head
from srl.policies.trunk import Trunk


def has(spaces: Spaces, central: str) -> bool:
    """Whether the observation has a part of this name."""
    return isinstance(spaces.observation, gymnasium.spaces.Dict) and central in spaces.observation.spaces


def without(spaces: Spaces, central: str) -> Spaces:
    """The spaces as an agent sees them: without the part that is for training only."""
    if not has(spaces, central):
        return spaces
    assert isinstance(spaces.observation, gymnasium.spaces.Dict)
    kept = {name: space for name, space in spaces.observation.spaces.items() if name != central}
    return replace(spaces, observation=gymnasium.spaces.Dict(kept))


class CentralActorCritic(ActorCritic):
    """An actor that sees what its agent sees, and a critic that sees everything.

    Each has a memory of its own, if ``critic.memory`` says so. The critic's output layer is kept in step with the
    normalisation of returns, so that what it says stays the same when that moves (PopArt, van Hasselt et al. 2016).
    """

    def __init__(
        self,
        spaces: Spaces,
        options: NetworkOptions,
        critic: NetworkOptions,
        central: str,
        *,
        log_std: float = 0.0,
        normalize_obs: bool = False,
        normalize_return: bool = False,
    ) -> None:
        norms = {"normalize_obs": normalize_obs, "normalize_return": normalize_return}
        super().__init__(without(spaces, central), options, log_std=log_std, twins=False, **norms)
        self.critic = Trunk(spaces, critic, normalize=normalize_obs)
        self.value = head(self.critic.out_features, 1, 1.0)
        self.own_networks = options.own_network and critic.own_network
        self.by_hand = False

    def act(self, inputs: dict[str, Tensor], generator: torch.Generator | None) -> dict[str, Tensor]:
        """See :class:`ActorCritic`."""
        judged, theirs = self.critic({**inputs, **_critics(inputs)})
        features, state = self.trunk(inputs)
        params = self.action(features, inputs)
        actions = self.action.draw(params, generator)
        value = self.value(judged).squeeze(-1)
        found = {"log_prob": self.action.log_prob(params, actions), "value": self.in_rewards(value)}
        kept = {name.replace("state/", CRITIC, 1): each for name, each in theirs.items()}
        return {**actions, **state, **kept, **found}

    def evaluate(
        self, inputs: dict[str, Tensor], state: dict[str, Tensor], keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`ActorCritic`."""
        features, _ = self.trunk.unroll(inputs, {name: each for name, each in state.items() if CRITIC not in name})
        judged, _ = self.critic.unroll(inputs, _critics(state))
        if keep is not None:
            features, judged = features[keep], judged[keep]
            inputs = {name: value[keep] for name, value in inputs.items()}
        params = self.action(features, inputs)
        return self.action.log_prob(params, inputs), self.action.entropy(params), self.value(judged).squeeze(-1)

    def heads(self, features: Tensor, inputs: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """See :class:`ActorCritic`; of a critic without a memory."""
        return self.action(features, inputs), self.value(self.critic.encode(inputs)).squeeze(-1)

    @torch.no_grad()
    def observe(self, obs: dict[str, Tensor], returns: Tensor, peers: Peers | None = None) -> None:
        """See :class:`ActorCritic`."""
        self.critic.observe(obs, peers)
        norm = self.return_norm
        if norm is None:
            super().observe(obs, returns, peers)
            return
        std, mean = norm.std(), norm.mean.float().clone()
        super().observe(obs, returns, peers)
        self.value.weight.mul_(std / norm.std())
        self.value.bias.mul_(std).add_(mean - norm.mean.float()).div_(norm.std())


def _critics(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """The critic's memory under the names that a memory goes by."""
    return {name.replace(CRITIC, "state/", 1): each for name, each in fields.items() if name.startswith(CRITIC)}


class Mixer(nn.Module):
    """What a team is worth, from what its agents are worth: the sum (VDN), or with ``embed`` a network (QMIX).

    The network's weights come from the state and none is negative where an agent's value goes in: what is best for the
    team is best for each of its agents, so each can choose alone.
    """

    def __init__(self, spaces: Spaces, central: str, embed: int) -> None:
        super().__init__()
        self.agents, self.embed, self.central = spaces.agents, embed, has(spaces, central)
        if not embed:
            return
        if self.central:
            assert isinstance(spaces.observation, gymnasium.spaces.Dict)
            seen: gymnasium.Space[object] = gymnasium.spaces.Dict({central: spaces.observation[central]})
        else:
            seen = spaces.observation
        self.encoder = Encoder(seen, (), "relu", normalize=False, twins=False)
        width = self.encoder.out_features * (1 if self.central else self.agents)
        self.shift = nn.Linear(width, embed)
        self.first, self.second, self.last = (
            nn.Sequential(nn.Linear(width, 2 * embed), nn.ReLU(), nn.Linear(2 * embed, outputs))
            for outputs in (self.agents * embed, embed, 1)
        )

    def forward(self, values: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """``[samples]`` from the agents' values ``[samples, agents]`` and observations ``[samples * agents, …]``."""
        if not self.embed:
            return values.sum(-1)
        state = self.state(inputs)
        weights = self.first(state).abs().unflatten(-1, (self.agents, self.embed))
        hidden = nn.functional.elu(torch.einsum("sa,sae->se", values, weights) + self.shift(state))
        return (hidden * self.second(state).abs()).sum(-1) + self.last(state).squeeze(-1)  # type: ignore[no-any-return]

    def state(self, inputs: dict[str, Tensor]) -> Tensor:
        """What the mixer sees: the state, or what all agents see side by side."""
        seen = inputs
        if self.central:  # all agents have the same
            seen = {name: each[:: self.agents] for name, each in inputs.items()}
        features: Tensor = self.encoder(seen)
        return features if self.central else features.reshape(-1, self.agents * features.shape[-1])
