"""SRL: really scalable reinforcement learning. Declare a run as a graph of workers; run it anywhere.

Everything public is exported here and loaded on first use, so that importing srl is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srl import envs
    from srl.algorithms import APPO, DQN, IMPALA, MAPPO, PPO, QMIX, R2D2, SAC, VDN
    from srl.algorithms.base import Algorithm, Learner, Replay, TorchLearner
    from srl.core.errors import CheckpointError, ConfigError, EnvError, SrlError, TrainingError, WorkerError
    from srl.core.slab import Batch
    from srl.core.specs import ArraySpec, Spaces
    from srl.envs.base import Environment
    from srl.experiment import Actors, Evaluator, Experiment, Policies, Trainer, wire
    from srl.launch.run import Result, evaluate, resume, run
    from srl.monitor.exporters import Prometheus, WandB
    from srl.recipes import recipe
    from srl.workers.opponents import Opponent

__version__ = "0.1.0"

_HOMES = {
    "srl.algorithms": ["APPO", "DQN", "IMPALA", "MAPPO", "PPO", "QMIX", "R2D2", "SAC", "VDN"],
    "srl.algorithms.base": ["Algorithm", "Learner", "Replay", "TorchLearner"],
    "srl.core.errors": ["CheckpointError", "ConfigError", "EnvError", "SrlError", "TrainingError", "WorkerError"],
    "srl.core.slab": ["Batch"],
    "srl.core.specs": ["ArraySpec", "Spaces"],
    "srl.envs.base": ["Environment"],
    "srl.experiment": ["Actors", "Evaluator", "Experiment", "Policies", "Trainer", "wire"],
    "srl.launch.run": ["Result", "evaluate", "resume", "run"],
    "srl.monitor.exporters": ["Prometheus", "WandB"],
    "srl.recipes": ["recipe"],
    "srl.workers.opponents": ["Opponent"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "APPO",
    "DQN",
    "IMPALA",
    "MAPPO",
    "PPO",
    "QMIX",
    "R2D2",
    "SAC",
    "VDN",
    "Actors",
    "Algorithm",
    "ArraySpec",
    "Batch",
    "CheckpointError",
    "ConfigError",
    "EnvError",
    "Environment",
    "Evaluator",
    "Experiment",
    "Learner",
    "Opponent",
    "Policies",
    "Prometheus",
    "Replay",
    "Result",
    "Spaces",
    "SrlError",
    "TorchLearner",
    "Trainer",
    "TrainingError",
    "WandB",
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
