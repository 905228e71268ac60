"""From what a user declared to what can run: every policy's share, checked. Nothing here starts a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from srl.algorithms.base import Algorithm, load_object
from srl.core.errors import ConfigError, UnknownName
from srl.core.memory import available_memory
from srl.core.slab import BlockSpec
from srl.core.specs import Spaces
from srl.services.checkpoints import CheckpointStore
from srl.workers.actor import groups_of
from srl.workers.evaluator import Target
from srl.workers.opponents import Opponent
from srl.workers.replay import blocks_kept

if TYPE_CHECKING:
    from srl.experiment import Experiment

TRANSPORTS = ("auto", "shm", "tcp")
LAUNCHERS = ("inline", "local", "ray")
INFERENCE = ("inline", "remote")
RULES = ("latest", "uniform", "prioritized")


@dataclass(frozen=True)
class Plan:
    """A policy's share of the experiment, checked: who acts by it and how large things are."""

    policy: str
    algorithm: Algorithm
    agents: tuple[str, ...]
    spaces: Spaces
    block: BlockSpec
    batch: int
    """Blocks a trainer takes per update."""
    slab: int
    """Blocks the stream from the actors to a trainer holds."""
    trainers: tuple[str, ...]
    """Policies whose trainers get its samples."""
    opponent: Opponent | None = None
    """Set if it is not trained."""


def checkpoint_store(run_dir: Path, plan: Plan) -> CheckpointStore:
    """Where the policy's checkpoints lie."""
    return CheckpointStore(run_dir / "checkpoints" / plan.policy, _identity(plan))


def opponent_store(plan: Plan, plans: Sequence[Plan], run_dir: Path) -> CheckpointStore:
    """Where the versions lie that an opponent plays."""
    assert plan.opponent is not None
    folder = Path(plan.opponent.run) if plan.opponent.run else run_dir
    return CheckpointStore(folder / "checkpoints" / plan.opponent.of, _identity(plan))


def _identity(plan: Plan) -> str:
    return f"{plan.algorithm.name} {plan.spaces.observation} -> {plan.spaces.action}"


Seats = Mapping[str, tuple[tuple[str, ...], Spaces]]
"""The agents of each policy that acts, and what they see and do."""


def check(x: Experiment) -> list[Plan]:
    """Refuse, with one clear line, what cannot run; else say how large everything is. Starts no process."""
    return planned(x, seats(x))


