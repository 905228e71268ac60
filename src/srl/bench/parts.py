"""The raw parts of a training run, each by itself: environment, forward pass, training step, copy.

Nothing of the system is around them: no streams, no worker. For a benchmark they run in one process on each core, all
at the same time, since cores that share caches, memory and power are slower together than one alone
(:class:`Meters`). To choose a layout they are looked at for a moment only (:func:`measure_costs`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any

import numpy as np

from srl.algorithms.base import Peers
from srl.core.errors import SrlError
from srl.envs.base import EnvConfig, Observed, StepViews
from srl.envs.gym import Gym
from srl.envs.single import AGENT
from srl.experiment import Experiment, cores
from srl.plan import settled

SECONDS = 0.7
"""How long each part is measured."""
REPEATS = 7
ENVPOOL = {"CartPole-v1": "CartPole-v1", "HalfCheetah-v5": "HalfCheetah-v4", "ALE/Pong-v5": "Pong-v5"}
"""What EnvPool calls the environments it has too."""
_LEAST = 3
"""Stretches of time that are measured at least."""
_END = 5.0
"""Seconds a process has to end by itself."""
_MOMENT = 0.03
"""Seconds for each part where a moment has to do."""
_GROWTH = 4
"""With how many times as many copies it is tried again."""
_BEGINNING = 2000
"""Steps that are not looked at: games begin alike, and show less then than in most of a run."""
_ANSWERS, _DRAWN = 16, 997
"""How often a policy is asked for actions, and how many steps' are drawn from what it said."""
_APART = 8
"""Steps between two that are looked at, where there is time for as many."""
_LOOK = 0.25
"""Seconds of play to see what observations are like, where a moment has to do."""

Parts = dict[str, float]
"""Microseconds: ``env…`` and ``forward`` per agent step, ``train`` and ``copy`` per sample of one pass."""
Played = dict[str, Any]
"""Observations and masks, step by step and row by row: ``[entries, …]``."""


@dataclass(frozen=True)
class Cost:
    """Microseconds of one core that an agent's step costs, as a part of a vector's step."""

    each: float
    vector: float
    """What the vector costs on top, however many copies it has; they share it."""

    def among(self, copies: float) -> float:
        """The cost of an agent's step in a vector of so many copies."""
        return self.each + self.vector / copies


@dataclass(frozen=True)
class Costs:
    """What a run is made of."""

    env: Cost
    """Stepping the environment."""
    forward: Cost
    """The policy's answer."""
    train: float
    """Training on one step, all passes: microseconds of one core."""
    waits: float
    """Microseconds of a step in which the environment waits for something other than the processor."""
    make: float
    """Seconds to make and reset one copy."""
    divides: bool
    """Whether training on a minibatch can be divided over threads, small as it is."""


@dataclass(frozen=True)
class Task:
    """What :func:`measure_costs` looks at: one policy and the environment it acts in."""

    env: EnvConfig
    agents: tuple[str, ...]
    spaces: Any
    algorithm: Any
    copies: int
    """Copies in one vector if there is one actor."""
    device: str
    """Where training takes place."""


def measure_costs(task: Task) -> Costs:
    """A look at every part, in this process: some tenths of a second, more if a copy takes long to make."""
    import torch

    torch.set_num_threads(1)
    agents = len(task.agents)
    one, few, copies, make, played = _env_costs(task)
    env = _cost(one.cpu, few.cpu, copies, agents)
    waits = _cost(one.waits, few.waits, copies, agents).each
    act = _acting(task.algorithm, task.spaces, task.copies * agents, played)
    forward = _cost(_glance(partial(act, agents)).cpu, _glance(act).cpu, task.copies, agents)
    policy: Any = task.algorithm.policy(task.spaces)
    divides = getattr(policy, "small", lambda: None)() is not None
    return Costs(env, forward, _train_cost(task, played), waits, make, divides)


