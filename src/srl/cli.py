"""The command line: ``srl train | resume | eval | play | export | recipes | check | bench``.

What a user got wrong ends with one line on stderr and exit code 2; a run that failed ends with 1, an interrupted one
with 130.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

from srl.core.errors import CheckpointError, ConfigError, SrlError, UnknownName
from srl.launch import share_the_machine

T = TypeVar("T")


def _unless(value: str, **more: Any) -> Any:
    """How the help of an option says what happens without it."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {value})", **more)


_Run = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
_Sample = Annotated[bool | None, _unless("draw where observations are images", metavar="{True,False}")]
_Project = Annotated[str, _unless("no", metavar="PROJECT")]
_Port = Annotated[int, _unless("no", metavar="PORT")]


def main() -> None:
    """Entry point of the ``srl`` command."""
    share_the_machine()
    sys.path.insert(0, str(Path.cwd()))  # for environments and algorithms of one's own
    try:
        code = _command(sys.argv[1:])
    except (ConfigError, CheckpointError) as error:
        code = _complain(str(error), 2)
    except SrlError as error:
        code = _complain(str(error), 1)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `srl … | head`
        code = 1
    sys.exit(code)


def _complain(text: str, code: int) -> int:
    print("srl: " + " ".join(text.split()), file=sys.stderr)
    return code


def _command(arguments: Sequence[str]) -> int:
    commands: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
        "train": (_train, "train a recipe, or an algorithm on any Gymnasium environment"),
        "resume": (_resume, "go on with a run"),
        "eval": (_eval, "measure saved policies"),
        "play": (_play, "watch saved policies play, or film them"),
        "export": (_export, "write a saved policy to an ONNX file"),
        "recipes": (_recipes, "list the recipes"),
        "check": (_check, "look whether this machine has what SRL needs"),
        "bench": (_bench, "measure throughput, its limit, and rivals"),
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _usage({name: about for name, (_, about) in commands.items()})
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from srl import __version__

        print(f"srl {__version__}")
        return 0
    if arguments[0] not in commands:
        raise UnknownName("command", arguments[0], commands, "srl --help lists them")
    return commands[arguments[0]][0](arguments[1:])


def _usage(commands: dict[str, str]) -> None:
    console = Console()
    console.print("[bold]srl[/] COMMAND …   really scalable reinforcement learning\n")
    table = Table.grid(padding=(0, 3))
    for name, about in commands.items():
        table.add_row(f"  [bold cyan]{name}[/]", about)
    console.print(table)
    console.print("\nsrl COMMAND --help explains a command. Begin with:  [bold]srl train cartpole[/]")


def parse(kind: type[T], arguments: Sequence[str], command: str, default: T | None = None) -> T:
    """Parse ``arguments`` into the dataclass ``kind``; a mistake becomes a ConfigError of one line."""
    said = io.StringIO()
    given: Any = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said):
            found: T = tyro.cli(kind, args=list(arguments), prog=f"srl {command}", **given)
            return found
    except SystemExit as error:
        if not error.code:
            raise
        raise ConfigError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """The message in one of tyro's boxes, and the option it suggests."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines()[1:]:  # the first line is the box's upper edge with a heading
        words = line.strip("│|╭╮╰╯+ ")
        if set(words) <= set("─-"):
            sections.append([])
        else:
            sections[-1].append(words)
    found = [section for section in sections if section]
    text = " ".join(found[0]) if found else "the command line cannot be understood"
    for section in found[1:]:
        if section[0].startswith("Perhaps you meant") and len(section) > 1:
            text += f"; did you mean {section[1].split()[0]}?"
    return text


@dataclass(frozen=True)
class TrainOptions:
    """What to train, where, and how long."""

    recipe: Annotated[tyro.conf.Positional[str | None], _unless("none", metavar="[RECIPE]")] = None
    """A recipe (see srl recipes), unless --env is given."""
    env: Annotated[str | None, _unless("the recipe's", metavar="ID")] = None
    """A Gymnasium id; module:id imports the module first."""
    algorithm: str = "ppo"
    """With --env: ppo, dqn, or module:Class of one's own. Its options follow below."""
    steps: int = 1_000_000
    """Agent steps to train on."""
    launcher: Literal["inline", "local"] = "local"
    """inline: all workers in this process, in turn, deterministic. local: one process each."""
    transport: Literal["auto", "shm", "tcp"] = "auto"
    """auto: the best for where the workers are. shm or tcp: that one."""
    port: int = 0
    """First TCP port to listen on (0: any that is free)."""
    restarts: int = 3
    """How often workers may be started again after a crash, in all."""
    stall_seconds: float = 60.0
    """After how long without progress the run says who is stuck where."""
    until: Annotated[str, _unless("train on all steps", metavar="TARGET")] = ""
    """End once an evaluation reaches this, such as return>=475 (or return/policy>=475)."""
    curriculum: Annotated[str, _unless("none", metavar="MODULE:FUNCTION")] = ""
    """module:function of an evaluation that says what the environments are told."""
    seed: int = 1
    """All random choices of the run derive from it."""
    out: Annotated[Path | None, _unless("a new one in runs/", metavar="FOLDER")] = None
    """The run's folder."""
    wandb: _Project = ""
    """Log to this Weights & Biases project too (WANDB_MODE=offline: to files)."""
    prometheus: _Port = 0
    """Serve the numbers to Prometheus at 127.0.0.1 on this port while the run goes on."""
    quiet: bool = False
    """Show nothing but the result."""


