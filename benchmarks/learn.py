"""Learning curves of the recipes: train (or go on), evaluate, and keep curve, raw numbers and result in docs/curves/.

python benchmarks/learn.py                    all recipes, one after the other; interrupted runs are resumed
python benchmarks/learn.py cartpole pong      these
python benchmarks/learn.py --collect pong DIR keep the results of a run that was made by hand
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from srl.bench import machine
from srl.config import CONFIG, load
from srl.launch.run import evaluate, resume, run
from srl.monitor.console import on_console
from srl.monitor.sinks import CURVE, draw_curve, read_metrics
from srl.recipes import RECIPES, recipe

KEPT = Path(__file__).parent.parent / "docs" / "curves"
RUNS = Path("runs") / "learn"
COLUMNS = ("time", "steps", "return_mean", "length_mean", "episodes", "steps_per_second", "version")
ROWS = 400


def learn(name: str) -> None:
    run_dir = RUNS / name
    x = recipe(name)
    if not (run_dir / CONFIG).exists():
        result = run(x, run_dir, display=on_console)
    elif (read_metrics(run_dir) or [{"steps": 0}])[-1]["steps"] < x.steps:
        result = resume(run_dir, display=on_console)
    else:
        return collect(name, run_dir)
    if result.interrupted:
        sys.exit(130)
    collect(name, run_dir)


def collect(name: str, run_dir: Path) -> None:
    """Keep what a run shows, small."""
    KEPT.mkdir(parents=True, exist_ok=True)
    x, rows = load(run_dir), read_metrics(run_dir)
    rows = [row for row in rows if "return_mean" in row]
    with open(KEPT / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows[:: max(1, len(rows) // ROWS)])
    draw_curve(run_dir, f"srl train {name}")
    shutil.copy(run_dir / CURVE, KEPT / f"{name}.png")
    about = {
        "command": f"srl train {name}",
        "steps": rows[-1]["steps"],
        "minutes": round(rows[-1]["time"] / 60, 1),
        "seed": x.seed,
        "evaluation": asdict(evaluate(run_dir)),
        "machine": machine(),
    }
    (KEPT / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"{name}: return {about['evaluation']['return_mean']:.1f} after {about['steps']:,.0f} steps")


def main() -> None:
    if sys.argv[1:2] == ["--collect"]:
        collect(sys.argv[2], Path(sys.argv[3]))
    else:
        for name in sys.argv[1:] or RECIPES:
            learn(name)


if __name__ == "__main__":
    main()
