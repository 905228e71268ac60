"""What is run under load: environments that wait, that are huge, or that are crowds, and learners that take their time.

Workers import this module, light actors too: it imports neither torch nor anything else that they do without.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np

from srl.algorithms.ppo import PPO, PPOLearner, Prepared
from srl.core.errors import TrainingError
from srl.core.slab import Batch
from srl.core.specs import Array, Arrays, Spaces
from srl.envs.base import EnvConfig, Environment, Observed, StepViews

if TYPE_CHECKING:
    from srl.algorithms.base import Interrupted

_CHOICES = 4
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_SLICE = 0.05
"""Seconds a learner sleeps at a time before it looks whether the run is ending."""

Seen = tuple[Any, dict[str, Any]]
Stepped = tuple[Any, float, bool, bool, dict[str, Any]]


class Sleeper(gymnasium.Env[Any, Any]):
    """An environment somewhere else: a step takes ``seconds`` and no processor time."""

    observation_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(_CHOICES)

    def __init__(self, seconds: float, episode: int = 200) -> None:
        self.seconds, self.episode, self.steps = seconds, episode, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Seen:
        """Begin anew, at once."""
        super().reset(seed=seed)
        self.steps = 0
        return self._look(), {}

    def step(self, action: Any) -> Stepped:
        """Wait."""
        time.sleep(self.seconds)
        self.steps += 1
        return self._look(), 1.0, False, self.steps == self.episode, {}

    def _look(self) -> Array:
        return self.np_random.uniform(-1, 1, 8).astype(np.float32)


class Huge(gymnasium.Env[Any, Any]):
    """Observations of ``nbytes`` bytes, all different: see :func:`wrong_bytes`."""

    action_space = gymnasium.spaces.Discrete(_CHOICES)

    def __init__(self, nbytes: int) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (nbytes,), np.uint8)
        self.pattern = pattern(nbytes)
        self.buffer = np.empty_like(self.pattern)
        self.number = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Seen:
        """Begin to count somewhere else."""
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(2**32))
        return self._look(), {}

    def step(self, action: Any) -> Stepped:
        """Count on."""
        self.number += 1
        return self._look(), 1.0, False, False, {}

    def _look(self) -> Array:
        np.add(self.pattern, np.uint64(self.number), out=self.buffer)
        return self.buffer.view(np.uint8)


def pattern(nbytes: int) -> Array:
    """Words that are all different."""
    return np.arange(nbytes // 8, dtype=np.uint64) * _SPREAD


def wrong_bytes(observations: Array, expected: Array) -> int:
    """How many bytes of consecutive observations ``[steps, bytes]`` of :class:`Huge` are not as they were made."""
    words = observations.view(np.uint64)
    first = int(words[0, 0])
    numbers = [np.uint64((first + t) % 2**64) for t in range(len(words))]
    return sum(8 * int(np.count_nonzero(each != expected + n)) for each, n in zip(words, numbers, strict=True))


@dataclass(frozen=True)
class Checked(PPO):
    """PPO that looks at every byte of every observation before it trains on it."""

    name: ClassVar[str] = "checked"

    network: str = "srl.bench.load_network:Glance"

    def learner(self, spaces: Spaces, seed: int, device: str) -> CheckedLearner:
        """See :class:`~srl.algorithms.base.Algorithm`."""
        return CheckedLearner(self, self.policy(spaces).to(device), seed, device)


class CheckedLearner(PPOLearner):
    """Refuses batches that are not what :class:`Huge` has shown."""

    checked = 0

    def prepare(self, batch: Batch) -> Prepared:
        """See :class:`~srl.algorithms.base.Learner`."""
        seen = batch.slab.arrays["obs"]
        expected = pattern(seen.shape[-1])
        for block in batch.blocks:
            for row in range(seen.shape[2]):
                wrong = wrong_bytes(seen[block, :, row], expected)
                if wrong:
                    raise TrainingError(f"{wrong:,} bytes of block {block} are not those that the environment showed")
                self.checked += seen.shape[1]
        return super().prepare(batch)

    def train(self, prepared: Prepared, steps: int, interrupted: Interrupted) -> dict[str, float] | None:
        """See :class:`~srl.algorithms.base.Learner`."""
        found = super().train(prepared, steps, interrupted)
        return None if found is None else {**found, "checked": float(self.checked)}


@dataclass(frozen=True)
class Slow(PPO):
    """PPO whose updates take a while."""

    name: ClassVar[str] = "slow"

    pause: float = 1.0
    """Seconds that an update takes longer."""

    def learner(self, spaces: Spaces, seed: int, device: str) -> SlowLearner:
        """See :class:`~srl.algorithms.base.Algorithm`."""
        return SlowLearner(self, self.policy(spaces).to(device), seed, device)


class SlowLearner(PPOLearner):
    """Sleeps, then trains."""

    def train(self, prepared: Prepared, steps: int, interrupted: Interrupted) -> dict[str, float] | None:
        """See :class:`~srl.algorithms.base.Learner`."""
        assert isinstance(self.config, Slow)
        until = time.monotonic() + self.config.pause
        while time.monotonic() < until:
            if interrupted():
                return None
            time.sleep(_SLICE)
        return super().train(prepared, steps, interrupted)


class Cues:
    """What a crowd sees and is paid for: everybody is shown one of four cues and gets 1 for naming it."""

    observation = gymnasium.spaces.Box(0, 1, (_CHOICES,), np.float32)
    action = gymnasium.spaces.Discrete(_CHOICES)

    def __init__(self, agents: int) -> None:
        self.agents, self.random = agents, np.random.default_rng(0)
        self.cues: Array = np.zeros(agents, np.int64)

    def seed(self, seed: int) -> None:
        """Begin to draw anew."""
        self.random = np.random.default_rng(seed)

    def show(self) -> Array:
        """New cues, ``[agents, 4]``."""
        self.cues = self.random.integers(_CHOICES, size=self.agents)
        return np.eye(_CHOICES, dtype=np.float32)[self.cues]

    def pay(self, actions: Array) -> Array:
        """Everybody's reward."""
        paid: Array = (actions == self.cues).astype(np.float32)
        return paid