def _train(arguments: Sequence[str]) -> int:
    from srl.launch.run import run

    x, options = _experiment(_actors_in_short(_recipe_first(arguments)))
    sinks, show = _sinks(options), _display(options.quiet)
    return _finish(lambda: run(x, options.out, display=show, sinks=sinks), options.quiet)


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
    """The experiment that the arguments of ``srl train`` describe, and all options as parsed."""
    from srl import envs
    from srl.experiment import Actors, Evaluator, Experiment, Policies, Trainer
    from srl.recipes import recipe

    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    env = _value_of(arguments, "--env")
    asked_for_help = "-h" in arguments or "--help" in arguments
    if named is None and env is None and not asked_for_help:
        raise ConfigError("name a recipe (srl recipes lists them) or an environment (--env ID)")
    if named is not None and env is not None:
        raise ConfigError(f"either the recipe {named!r} or --env {env}, not both")
    algorithm = _value_of(arguments, "--algorithm")
    if named is not None and algorithm is not None:
        raise ConfigError(f"the recipe {named!r} has its own algorithm; --algorithm goes with --env")
    if named is not None:
        base = recipe(named)
    else:
        base = Experiment(envs.gym(env or "CartPole-v1"), _algorithm(algorithm or "ppo"))
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


def _value_of(arguments: Sequence[str], option: str) -> str | None:
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

    run_dir: _Run
    """The run's folder."""
    steps: Annotated[int | None, _unless("as the run was declared", metavar="INT")] = None
    """Agent steps to train on in all."""
    tag: str = "latest"
    """Which checkpoint: latest, best, or v followed by a version."""
    wandb: _Project = ""
    """Log to this Weights & Biases project too (WANDB_MODE=offline: to files)."""
    prometheus: _Port = 0
    """Serve the numbers to Prometheus at 127.0.0.1 on this port while the run goes on."""
    quiet: bool = False
    """Show nothing but the result."""


def _resume(arguments: Sequence[str]) -> int:
    from srl.launch.run import resume

    options = parse(ResumeOptions, arguments, "resume")
    going: dict[str, Any] = {"tag": options.tag, "display": _display(options.quiet), "sinks": _sinks(options)}
    if options.steps is not None:
        going["steps"] = options.steps
    return _finish(lambda: resume(options.run_dir, **going), options.quiet)


@dataclass(frozen=True)
class EvalOptions:
    """Measure saved policies."""

    run_dir: _Run
    """The run's folder."""
    tag: str = "latest"
    """Which checkpoint: latest, best, or v followed by a version."""
    episodes: int = 20
    """Episodes to play."""
    policy: Annotated[str, _unless("all that are trained")] = ""
    """Which policy of the run."""
    versus: str = "latest"
    """Which version opponents play, in a run with opponents."""
    seed: int = 0
    """Seed of the episodes."""
    sample: _Sample = None
    """Draw actions at random as in training, or take the likeliest."""
    json: bool = False
    """Print one line of JSON for each policy."""


