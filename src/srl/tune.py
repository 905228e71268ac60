"""The layout for this machine: how many actors share the copies, where that is left open.

Before a run is wired the parts it is made of are looked at for a moment (:func:`srl.bench.parts.measure_costs`), in a
process forked as its workers will be. A rule turns the costs into a number of actors (:func:`best`)::

    steps per second = 1 / max(acting / actors, training / threads, (acting + training) / cores)

The copies stay as many as they are, so a batch and what is learned from it do not depend on the machine. Costs are kept
in the user's cache folder, for the same experiment on the same machine; a run keeps the numbers chosen in its
``config.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from srl import config
from srl.bench.machine import machine
from srl.bench.parts import Costs, Task, measure_costs
from srl.core.errors import WorkerError
from srl.experiment import Actors, Experiment, cores, trainer_threads
from srl.plan import Plan, divided, settled

_CLOSE = 0.95
"""A layout this close to the best one predicted is as good: predictions are no better than that."""
_UNSEEN = 0.5
"""What a copy's step may cost beyond what was seen: a run is dearer than a moment with a few copies, and an actor too
many costs little, one too few half of the throughput."""
_SHOWN = 0.8
"""What training on images that repeat was seen to cost, of what it costs in a run: a moment of a game shows less."""
_CROWD = 8
"""Actors per core at most, for environments that wait."""
_SLOW_START = 1.0
"""Seconds to make all copies from which on every core should make some."""
_PATIENCE = 20
"""Seconds a calibration may take."""


@dataclass(frozen=True)
class Machine:
    """What a layout is chosen for."""

    cores: int
    threads: int
    """Of the trainer."""


def tuned(x: Experiment, plans: Sequence[Plan], all_cores: int = 0) -> tuple[Experiment, str]:
    """``x`` with every number of its layout chosen, and one line that says what was chosen and why.

    What the user has chosen stays, and then the line is empty. ``plans`` are those of a single actor; ``all_cores`` are
    those of all hosts, if there are several like this one.
    """
    if x.actors.count:
        return x, ""
    if x.launcher == "inline":
        return divided(x, 1), ""
    found = obstacle(x, plans) or costs_of(x, plans[0])
    threads = trainer_threads(x, plans)
    if not x.trainer.threads and isinstance(found, Costs) and (found.divides or threads > 1):
        threads = threads_for(found, x.actors.envs // x.actors.ring, cores())
    here = Machine(all_cores or cores(), threads)
    x = replace(x, trainer=replace(x.trainer, threads=threads))
    if isinstance(found, str):
        x = settled(x)
        return x, f"{describe(x)}: not calibrated, {found}"
    count = best(found, x.actors, x.policies.count, here)
    advice = better_divided(found, x.actors, x.policies.count, here, count)
    x = divided(x, count)
    return x, f"{describe(x)}: {explain(found, x.actors.envs, here)}{advice}"


def obstacle(x: Experiment, plans: Sequence[Plan]) -> str:
    """Why more actors would change the run, or its parts cannot be measured alone, if so."""
    if x.trainer.batch or x.trainer.slab:
        return "trainer.batch and trainer.slab count blocks of one actor"
    if x.trainer.count > 1:
        return "every trainer has an actor of its own"
    if len(plans) > 1:
        return "there are several policies"
    replay = plans[0].algorithm.replay()
    return "training is from a replay buffer" if replay is not None and replay.kind != "fifo" else ""


def threads_for(costs: Costs, copies: int, cores: int) -> int:
    """As many threads for the trainer as its share of all work fills cores.

    Where what an actor leaves of its core is helped with besides (ADR 13) only whole cores count: a thread of the
    trainer would be in its way. Else a part of a core takes a thread too.
    """
    acting = costs.env.among(copies) + costs.forward.among(copies)
    share = costs.train / (acting + costs.train) * cores
    return max(1, int(share) if costs.divides else ceil(share / _SHOWN))


def rate(costs: Costs, actors: Actors, policies: int, here: Machine, count: int) -> float:
    """Steps per second to be expected of ``count`` actors."""
    copies = actors.envs / (count * actors.ring)
    env, forward, train = costs.env.among(copies), costs.forward.among(copies), costs.train
    inline = actors.inference == "inline"
    unseen = _UNSEEN * (costs.env.each + costs.forward.each) if count < here.cores else 0.0
    stages = [
        (env + unseen + costs.waits + (forward if inline else 0.0)) / count,
        0.0 if inline else forward / policies,
        train / here.threads,
        (env + forward + train) / here.cores,
    ]
    return 1e6 / max(stages)


def best(costs: Costs, actors: Actors, policies: int, here: Machine) -> int:
    """The fewest actors that do as well as any number; as many as there are cores if copies take long to make."""
    vectors = actors.envs // actors.ring
    counts = [count for count in range(1, min(vectors, _CROWD * here.cores) + 1) if vectors % count == 0]
    rates = {count: rate(costs, actors, policies, here, count) for count in counts}
    good = [count for count in counts if rates[count] >= _CLOSE * max(rates.values())]
    if slow_to_start(costs, actors.envs):
        return max([count for count in good if count <= here.cores], default=good[0])
    return good[0]


def better_divided(costs: Costs, actors: Actors, policies: int, here: Machine, count: int) -> str:
    """What to say if ``count`` actors are far from what another number of copies would allow."""
    reached, possible = (rate(costs, actors, policies, here, each) for each in (count, here.cores))
    if reached > 0.8 * possible:
        return ""
    return f"; {actors.envs} copies cannot be divided well, a multiple of {here.cores * actors.ring} can"


def slow_to_start(costs: Costs, copies: int) -> bool:
    """Whether one actor would take noticeably long to make all copies."""
    return costs.make * copies > _SLOW_START


def describe(x: Experiment) -> str:
    """The layout of ``x`` in a few words."""
    actors = x.actors
    ring = f" × {actors.ring} vectors" if actors.ring > 1 else ""
    copies = "1 copy" if actors.envs == 1 else f"{actors.envs} copies"
    trainers = "trainer" if x.trainer.count == 1 else f"{x.trainer.count} trainers, each"
    trainer = f"{trainers} on {_many(x.trainer.threads, 'thread')}"
    return f"{_many(actors.count, 'actor')}{ring} × {copies}, inference {actors.inference}, {trainer}"


def explain(costs: Costs, copies: int, here: Machine) -> str:
    """What a choice of vectors of so many copies is based on."""
    env, forward, train = costs.env.among(copies), costs.forward.among(copies), costs.train
    share = f"acting is {(env + forward) / (env + forward + train):.0%} of the work"
    parts = f"env {_micro(env)}, forward {_micro(forward)}, training {_micro(train)} a step"
    waits = f", the environment waits {_micro(costs.waits)} a step" if costs.waits else ""
    slow = f", a copy takes {costs.make:.2f} s to make" if costs.make > _SLOW_START / 50 else ""
    return f"{share} ({parts}){waits}{slow}, {_many(here.cores, 'core')}"


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _micro(cost: float) -> str:
    return f"{cost:,.{0 if cost >= 10 else 1}f} µs"


def costs_of(x: Experiment, plan: Plan) -> Costs | str:
    """What the parts of ``x`` cost, measured now or before; a few words if they cannot be measured."""
    path = cache_folder() / f"{fingerprint(x)}.json"
    known = read_costs(path)
    if known is not None:
        return known
    found = _measure(x, plan)
    if isinstance(found, Costs):
        write_costs(found, path)
    return found


def cache_folder() -> Path:
    """Where costs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "srl" / "costs"


def fingerprint(x: Experiment) -> str:
    """What costs depend on: machine, versions, environment, algorithm, and how many copies there are."""
    from srl import __version__

    whole = config.to_json(x)
    here = {**machine(), "usable": cores(), "srl": __version__}
    asked = [whole["env"], whole["algorithm"], x.actors.envs, x.actors.ring, x.trainer.device]
    return hashlib.sha256(msgspec.json.encode([here, asked], order="sorted")).hexdigest()[:32]


def read_costs(path: Path) -> Costs | None:
    """Costs kept before, if they can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Costs)
    except (OSError, msgspec.DecodeError):
        return None


def write_costs(costs: Costs, path: Path) -> None:
    """Keep ``costs``, where there is a folder to keep them in."""
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(costs)))
        partial.replace(path)


def _measure(x: Experiment, plan: Plan) -> Costs | str:
    from srl.launch.local import ask, preload

    task = Task(x.env, plan.agents, plan.spaces, plan.algorithm, x.actors.envs // x.actors.ring, x.trainer.device)
    try:
        return msgspec.convert(ask(_answer, task, preload(x), _PATIENCE), Costs)
    except WorkerError as error:
        return str(error)


def _answer(task: Task) -> dict[str, Any]:
    return asdict(measure_costs(task))
