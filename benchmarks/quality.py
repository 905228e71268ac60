"""Draw what `srl bench rivals --target` found: return against time and against steps, all seeds of everybody.

srl bench rivals cartpole halfcheetah --target --rounds 3 --rivals envpool sb3 --json benchmarks/results/quality.json
python benchmarks/quality.py benchmarks/results/quality.json docs/img/quality.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(works: dict[str, Any], picture: Path) -> None:
    figure, axes = pyplot.subplots(len(works), 2, figsize=(10, 3.2 * len(works)), squeeze=False)
    for row, (work, everybody) in zip(axes, works.items(), strict=True):
        for colour, (name, found) in enumerate(everybody.items()):
            for number, outcome in enumerate(found["rounds"]):
                events = [event for event in outcome["events"] if event["return"] is not None]
                for place, key in zip(row, ("time", "steps"), strict=True):
                    xs, ys = [event[key] for event in events], [event["return"] for event in events]
                    place.plot(xs, ys, color=f"C{colour}", alpha=0.8, label=name if not number else None)
        for place, label in zip(row, ("seconds since the command", "agent steps"), strict=True):
            place.set(title=work, xlabel=label, ylabel="return of the last 100 episodes")
            place.grid(alpha=0.3)
            place.legend()
        row[1].xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
    figure.tight_layout()
    figure.savefig(picture, dpi=100)


def table(works: dict[str, Any]) -> None:
    print("| work | | seconds to target | steps to target | reached |\n|---|---|---|---|---|")
    for work, everybody in works.items():
        for name, found in everybody.items():
            hits = [outcome["reached"] for outcome in found["rounds"] if outcome["reached"]]
            cells = [spread([hit[i] for hit in hits]) for i in (0, 1)]
            print(f"| {work} | {name} | {cells[0]} | {cells[1]} | {len(hits)} of {len(found['rounds'])} |")


def spread(values: list[float]) -> str:
    return f"{median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})" if values else "–"


if __name__ == "__main__":
    works = json.loads(Path(sys.argv[1]).read_text())["works"]
    draw(works, Path(sys.argv[2]))
    table(works)
