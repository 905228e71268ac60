"""``srl train`` and ``srl resume``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from srl.commands.options import RunFolder, parse, unless
from srl.core.errors import ConfigError, UnknownName
from srl.launch import workers_prepared

_Project = Annotated[str, unless("no", metavar="PROJECT")]
_Port = Annotated[int, unless("no", metavar="PORT")]
_LAUNCHERS = "inline|local|ray|ray://ADDRESS"


@dataclass(frozen=True)
class TrainOptions:
    """What to train, where, and how long."""

    recipe: Annotated[tyro.conf.Positional[str | None], unless("none", metavar="[RECIPE]")] = None
    """A recipe (see srl recipes), unless --env is given."""
    env: Annotated[str | None, unless("the recipe's", metavar="ID")] = None
    """A Gymnasium id; module:id imports the module first."""
    algorithm: str = "ppo"
    """With --env: ppo, dqn, or module:Class of one's own. Its options follow below."""
    steps: int = 1_000_000
    """Agent steps to train on."""
    launcher: Annotated[str, tyro.conf.arg(metavar=_LAUNCHERS, aliases=["--on"])] = "local"
    """inline: all workers in this process, in turn, deterministic. local: one process each. ray: on a Ray cluster."""
    transport: Literal["auto", "shm", "tcp"] = "auto"
    """auto: the best for where the workers are. shm or tcp: that one."""
    port: int = 0
    """First TCP port to listen on (0: any that is free)."""
    restarts: int = 3
    """How often workers may be started again after a crash, in all."""
    stall_seconds: float = 60.0
    """After how long without progress the run says who is stuck where."""
    until: Annotated[str, unless("train on all steps", metavar="TARGET")] = ""
    """End once an evaluation reaches this, such as return>=475 (or return/policy>=475)."""
    curriculum: Annotated[str, unless("none", metavar="MODULE:FUNCTION")] = ""
    """module:function of an evaluation that says what the environments are told."""
    seed: int = 1
    """All random choices of the run derive from it."""
    out: Annotated[Path | None, unless("a new one in runs/", metavar="FOLDER")] = None
    """The run's folder."""
    wandb: _Project = ""
    """Log to this Weights & Biases project too (WANDB_MODE=offline: to files)."""
    prometheus: _Port = 0
    """Serve the numbers to Prometheus at 127.0.0.1 on this port while the run goes on."""
    quiet: bool = False
    """Show nothing but the result."""


def train(arguments: Sequence[str]) -> int:
    """Entry point of ``srl train``."""
    # Where no process, or not every one, will need torch it is not imported for all.
    elsewhere = ("remote", "inline", "ray")
    light = {"-h", "--help"} & set(arguments) or any(word in each for each in arguments for word in elsewhere)
    with contextlib.nullcontext() if light else workers_prepared("torch"):
        x, options = declared(arguments)
        sinks, show = _sinks(options), _display(options.quiet)
    from srl.launch.run import run

    return _finish(lambda: run(x, options.out, display=show, sinks=sinks), options.quiet)


def declared(arguments: Sequence[str]) -> tuple[Any, Any]:
    """The experiment that the arguments of ``srl train`` describe, and all options as parsed."""
    return _experiment(_actors_in_short(_recipe_first(arguments)))


def _actors_in_short(arguments: Sequence[str]) -> list[str]:
    """The arguments with ``--actors auto`` and ``--actors 4`` as options that exist: auto is a count of 0."""
    found: list[str] = []
    for argument in arguments:
        short = argument == "--actors" or argument.startswith("--actors=")
        given = argument.replace("--actors", "--actors.count", 1) if short else argument
        if given == "auto" and found[-1:] == ["--actors.count"]:
            given = "0"
        found.append("--actors.count=0" if given == "--actors.count=auto" else given)
    return found


def _recipe_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with the recipe's name, wherever it stands, in front."""
    from srl.recipes import RECIPES

    found = [] if not arguments or not arguments[0].startswith("-") else [a for a in arguments if a in RECIPES]
    return [*found[:1], *(a for a in arguments if a not in found[:1])]


def _experiment(arguments: Sequence[str]) -> tuple[Any, Any]:
    from srl import envs
    from srl.experiment import Actors, Evaluator, Experiment, Policies, Trainer
    from srl.recipes import recipe

    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    env = value_of(arguments, "--env")
    asked_for_help = "-h" in arguments or "--help" in arguments
    if named is None and env is None and not asked_for_help:
        raise ConfigError("name a recipe (srl recipes lists them) or an environment (--env ID)")
    if named is not None and env is not None:
        raise ConfigError(f"either the recipe {named!r} or --env {env}, not both")
    algorithm = value_of(arguments, "--algorithm")
    if named is not None and algorithm is not None:
        raise ConfigError(f"the recipe {named!r} has its own algorithm; --algorithm goes with --env")
    if named is not None:
        base = recipe(named)
    else:
        base = Experiment(envs.named(env or "CartPole-v1"), _algorithm(algorithm or "ppo"))
    chosen = next(iter(base.algorithms.values()))
    alone = len(base.algorithms) == 1  # several algorithms are declared in Python
    groups: list[tuple[str, Any]] = [("actors", Actors), ("policies", Policies), ("trainer", Trainer)]
    groups += [("evaluator", Evaluator), *(((chosen.name, type(chosen)),) if alone else ())]
    extended = [(name, kind, field(default_factory=kind)) for name, kind in groups]
    kind = make_dataclass("Train", extended, bases=(TrainOptions,), frozen=True)
    kind.__doc__ = TrainOptions.__doc__
    simple = {f.name: getattr(base, f.name) for f in fields(TrainOptions) if hasattr(base, f.name)}
    simple.update(algorithm=chosen.name, env=env)
    inner = {name: chosen if name == chosen.name else getattr(base, name) for name, _ in groups}
    options: Any = parse(kind, arguments, "train", kind(**simple, **inner))
    changed = {f.name: getattr(options, f.name) for f in fields(Experiment) if hasattr(options, f.name)}
    policy = next(iter(base.algorithms))
    changed.update(env=base.env, algorithm={policy: getattr(options, chosen.name)} if alone else base.algorithms)
    return replace(base, **changed), options


