"""``srl eval``, ``srl play`` and ``srl export``: what is done with a saved policy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from srl.commands.options import RunFolder, parse, unless

_Sample = Annotated[bool | None, unless("draw where observations are images", metavar="{True,False}")]


@dataclass(frozen=True)
class EvalOptions:
    """Measure saved policies."""

    run_dir: RunFolder
    """The run's folder."""
    tag: str = "latest"
    """Which checkpoint: latest, best, or v followed by a version."""
    episodes: int = 20
    """Episodes to play."""
    policy: Annotated[str, unless("all that are trained")] = ""
    """Which policy of the run."""
    versus: str = "latest"
    """Which version opponents play, in a run with opponents."""
    seed: int = 0
    """Seed of the episodes."""
    sample: _Sample = None
    """Draw actions at random as in training, or take the likeliest."""
    json: bool = False
    """Print one line of JSON for each policy."""


def evaluate(arguments: Sequence[str]) -> int:
    """Entry point of ``srl eval``."""
    from srl.launch import run
    from srl.play import trained_policies

    options = parse(EvalOptions, arguments, "eval")
    rest = {k: v for k, v in asdict(options).items() if k not in ("run_dir", "json", "policy")}
    policies = [options.policy] if options.policy else trained_policies(options.run_dir)
    for policy in policies:
        found = run.evaluate(options.run_dir, policy=policy, **rest)
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

    run_dir: RunFolder
    """The run's folder."""
    tag: str = "latest"
    """Which checkpoint: latest, best, or v followed by a version."""
    policy: Annotated[str, unless("everyone's")] = ""
    """Whose returns to print."""
    versus: str = "latest"
    """Which version opponents play, in a run with opponents."""
    episodes: int = 3
    """Episodes to play."""
    video: Annotated[Path | None, unless("only print returns", metavar="FILE.mp4")] = None
    """File to film them into."""
    fps: int = 30
    """Frames per second of the video; a frame is a step."""
    seed: int = 0
    """Seed of the episodes."""
    sample: _Sample = None
    """Draw actions at random as in training, or take the likeliest."""


def play(arguments: Sequence[str]) -> int:
    """Entry point of ``srl play``."""
    from srl import play as films

    options = parse(PlayOptions, arguments, "play")
    _draw_in_memory()
    count = 0

    def tell(episode: films.Episode) -> None:
        nonlocal count
        count += 1
        print(f"episode {count}: {episode}", flush=True)

    films.play(tell=tell, **asdict(options))
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

    run_dir: RunFolder
    """The run's folder."""
    onnx: Annotated[Path, tyro.conf.arg(metavar="FILE.onnx")]
    """File to write; it is checked against torch before it appears."""
    tag: str = "latest"
    """Which checkpoint: latest, best, or v followed by a version."""
    policy: Annotated[str, unless("the first")] = ""
    """Which policy of the run."""


def export(arguments: Sequence[str]) -> int:
    """Entry point of ``srl export``."""
    options = parse(ExportOptions, arguments, "export")
    from srl import export as exporting  # imports torch: not before the arguments are known to be right

    found = exporting.export(options.run_dir, options.onnx, tag=options.tag, policy=options.policy)
    print(f"{found.path}: {', '.join(found.inputs)} -> {', '.join(found.outputs)}")
    print(
        f"policy {found.policy}, version {found.version}; "
        f"onnxruntime gave the same as torch for {found.samples} random observations"
    )
    return 0