@dataclass(frozen=True)
class Crowd(EnvConfig):
    """Many agents in one environment, which writes what they see straight into the block."""

    agents: int = 10_000
    episode: int = 25

    def make(self, copies: int, *, render: bool = False) -> CrowdVector:
        """See :class:`~srl.envs.base.EnvConfig`."""
        return CrowdVector(self, copies)


class CrowdVector(Environment):
    """Copies of a crowd."""

    def __init__(self, config: Crowd, copies: int) -> None:
        super().__init__()
        self.copies, self.episode, self.time = copies, config.episode, 0
        self.agents = tuple(f"agent_{number}" for number in range(config.agents))
        self.cues = Cues(copies * config.agents)

    def spaces(self, agent: str) -> Spaces:
        """See :class:`~srl.envs.base.Environment`."""
        return Spaces(Cues.observation, Cues.action)

    def bind(self, groups: Sequence[Sequence[str]]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        assert len(groups) == 1, "a crowd has one policy"

    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self.cues.seed(seed)
        self._begin(out[0])

    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        views = out[0]
        views.terminated[:] = False
        if self.time == self.episode:
            views.reward[:], views.truncated[:] = 0, False
            self._begin(views.after)
            return
        self.time += 1
        over = self.time == self.episode
        views.reward[:], views.truncated[:] = self.cues.pay(actions[0]["action"]), over
        views.after.obs["obs"][:] = self.cues.show()
        views.after.first[:], views.after.acts[:] = False, not over

    def _begin(self, out: Observed) -> None:
        self.time = 0
        out.obs["obs"][:] = self.cues.show()
        out.first[:], out.acts[:] = True, True

    def close(self) -> None:
        """See :class:`~srl.envs.base.Environment`."""