def _eval(arguments: Sequence[str]) -> int:
    from srl.launch.run import evaluate
    from srl.play import trained_policies

    options = parse(EvalOptions, arguments, "eval")
    rest = {k: v for k, v in asdict(options).items() if k not in ("run_dir", "json", "policy")}
    policies = [options.policy] if options.policy else trained_policies(options.run_dir)
    for policy in policies:
        found = evaluate(options.run_dir, policy=policy, **rest)
        if options.json:
            print(found.as_json())
        else:
            Console(highlight=False, soft_wrap=True).print(
                f"{f'{policy}: ' if len(policies) > 1 else ''}return [bold]{found.return_mean:.1f}[/] "
                f"± {found.return_std:.1f} (min {found.return_min:.1f}, max {found.return_max:.1f}), "
                f"episode length {found.length_mean:.0f}, {found.episodes} episodes, "
                f"version {found.version} ({found.tag})"
            )
    return 0


@dataclass(frozen=True)
class PlayOptions:
    """Watch saved policies play: all policies of the run at once, one episode after the other."""

    run_dir: _Run
    """The run's folder."""
    tag: str = "latest"
    """Which checkpoint: latest, best, or v followed by a version."""
    policy: Annotated[str, _unless("everyone's")] = ""
    """Whose returns to print."""
    versus: str = "latest"
    """Which version opponents play, in a run with opponents."""
    episodes: int = 3
    """Episodes to play."""
    video: Annotated[Path | None, _unless("only print returns", metavar="FILE.mp4")] = None
    """File to film them into."""
    fps: int = 30
    """Frames per second of the video; a frame is a step."""
    seed: int = 0
    """Seed of the episodes."""
    sample: _Sample = None
    """Draw actions at random as in training, or take the likeliest."""


def _play(arguments: Sequence[str]) -> int:
    from srl.play import Episode, play

    options = parse(PlayOptions, arguments, "play")
    _draw_in_memory()
    count = 0

    def tell(episode: Episode) -> None:
        nonlocal count
        count += 1
        print(f"episode {count}: {episode}", flush=True)

    play(tell=tell, **asdict(options))
    if options.video is not None:
        print(f"video: {options.video}")
    return 0


def _draw_in_memory() -> None:
    """Frames go into a file: pygame need not look for a screen, nor MuJoCo where there is none."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


@dataclass(frozen=True)
class ExportOptions:
    """Write a saved policy, observations to likeliest actions, to a file that needs neither SRL nor torch."""

    run_dir: _Run
    """The run's folder."""
    onnx: Annotated[Path, tyro.conf.arg(metavar="FILE.onnx")]
    """File to write; it is checked against torch before it appears."""
    tag: str = "latest"
    """Which checkpoint: latest, best, or v followed by a version."""
    policy: Annotated[str, _unless("the first")] = ""
    """Which policy of the run."""


def _export(arguments: Sequence[str]) -> int:
    options = parse(ExportOptions, arguments, "export")
    from srl.export import export  # imports torch: not before the arguments are known to be right

    found = export(options.run_dir, options.onnx, tag=options.tag, policy=options.policy)
    print(f"{found.path}: {', '.join(found.inputs)} -> {', '.join(found.outputs)}")
    print(
        f"policy {found.policy}, version {found.version}; "
        f"onnxruntime gave the same as torch for {found.samples} random observations"
    )
    return 0


def _recipes(arguments: Sequence[str]) -> int:
    from srl.recipes import RECIPES

    table = Table("recipe", "environment", "algorithm", "steps", "extra", "what", box=None, header_style="bold")
    for name, each in RECIPES.items():
        x = each.make()
        algorithms = "+".join(sorted({a.name for a in x.algorithms.values()}))
        table.add_row(name, x.env.name, algorithms, f"{x.steps:,}", each.extra or "–", each.about)
    Console(highlight=False).print(table)
    return 0


def _check(arguments: Sequence[str]) -> int:
    from srl.check import report

    return report()


def _bench(arguments: Sequence[str]) -> int:
    from srl.bench import main as bench

    return bench(arguments)
