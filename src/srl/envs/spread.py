"""MPE's simple spread, all copies at a time: agents are to cover as many places, without running into each other.

The same steps as ``mpe2.simple_spread_v3`` with the same seeds, to the last bit (``tests/test_spread.py``), in a
hundredth of the time: every operation is over arrays ``[copies, agents, 2]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils.seeding import np_random

from srl.core.errors import ConfigError
from srl.core.specs import Array, Arrays, Spaces
from srl.core.worker import State
from srl.envs.base import EnvConfig, Environment, Observed, StepViews

_DT, _DAMPING, _STRENGTH = 0.1, 0.25, 5.0
_CONTACT, _MARGIN, _WIDTH = 100.0, 0.001, 0.3
"""How hard agents push each other away, how soft they are, and how far apart they touch."""
_MOVES = np.array([[0.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [0.0, -1.0], [0.0, 1.0]]) * _STRENGTH


@dataclass(frozen=True)
class Spread(EnvConfig):
    """Agents ``agent_0`` and so on, as many as there are places."""

    count: int = 3
    """Agents, and places."""
    local_ratio: float = 0.5
    """Share of an agent's own collisions in its reward; the rest is how well all places are covered."""
    max_cycles: int = 25
    """Steps of an episode."""
    state: bool = False
    """Whether agents also get what all of them see, for a critic (see MAPPO and QMIX)."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.max_cycles < 1 or not 0 <= self.local_ratio <= 1:
            raise ConfigError("simple spread: count and max_cycles are at least 1, local_ratio is between 0 and 1")

    def make(self, copies: int, *, render: bool = False) -> SpreadVector:
        """See :class:`~srl.envs.base.EnvConfig`."""
        return SpreadVector(self, copies)


def spread(count: int = 3, local_ratio: float = 0.5, max_cycles: int = 25, state: bool = False) -> Spread:
    """Simple spread as a native vector; see :class:`Spread`."""
    return Spread(count, local_ratio, max_cycles, state)


class SpreadVector(Environment):
    """``copies`` copies of simple spread."""

    def __init__(self, config: Spread, copies: int) -> None:
        super().__init__()
        self.config, self.copies = config, copies
        self.agents = tuple(f"agent_{i}" for i in range(config.count))
        shape = copies, config.count, 2
        self.position, self.velocity, self.places = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.time: Array = np.zeros(copies, np.int64)
        self.over: Array = np.zeros(copies, bool)  # the next step is a reset
        self.rngs = [np.random.default_rng() for _ in range(copies)]
        # Velocity, position, where the places are and where the others are; nobody ever says anything (two words each).
        self._seen: Array = np.zeros((copies, config.count, 4 + 2 * config.count + 4 * (config.count - 1)), np.float32)
        self._others = np.array([[j for j in range(config.count) if j != i] for i in range(config.count)], np.int64)
        self._rows: list[list[int]] = []

    def spaces(self, agent: str) -> Spaces:
        """See :class:`~srl.envs.base.Environment`."""
        width = self._seen.shape[2]
        seen: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (width,), np.float32)
        if self.config.state:
            whole = spaces.Box(-np.inf, np.inf, (len(self.agents) * width,), np.float32)
            seen = spaces.Dict({"observation": seen, "state": whole})
        return Spaces(seen, spaces.Discrete(len(_MOVES)))

    def bind(self, groups: Sequence[Sequence[str]]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        if sorted(agent for group in groups for agent in group) != sorted(self.agents):
            raise ConfigError(f"simple spread: every agent of {self.agents} must be in one group, got {groups}")
        self._rows = [[self.agents.index(agent) for agent in group] for group in groups]

    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self.rngs = [np_random(seed + copy)[0] for copy in range(self.copies)]
        self.over[:] = False
        self._begin(range(self.copies))
        self._observe(np.ones(self.copies, bool), out)

    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        fresh = self.over.copy()
        force = np.empty_like(self.position)
        for rows, fields in zip(self._rows, actions, strict=True):
            force[:, rows] = _MOVES[fields["action"].reshape(self.copies, len(rows))]
        self._move(force)
        self.time += 1
        reward = np.where(fresh[:, None], 0.0, self._rewards())
        self._begin(np.flatnonzero(fresh).tolist())
        self.over[:] = self.time == self.config.max_cycles
        self._observe(fresh, [views.after for views in out])
        for rows, views in zip(self._rows, out, strict=True):
            views.reward[:] = reward[:, rows].reshape(-1)
            views.truncated[:] = np.repeat(self.over, len(rows))
            views.terminated[:] = False

    def _begin(self, copies: Sequence[int]) -> None:
        for copy in copies:
            drawn = self.rngs[copy].uniform(-1, 1, (2 * len(self.agents), 2))
            self.position[copy], self.places[copy] = drawn[: len(self.agents)], drawn[len(self.agents) :]
            self.velocity[copy], self.time[copy] = 0, 0

    def _move(self, force: Array) -> None:
        for a, b in combinations(range(len(self.agents)), 2):
            apart = self.position[:, a] - self.position[:, b]
            distance = np.sqrt(np.square(apart).sum(-1, keepdims=True))
            overlap = np.logaddexp(0, -(distance - _WIDTH) / _MARGIN) * _MARGIN
            push = _CONTACT * apart / distance * overlap
            force[:, a] += push
            force[:, b] -= push
        self.position += self.velocity * _DT
        self.velocity *= 1 - _DAMPING
        self.velocity += force * _DT

    def _rewards(self) -> Array:
        """The rewards of all agents, ``[copies, agents]``."""
        away = np.sqrt(np.square(self.position[:, None] - self.places[:, :, None]).sum(-1))
        covered = -away.min(2).sum(1, keepdims=True)
        apart = np.sqrt(np.square(self.position[:, None] - self.position[:, :, None]).sum(-1))
        bumped = (apart < _WIDTH).sum(2) - 1.0  # nobody is apart from itself
        ratio = self.config.local_ratio
        return np.asarray(covered * (1 - ratio) - bumped * ratio)

    def _observe(self, first: Array, out: Sequence[Observed]) -> None:
        count = len(self.agents)
        relative = self.position[:, None] - self.position[:, :, None]
        self._seen[..., :2], self._seen[..., 2:4] = self.velocity, self.position
        self._seen[..., 4 : 4 + 2 * count] = (self.places[:, None] - self.position[:, :, None]).reshape(
            self.copies, count, -1
        )
        nearby = relative[:, np.arange(count)[:, None], self._others].reshape(self.copies, count, -1)
        self._seen[..., 4 + 2 * count : 4 + 2 * count + nearby.shape[2]] = nearby
        whole = self._seen.reshape(self.copies, -1)
        for rows, observed in zip(self._rows, out, strict=True):
            seen = self._seen[:, rows].reshape(-1, self._seen.shape[2])
            if self.config.state:
                observed.obs["obs/observation"][:] = seen
                observed.obs["obs/state"].reshape(self.copies, len(rows), -1)[:] = whole[:, None]
            else:
                observed.obs["obs"][:] = seen
            observed.first[:] = np.repeat(first, len(rows))
            observed.acts[:] = np.repeat(~self.over, len(rows))

    def state(self) -> State:
        """See :class:`~srl.envs.base.Environment`."""
        names = ("position", "velocity", "places", "time", "over")
        return State(
            {name: getattr(self, name).copy() for name in names},
            {"rng": [rng.bit_generator.state for rng in self.rngs]},
        )

    def load_state(self, state: State) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        for name, value in state.arrays.items():
            getattr(self, name)[:] = value
        for rng, saved in zip(self.rngs, state.values["rng"], strict=True):
            rng.bit_generator.state = saved

    def close(self) -> None:
        """See :class:`~srl.envs.base.Environment`."""
