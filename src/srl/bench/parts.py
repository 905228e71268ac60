"""The raw parts of a training run, each alone on one core: environment, forward pass, training step, copy.

Nothing of the system is around them: no streams, no other worker. They run in a process of its own that is bound to one
core, so that what threads a part may have share that core.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

import numpy as np

from srl.envs.base import Observed, StepViews
from srl.envs.gym import Gym
from srl.envs.single import AGENT
from srl.experiment import Experiment

SECONDS = 1.2
"""How long each part is measured."""
REPEATS = 7
ENVPOOL = {"CartPole-v1": "CartPole-v1", "HalfCheetah-v5": "HalfCheetah-v4", "ALE/Pong-v5": "Pong-v5"}
"""What EnvPool calls the environments it has too."""

Parts = dict[str, float]
"""Microseconds: ``env…`` and ``forward`` per agent step, ``train`` and ``copy`` per sample of one pass."""


def measure_parts(x: Experiment) -> Parts:
    """The cost of each part of ``x``, a single-agent experiment."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_alone) as pool:
        return pool.submit(_measure, x).result()


def _alone() -> None:
    import torch

    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _measure(x: Experiment) -> Parts:
    rows = x.actors.envs
    algorithm: Any = next(iter(x.algorithms.values()))
    found = {f"env, {way}": _time(step) / rows for way, step in _ways(x).items()}
    spaces = x.env.make(1).spaces(AGENT)
    found["forward"] = _time(_acting(algorithm, spaces, rows)) / rows
    train, copy, samples = _training(algorithm, spaces, rows)
    found["copy"] = _time(copy) / samples
    found["train"] = _time(train) / (samples * algorithm.epochs) - found["copy"]
    return found


def _time(call: Callable[[], Any]) -> float:
    """Microseconds of one call: the median over a few stretches."""
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < SECONDS / REPEATS or count < 3:
        call()
        count += 1
    stretches = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        stretches.append((time.perf_counter() - begin) / count)
    return median(stretches) * 1e6


def _ways(x: Experiment) -> dict[str, Callable[[], Any]]:
    """The ways there are to step the environments on this machine."""
    found = {"SRL": _own_way(x)}
    theirs = ENVPOOL.get(str(x.env.id)) if isinstance(x.env, Gym) else None
    if theirs is not None and importlib.util.find_spec("envpool") is not None:
        found["EnvPool"] = _envpool_way(theirs, x.actors.envs)
    return found


def _own_way(x: Experiment) -> Callable[[], Any]:
    rows = x.actors.envs
    env = x.env.make(rows)
    env.bind([[AGENT]])
    spaces = env.spaces(AGENT)
    seen = {**spaces.observation_spec(), **spaces.mask_spec()}
    first, acts, terminated, truncated, valid = np.zeros((5, rows), bool)
    after = Observed({name: np.zeros((rows, *spec.shape), spec.dtype) for name, spec in seen.items()}, first, acts)
    views = StepViews(after, np.zeros(rows, np.float32), terminated, truncated, valid)
    env.reset(0, [after])
    actions = _actions(spaces, rows)
    turn = iter(range(10**12))
    return lambda: env.step([actions[next(turn) % len(actions)]], [views])


def _envpool_way(name: str, rows: int) -> Callable[[], Any]:
    import envpool  # type: ignore[import-not-found,unused-ignore]

    env = envpool.make_gymnasium(name, num_envs=rows, num_threads=1, seed=0)
    env.reset()
    actions = [np.stack([env.action_space.sample() for _ in range(rows)]) for _ in range(16)]
    turn = iter(range(10**12))
    return lambda: env.step(actions[next(turn) % 16])


def _actions(spaces: Any, rows: int) -> list[dict[str, Any]]:
    spaces.action.seed(0)
    samples = [np.stack([spaces.action.sample() for _ in range(rows)]) for _ in range(16)]
    return [{"action": each} for each in samples]


def _acting(algorithm: Any, spaces: Any, rows: int) -> Callable[[], Any]:
    from srl.policies.host import PolicyHost

    host = PolicyHost(algorithm, spaces, 0, clients=1, rows=rows)
    inputs = {name: _plausible(spec.dtype, (rows, *spec.shape)) for name, spec in spaces.observation_spec().items()}
    which, no = np.zeros(1, np.int64), np.zeros(1, bool)
    return lambda: host.act(inputs, which, no)


def _training(algorithm: Any, spaces: Any, rows: int) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """A whole update on a block that stays where it is, the copies in it alone, and the samples of both."""
    import torch

    from srl.core.slab import Batch, Slab

    slab = Slab(algorithm.block(spaces, rows), 1, shared=False)
    for name, array in slab.arrays.items():
        array[...] = _plausible(array.dtype.str, array.shape)
        if name in ("terminated", "truncated", "first"):
            array[...] = False
        if name == "valid":
            array[...] = True
    learner = algorithm.learner(spaces, 0, "cpu")
    batch = Batch(slab, [0])
    prepared = learner.prepare(batch)
    samples, minibatch = algorithm.horizon * rows, algorithm.minibatch
    fields = [torch.from_numpy(slab.flat[name]) for name in (*slab.spec.inputs, "log_prob")]
    places = torch.from_numpy(batch.positions)

    def copy() -> None:
        for part in torch.split(places[torch.randperm(samples)], minibatch):
            for field in fields:
                field.index_select(0, part)

    def train() -> None:
        learner.train(prepared, 0, lambda: False)

    return train, copy, samples


def _plausible(dtype: str, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(0)
    kind = np.dtype(dtype).kind
    if kind == "f":
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, 2 if kind != "u" else 255, shape).astype(dtype)
