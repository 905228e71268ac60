"""What a user declares, and :func:`wire`: the whole dataflow in one function.

Data passes through the graph like this (``docs/architecture.md`` has the picture)::

    actor --observations--> policy --actions--> actor --blocks--> trainer --versions--> policy
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from srl.algorithms.base import Algorithm
from srl.algorithms.ppo import PPO
from srl.core.errors import ConfigError
from srl.core.memory import Doorbell, available_memory
from srl.core.seeding import derive
from srl.core.slab import BlockSpec
from srl.core.specs import Spaces
from srl.core.worker import Worker
from srl.envs.base import EnvConfig
from srl.services.checkpoints import CheckpointStore
from srl.services.names import FileNames
from srl.streams.inference import InferenceBoard
from srl.streams.parameters import ParameterBoard
from srl.streams.protocols import InferenceStream, ParameterStream, SampleStream
from srl.streams.samples import SampleBoard
from srl.workers.actor import ActorWorker, Route, groups_of
from srl.workers.policy import InlineInference, PolicyWorker
from srl.workers.trainer import TrainerPlan, TrainerWorker

if TYPE_CHECKING:
    from srl.launch.run import Result

_LARGE = 8192
"""Bytes of an observation from which on a network is worth several threads."""

TRANSPORTS = ("auto", "shm", "tcp")
LAUNCHERS = ("inline", "local")
INFERENCE = ("inline", "remote")


@dataclass(frozen=True)
class Actors:
    """Who steps the environments."""

    count: int = 1
    """Actor workers."""
    envs: int = 32
    """Environment copies in one vector."""
    ring: int = 1
    """Vectors an actor steps in turn: while one waits for actions the next one steps (for remote inference)."""
    inference: Literal["inline", "remote"] = "inline"
    """inline: the policy sits in the actor. remote: in policy workers, which batch what several actors ask."""


@dataclass(frozen=True)
class Policies:
    """Who answers requests for actions, with remote inference."""

    count: int = 1
    """Policy workers of each policy."""
    threads: int = 1
    """Threads of one policy worker."""


@dataclass(frozen=True)
class Trainer:
    """Who trains."""

    batch: int = 0
    """Blocks per update (0: one from every vector of every actor)."""
    slab: int = 0
    """Blocks the sample stream can hold (0: what the staleness bound needs)."""
    threads: int = 0
    """Threads of the trainer (0: one for small observations, for images the cores that the actors leave over)."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    prefetch: bool = True
    """Prepare the next batch while this one is trained on."""
    checkpoint_seconds: float = 60.0
    """Time between checkpoints; one is always saved at the end."""


@dataclass(frozen=True)
class Experiment:
    """One RL run. ``run()`` it, or hand it to a launcher."""

    env: EnvConfig
    algorithm: Algorithm | Mapping[str, Algorithm] = field(default_factory=PPO)
    """The algorithm, or one for every policy by name."""
    agents: Mapping[str, str] = field(default_factory=lambda: {"*": "default"})
    """Which agents act by which policy: {pattern of the agent's name: policy}; the first match counts."""
    actors: Actors = field(default_factory=Actors)
    policies: Policies = field(default_factory=Policies)
    trainer: Trainer = field(default_factory=Trainer)
    steps: int = 1_000_000
    """Agent steps to train on."""
    seed: int = 1
    launcher: Literal["inline", "local"] = "local"
    """inline: all workers in this process, in turn, deterministic. local: one process each."""
    transport: Literal["auto", "shm", "tcp"] = "auto"
    """auto: the best for where the workers are. shm or tcp: that one."""
    port: int = 0
    """First TCP port to listen on (0: any that is free)."""
    restarts: int = 3
    """How often the workers of a run may be started again after a crash, in all."""

    def run(self, out: str | Path | None = None, *, quiet: bool = False, **changes: Any) -> Result:
        """Train, with ``changes`` to the fields above; everything about the run is kept in the folder ``out``."""
        from srl.launch.run import run
        from srl.monitor.console import on_console

        return run(replace(self, **changes), out, display=None if quiet else on_console)

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """The algorithm of every policy."""
        return {"default": self.algorithm} if isinstance(self.algorithm, Algorithm) else self.algorithm


