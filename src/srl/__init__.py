"""SRL: really scalable reinforcement learning. Declare a run as a graph of workers; run it anywhere.

Everything public is exported here and loaded on first use, so that importing srl is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srl import envs
    from srl.algorithms import PPO
    from srl.algorithms.base import Algorithm, Learner
    from srl.core.errors import CheckpointError, ConfigError, SrlError, WorkerError
    from srl.envs.base import Environment
    from srl.experiment import Actors, Experiment, Policies, Trainer, wire
    from srl.launch.run import Result, evaluate, resume, run
    from srl.recipes import recipe

__version__ = "0.1.0"

_HOMES = {
    "srl.algorithms": ["PPO"],
    "srl.algorithms.base": ["Algorithm", "Learner"],
    "srl.core.errors": ["CheckpointError", "ConfigError", "SrlError", "WorkerError"],
    "srl.envs.base": ["Environment"],
    "srl.experiment": ["Actors", "Experiment", "Policies", "Trainer", "wire"],
    "srl.launch.run": ["Result", "evaluate", "resume", "run"],
    "srl.recipes": ["recipe"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "PPO",
    "Actors",
    "Algorithm",
    "CheckpointError",
    "ConfigError",
    "Environment",
    "Experiment",
    "Learner",
    "Policies",
    "Result",
    "SrlError",
    "Trainer",
    "WorkerError",
    "envs",
    "evaluate",
    "recipe",
    "resume",
    "run",
    "wire",
]


def __getattr__(name: str) -> Any:
    if name == "envs":
        return importlib.import_module("srl.envs")
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'srl' has no attribute {name!r}")
