"""Environments: adapters that make any of them a vector, and a way back from saved configurations."""

from __future__ import annotations

from typing import Any

from srl.core.errors import ConfigError
from srl.envs.base import EnvConfig, Environment, Observed, StepViews
from srl.envs.gym import Gym, callable_from, gym
from srl.envs.hide_and_seek import HideAndSeek, hide_and_seek
from srl.envs.jaxmarl import JaxMarl, jaxmarl
from srl.envs.pettingzoo import PettingZoo, pettingzoo
from srl.envs.pool import PREFIX, EnvPool, envpool
from srl.envs.spread import Spread, spread

__all__ = [
    "EnvConfig",
    "EnvPool",
    "Environment",
    "Gym",
    "HideAndSeek",
    "JaxMarl",
    "Observed",
    "PettingZoo",
    "Spread",
    "StepViews",
    "envpool",
    "from_json",
    "gym",
    "hide_and_seek",
    "jaxmarl",
    "named",
    "pettingzoo",
    "spread",
]

_KINDS: dict[str, type[Gym] | type[PettingZoo]] = {"gym": Gym, "pettingzoo": PettingZoo}


def named(text: str) -> EnvConfig:
    """The environment that a text stands for: ``envpool:ID``, or any Gymnasium id."""
    return envpool(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else gym(text)


def from_json(config: dict[str, Any]) -> EnvConfig:
    """The config that :meth:`EnvConfig.describe` described."""
    kind = next((kind for kind in (*_KINDS, "config") if kind in config), None)
    if kind is None:
        raise ConfigError(f"unknown kind of environment in the saved configuration: {sorted(config)}")
    name = config[kind]
    given: dict[str, Any] = {key: value for key, value in config.items() if key != kind}
    given |= {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
    if kind == "config":
        made: EnvConfig = callable_from(name)(**given)
        return made
    return _KINDS[kind](callable_from(name) if name.endswith("()") else name, **given)