@dataclass(frozen=True)
class Node:
    """A worker to be: its class and the arguments to make it with, streams among them."""

    worker: type[Worker]
    name: str
    arguments: dict[str, Any]

    def build(self) -> Worker:
        """Make the worker. Done in the process it will live in."""
        return self.worker(name=self.name, **self.arguments)


@dataclass(frozen=True)
class Plan:
    """A policy's share of the experiment, checked: who acts by it and how large things are."""

    policy: str
    algorithm: Algorithm
    agents: tuple[str, ...]
    spaces: Spaces
    block: BlockSpec
    batch: int
    slab: int


def wire(x: Experiment, plans: Sequence[Plan], run_dir: Path, resume: str | None) -> list[Node]:
    """The graph: every stream is made here and handed to the workers it joins. Actors first, trainers last."""
    shared = x.launcher != "inline"
    threads = trainer_threads(x, plans)
    bells = [Doorbell() for _ in range(x.actors.count)]  # wakes an actor, whatever it waits for
    routes: list[list[Route]] = [[] for _ in range(x.actors.count)]
    policies: list[Node] = []
    trainers: list[Node] = []

    for place, plan in enumerate(plans):
        samples, inference, parameters = streams(x, plan, place, bells, FileNames(run_dir / "names"))
        common: dict[str, Any] = {"algorithm": plan.algorithm, "spaces": plan.spaces, "parameters": parameters}

        todo = TrainerPlan(
            batch=plan.batch,
            steps=x.steps,
            seed=x.seed,
            device=x.trainer.device,
            threads=threads,
            prefetch=x.trainer.prefetch and shared,
            checkpoint_seconds=x.trainer.checkpoint_seconds,
            resume=resume,
        )
        store = checkpoint_store(run_dir, plan)
        trained = {"policy": plan.policy, "samples": samples, "checkpoints": store, "plan": todo}
        trainers.append(Node(TrainerWorker, f"trainer-{plan.policy}", {**common, **trained}))

        if x.actors.inference == "remote":
            for i in range(x.policies.count):
                served = {"index": i, "inference": inference, "seed": x.seed, "threads": x.policies.threads}
                policies.append(Node(PolicyWorker, f"policy-{plan.policy}-{i}", {**common, **served}))

        for i in range(x.actors.count):
            if x.actors.inference == "inline":
                seed = derive(x.seed, "inference", plan.policy, i)
                inference = InlineInference(**common, seed=seed, threads=1 if shared else threads)
            routes[i].append(Route(plan.policy, plan.agents, inference, samples))

    acting = {"env": x.env, "copies": x.actors.envs, "ring": x.actors.ring, "seed": x.seed}
    actors = [Node(ActorWorker, f"actor-{i}", {"index": i, "routes": routes[i], **acting}) for i in range(len(routes))]
    return [*actors, *policies, *trainers]


def streams(
    x: Experiment, plan: Plan, place: int, bells: Sequence[Doorbell], names: FileNames
) -> tuple[SampleStream, InferenceStream, ParameterStream]:
    """The three streams of one policy, over the transport that suits where its workers are."""
    slots = [bell for bell in bells for _ in range(x.actors.ring)]
    if x.transport != "tcp":
        shared = x.launcher != "inline"
        board = SampleBoard(plan.block, plan.slab, slots, shared=shared)
        inference = InferenceBoard(board.slab, slots, x.policies.count, shared=shared)
        return board, inference, ParameterBoard(shared=shared)

    from srl.streams.tcp_inference import TcpInference
    from srl.streams.tcp_parameters import TcpParameters
    from srl.streams.tcp_samples import TcpSamples

    ports = [x.port + place * (2 + x.policies.count) + i if x.port else 0 for i in range(3)]
    return (
        TcpSamples(f"samples/{plan.policy}", names, plan.block, plan.slab, len(slots), ports[0]),
        TcpInference(f"inference/{plan.policy}", names, plan.block, len(slots), x.policies.count, ports[2]),
        TcpParameters(f"parameters/{plan.policy}", names, ports[1]),
    )


