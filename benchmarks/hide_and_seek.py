"""What a run of hide and seek has learned: each team against one that acts at random, along the run.

srl train hide-and-seek --out runs/hide-and-seek --trainer.past-every 50      # an hour or two; `srl resume` goes on
python benchmarks/hide_and_seek.py runs/hide-and-seek [--episodes 256] [--points 12]

Versions kept along the way (``past-every``) play as hiders against seekers whose actions are drawn evenly, and as
seekers against such hiders; all play the same episodes. What counts is the part of the steps after the preparation in
which a hider is seen: seekers want it high, hiders low. Writes benchmarks/results/hide-and-seek.json and
docs/curves/hide-and-seek.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from srl import config
from srl.bench.machine import machine
from srl.core.specs import Array, Arrays
from srl.launch.run import checkpoint_store
from srl.monitor.sinks import read_metrics
from srl.plan import Plan, check
from srl.workers.player import Player, Seat

FOLDER = Path(__file__).parent
COPIES, SEED = 64, 7


def evenly(weights: Arrays) -> Arrays:
    """These weights with an action head of zeros: every action is as likely as every other."""
    return {name: np.zeros_like(each) if name.startswith("action.") else each for name, each in weights.items()}


def seen(plan: Plan, env: Any, hiders: Arrays, seekers: Arrays, episodes: int) -> Array:
    """The part of the steps in which a hider was seen, of every episode."""
    seats = [
        Seat(team, tuple(a for a in plan.agents if a.startswith(team[:-1])), plan.spaces, plan.algorithm, each, 0, True)
        for team, each in (("hiders", hiders), ("seekers", seekers))
    ]
    player = Player(env, seats, COPIES, SEED)
    found: list[float] = []
    for start in range(0, episodes, COPIES):
        player.begin(SEED + start)
        while player.step():
            pass
        found += [value for name, value in player.env.measured if name == "hiders_seen"]
        player.env.measured.clear()
    player.close()
    return np.array(found)


def spread(found: Array) -> list[float]:
    """Mean and standard error."""
    return [round(float(found.mean()), 4), round(float(found.std() / np.sqrt(len(found))), 4)]


def judge(run_dir: Path, episodes: int, points: int) -> dict[str, Any]:
    """All that is to be known about the run."""
    x = config.load(run_dir)
    (plan,) = check(x)
    store = checkpoint_store(run_dir, plan)
    versions = store.versions()
    chosen = [versions[i] for i in sorted(set(np.linspace(0, len(versions) - 1, points).round().astype(int).tolist()))]
    rows = []
    for version in chosen:
        state = store.load(f"v{version}")
        weights = state.under("learner").under("policy").arrays
        random = evenly(weights)
        row = {
            "version": version,
            "steps": state.values["steps"],
            "hiders": spread(seen(plan, x.env, weights, random, episodes)),
            "seekers": spread(seen(plan, x.env, random, weights, episodes)),
            "both": spread(seen(plan, x.env, weights, weights, episodes)),
        }
        if not rows:
            row["random"] = spread(seen(plan, x.env, random, random, episodes))
        rows.append(row)
        print(row, flush=True)
    return {"machine": machine(), "episodes": episodes, "versions": rows, "along": along(run_dir)}


def along(run_dir: Path, points: int = 60) -> dict[str, list[float]]:
    """Statistics of training, at a few places."""
    rows = [row for row in read_metrics(run_dir) if row.get("env/hiders_seen") is not None]
    parts = np.array_split(np.arange(len(rows)), min(points, len(rows)))
    names = ("steps", "time", *sorted(name for name in rows[-1] if name.startswith("env/")))
    return {name: [round(float(np.mean([rows[i][name] for i in part])), 4) for part in parts] for name in names}


def draw(found: dict[str, Any], picture: Path) -> None:
    """Both teams against random play, and the statistics of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, training = found["versions"], found["along"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    at = np.array([row["steps"] for row in rows]) / 1e6
    for name, label in (("seekers", "seekers against random hiders"), ("hiders", "hiders against random seekers")):
        mean, error = np.array([row[name] for row in rows]).T
        left.errorbar(at, mean, 2 * error, label=label, marker="o", markersize=3)
    left.axhline(rows[0]["random"][0], color="grey", linestyle="--", label="random against random")
    left.set(xlabel="million agent steps", ylabel="hiders seen, part of steps", ylim=(0, 1))
    left.legend()
    for name in ("box_moved_in_preparation", "ramp_moved_in_preparation", "hiders_seen"):
        right.plot(np.array(training["steps"]) / 1e6, training[f"env/{name}"], label=name.replace("_", " "))
    right.set(xlabel="million agent steps", title="both teams as they train", ylim=(0, None))
    right.legend()
    figure.savefig(picture, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--points", type=int, default=12, help="versions to judge")
    parser.add_argument("--json", type=Path, default=FOLDER / "results" / "hide-and-seek.json")
    parser.add_argument("--picture", type=Path, default=FOLDER.parent / "docs" / "curves" / "hide-and-seek.png")
    given = parser.parse_args(argv)
    found = judge(given.run, given.episodes, given.points)
    given.json.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, given.picture)


if __name__ == "__main__":
    main()
