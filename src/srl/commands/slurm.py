"""``srl slurm submit``: a run as a Slurm job."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from srl.commands.options import parse, unless
from srl.commands.train import ResumeOptions, declared, value_of
from srl.core.errors import ConfigError, UnknownName
from srl.launch.slurm import SAVE_SECONDS, Job

_COMMANDS = ("train", "resume")
_USAGE = "srl slurm submit [OPTIONS] -- train RECIPE …   (or: -- resume RUN …)"
_Text = Annotated[str, unless("as the cluster has it")]


@dataclass(frozen=True)
class SubmitOptions:
    """Submit a run as a Slurm job: srl slurm submit [OPTIONS] -- train RECIPE … (or: -- resume RUN …).

    The job starts Ray on its nodes and runs the command there, with --on added to it.
    """

    nodes: int = 1
    """Nodes of the job."""
    cpus_per_node: Annotated[int | None, unless("whole nodes", metavar="INT")] = None
    """Processor cores of each node."""
    gpus_per_node: int = 0
    """GPUs of each node."""
    time: Annotated[str, unless("as the cluster has it", metavar="[D-]HH:MM:SS")] = ""
    """Time limit; the run saves and ends a minute before."""
    partition: _Text = ""
    """Partition to submit to."""
    account: _Text = ""
    """Account to charge."""
    name: Annotated[str, unless("that of the run's folder")] = ""
    """Name of the job."""
    option: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, unless("none", metavar="--NAME=VALUE")] = ()
    """Another option for sbatch, such as --option=--constraint=a100; may be given several times."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the script only; write and submit nothing."""


def slurm(arguments: Sequence[str]) -> int:
    """Entry point of ``srl slurm``."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\nsrl slurm submit --help explains it.")
        return 0 if arguments else 2
    if arguments[0] != "submit":
        raise UnknownName("command", f"slurm {arguments[0]}", ["slurm submit"], _USAGE)
    return _submit(arguments[1:])


def _submit(arguments: Sequence[str]) -> int:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse(SubmitOptions, _joined(arguments[:cut]), "slurm submit")
    _check(options)
    command, run_dir, x = _runnable(arguments[cut + 1 :])
    _check_room(options, x)
    if not str(run_dir).isprintable() or "\\" in str(run_dir):
        raise ConfigError(f"Slurm cannot write a log beside {str(run_dir)!r}; choose a plainer folder (--out)")
    job = _job(options, command, run_dir)
    if options.dry_run:
        print(job.script(), end="")
        return 0
    script = _beside(run_dir, ".sbatch")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(job.script())
    again = shlex.join(["srl", "slurm", "submit", *arguments[:cut], "--", "resume", str(run_dir)])
    _tell(_sbatch(script), script, job, run_dir, again)
    return 0


def _joined(arguments: Sequence[str]) -> list[str]:
    """The arguments with ``--option --mem=0`` as ``--option=--mem=0``: else it would be an option of ours."""
    found: list[str] = []
    for argument in arguments:
        if found[-1:] == ["--option"]:
            found[-1] = f"--option={argument}"
        else:
            found.append(argument)
    return found


def _check(options: SubmitOptions) -> None:
    least = {"nodes": 1, "cpus_per_node": 1, "gpus_per_node": 0}
    for name, number in least.items():
        given = getattr(options, name)
        if given is not None and given < number:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {number}, got {given}")
    for option in options.option:
        if not option.startswith("-"):
            raise ConfigError(f"--option takes an option of sbatch, such as --option=--constraint=a100, got {option!r}")
    for text in (options.time, options.partition, options.account, options.name, *options.option):
        if not text.isprintable():
            raise ConfigError(f"{text!r} does not fit on one line")


def _runnable(command: Sequence[str]) -> tuple[list[str], Path, Any]:
    """The command to run in the job, its run's folder and experiment; what cannot run is refused now, not there."""
    if not command:
        raise ConfigError(f"say what to run after --: {_USAGE}")
    what, rest = command[0], command[1:]
    if what not in _COMMANDS:
        raise UnknownName("command for a job", what, _COMMANDS, _USAGE)
    if value_of(rest, "--on") is not None or value_of(rest, "--launcher") is not None:
        raise ConfigError("a job runs on Ray on its own nodes; leave out --on")
    from srl import config
    from srl.launch.run import new_folder, refuse_used
    from srl.plan import seats

    if what == "resume":
        found = parse(ResumeOptions, rest, "resume")
        return list(command), found.run_dir.absolute(), config.load(found.run_dir)
    x, given = declared(rest)
    seats(replace(x, launcher="ray"))
    run_dir: Path = given.out or new_folder(x)
    refuse_used(run_dir)
    told = [] if given.out else [f"--out={run_dir}"]
    return [*command, *told], run_dir.absolute(), x


def _check_room(options: SubmitOptions, x: Any) -> None:
    """Refuse a run that would wait for ever for more room than the job has, as far as that is known."""
    if options.option:
        return
    groups = [(x.actors, x.actors.count), (x.trainer, len(x.algorithms))]
    groups += [(x.policies, x.policies.count)] if x.actors.inference == "remote" else []
    least = {kind: sum(getattr(group, kind) * count for group, count in groups) for kind in ("cpus", "gpus")}
    for kind, given in (("cpus", options.cpus_per_node), ("gpus", options.gpus_per_node)):
        if given is not None and least[kind] > options.nodes * given:
            raise ConfigError(
                f"the run needs {least[kind]:g} {kind[:-1].upper()}s, and {options.nodes} nodes with {given} each "
                f"have fewer; raise --nodes or --{kind}-per-node, or lower --actors"
            )


def _job(options: SubmitOptions, command: Sequence[str], run_dir: Path) -> Job:
    log = _beside(run_dir, "-%j.log", "%%")
    named = {name: getattr(options, name) for name in ("nodes", "time", "partition", "account")}
    return Job(
        command,
        Path.cwd(),
        log,
        options.name or run_dir.name,
        cpus=options.cpus_per_node,
        gpus=options.gpus_per_node,
        options=options.option,
        **named,
    )


def _beside(run_dir: Path, end: str, percent: str = "%") -> Path:
    """A file beside the run's folder: a new run's folder must be empty."""
    return Path(f"{run_dir}".replace("%", percent) + end)


def _sbatch(script: Path) -> str:
    """Submit; the job's number."""
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)  # noqa: S607
    except FileNotFoundError as error:
        script.unlink()
        raise ConfigError("the command sbatch is not here; run this where jobs are submitted (or --dry-run)") from error
    number = re.match(r"\d+", done.stdout)
    if done.returncode or number is None:
        script.unlink()
        raise ConfigError(f"sbatch refused the job: {done.stderr.strip() or done.stdout.strip()}")
    return number[0]


def _tell(number: str, script: Path, job: Job, run_dir: Path, again: str) -> None:
    log = str(job.log).replace("%j", number).replace("%%", "%")
    print(f"submitted job {number}: {shlex.join(['srl', *job.command])}")
    print(f"  run     {run_dir}")
    print(f"  script  {script}")
    print(f"  log     {log}")
    print(f"  watch   squeue -j {number}; tail -F {shlex.quote(log)}")
    print(f"  cancel  scancel {number}   (the run is saved, as it is {SAVE_SECONDS} s before the time limit)")
    print(f"  go on   {again}")
