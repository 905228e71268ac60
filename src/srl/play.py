"""``srl play``: watch saved policies play, all policies of a run at once, and film it.

One environment copy plays one episode after the other. What the environment draws goes, frame by frame, into an
H.264 video; without one only the returns are told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from srl import config
from srl.core.errors import ConfigError, UnknownName
from srl.core.seeding import derive
from srl.launch.run import saved_seats
from srl.monitor.exporters import optional
from srl.plan import check
from srl.workers.player import Player

Draw = Callable[[], None]


@dataclass(frozen=True)
class Episode:
    """One episode that was played."""

    returns: dict[str, float]
    """By policy; the mean over its agents, and nothing for a policy whose agents had no part."""
    length: int
    """Steps of the agent that took most."""

    def __str__(self) -> str:
        many = len(self.returns) > 1
        told = [f"{policy} {value:.1f}" if many else f"return {value:.1f}" for policy, value in self.returns.items()]
        return f"{', '.join(told)}, {self.length} steps"


def play(
    run_dir: str | Path,
    *,
    tag: str = "latest",
    policy: str = "",
    versus: str = "latest",
    episodes: int = 3,
    video: str | Path | None = None,
    fps: int = 30,
    seed: int = 0,
    sample: bool | None = None,
    tell: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play ``episodes`` episodes with the policies saved under ``tag``, opponents with those under ``versus``.

    With ``policy`` only its returns are told. ``video`` is the MP4 file to write; ``tell`` gets every episode when it
    is over. ``sample`` is as in :func:`srl.evaluate`.
    """
    if episodes < 1 or fps < 1:
        raise ConfigError(f"episodes and fps must be at least 1, got {episodes} and {fps}")
    run_dir, film = Path(run_dir), Path(video) if video is not None else None
    if film is not None and film.suffix.lower() != ".mp4":
        raise ConfigError(f"a video's name must end in .mp4, got {film}")
    x = config.load(run_dir)
    plans = check(x)
    playing = [plan.policy for plan in plans if plan.agents]
    if policy and policy not in playing:
        raise UnknownName("policy", policy, playing)
    told = [policy] if policy else playing
    seats = saved_seats(plans, run_dir, tag, versus, sample)
    with contextlib.ExitStack() as ends:
        frames = ends.enter_context(_mp4(film, fps)) if film is not None else None
        player = Player(x.env, seats, 1, seed, render=film is not None)
        ends.callback(player.close)
        found = []
        for i in range(episodes):
            found.append(_episode(player, derive(seed, "episode", i), told, _camera(player, x.env.name, frames)))
            if tell is not None:
                tell(found[-1])
    return found


def trained_policies(run_dir: str | Path) -> list[str]:
    """The policies of a run that are trained and that agents act by."""
    plans = check(config.load(Path(run_dir)))
    return [plan.policy for plan in plans if plan.agents and plan.opponent is None]


def _episode(player: Player, seed: int, told: list[str], draw: Draw) -> Episode:
    player.begin(seed)
    draw()
    going = True
    while going:
        going = player.step()
        draw()
    scores = player.scores()
    returns = {policy: float(np.mean(scores[policy].returns)) for policy in told if scores[policy].returns}
    return Episode(returns, max(length for each in scores.values() for length in (0, *each.lengths)))


def _camera(player: Player, name: str, film: Any) -> Draw:
    """What takes a picture of the environment as it is now."""

    def draw() -> None:
        if film is None:
            return
        try:
            frame = player.env.render()
        except Exception as error:  # a package that draws is missing, or there is no screen
            raise ConfigError(f"the environment {name!r} cannot draw itself: {error}") from error
        if frame is None:
            raise ConfigError(f"the environment {name!r} cannot draw itself; leave out the video")
        height, width = (size // 2 * 2 for size in frame.shape[:2])  # H.264 knows even sizes only
        film.append_data(np.ascontiguousarray(frame[:height, :width, :3], np.uint8))

    return draw


@contextlib.contextmanager
def _mp4(path: Path, fps: int) -> Iterator[Any]:
    """A writer of frames; the file appears when it is complete."""
    optional("imageio_ffmpeg", "video", "a video")
    writing = optional("imageio.v2", "video", "a video")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    try:
        with writing.get_writer(partial, fps=fps, codec="libx264", macro_block_size=1) as film:
            yield film
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"the video {path} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
