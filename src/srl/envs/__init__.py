"""Environments: adapters that make any of them a vector, and a way back from saved configurations."""

from __future__ import annotations

from typing import Any

from srl.core.errors import ConfigError
from srl.envs.base import EnvConfig, Environment, StepViews
from srl.envs.gym import Gym, callable_from, gym

__all__ = ["EnvConfig", "Environment", "Gym", "StepViews", "from_json", "gym"]


def from_json(config: dict[str, Any]) -> EnvConfig:
    """The config that :meth:`EnvConfig.describe` described."""
    if "gym" not in config:
        raise ConfigError(f"unknown kind of environment in the saved configuration: {sorted(config)}")
    name = config["gym"]
    return Gym(callable_from(name) if name.endswith("()") else name, config.get("kwargs", {}))
