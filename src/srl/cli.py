"""The command line: ``srl train | resume | scale | slurm | eval | play | export | recipes | check | bench``.

What a user got wrong ends with one line on stderr and exit code 2; a run that failed ends with 1, an interrupted one
with 130.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from srl.commands.saved import evaluate, export, play
from srl.commands.slurm import slurm
from srl.commands.train import resume, scale, train
from srl.core.errors import CheckpointError, ConfigError, SrlError, UnknownName
from srl.launch import share_the_machine


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
        "train": (train, "train a recipe, or an algorithm on any Gymnasium environment"),
        "resume": (resume, "go on with a run"),
        "scale": (scale, "let actors join or leave a run while it goes on"),
        "slurm": (slurm, "submit a run as a Slurm job"),
        "eval": (evaluate, "measure saved policies"),
        "play": (play, "watch saved policies play, or film them"),
        "export": (export, "write a saved policy to an ONNX file"),
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
