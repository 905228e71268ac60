"""What an actor knows of environments: always a vector of copies, with agents in each.

A *row* is one agent in one copy. Agents of one policy form a *group*; the rows of a group are ordered copy by copy.
The environment writes observations, rewards and flags straight into the views it is handed, which lie in the block.

After an episode's end the next step is the reset: its action is ignored, its reward is 0 and its row is not valid
(Gymnasium's ``NEXT_STEP`` autoreset). So the last observation of an episode passes through the policy like any
other, and a truncated episode is bootstrapped from its value without an extra forward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from srl.core.specs import Array, Arrays, Spaces
from srl.core.worker import State


@dataclass
class StepViews:
    """Where one step of one group is to be written, all ``[rows, …]``."""

    obs: Arrays
    """The observation after the step."""
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    """False where this step was a reset or the agent took no part."""


class Environment(ABC):
    """A vector of environment copies."""

    copies: int
    agents: tuple[str, ...]

    @abstractmethod
    def spaces(self, agent: str) -> Spaces:
        """What ``agent`` sees and does."""

    @abstractmethod
    def bind(self, groups: Sequence[Sequence[str]]) -> None:
        """Say which agents share a policy; every later call has one entry per group."""

    @abstractmethod
    def reset(self, seed: int, obs: Sequence[Arrays]) -> None:
        """Start every copy anew."""

    @abstractmethod
    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """Step every copy."""

    def state(self) -> State | None:
        """Everything needed to go on exactly here, or None if this environment cannot be saved."""
        return None

    def load_state(self, state: State) -> None:
        """Go on where ``state`` was taken."""

    @abstractmethod
    def close(self) -> None:
        """Free what the environment holds."""


class EnvConfig(ABC):
    """Describes an environment and makes vectors of it. A small, picklable, JSON-able dataclass."""

    @abstractmethod
    def make(self, copies: int) -> Environment:
        """A vector of ``copies`` copies. Raises ConfigError with one clear line if it cannot be made."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain JSON from which :func:`srl.envs.from_json` makes the same config again."""
