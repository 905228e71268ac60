"""EnvPool: environments written in C++ that step many copies at a time (Atari, MuJoCo, Procgen, ViZDoom and others).

A pool is a vector by itself. It takes its seed when it is made, so a reset makes a new one; what goes on inside cannot
be saved, so a resumed run starts new episodes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from srl.core.errors import ConfigError, UnknownName
from srl.core.specs import Array
from srl.core.worker import State
from srl.envs.base import EnvConfig
from srl.envs.guard import check_choice
from srl.envs.gym import names_of
from srl.envs.native import GymVector
from srl.envs.single import Watch

PREFIX = "envpool:"
"""What an environment's name begins with where only a text can be given."""


@dataclass(frozen=True)
class EnvPool(EnvConfig):
    """An environment of EnvPool with one player."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    """What EnvPool is given beside the number of copies and the seed; ``num_threads`` is 1 unless it says so."""
    mask: str = ""
    info: tuple[str, ...] = ()
    nonfinite: str = "stop"

    def __post_init__(self) -> None:
        check_choice(self.nonfinite)

    @property
    def name(self) -> str:
        """See :class:`~srl.envs.base.EnvConfig`."""
        return PREFIX + self.id

    def make(self, copies: int, *, render: bool = False) -> PoolVector:
        """See :class:`~srl.envs.base.EnvConfig`. A pool cannot draw itself."""
        return PoolVector(self, copies)


def envpool(
    id: str, /, *, mask: str = "", info: tuple[str, ...] = (), nonfinite: str = "stop", **kwargs: Any
) -> EnvPool:
    """The environment that EnvPool has under this id; the rest is explained at :class:`srl.envs.Gym`."""
    return EnvPool(id, kwargs, mask, names_of(info), nonfinite)


class PoolVector(GymVector):
    """``copies`` copies in a pool."""

    def __init__(self, config: EnvPool, copies: int) -> None:
        watch = Watch(config.mask, config.info, config.nonfinite)
        super().__init__(config.name, _Pool(config, copies), copies, watch)

    def state(self) -> State | None:
        """See :class:`~srl.envs.base.Environment`."""
        return None


class _Pool(VectorEnv[Any, Any, Any]):
    """A pool that is made anew by every reset with a seed."""

    def __init__(self, config: EnvPool, copies: int) -> None:
        self.num_envs, self.config = copies, config
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.pool: Any = None
        one = self._made(num_envs=1)
        if one.spec.config.max_num_players > 1:
            raise ConfigError(f"environment {config.name!r} has several players; only those with one are supported")
        self.single_observation_space, self.single_action_space = one.observation_space, one.action_space
        one.close()

    def _made(self, **more: Any) -> Any:
        """What EnvPool makes of the configuration."""
        try:
            import envpool
        except ImportError as error:
            raise ConfigError("needs the package envpool: pip install 'reallyscalablerl[envpool]'") from error
        config = self.config
        if config.id not in envpool.list_all_envs():
            raise UnknownName("environment of EnvPool", config.id, envpool.list_all_envs(), "envpool.list_all_envs()")
        try:
            with warnings.catch_warnings(action="ignore"):  # bounds of 64 bits do not fit into spaces of 32
                made = envpool.make_gymnasium(config.id, **{"num_threads": 1, **config.kwargs, **more})
                assert made.observation_space and made.action_space  # made when they are first looked at, then kept
                return made
        except Exception as error:
            raise ConfigError(f"environment {config.name!r} cannot be made with {config.kwargs}: {error}") from error

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start all copies anew."""
        if self.pool is None or seed is not None:
            self.close_extras()
            self.pool = self._made(num_envs=self.num_envs, seed=int(seed or 0) % 2**31)
        found: tuple[Any, dict[str, Any]] = self.pool.reset()
        return found

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step all copies."""
        found, reward, terminated, truncated, info = self.pool.step(actions)
        return found, np.asarray(reward), np.asarray(terminated), np.asarray(truncated), info

    def close_extras(self, **kwargs: Any) -> None:
        """Free the pool."""
        if self.pool is not None:
            self.pool.close()
