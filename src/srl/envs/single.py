"""What the two ways to run a Gymnasium environment have in common: one agent per copy, so that rows are copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from srl.core.errors import ConfigError, EnvError
from srl.core.specs import Array, Spaces
from srl.core.worker import State
from srl.envs.base import Environment, Observed, StepViews
from srl.envs.fields import Fields
from srl.envs.guard import Guard
from srl.envs.measures import Measures

AGENT = "agent"


@dataclass(frozen=True)
class Watch:
    """What an adapter does beside stepping; see :class:`srl.envs.Gym` for each field."""

    mask: str
    info: tuple[str, ...]
    nonfinite: str


class SingleAgent(Environment):
    """The books of a vector with one agent per copy."""

    agents = (AGENT,)

    def __init__(
        self,
        name: str,
        observation: gymnasium.Space[Any],
        action: gymnasium.Space[Any],
        copies: int,
        watch: Watch,
    ) -> None:
        super().__init__()
        self.copies = copies
        where = f"environment {name!r}"
        self.fields = Fields(where, observation, action, watch.mask)
        self.guard = Guard(where, watch.nonfinite, self.notes)
        self.measures = Measures(watch.info, copies, self.measured)
        self.ended: Array = np.zeros(copies, bool)
        """The copies whose next step is their reset."""

    def spaces(self, agent: str) -> Spaces:
        """See :class:`~srl.envs.base.Environment`."""
        return self.fields.spaces

    def bind(self, groups: Sequence[Sequence[str]]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        if [list(group) for group in groups] != [[AGENT]]:
            raise ConfigError(f"a Gymnasium environment has the one agent {AGENT!r}, got groups {groups}")

    def wrong_start(self, out: Observed) -> None:
        """Raise if a first observation is not finite: a copy that starts like that is not worth starting again."""
        for error in self.guard.check_results(self.floats(out), self.fields.at).values():
            raise error

    def wrong_steps(self, views: StepViews) -> dict[int, EnvError]:
        """The rows whose step gave something that is not finite."""
        return self.guard.check_results([*self.floats(views.after), ("reward", views.reward)], self.fields.at)

    def floats(self, out: Observed) -> list[tuple[str, Array]]:
        """The observation's fields that could hold NaN."""
        return [(path, out.obs[path]) for path in self.fields.float_paths]

    def with_books(self, state: State | None) -> State | None:
        """``state`` of the environment with everything that is kept here."""
        if state is not None:
            state.arrays |= {"ended": self.ended.copy(), **self.measures.state()}
            state.values["guard"] = self.guard.state()
        return state

    def load_books(self, state: State) -> None:
        """Take back what :meth:`with_books` added."""
        self.ended[:] = state.arrays["ended"]
        self.measures.load_state(state.arrays)
        self.guard.load_state(state.values["guard"])


def configure(env: Any, values: dict[str, Any], where: str) -> None:
    """Hand a curriculum's values to the environment itself, behind all wrappers."""
    method = getattr(env.unwrapped, "configure", None)
    if method is None:
        raise EnvError(f"{where} has no method configure(), which would take the values {sorted(values)}")
    method(**values)
