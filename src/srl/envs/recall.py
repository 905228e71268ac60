"""A task that cannot be solved without memory: a cue is shown once, and asked for much later."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

Observation = NDArray[np.float32]


class Recall(gymnasium.Env[Observation, np.int64]):
    """One of ``cues`` cues is shown at first, then ``delay`` steps of noise; the last action must name the cue.

    The reward is 1 for the right answer and 0 for any other, so whoever does not remember gets 1 / ``cues`` on average,
    however well it plays: nothing it sees when it must answer tells the cue.
    """

    def __init__(self, cues: int = 4, delay: int = 8) -> None:
        self.cues, self.delay = cues, delay
        self.observation_space = gymnasium.spaces.Box(-1, 1, (cues + 2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(cues)
        self.cue = self.time = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Show a new cue."""
        super().reset(seed=seed)
        self.cue, self.time = int(self.np_random.integers(self.cues)), 0
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Wait, or answer."""
        over = self.time > self.delay
        reward = float(over and int(action) == self.cue)
        self.time += 1
        return self._look(), reward, over, False, {}

    def _look(self) -> Observation:
        seen = np.zeros(self.cues + 2, np.float32)
        if self.time == 0:
            seen[self.cue] = 1
        seen[-2] = self.np_random.uniform(-1, 1)
        seen[-1] = self.time > self.delay
        return seen
