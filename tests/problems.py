"""Small problems whose best answer is known."""

from __future__ import annotations

import gymnasium
import numpy as np
from pettingzoo import ParallelEnv


class Steps(gymnasium.Env):
    """What these have in common: something is seen, and what is done about it is judged at once."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.seen = 0, self.look()
        return self.seen, {}

    def step(self, action):
        reward = float(self.judge(action))
        self.time, self.seen = self.time + 1, self.look()
        return self.seen, reward, *self.ends(), {}


class Copycat(Steps):
    """Do what you see: the reward is minus the square of the difference, so the best return is 0."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-2, 4, (1,), np.float32)

    def look(self):
        return self.np_random.uniform(-1, 1, 1).astype(np.float32)

    def judge(self, action):
        return -((action[0] - self.seen[0]) ** 2)

    def ends(self):
        return False, self.time == 10


class Pick(Steps):
    """One of four actions is right, and which one can be seen: the best return is 8."""

    observation_space = gymnasium.spaces.Discrete(4)
    action_space = gymnasium.spaces.Discrete(4, start=1)

    def look(self):
        return int(self.np_random.integers(4))

    def judge(self, action):
        return action - 1 == (self.seen + 1) % 4

    def ends(self):
        return self.time == 8, False


class Together(ParallelEnv):
    """What all parallel games here have in common: two agents, one reward for both, and a state."""

    metadata = {"name": "together"}  # noqa: RUF012
    possible_agents = ("a", "b")
    state_space = gymnasium.spaces.Box(0, 1, (3,), np.float32)
    render_mode = None

    def observation_space(self, agent):
        return gymnasium.spaces.Box(0, 1, (3,), np.float32)

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(2)

    def state(self):
        return np.eye(3, dtype=np.float32)[self.where]

    def reset(self, seed=None, options=None):
        self.agents, self.where = list(self.possible_agents), 0
        return self._looks(), {agent: {} for agent in self.agents}

    def _looks(self):
        return {agent: self.state() for agent in self.agents}

    def _answer(self, reward, over):
        agents, found = list(self.agents), self._looks()
        self.agents = [] if over else agents
        flags = dict.fromkeys(agents, over)
        return found, dict.fromkeys(agents, reward), flags, dict.fromkeys(agents, False), {a: {} for a in agents}


class TwoSteps(Together):
    """The game of the QMIX paper: agent a chooses where to go; there 7 is safe, or 8 if both dare, else little.

    Who adds up values cannot say what the second place is worth and stays safe: VDN gets 7, QMIX 8.
    """

    def step(self, actions):
        if self.where == 0:
            self.where = 1 + int(actions["a"])
            return self._answer(0.0, False)
        pays = ((7.0, 7.0), (7.0, 7.0)) if self.where == 1 else ((0.0, 1.0), (1.0, 8.0))
        return self._answer(pays[int(actions["a"])][int(actions["b"])], True)


class Alike(Together):
    """One of two actions is right for both agents, and which one can be seen: the best return is 8."""

    def reset(self, seed=None, options=None):
        if seed is not None or not hasattr(self, "luck"):
            self.luck = np.random.default_rng(seed)
        self.time = 0
        return super().reset(seed)

    def step(self, actions):
        right = int(actions["a"] == self.where % 2) + int(actions["b"] == self.where % 2)
        self.time += 1
        self.where = int(self.luck.integers(2))
        return self._answer(right / 2, self.time == 8)
