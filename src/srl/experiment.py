"""What a user declares, and :func:`wire`: the whole dataflow in one function.

Data passes through the graph like this (``docs/architecture.md`` has the picture)::

    actor --observations--> policy --actions--> actor --blocks--> [buffer] --blocks--> trainer --versions--> policy
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from srl.algorithms.base import Algorithm, Replay
from srl.algorithms.ppo import PPO
from srl.core.memory import Doorbell
from srl.core.seeding import derive
from srl.core.slab import BlockSpec
from srl.core.worker import Worker
from srl.envs.base import EnvConfig
from srl.plan import Plan, checkpoint_store, opponent_store, settled
from srl.services.checkpoints import CheckpointStore
from srl.services.names import FileNames, Names
from srl.streams.combine import NullSamples, TeeSamples
from srl.streams.inference import InferenceBoard
from srl.streams.parameters import ParameterBoard
from srl.streams.protocols import InferenceStream, ParameterStream, SampleStream
from srl.streams.samples import SampleBoard
from srl.workers.actor import ActorWorker, Route
from srl.workers.buffer import FifoBuffer, ReplayBuffer
from srl.workers.evaluator import EvalSeat, EvalWorker, Target
from srl.workers.group import Group
from srl.workers.opponents import Opponent, OpponentInference
from srl.workers.policy import InlineInference, PolicyWorker
from srl.workers.replay import feedback_block, sample_block
from srl.workers.trainer import PeerTrainer, TrainerPlan, TrainerWorker

if TYPE_CHECKING:
    from srl.launch.run import Result
    from srl.monitor.monitor import Sink

_LARGE = 8192
"""Bytes of an observation from which on a network is worth several threads."""


_BATCHES = 3
"""Batches between a buffer and its trainer: one being trained on, one ready, one being drawn."""


@dataclass(frozen=True)
class Actors:
    """Who steps the environments."""

    count: int = 0
    """Actor workers (0 or --actors auto: as many as suit this machine, after stepping a few copies for a moment)."""
    envs: int = 32
    """Environment copies in one vector; if the number of actors is left open, in all vectors of all actors."""
    ring: int = 1
    """Vectors an actor steps in turn: while one waits for actions the next one steps (for remote inference)."""
    inference: Literal["inline", "remote"] = "inline"
    """inline: the policy sits in the actor. remote: in policy workers, which batch what several actors ask."""
    memory_mb: int = 0
    """An actor that holds more memory than this is started anew, for environments that leak (0: no limit)."""
    most: int = 0
    """Actors there may be at any time, if srl scale is to add some while the run goes on (0: count)."""
    cpus: float = 1.0
    """Processor cores one actor is counted for on a cluster."""
    gpus: float = 0.0
    """GPUs one actor is counted for on a cluster."""
    on: str = ""
    """Labels of the hosts they may be on, such as role=actor (for Ray; default: any)."""


@dataclass(frozen=True)
class Policies:
    """Who answers requests for actions, with remote inference."""

    count: int = 1
    """Policy workers of each policy."""
    threads: int = 1
    """Threads of one policy worker."""
    cpus: float = 1.0
    """Processor cores one policy worker is counted for on a cluster."""
    gpus: float = 0.0
    """GPUs one policy worker is counted for on a cluster."""
    on: str = ""
    """Labels of the hosts they may be on, such as role=policy (for Ray; default: any)."""


@dataclass(frozen=True)
class Trainer:
    """Who trains."""

    count: int = 1
    """Trainers of each policy: they divide the actors among them and sum their gradients."""
    batch: int = 0
    """Blocks per update of one trainer (0: one from every vector of every actor it has)."""
    slab: int = 0
    """Blocks the sample stream to one trainer can hold (0: what the staleness bound needs)."""
    threads: int = 0
    """Threads of the trainer (0: for images as many as there are cores, else as calibrated, or one)."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    prefetch: bool = True
    """Prepare the next batch while this one is trained on."""
    checkpoint_seconds: float = 60.0
    """Time between checkpoints; one is always saved at the end."""
    past_every: int = 0
    """Updates between two versions kept for opponents to play (0: 20 if there are opponents, else none)."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What to do about an update that gives NaN or Inf: end the run, or skip the batch."""
    cpus: float = 1.0
    """Processor cores one trainer is counted for on a cluster."""
    gpus: float = 0.0
    """GPUs one trainer is counted for on a cluster."""
    on: str = ""
    """Labels of the hosts it may be on, such as role=trainer (for Ray; default: any)."""


