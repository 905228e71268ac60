"""Which rivals there are, and the configurations that are tried for each work to find its fastest.

In all of them an update has as many steps, minibatches and passes; what varies is the number of environments, how they
are spread over processes, and the threads of PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Configs = list[dict[str, Any]]


@dataclass(frozen=True)
class Rival:
    """A library that does the same work."""

    script: str
    search: dict[str, Configs]
    """For each work, what is tried."""


def _each(**choices: list[Any]) -> Configs:
    """Every combination of these choices."""
    found: Configs = [{}]
    for name, values in choices.items():
        found = [{**config, name: value} for config in found for value in values]
    return found


def _one_process(envs: list[int], threads: tuple[int, ...] = (1, 2)) -> Configs:
    return _each(envs=envs, subprocesses=[False], threads=list(threads))


def _subprocesses(envs: list[int]) -> Configs:
    return _each(envs=envs, subprocesses=[True], threads=[1, 2])


SB3 = Rival(
    "sb3.py",
    {
        "cartpole": [*_one_process([8, 16, 32, 64]), *_subprocesses([8])],
        "halfcheetah": [*_one_process([8, 16, 32]), *_subprocesses([4, 8, 16])],
        "pong": [*_one_process([8, 16]), *_subprocesses([4, 8, 16, 32])],
        "pong-4": [*_one_process([8, 16]), *_subprocesses([4, 8, 16, 32])],
    },
)

_SERIAL = {"workers": 1, "async": False, "serial": True, "splits": 1}
_SF_VECTOR = [
    *_each(workers=[1, 2], envs=[32, 64], **{"async": [False, True]}),
    *_each(workers=[2], envs=[32], affinity=[False], **{"async": [True]}),
    *({"envs": envs, "threads": 1, **_SERIAL} for envs in (16, 64)),
]
_SF_PIXELS = [
    *_each(workers=[1, 2], envs=[16, 32], **{"async": [False, True]}),
    *_each(workers=[2], envs=[32], affinity=[False], **{"async": [True]}),
    {"envs": 32, "threads": 2, **_SERIAL},
]
SAMPLE_FACTORY = Rival(
    "sample_factory_ppo.py",
    {"cartpole": _SF_VECTOR, "halfcheetah": _SF_VECTOR, "pong": _SF_PIXELS, "pong-4": _SF_PIXELS},
)

_RLLIB_VECTOR = [
    *_each(runners=[0], envs=[16, 64], threads=[1, 2]),
    *_each(runners=[1, 2], envs=[16, 64], threads=[1]),
]
_RLLIB_PPO = [
    *_each(runners=[0], envs=[16], threads=[2]),
    *_each(runners=[1, 2], envs=[16, 32], threads=[1, 2]),
]
_RLLIB_IMPALA = _each(algorithm=["impala"], runners=[1, 2], envs=[16, 32], learners=[1], threads=[1])
RLLIB = Rival(
    "rllib_ppo.py",
    {
        "cartpole": [*_RLLIB_VECTOR, {"runners": 0, "envs": 64, "threads": 1, "vectorize": "vector_entry_point"}],
        "halfcheetah": _RLLIB_VECTOR,
        "pong": [*_RLLIB_IMPALA, *_each(runners=[2], envs=[16], threads=[2])],
        "pong-4": _RLLIB_PPO,
    },
)

_ENVPOOL_VECTOR = _each(envs=[32, 64, 128], groups=[1, 2], threads=[1], env_threads=[1, 2])
_ENVPOOL_PIXELS = [
    *_each(envs=[16, 32, 64], groups=[1], threads=[2], env_threads=[2]),
    *_each(envs=[32, 64], groups=[2], threads=[1, 2], env_threads=[1]),
]
ENVPOOL = Rival(
    "envpool_ppo.py",
    {
        "cartpole": _ENVPOOL_VECTOR,
        "halfcheetah": [*_ENVPOOL_VECTOR, {"envs": 64, "groups": 1, "threads": 2, "env_threads": 2}],
        "pong": _ENVPOOL_PIXELS,
        "pong-4": _ENVPOOL_PIXELS,
    },
)

_TORCHRL = [
    *_each(collectors=[0], envs=[16, 32, 64], threads=[1, 2]),
    *_each(collectors=[2], envs=[32], threads=[1, 2]),
]
TORCHRL = Rival("torchrl_ppo.py", dict.fromkeys(("cartpole", "halfcheetah", "pong", "pong-4"), _TORCHRL))

RIVALS = {
    "sb3": SB3,
    "sample_factory": SAMPLE_FACTORY,
    "rllib": RLLIB,
    "envpool": ENVPOOL,
    "torchrl": TORCHRL,
}

LEFT_OUT = {
    "pufferlib": "3.0.0 has no wheel; its build downloads raylib and Box2D, and fails when told not to (NO_OCEAN=1)",
}
"""Libraries that cannot be installed from the package index alone, and why."""
