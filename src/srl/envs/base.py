"""What an actor knows of environments: always a vector of copies, with agents in each.

A *row* is one agent in one copy. Agents of one policy form a *group*; the rows of a group are ordered copy by copy.
The environment writes observations, rewards and flags straight into the views it is handed, which lie in the block.

After an episode's end the next step is the reset: its action is ignored, its reward is 0 and its row is not valid
(Gymnasium's ``NEXT_STEP`` autoreset). So the last observation of an episode passes through the policy like any
other, and a truncated episode is bootstrapped from its value without an extra forward pass. An agent that is dead or
not on turn has a row too, which is not valid; reward it is given meanwhile belongs to its last valid step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from srl.core.specs import Array, Arrays, Spaces
from srl.core.worker import State


@dataclass
class Observed:
    """Where the observations of one group are to be written, all ``[rows, …]``."""

    obs: Arrays
    """Fields ``obs…``, and ``mask…`` where actions are masked."""
    first: Array
    """True where the observation is the first of an episode, or of an agent's new life."""
    acts: Array
    """True where the row acts on it; False if its episode has just ended, or it is dead or not on turn."""


@dataclass
class StepViews:
    """Where one step of one group is to be written, all ``[rows, …]``."""

    after: Observed
    """The observation after the step."""
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    """What ``acts`` said before the step; the environment clears it where the step failed."""

    @classmethod
    def zeros(cls, spaces: Spaces, rows: int) -> StepViews:
        """Room for so many rows outside of a block, for whoever steps an environment without a run around it."""
        spec = {**spaces.observation_spec(), **spaces.mask_spec()}
        obs = {name: np.zeros((rows, *leaf.shape), leaf.dtype) for name, leaf in spec.items()}
        first, acts, terminated, truncated, valid = np.zeros((5, rows), bool)
        return cls(Observed(obs, first, acts), np.zeros(rows, np.float32), terminated, truncated, valid)


class Environment(ABC):
    """A vector of environment copies."""

    copies: int
    agents: tuple[str, ...]

    def __init__(self) -> None:
        self.measured: list[tuple[str, float]] = []
        """Numbers from the environment's own ``info`` that the user asked for; the actor takes them away."""
        self.notes: list[str] = []
        """Sentences for the user, such as that a copy failed and was made anew; the actor takes them away."""

    @abstractmethod
    def spaces(self, agent: str) -> Spaces:
        """What ``agent`` sees and does."""

    @abstractmethod
    def bind(self, groups: Sequence[Sequence[str]]) -> None:
        """Say which agents share a policy; every later call has one entry per group."""

    @abstractmethod
    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """Start every copy anew."""

    @abstractmethod
    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """Step every copy."""

    def configure(self, values: dict[str, Any]) -> None:
        """Pass what a curriculum has decided on to every copy."""

    def render(self) -> Array | None:
        """A picture ``[height, width, 3]`` of the first copy, or None if it cannot draw itself."""
        return None

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
    def make(self, copies: int, *, render: bool = False) -> Environment:
        """A vector of ``copies`` copies. Raises ConfigError with one clear line if it cannot be made.

        With ``render`` it can draw itself, if the environment knows how.
        """

    @property
    def name(self) -> str:
        """The environment in a word."""
        return str(next(iter(self.describe().values())))

    def describe(self) -> dict[str, Any]:
        """Plain JSON, the name first, from which :func:`srl.envs.from_json` makes the same config again."""
        kind = type(self)
        given = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        return {"config": f"{kind.__module__}:{kind.__qualname__}", **given}