def _algorithm(name: str) -> Any:
    """The algorithm of this name, or the one at ``module:Class``, with its own default options."""
    from srl.algorithms import ALGORITHMS, Algorithm
    from srl.algorithms.base import load_object

    if ":" not in name and name not in ALGORITHMS:
        raise UnknownName("algorithm", name, ALGORITHMS)
    kind = ALGORITHMS[name] if name in ALGORITHMS else load_object(name, "--algorithm")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ConfigError(f"--algorithm {name} is not a subclass of srl.Algorithm")
    return kind()


def value_of(arguments: Sequence[str], option: str) -> str | None:
    """What the arguments give for an option."""
    for i, argument in enumerate(arguments):
        if argument == option and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(option + "="):
            return argument.partition("=")[2]
    return None


def _display(quiet: bool) -> Any:
    from srl.monitor.console import on_console

    return None if quiet else on_console


def _sinks(options: Any) -> list[Any]:
    """Where the numbers go beside the run's own files."""
    if not options.wandb and not options.prometheus:
        return []
    from srl.monitor.exporters import Prometheus, WandB

    found: list[Any] = [WandB(options.wandb)] if options.wandb else []
    return [*found, Prometheus(options.prometheus)] if options.prometheus else found


def _finish(go: Callable[[], Any], quiet: bool) -> int:
    """Run, then measure what was learned and say where everything is."""
    from srl.launch.run import EVAL_EPISODES, evaluate
    from srl.monitor.sinks import CURVE
    from srl.play import trained_policies

    result = go()
    out = Console(highlight=False)
    if result.interrupted:
        out.print(f"interrupted at {result.steps:,} steps, saved; go on with: srl resume {result.run_dir}")
        return 130
    rate = result.trained / max(result.seconds, 1e-9)
    out.print(f"trained on {result.trained:,} steps in {result.seconds:.0f} s ({rate:,.0f} steps/s)")
    if not quiet:
        out.print(f"evaluating {EVAL_EPISODES} episodes …")
    policies = trained_policies(result.run_dir)
    for policy in policies:
        found = evaluate(result.run_dir, policy=policy)
        out.print(
            f"evaluation{f' of {policy}' if len(policies) > 1 else ''}: return [bold]{found.return_mean:.1f}[/] "
            f"± {found.return_std:.1f} over {found.episodes} episodes (version {found.version})"
        )
    if (result.run_dir / CURVE).exists():
        out.print(f"learning curve: {result.run_dir / CURVE}")
    return 0


@dataclass(frozen=True)
class ResumeOptions:
    """Go on with a run, from its last checkpoint or another one."""

    run_dir: RunFolder
    """The run's folder."""
    steps: Annotated[int | None, unless("as the run was declared", metavar="INT")] = None
    """Agent steps to train on in all."""
    tag: str = "latest"
    """Which checkpoint: latest, best, or v followed by a version."""
    launcher: Annotated[str | None, unless("as the run was declared", metavar=_LAUNCHERS, aliases=["--on"])] = None
    """Where to go on: see srl train."""
    wandb: _Project = ""
    """Log to this Weights & Biases project too (WANDB_MODE=offline: to files)."""
    prometheus: _Port = 0
    """Serve the numbers to Prometheus at 127.0.0.1 on this port while the run goes on."""
    quiet: bool = False
    """Show nothing but the result."""


def resume(arguments: Sequence[str]) -> int:
    """Entry point of ``srl resume``."""
    from srl.launch import run

    options = parse(ResumeOptions, arguments, "resume")
    going: dict[str, Any] = {"tag": options.tag, "display": _display(options.quiet), "sinks": _sinks(options)}
    changes = {"steps": options.steps, "launcher": options.launcher}
    going.update({name: value for name, value in changes.items() if value is not None})
    return _finish(lambda: run.resume(options.run_dir, **going), options.quiet)


@dataclass(frozen=True)
class ScaleOptions:
    """Let actors join or leave a run while it goes on."""

    run_dir: RunFolder
    """The run's folder."""
    actors: Annotated[int, tyro.conf.arg(metavar="INT")]
    """How many actors it should have from now on."""


def scale(arguments: Sequence[str]) -> int:
    """Entry point of ``srl scale``."""
    from srl import config
    from srl.launch.controller import write_scale

    options = parse(ScaleOptions, arguments, "scale")
    actors = config.load(options.run_dir).actors
    most = max(actors.most, actors.count)
    if not 1 <= options.actors <= most:
        raise ConfigError(f"{options.run_dir} was started for 1 to {most} actors (--actors.most), got {options.actors}")
    write_scale(options.run_dir, options.actors)
    return 0
