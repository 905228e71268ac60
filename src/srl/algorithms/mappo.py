"""PPO for teams (MAPPO, Yu et al. 2022): every agent acts by what it sees, one critic sees everything.

The critic is only there for training, so it may look at the state of the whole environment: the part of the observation
named ``central``, which the actor does not get. Agents may share one policy or have one each (``agents`` of the
experiment). Steps of agents that are dead are in no batch. The critic predicts normalised returns, and its output layer
is kept in step with that normalisation (PopArt).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from srl.algorithms.base import load_object
from srl.algorithms.ppo import PPO
from srl.core.errors import ConfigError
from srl.core.specs import ArraySpec, Spaces

if TYPE_CHECKING:
    from srl.policies.central import CentralActorCritic

CRITIC = "state/critic/"
"""What the names of the critic's memory begin with."""


@dataclass(frozen=True)
class MAPPO(PPO):
    """Hyper-parameters of MAPPO."""

    name: ClassVar[str] = "mappo"

    central: str = "state"
    """The part of the observation that only the critic sees."""
    critic_network: str = ""
    """module:Class of a network of one's own for the critic."""
    critic_memory: bool = False
    """Whether the critic has a memory like the actor's."""
    normalize_obs: bool = True
    """Scale vector observations by their running mean and variance."""
    normalize_return: bool = True
    """Let the value network predict returns scaled by their running mean and variance."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        """See :class:`Algorithm`."""
        import gymnasium

        super().check(spaces, batch_steps)
        parts = list(spaces.observation.spaces) if isinstance(spaces.observation, gymnasium.spaces.Dict) else []
        if self.critic_network:
            load_object(self.critic_network, "mappo.critic_network")
        elif self.central not in parts or len(parts) < 2:
            raise ConfigError(
                f"mappo needs an observation with a part {self.central!r} for the critic and others for the actor, "
                f"not {spaces.observation}; PettingZoo environments have one with state=True"
            )

    def memory_spec(self) -> dict[str, ArraySpec]:
        """See :class:`Algorithm`."""
        own = self.memory_fields()
        theirs = own if self.critic_memory else {}
        return {**own, **{name.replace("state/", CRITIC, 1): spec for name, spec in theirs.items()}}

    def policy(self, spaces: Spaces) -> CentralActorCritic:
        """See :class:`Algorithm`."""
        from srl.policies.central import CentralActorCritic

        norms = {"normalize_obs": self.normalize_obs, "normalize_return": self.normalize_return}
        critic = replace(self, network=self.critic_network, memory=self.memory if self.critic_memory else "")
        return CentralActorCritic(spaces, self, critic, self.central, log_std=self.log_std, **norms)