def _env_costs(task: Task) -> tuple[_Glance, _Glance, int, float, Played]:
    """A step of one copy, a step of many, how many these are, seconds to make one, and what was observed meanwhile.

    There are as many as a moment allows.

    A vector that is one by itself is made as fast with many copies as with one, so that is tried.
    """
    Stepping(task.env, task.agents, 1, task.algorithm)  # what is imported and loaded once is not the cost of a copy
    step, make = _made(task, 1)
    one = many = _glance(step)
    copies, lasting = 1, max(make, (one.cpu + one.waits) / 1e6)
    while copies < task.copies and _GROWTH * lasting < _MOMENT:
        copies = min(task.copies, _GROWTH * copies)
        step, took = _made(task, copies)
        many = _glance(step)
        lasting = max(took, (many.cpu + many.waits) / 1e6)
    return one, many, copies, make, _glimpses(step, -(-_samples(task) // (copies * len(task.agents))))


def _rows(task: Task, algorithm: Any, horizon: int) -> int:
    """Rows of a block that is enough for one minibatch."""
    one_minibatch = -(-getattr(algorithm, "minibatch", horizon) // horizon)
    return int(min(task.copies * len(task.agents), one_minibatch))


def _samples(task: Task) -> int:
    """Observations in such a block."""
    horizon: int = task.algorithm.block(task.spaces, 1).horizon
    return _rows(task, task.algorithm, horizon) * (horizon + 1)


def _glimpses(step: Stepping, wanted: int) -> Played:
    """What is observed in so many steps of as much play as there is time for: what goes on shows more than a moment."""
    whole = play(step, _APART * wanted, _LOOK)
    rows = len(next(iter(step.seen.values())))
    steps = len(next(iter(whole.values()))) // rows
    kept = np.unique(np.linspace(0, steps - 1, wanted).astype(int))
    return {
        name: each.reshape(steps, rows, *each.shape[1:])[kept].reshape(-1, *each.shape[1:])
        for name, each in whole.items()
    }


def _made(task: Task, copies: int) -> tuple[Stepping, float]:
    """What steps so many copies, and the seconds it took to make them."""
    begin = time.perf_counter()
    step = Stepping(task.env, task.agents, copies, task.algorithm)
    return step, time.perf_counter() - begin


def _train_cost(task: Task, played: Played) -> float:
    import torch

    device = task.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    passes = getattr(task.algorithm, "epochs", 1)
    algorithm = replace(task.algorithm, epochs=1) if passes > 1 else task.algorithm
    horizon = algorithm.block(task.spaces, 1).horizon
    for rows in (1, _rows(task, algorithm, horizon)):
        with _one_core():  # or what its helpers did would count
            found = _glance(training(algorithm, task.spaces, rows, played, device)[0])
        spent = found.cpu if device == "cpu" else found.wall
        cost = float(passes * spent / (horizon * rows))
        if found.wall > _MOMENT * 1e6:  # with a large network the size of a minibatch hardly matters
            break
    return cost


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """Keep this thread, and those it starts, on one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    free = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(free)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, free)


@dataclass(frozen=True)
class _Glance:
    """Microseconds of one call."""

    wall: float
    cpu: float
    waits: float


def _glance(call: Callable[[], Any]) -> _Glance:
    """The cost of ``call``, from the calls that fit into a moment, after one that does what is done only once.

    That it waits is believed if it gave up the processor by itself and longer than it used it: other processes may
    have taken it.
    """
    call()
    begin, busy, given_up = time.perf_counter(), time.process_time(), _given_up()
    count, wall = 0, 0.0
    while wall < _MOMENT:
        call()
        count += 1
        wall = time.perf_counter() - begin
    cpu = time.process_time() - busy
    waited = wall > 2 * cpu and _given_up() - given_up >= count
    return _Glance(wall / count * 1e6, cpu / count * 1e6, (wall - cpu) / count * 1e6 if waited else 0.0)


def _given_up() -> int:
    """How often this process gave up the processor by itself."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _cost(one: float, many: float, copies: int, agents: int) -> Cost:
    """The cost of an agent's step, from that of a vector of one copy and one of ``copies``."""
    each = (many - one) / (copies - 1) if copies > 1 and many > one else many / copies
    return Cost(each / agents, max(0.0, one - each) / agents)


class Meters:
    """The parts of ``x``, a single-agent experiment, ready to be measured: a process on each core.

    All measure the same at the same time, as often as they are asked to.
    """

    def __init__(self, x: Experiment) -> None:
        free = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(cores())
        spawn = multiprocessing.get_context("spawn")
        pairs = [spawn.Pipe() for _ in free]
        self.pipes = [mine for mine, _ in pairs]
        self.processes = [
            spawn.Process(target=_meter, args=(x, core, theirs), daemon=True)
            for core, (_, theirs) in zip(free, pairs, strict=True)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()
        self._answers()

    def __enter__(self) -> Meters:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.join(_END)
            process.kill()

    def measure(self) -> Parts:
        """The mean of what the cores found now."""
        for pipe in self.pipes:
            pipe.send(None)
        found = self._answers()
        return {name: fmean(each[name] for each in found) for name in found[0]}

    def _answers(self) -> list[Parts]:
        try:
            return [pipe.recv() for pipe in self.pipes]
        except EOFError as error:
            raise SrlError("a process that measures parts has died; what it said is above") from error


def _meter(x: Experiment, core: int, pipe: Connection) -> None:
    """A process of :class:`Meters`."""
    import torch

    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    bench = Bench(x)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        pipe.send({})
        while True:
            pipe.recv()
            pipe.send(bench.measure())


class Bench:
    """The parts of ``x``, a single-agent experiment, in this process."""

    def __init__(self, x: Experiment) -> None:
        x = settled(x)
        rows = x.actors.envs
        algorithm: Any = next(iter(x.algorithms.values()))
        ways = _ways(x, algorithm)
        spaces = x.env.make(1).spaces(AGENT)
        played = _later(ways["SRL"], algorithm.horizon + 1)
        calls = {f"env, {way}": (step, rows) for way, step in ways.items()}
        calls["forward"] = _acting(algorithm, spaces, rows, played), rows
        # A batch comes from all copies there are: what copies show repeats less from one to the other.
        whole = x.actors.count * x.actors.ring * rows
        if whole > rows:
            played = _later(Stepping(x.env, (AGENT,), whole, algorithm), algorithm.horizon + 1)
        train, batch = training(algorithm, spaces, whole, played)
        samples = len(batch.positions)
        calls["copy"] = _copying(batch, algorithm.minibatch), samples
        calls["train"] = train, samples * algorithm.epochs
        self.calls = {name: (call, _fitting(call), each) for name, (call, each) in calls.items()}

    def measure(self) -> Parts:
        """What each part costs now."""
        found = {name: _time(call, count) / each for name, (call, count, each) in self.calls.items()}
        found["train"] -= found["copy"]
        return found


def _fitting(call: Callable[[], Any]) -> int:
    """How many calls fit into a stretch of time, the first one not counted."""
    call()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < SECONDS / REPEATS:
        call()
        count += 1
    return count


def _time(call: Callable[[], Any], count: int) -> float:
    """Microseconds of one call: the median over stretches of ``count`` of them."""
    stretches: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(stretches) < _LEAST:
        begin = time.perf_counter()
        for _ in range(count):
            call()
        stretches.append((time.perf_counter() - begin) / count)
    return median(stretches) * 1e6


def _ways(x: Experiment, algorithm: Any) -> dict[str, Any]:
    """The ways there are to step the environments on this machine."""
    found: dict[str, Any] = {"SRL": Stepping(x.env, (AGENT,), x.actors.envs, algorithm)}
    theirs = ENVPOOL.get(str(x.env.id)) if isinstance(x.env, Gym) else None
    if theirs is not None and importlib.util.find_spec("envpool") is not None:
        actions = _actions(algorithm, x.env.make(1).spaces(AGENT), x.actors.envs)
        found["EnvPool"] = _envpool_way(theirs, x.actors.envs, actions)
    return found


class Stepping:
    """Steps so many copies when called; ``seen`` is what they show."""

    def __init__(self, env: EnvConfig, agents: Sequence[str], copies: int, algorithm: Any) -> None:
        self.env, rows = env.make(copies), copies * len(agents)
        self.env.bind([agents])
        spaces = self.env.spaces(agents[0])
        specs = {**spaces.observation_spec(), **spaces.mask_spec()}
        self.seen = {name: np.zeros((rows, *spec.shape), spec.dtype) for name, spec in specs.items()}
        first, acts, terminated, truncated, valid = np.zeros((5, rows), bool)
        after = Observed(self.seen, first, acts)
        self.views = [StepViews(after, np.zeros(rows, np.float32), terminated, truncated, valid)]
        self.env.reset(0, [after])
        self.actions = itertools.cycle(_actions(algorithm, spaces, rows))

    def __call__(self) -> None:
        """One step of every copy."""
        self.env.step([next(self.actions)], self.views)


def play(step: Stepping, steps: int, seconds: float = float("inf")) -> Played:
    """What is observed in so many steps, or as many as there is time for: what it costs to look at may depend on it."""
    begin = time.perf_counter()
    found: list[Played] = []
    while len(found) < steps and (not found or time.perf_counter() - begin < seconds):
        step()
        found.append({name: field.copy() for name, field in step.seen.items()})
    return {name: np.concatenate([each[name] for each in found]) for name in step.seen}


def _later(step: Stepping, steps: int) -> Played:
    """The same, once games have gone their own ways."""
    for _ in range(_BEGINNING):
        step()
    return play(step, steps)


def _envpool_way(name: str, rows: int, actions: list[dict[str, Any]]) -> Callable[[], Any]:
    import envpool  # type: ignore[import-not-found,unused-ignore]

    env = envpool.make_gymnasium(name, num_envs=rows, num_threads=1, seed=0)
    env.reset()
    taken = [each["action"].astype(env.action_space.dtype) for each in actions]
    turn = itertools.cycle(taken)
    return lambda: env.step(next(turn))


def _actions(algorithm: Any, spaces: Any, rows: int) -> list[dict[str, Any]]:
    """Actions as a policy takes them that has not learned yet: a robot's physics depends on what it does.

    They are drawn from a few answers, so many that a game does not go round in circles: it would show less.
    """
    act, names = _acting(algorithm, spaces, rows, {}), spaces.action_spec()
    answers = [{name: found[name].copy() for name in names} for found in (act() for _ in range(_ANSWERS))]
    found = {name: np.concatenate([each[name] for each in answers]) for name in names}
    drawn = np.random.default_rng(0).integers(_ANSWERS * rows, size=(_DRAWN, rows))
    return [{name: array[which] for name, array in found.items()} for which in drawn]


def _acting(algorithm: Any, spaces: Any, rows: int, played: Played) -> Callable[..., Any]:
    """The forward pass of so many rows, or of the first few, step after step of what was played."""
    from srl.policies.host import PolicyHost, arrays_of

    host = PolicyHost(algorithm, spaces, 0, clients=rows, rows=1)
    block = algorithm.block(spaces, rows)
    specs = {name: block.fields[name] for name in block.inputs}
    steps = max((len(each) // rows for each in played.values()), default=1)
    series = {name: _like(played, name, spec.dtype, (steps, rows, *spec.shape)) for name, spec in specs.items()}
    which, no, turn = np.arange(rows), np.zeros(rows, bool), itertools.cycle(range(steps))

    def act(count: int = rows) -> Any:
        step = next(turn)
        if step == 0:  # as often as in a run there are new weights: what is known about images holds for one version
            host.load(arrays_of(host.policy), 0)
        return host.act({name: field[step, :count] for name, field in series.items()}, which[:count], no[:count])

    return act


def training(
    algorithm: Any, spaces: Any, rows: int, played: Played, device: str = "cpu", peers: Peers | None = None
) -> tuple[Callable[[], Any], Any]:
    """A whole update on a block of what was played, and that block as a batch."""
    from srl.core.slab import Batch, Slab

    slab = Slab(algorithm.block(spaces, rows), 1, shared=False)
    for name, array in slab.arrays.items():
        array[...] = _like(played, name, array.dtype.str, array.shape)
    learner = algorithm.learner(spaces, 0, device)
    learner.peers = peers
    batch = Batch(slab, [0])
    prepared = learner.prepare(batch)
    return lambda: learner.train(prepared, 0, lambda: False), batch


def _copying(batch: Any, minibatch: int) -> Callable[[], None]:
    """The copies in one pass over ``batch``, alone."""
    import torch

    slab = batch.slab
    fields = [torch.from_numpy(slab.flat[name]) for name in (*slab.spec.inputs, "log_prob")]
    places = torch.from_numpy(batch.positions)

    def copy() -> None:
        for part in torch.split(places[torch.randperm(len(places))], minibatch):
            for field in fields:
                field.index_select(0, part)

    return copy


def _like(played: Played, name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """A field of a block: what was played over and over, or what was not observed made up."""
    return np.resize(played[name], shape) if name in played else _plausible(name, dtype, shape)


def _plausible(name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(0)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.full(shape, name == "valid" or name.startswith("mask"))
    if kind == "f":
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, 2 if kind != "u" else 255, shape).astype(dtype)