@dataclass(frozen=True)
class Evaluator:
    """Who evaluates beside training."""

    count: int = 0
    """1: one evaluator. 0: none, unless the run has a target or a curriculum."""
    episodes: int = 20
    """Episodes played with each version."""
    seconds: float = 10.0
    """Time between two versions saved to be evaluated."""
    sample: bool | None = None
    """Draw actions at random as in training, or take the likeliest (default: draw where observations are images)."""


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
    evaluator: Evaluator = field(default_factory=Evaluator)
    samples: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Whose trainers get a policy's samples, if not just its own: {policy: policies}; nobody's: an empty list."""
    opponents: Mapping[str, Opponent] = field(default_factory=dict)
    """Policies that are not trained but are past versions of others: {policy: opponent}."""
    until: str = ""
    """End the run once an evaluation reaches this, such as return>=475 (or return/policy>=475)."""
    curriculum: str = ""
    """module:function of an evaluation that says what the actors' environments are told, or None for nothing."""
    steps: int = 1_000_000
    """Agent steps to train on."""
    seed: int = 1
    launcher: str = "local"
    """inline: all workers in this process, in turn, deterministic. local: one process each. ray or ray://address: on
    the hosts of a Ray cluster."""
    transport: Literal["auto", "shm", "tcp"] = "auto"
    """auto: the best for where the workers are. shm or tcp: that one."""
    port: int = 0
    """First TCP port to listen on (0: any that is free)."""
    restarts: int = 3
    """How often the workers of a run may be started again after a crash, in all."""
    stall_seconds: float = 60.0
    """After how long without progress the run says who is stuck where; a stuck actor is then started anew."""

    def run(
        self, out: str | Path | None = None, *, quiet: bool = False, sinks: Sequence[Sink] = (), **changes: Any
    ) -> Result:
        """Train, with ``changes`` to the fields above; everything about the run is kept in the folder ``out``.

        ``sinks`` also get the run's numbers.
        """
        from srl.launch.run import run
        from srl.monitor.console import on_console

        return run(replace(self, **changes), out, display=None if quiet else on_console, sinks=sinks)

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
    spare: bool = False
    """Whether it is started only when it is asked for."""

    def build(self) -> Worker:
        """Make the worker. Done in the process it will live in."""
        return self.worker(name=self.name, **self.arguments)