def trainer_threads(x: Experiment, plans: Sequence[Plan]) -> int:
    """Threads for the trainer: one for small observations, else the cores that the other workers leave over."""
    if x.trainer.threads:
        return x.trainer.threads
    observed = max(plan.block.fields[name].nbytes for plan in plans for name in plan.block.observations)
    if observed < _LARGE:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = x.actors.count if x.actors.inference == "inline" else x.policies.count * x.policies.threads
    return cores if x.launcher == "inline" else max(1, cores - busy)


def checkpoint_store(run_dir: Path, plan: Plan) -> CheckpointStore:
    """Where the policy's checkpoints lie."""
    identity = f"{plan.algorithm.name} {plan.spaces.observation} -> {plan.spaces.action}"
    return CheckpointStore(run_dir / "checkpoints" / plan.policy, identity)


def check(x: Experiment) -> list[Plan]:
    """Refuse, with one clear line, what cannot run; else say how large everything is. Starts no process."""
    _check_choices(x)
    probe = x.env.make(1)
    try:
        groups = groups_of(probe.agents, x.agents)
        spaces = {policy: [probe.spaces(agent) for agent in agents] for policy, agents in groups.items()}
    finally:
        probe.close()
    missing = sorted(set(groups) - set(x.algorithms))
    if missing or not groups:
        raise ConfigError(f"no algorithm for the policies {missing}" if missing else "no agent matches any pattern")
    return [_plan(x, policy, agents, spaces[policy]) for policy, agents in groups.items()]


def _plan(x: Experiment, policy: str, agents: tuple[str, ...], spaces: Sequence[Spaces]) -> Plan:
    algorithm = x.algorithms[policy]
    if any(other != spaces[0] for other in spaces):
        raise ConfigError(f"the agents of policy {policy!r} differ in their spaces: {', '.join(agents)}")
    block = algorithm.block(spaces[0], x.actors.envs * len(agents))
    slots = x.actors.count * x.actors.ring
    batch = x.trainer.batch or slots
    slab = x.trainer.slab or max((min(algorithm.max_staleness, 2) + 1) * batch, slots)
    if batch > slab:
        raise ConfigError(f"trainer.batch {batch} is larger than the slab of {slab} blocks; raise trainer.slab")
    algorithm.check(spaces[0], batch * block.horizon * block.rows)
    need, there = block.layout(slab).nbytes, available_memory()
    if need > there:
        raise ConfigError(
            f"the slab of policy {policy!r} needs {need / 2**20:,.0f} MiB of shared memory and only "
            f"{there / 2**20:,.0f} MiB are available; lower actors.envs, actors.count, {algorithm.name}.horizon "
            "or trainer.slab"
        )
    return Plan(policy, algorithm, agents, spaces[0], block, batch, slab)


def _check_choices(x: Experiment) -> None:
    choices = (
        ("launcher", x.launcher, LAUNCHERS),
        ("transport", x.transport, TRANSPORTS),
        ("actors.inference", x.actors.inference, INFERENCE),
        ("trainer.device", x.trainer.device.split(":")[0], ("auto", "cpu", "cuda", "mps")),
    )
    for name, value, known in choices:
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    numbers = (
        ("actors.count", x.actors.count, 1),
        ("actors.envs", x.actors.envs, 1),
        ("actors.ring", x.actors.ring, 1),
        ("policies.count", x.policies.count, 1),
        ("policies.threads", x.policies.threads, 1),
        ("trainer.batch", x.trainer.batch, 0),
        ("trainer.slab", x.trainer.slab, 0),
        ("trainer.threads", x.trainer.threads, 0),
        ("steps", x.steps, 1),
        ("seed", x.seed, 0),
        ("port", x.port, 0),
        ("restarts", x.restarts, 0),
    )
    for name, number, least in numbers:
        if number < least:
            raise ConfigError(f"{name} must be at least {least}, got {number}")
    if x.launcher == "inline" and x.transport != "auto":
        raise ConfigError(f"the inline launcher has no transport to choose; leave out transport={x.transport}")
