"""Hide and seek as a PettingZoo environment, for whoever wants it without SRL around it."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from srl.core.specs import Array
from srl.envs.base import StepViews
from srl.envs.hide_and_seek import HideAndSeek

Seen = dict[str, dict[str, Array]]


class HideAndSeekZoo(ParallelEnv):  # type: ignore[misc]
    """One copy; the agents of an episode are those that take part in it."""

    metadata = {"name": "hide_and_seek", "render_modes": ["rgb_array"], "render_fps": 13}  # noqa: RUF012

    def __init__(self, scenario: str = "quadrant", render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.vector = HideAndSeek(scenario).make(1)
        self.possible_agents = list(self.vector.agents)
        self.agents: list[str] = []
        self.vector.bind([self.possible_agents])
        self._spaces = [self.vector.spaces(agent) for agent in self.possible_agents]
        self._views = StepViews.zeros(self._spaces[0], len(self._spaces))
        self._seed = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """What an agent sees."""
        return self._spaces[self.possible_agents.index(agent)].observation

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """What an agent does."""
        return self._spaces[self.possible_agents.index(agent)].action

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Seen, dict[str, Any]]:
        """Begin an episode."""
        if seed is not None:
            self._seed = np.random.default_rng(seed)
        self.vector.reset(int(self._seed.integers(2**31)), [self._views.after])
        acts = self._views.after.acts
        self.agents = [agent for agent, there in zip(self.possible_agents, acts, strict=True) if there]
        return self._seen(), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[Seen, dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, float]]]:
        """Take a step. At an episode's end ``infos`` have its statistics."""
        given: Array = np.zeros((len(self.possible_agents), 5), np.int64)
        for agent, action in actions.items():
            given[self.possible_agents.index(agent)] = action
        views = self._views
        views.valid[:] = views.after.acts
        self.vector.measured.clear()
        self.vector.step([{"action": given}], [views])
        rows = {agent: self.possible_agents.index(agent) for agent in self.agents}
        rewards = {agent: float(views.reward[row]) for agent, row in rows.items()}
        terminated = {agent: bool(views.terminated[row]) for agent, row in rows.items()}
        truncated = {agent: bool(views.truncated[row]) for agent, row in rows.items()}
        infos = {agent: dict(self.vector.measured) for agent in self.agents}
        seen = self._seen()
        if any(truncated.values()):
            self.agents = []
        return seen, rewards, terminated, truncated, infos

    def _seen(self) -> Seen:
        obs = self._views.after.obs
        rows = {agent: self.possible_agents.index(agent) for agent in self.agents}
        return {agent: {name[4:]: each[row].copy() for name, each in obs.items()} for agent, row in rows.items()}

    def render(self) -> Array | None:
        """A picture, with ``render_mode="rgb_array"``."""
        return self.vector.render() if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Free what the environment holds."""
        self.vector.close()