def wire(
    x: Experiment, plans: Sequence[Plan], run_dir: Path, resume: str | None, names: Names | None = None
) -> list[Node]:
    """The graph: every stream is made here and handed to the workers it joins. Actors first, trainers after buffers.

    With ``names`` of a network that spans hosts, workers may be on any of them.
    """
    x = settled(x)
    ranks = Streams.ranks(x, run_dir, names)
    threads = trainer_threads(x, plans)
    routes: list[list[Route]] = [[] for _ in range(ranks[0].actors)]
    policies: list[Node] = []
    buffers: list[Node] = []
    trainers: list[Node] = []
    trained = [plan for plan in plans if not plan.opponent]
    samples = [{plan.policy: make.samples(plan.policy, plan.block, plan.slab) for plan in trained} for make in ranks]
    weights = {plan.policy: ranks[0].parameters(plan.policy) for plan in trained}

    for plan, (make, own) in itertools.product(plans, zip(ranks, samples, strict=True)):
        name, sink = plan.policy, make.sink(plan, own)
        common: dict[str, Any] = {"algorithm": plan.algorithm, "spaces": plan.spaces}
        if plan.opponent is not None:
            for i in make.mine:
                against = make.opponent(plan, opponent_store(plan, plans, run_dir), derive(x.seed, name, i))
                routes[i].append(Route(name, plan.agents, against, sink))
            continue

        source, priorities = own[name], None
        replay = plan.algorithm.replay()
        if replay is not None:
            source, priorities, buffer = make.buffer(plan, replay, source, resume)
            buffers.append(buffer)
        todo = {"plan": trainer_plan(x, plan, plans, threads, resume), "checkpoints": checkpoint_store(run_dir, plan)}
        given = {"samples": source, "priorities": priorities, "parameters": weights[name], "group": make.group(name)}
        kind = PeerTrainer if make.rank else TrainerWorker
        trainers.append(Node(kind, f"trainer-{make.called(name, '-')}", {"policy": name, **common, **given, **todo}))
        if not plan.agents:  # it learns from what others do
            continue

        hosted = {**common, "parameters": weights[name], "clients": make.slots, "rows": plan.block.rows}
        inference: InferenceStream
        if x.actors.inference == "remote":
            inference = make.inference(name, sink, plan.block)
            for i in range(make.servers):
                served = {"index": i, "inference": inference, "seed": x.seed, "threads": x.policies.threads}
                number = i * len(ranks) + make.rank
                policies.append(Node(PolicyWorker, f"policy-{name}-{number}", {**hosted, **served}))
        for i in make.mine:
            if x.actors.inference == "inline":
                seed = derive(x.seed, "inference", name, i)
                inference = InlineInference(**hosted, seed=seed, threads=1 if make.shared else threads)
            routes[i].append(Route(name, plan.agents, inference, sink))

    acting = {"env": x.env, "copies": x.actors.envs, "ring": x.actors.ring, "seed": x.seed}
    acting["niceness"] = 10 if threads > 1 else 0  # a trainer's threads wait for each other, actors for nobody (ADR 11)
    actors = []
    for i, each in enumerate(routes):
        numbered = {"index": i // len(ranks), "routes": each}
        actors.append(Node(ActorWorker, f"actor-{i}", {**numbered, **acting}, spare=i >= x.actors.count))
    return [*actors, *policies, *buffers, *trainers, *evaluators(x, plans, run_dir)]


class Streams:
    """Makes the streams of one rank over the transport that suits where the workers are.

    A rank is one trainer of every policy, and the actors and policy workers that work for it.
    """

    def __init__(
        self, x: Experiment, run_dir: Path, names: Names | None, rank: int = 0, ports: Iterator[int] | None = None
    ) -> None:
        self.x, self.run_dir, self.rank = x, run_dir, rank
        self.shared = x.launcher != "inline"
        self.tcp = names is not None or x.transport == "tcp"
        self.names: Names = names or FileNames(run_dir / "names")
        self.actors = max(x.actors.count, x.actors.most)
        self.mine = range(rank, self.actors, x.trainer.count)
        """The actors of this rank."""
        bells = [Doorbell() for _ in self.mine]  # one wakes an actor, whatever it waits for
        self.bells = [bell for bell in bells for _ in range(x.actors.ring)]
        self.slots, self.servers = len(self.bells), x.policies.count // x.trainer.count
        self._ports = ports or itertools.repeat(0)

    @classmethod
    def ranks(cls, x: Experiment, run_dir: Path, names: Names | None) -> list[Streams]:
        """Of every rank."""
        ports = itertools.count(x.port) if x.port else None
        return [cls(x, run_dir, names, rank, ports) for rank in range(x.trainer.count)]

    def called(self, name: str, between: str) -> str:
        """What something of this rank is called: those of the first have no number."""
        return f"{name}{between}{self.rank}" if self.rank else name

    def group(self, name: str) -> Group | None:
        """The trainers of a policy, if there are several."""
        if self.x.trainer.count == 1:
            return None
        return Group(f"trainers/{name}", self.rank, self.x.trainer.count, self.names, self.run_dir / "names")

    def samples(self, name: str, spec: BlockSpec, blocks: int, bells: Sequence[Doorbell] = ()) -> SampleStream:
        """A sample stream from the actors, or from whoever waits for ``bells``."""
        bells = bells or self.bells
        if not self.tcp:
            return SampleBoard(spec, blocks, bells, shared=self.shared)
        from srl.streams.tcp_samples import TcpSamples

        called = f"samples/{self.called(name, '/')}"
        return TcpSamples(called, self.names, spec, blocks, len(bells), next(self._ports))

    def sink(self, plan: Plan, samples: Mapping[str, SampleStream]) -> SampleStream:
        """Where the agents of a policy put their samples."""
        if not plan.trainers:
            return NullSamples(plan.block, self.slots, shared=self.shared)
        if plan.trainers == (plan.policy,):
            return samples[plan.policy]
        own = plan.policy in plan.trainers
        order = sorted(plan.trainers, key=lambda name: name != plan.policy)  # its own is where blocks are filled
        return TeeSamples([samples[name] for name in order], own=own)

    def opponent(self, plan: Plan, store: CheckpointStore, seed: int) -> OpponentInference:
        """How agents get their actions that play past versions of another policy."""
        assert plan.opponent is not None
        seat: dict[str, Any] = {"store": store, "seed": seed, "clients": self.slots, "rows": plan.block.rows}
        return OpponentInference(plan.opponent, algorithm=plan.algorithm, spaces=plan.spaces, **seat)

    def parameters(self, name: str) -> ParameterStream:
        """A parameter stream."""
        if not self.tcp:
            return ParameterBoard(shared=self.shared)
        from srl.streams.tcp_parameters import TcpParameters

        return TcpParameters(f"parameters/{name}", self.names, next(self._ports))

    def inference(self, name: str, sink: SampleStream, spec: BlockSpec) -> InferenceStream:
        """An inference stream for observations that lie in the blocks of ``sink``."""
        if not self.tcp:
            slab = (sink.streams[0] if isinstance(sink, TeeSamples) else sink).slab  # type: ignore[attr-defined]
            return InferenceBoard(slab, self.bells, self.servers, shared=self.shared)
        from srl.streams.tcp_inference import TcpInference

        ports = [next(self._ports) for _ in range(self.servers)]
        called = f"inference/{self.called(name, '/')}"
        return TcpInference(called, self.names, spec, self.slots, self.servers, ports[0])

    def buffer(
        self, plan: Plan, replay: Replay, samples: SampleStream, resume: str | None
    ) -> tuple[SampleStream, SampleStream | None, Node]:
        """A buffer worker: the stream the trainer takes from, the one its priorities go to, and the worker."""
        bell, name, called = [Doorbell()], plan.policy, self.called(plan.policy, "-")
        if replay.kind == "fifo":
            batches = self.samples(f"{name}/batches", plan.block, plan.slab, bell)
            passing = {"replay": replay, "samples": samples, "batches": batches}
            return batches, None, Node(FifoBuffer, f"buffer-{called}", passing)
        batches = self.samples(f"{name}/batches", sample_block(plan.block, replay), _BATCHES, bell)
        priorities = None
        if replay.kind == "prioritized":
            priorities = self.samples(f"{name}/priorities", feedback_block(replay), _BATCHES, [Doorbell()])
        keeping: dict[str, Any] = {"replay": replay, "samples": samples, "batches": batches, "priorities": priorities}
        store = CheckpointStore(self.run_dir / "replay" / called, "replay", keep=1) if replay.keep else None
        keeping.update(seed=self.x.seed, actors=self.slots, checkpoints=store, resume=resume is not None)
        return batches, priorities, Node(ReplayBuffer, f"buffer-{called}", keeping)


def trainer_plan(x: Experiment, plan: Plan, plans: Sequence[Plan], threads: int, resume: str | None) -> TrainerPlan:
    """What the trainer of one policy is to do."""
    foreign = any(plan.policy in each.trainers for each in plans if each.policy != plan.policy)
    watched = any(plan.policy == each.opponent.of for each in plans if each.opponent and not each.opponent.run)
    return TrainerPlan(
        batch=plan.batch,
        steps=x.steps,
        seed=x.seed,
        device=x.trainer.device,
        threads=threads,
        prefetch=x.trainer.prefetch and x.launcher != "inline",
        checkpoint_seconds=min(x.trainer.checkpoint_seconds, x.evaluator.seconds if evaluated(x) else float("inf")),
        resume=resume,
        past_every=(x.trainer.past_every or 20) if watched else x.trainer.past_every,
        nonfinite=x.trainer.nonfinite,
        foreign=foreign,
        alone=sum(not each.opponent for each in plans) == 1,
    )


def evaluated(x: Experiment) -> bool:
    """Whether the run has an evaluator."""
    return bool(x.evaluator.count or x.until or x.curriculum)


def evaluators(x: Experiment, plans: Sequence[Plan], run_dir: Path) -> list[Node]:
    """The evaluator, if the run has one."""
    if not evaluated(x):
        return []
    seats = []
    for plan in plans:
        if plan.agents:
            store = opponent_store(plan, plans, run_dir) if plan.opponent else checkpoint_store(run_dir, plan)
            seats.append(EvalSeat(plan.policy, plan.agents, plan.spaces, plan.algorithm, store, not plan.opponent))
    trained = [plan.policy for plan in plans if plan.agents and not plan.opponent]
    judging: dict[str, Any] = {"until": Target.parse(x.until, trained), "curriculum": x.curriculum, "run_dir": run_dir}
    playing = {"env": x.env, "seats": seats, "episodes": x.evaluator.episodes, "sample": x.evaluator.sample}
    own_process = x.launcher != "inline"
    return [Node(EvalWorker, "evaluator", {**playing, **judging, "seed": x.seed, "own_process": own_process})]


def trainer_threads(x: Experiment, plans: Sequence[Plan]) -> int:
    """Threads for the trainer: one for small observations, else every core: threads that wait do not spin."""
    if x.trainer.threads:
        return x.trainer.threads
    observed = max(plan.block.fields[name].nbytes for plan in plans for name in plan.block.observations)
    if observed < _LARGE:
        return 1
    return cores()


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