def divided(x: Experiment, actors: int) -> Experiment:
    """``x`` with its copies divided evenly over this many actors, and over the ring of each."""
    copies, vectors = x.actors.envs, actors * x.actors.ring
    if copies % vectors:
        raise ConfigError(
            f"{copies} copies (actors.envs) cannot be divided evenly over {vectors} vectors; "
            f"{copies - copies % vectors or vectors} can"
        )
    return replace(x, actors=replace(x.actors, count=actors, envs=copies // vectors))


def settled(x: Experiment) -> Experiment:
    """``x``, with one actor for every trainer if their number is left open."""
    return x if x.actors.count else divided(x, x.trainer.count)


def seats(x: Experiment) -> Seats:
    """Who acts by which policy: from one copy of the environment, once the rest of ``x`` is known to make sense."""
    _check_choices(x)
    probe = x.env.make(1)
    try:
        groups = groups_of(probe.agents, x.agents)
        spaces = {policy: [probe.spaces(agent) for agent in agents] for policy, agents in groups.items()}
    finally:
        probe.close()
    missing = sorted(set(groups) - set(x.algorithms) - set(x.opponents))
    if missing or not groups:
        raise ConfigError(f"no algorithm for the policies {missing}" if missing else "no agent matches any pattern")
    for policy, found in spaces.items():
        if any(other != found[0] for other in found):
            raise ConfigError(
                f"the agents of policy {policy!r} differ in their spaces: {', '.join(groups[policy])}; "
                "give those with other spaces a policy of their own"
            )
    return {policy: (agents, replace(spaces[policy][0], agents=len(agents))) for policy, agents in groups.items()}


def planned(x: Experiment, seats: Seats) -> list[Plan]:
    """Every policy's share, of one actor if their number is left open."""
    x = settled(x)
    plans = [_plan(x, policy, agents, spaces) for policy, (agents, spaces) in seats.items()]
    plans += [_follower(x, policy, plans) for policy in x.algorithms if policy not in seats]
    _check_flows(plans)
    Target.parse(x.until, [plan.policy for plan in plans if plan.agents and not plan.opponent])
    if x.curriculum:
        load_object(x.curriculum, "the curriculum")
    return plans


def _plan(x: Experiment, policy: str, agents: tuple[str, ...], spaces: Spaces, rows: int = 0) -> Plan:
    opponent = x.opponents.get(policy)
    source = policy if opponent is None else opponent.of
    if source not in x.algorithms:
        raise UnknownName(f"policy for the opponent {policy!r}", source, x.algorithms)
    algorithm = x.algorithms[source]
    block = algorithm.block(spaces, rows or x.actors.envs * len(agents))
    slots, replay = x.actors.count // x.trainer.count * x.actors.ring, algorithm.replay()
    batch = x.trainer.batch or slots
    most = -(-max(x.actors.most, x.actors.count) // x.trainer.count) * x.actors.ring
    slab = x.trainer.slab or max((min(algorithm.max_staleness, 2) + 1) * batch, most)
    if replay is not None and replay.kind != "fifo":
        batch, slab = 1, blocks_kept(block, replay) + 2 * most
    if batch > slab:
        raise ConfigError(f"trainer.batch {batch} is larger than the slab of {slab} blocks; raise trainer.slab")
    algorithm.check(spaces, batch * block.horizon * block.rows)
    if x.trainer.count > 1 and not algorithm.parallel:
        raise ConfigError(f"{algorithm.name} cannot be trained by several trainers; leave out trainer.count")
    need, there = block.layout(slab).nbytes, available_memory()
    if need > there:
        raise ConfigError(
            f"the slab of policy {policy!r} needs {need / 2**20:,.0f} MiB of shared memory and only "
            f"{there / 2**20:,.0f} MiB are available; lower actors.envs, actors.count, {algorithm.name}.horizon "
            "or trainer.slab"
        )
    trainers = tuple(x.samples.get(policy, () if opponent else (policy,)))
    return Plan(policy, algorithm, agents, spaces, block, batch, slab, trainers, opponent)


def _follower(x: Experiment, policy: str, plans: Sequence[Plan]) -> Plan:
    """The plan of a policy that no agent acts by: it is trained on the samples of another."""
    for plan in plans:
        if policy in plan.trainers:
            return _plan(x, policy, (), plan.spaces, plan.block.rows)
    raise ConfigError(f"no agent acts by the policy {policy!r} and it gets nobody's samples; see agents and samples")


def _check_flows(plans: Sequence[Plan]) -> None:
    """Refuse samples that do not fit where they are to go."""
    by_name = {plan.policy: plan for plan in plans if not plan.opponent}
    for plan in plans:
        for name in plan.trainers:
            if name not in by_name:
                raise UnknownName(f"policy in samples[{plan.policy!r}]", name, by_name)
            there, here = by_name[name].block, plan.block
            fits = all(here.fields.get(field) == spec for field, spec in there.fields.items())
            if (there.horizon, there.rows) != (here.horizon, here.rows) or not fits:
                raise ConfigError(
                    f"the samples of {plan.policy!r} do not fit the trainer of {name!r}: it needs blocks of "
                    f"{there.horizon} steps and {there.rows} rows with {', '.join(there.fields)}"
                )
        if plan.opponent and not plan.opponent.run and plan.spaces != by_name[plan.opponent.of].spaces:
            raise ConfigError(f"{plan.policy!r} sees or does other things than {plan.opponent.of!r}, whose past it is")
        if not plan.opponent and not any(plan.policy in each.trainers for each in plans):
            raise ConfigError(f"the trainer of {plan.policy!r} gets nobody's samples; see samples")


def _check_choices(x: Experiment) -> None:
    choices = (
        ("launcher", x.launcher.split("://")[0], LAUNCHERS),
        ("transport", x.transport, TRANSPORTS),
        ("actors.inference", x.actors.inference, INFERENCE),
        ("trainer.device", x.trainer.device.split(":")[0], ("auto", "cpu", "cuda", "mps")),
        ("trainer.nonfinite", x.trainer.nonfinite, ("stop", "skip")),
        *((f"opponents[{name!r}].rule", each.rule, RULES) for name, each in x.opponents.items()),
    )
    for name, value, known in choices:
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    numbers = (
        ("actors.count", x.actors.count, 0),
        ("actors.envs", x.actors.envs, 1),
        ("actors.ring", x.actors.ring, 1),
        ("actors.most", x.actors.most, 0),
        ("policies.count", x.policies.count, 1),
        ("policies.threads", x.policies.threads, 1),
        ("trainer.count", x.trainer.count, 1),
        ("trainer.batch", x.trainer.batch, 0),
        ("trainer.slab", x.trainer.slab, 0),
        ("trainer.threads", x.trainer.threads, 0),
        ("trainer.past_every", x.trainer.past_every, 0),
        ("actors.memory_mb", x.actors.memory_mb, 0),
        *((f"{name}.cpus", getattr(x, name).cpus, 0) for name in ("actors", "policies", "trainer")),
        *((f"{name}.gpus", getattr(x, name).gpus, 0) for name in ("actors", "policies", "trainer")),
        ("evaluator.count", x.evaluator.count, 0),
        ("evaluator.episodes", x.evaluator.episodes, 1),
        ("steps", x.steps, 1),
        ("seed", x.seed, 0),
        ("port", x.port, 0),
        ("restarts", x.restarts, 0),
    )
    for name, number, least in numbers:
        if number < least:
            raise ConfigError(f"{name} must be at least {least}, got {number}")
    if "://" in x.launcher and not x.launcher.startswith("ray://"):
        raise ConfigError(f"only Ray clusters have an address, as in ray://10.0.0.1:6379, got {x.launcher!r}")
    if x.launcher.startswith("ray") and x.transport == "shm":
        raise ConfigError("workers on several hosts share no memory; leave out transport=shm")
    _check_trainers(x)
    if x.launcher == "inline" and x.actors.most > x.actors.count:
        raise ConfigError("the inline launcher cannot add actors; leave out actors.most")
    if x.launcher == "inline" and x.transport != "auto":
        raise ConfigError(f"the inline launcher has no transport to choose; leave out transport={x.transport}")


def _check_trainers(x: Experiment) -> None:
    """Several trainers of a policy each have actors, and policy workers, of their own."""
    count = x.trainer.count
    if count > 1 and x.launcher == "inline":
        raise ConfigError("the inline launcher has one trainer for a policy; leave out trainer.count")
    remote = x.actors.inference == "remote"
    for name, number in (("actors.count", x.actors.count), ("policies.count", x.policies.count if remote else 0)):
        if number % count:
            raise ConfigError(f"{name} {number} cannot be divided evenly over {count} trainers")
