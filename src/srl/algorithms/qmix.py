"""Teams that share a reward: value decomposition (VDN, Sunehag et al. 2018; QMIX, Rashid et al. 2018).

All agents of a team have one Q-network and each acts by its own values alone, with a memory if it is given one. What is
learned is what the team is worth: the sum of its agents' values (VDN), or a network of them whose weights depend on the
state of the whole environment (QMIX). The replay draws all agents of a copy of the environment together.

The state is the part of the observation that is named ``central``; agents do not see it. Without one the mixer sees
what all agents see.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from srl.algorithms.base import Replay, seeded
from srl.algorithms.r2d2 import R2D2, R2D2Learner
from srl.core.errors import ConfigError
from srl.core.specs import Spaces

if TYPE_CHECKING:
    from torch import Tensor

    from srl.policies.central import Mixer
    from srl.policies.q_network import QNetwork


@dataclass(frozen=True)
class QMIX(R2D2):
    """Hyper-parameters of QMIX."""

    name: ClassVar[str] = "qmix"

    horizon: int = 32
    """Steps in a block: what an actor collects before handing over."""
    memory: str = ""
    """Recurrent layer after the encoder: lstm, gru, or none."""
    chunk: int = 8
    """Steps of a window that are learned from; the memory is kept as often."""
    burn_in: int = 0
    """Steps of a window before those, which only bring the memory up to date."""
    n_step: int = 1
    """Rewards summed up before the value of what follows is used."""
    prioritized: bool = False
    """Draw samples with large errors more often."""
    dueling: bool = False
    """Learn an observation's value apart from the advantages of actions."""
    squeeze: bool = False
    """Learn sign(v) (sqrt(|v| + 1) - 1) instead of a value v: large ones then differ less."""
    embed: int = 32
    """Width of the mixer's hidden layer."""
    normalize_reward: bool = False
    """Shift and scale rewards to mean 0 and variance 1. For long or endless episodes: where an episode may end early,
    the shift changes what is best. A mixer of values that are all far below 0 hardly learns without it."""
    central: str = "state"
    """The part of the observation that only the mixer sees."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        """See :class:`Algorithm`."""
        import gymnasium

        super().check(spaces, batch_steps)
        if not isinstance(spaces.action, gymnasium.spaces.Discrete):
            raise ConfigError(
                f"{self.name} gives every action a value; that takes a Discrete space, not {spaces.action}"
            )
        if self.prioritized:
            raise ConfigError(f"{self.name} draws whole teams, all alike; leave out {self.name}.prioritized")

    def replay(self) -> Replay:
        """See :class:`Algorithm`."""
        return replace(super().replay(), teams=True)

    def policy(self, spaces: Spaces) -> QNetwork:
        """See :class:`Algorithm`."""
        from srl.policies.central import without

        return super().policy(without(spaces, self.central))

    def mixer(self, spaces: Spaces) -> Mixer:
        """What joins the values of the agents."""
        from srl.policies.central import Mixer

        return Mixer(spaces, self.central, self.embed)

    def learner(self, spaces: Spaces, seed: int, device: str) -> QMIXLearner:
        """See :class:`Algorithm`."""
        with seeded(seed):
            return QMIXLearner(self, spaces, seed, device)


@dataclass(frozen=True)
class VDN(QMIX):
    """Hyper-parameters of VDN: QMIX that just adds up."""

    name: ClassVar[str] = "vdn"

    embed: int = 0
    """There is no mixer."""


class QMIXLearner(R2D2Learner):
    """Trains the Q-network of a team, and the mixer of its values."""

    config: QMIX
    networks: ClassVar[tuple[str, ...]] = ("policy", "target", "mixer", "target_mixer", "rewards")

    def __init__(self, config: QMIX, spaces: Spaces, seed: int, device: str) -> None:
        import torch

        from srl.algorithms.adam import Adam
        from srl.policies.networks import RunningNorm

        super().__init__(config, config.policy(spaces).to(device), seed, device)
        self.agents = spaces.agents
        self.mixer = config.mixer(spaces).to(device)
        self.rewards = RunningNorm(()).to(device)
        self.optimizer = Adam(torch.nn.ModuleList([self.policy, self.mixer]), config.lr)
        self.target_mixer: Mixer = deepcopy(self.mixer).requires_grad_(False)

    def _joined(self, values: Tensor, batch: dict[str, Tensor], *, target: bool) -> Tensor:
        """See :class:`R2D2Learner`: agents that are not there count for nothing."""
        steps, burn_in = len(values), self.config.burn_in
        values = values * batch["alive"][:steps]
        seen = {name: each[burn_in : burn_in + steps].flatten(0, 1) for name, each in batch.items() if _seen(name)}
        mixer = self.target_mixer if target else self.mixer
        mixed: Tensor = mixer(values.reshape(-1, self.agents), seen)
        return mixed.reshape(steps, -1)

    def _paid(self, reward: Tensor) -> Tensor:
        """See :class:`R2D2Learner`."""
        if not self.config.normalize_reward:
            return reward
        self.rewards.update(reward.reshape(-1), self.peers)
        return (reward - self.rewards.mean.float()) / self.rewards.std()

    def _renew_target(self) -> None:
        super()._renew_target()
        self.target_mixer.load_state_dict(self.mixer.state_dict())


def _seen(name: str) -> bool:
    return name.split("/")[0] == "obs"
