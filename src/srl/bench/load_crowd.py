"""A crowd as PettingZoo has it: every agent has a name and an entry in every dictionary."""

from __future__ import annotations

from typing import Any

import numpy as np
from pettingzoo import ParallelEnv

from srl.bench.load_work import Cues


class Zoo(ParallelEnv):  # type: ignore[misc, type-arg, unused-ignore]
    """``count`` agents that are paid for naming the cue they are shown."""

    metadata: dict[str, Any] = {"name": "crowd"}  # noqa: RUF012

    def __init__(self, count: int = 10_000, episode: int = 25) -> None:
        self.possible_agents = [f"agent_{number}" for number in range(count)]
        self.agents: list[str] = []
        self.episode, self.time, self.cues = episode, 0, Cues(count)

    def observation_space(self, agent: str) -> Any:
        """What an agent sees."""
        return Cues.observation

    def action_space(self, agent: str) -> Any:
        """What an agent does."""
        return Cues.action

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        if seed is not None:
            self.cues.seed(seed)
        self.agents, self.time = list(self.possible_agents), 0
        return self._shown(), {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Pay everybody and show them the next cue."""
        self.time += 1
        named = np.fromiter((actions[agent] for agent in self.agents), np.int64, len(self.agents))
        rewards = dict(zip(self.agents, self.cues.pay(named).tolist(), strict=True))
        going = dict.fromkeys(self.agents, False)
        over = dict.fromkeys(self.agents, self.time == self.episode)
        seen = self._shown()
        if self.time == self.episode:
            self.agents = []
        return seen, rewards, going, over, {}

    def _shown(self) -> dict[str, Any]:
        return dict(zip(self.possible_agents, self.cues.show(), strict=True))
