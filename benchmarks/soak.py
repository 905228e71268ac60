"""Soak: one long run, and many short ones. Nothing may grow, nothing may be left.

python benchmarks/soak.py [--minutes 10] [--cycles 100]

The long run has two actors with remote inference, a policy worker, a buffer, a trainer and an evaluator: DQN on
CartPole, whose replay fills in the first seconds. Every five seconds the memory, shared memory and file descriptors of
all its processes are written down; the table and the picture go to benchmarks/results/. Then the same graph is started
and stopped again and again, and afterwards nothing of it may be there: no process, no temporary file, no open file.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import srl
from srl.bench.machine import machine
from srl.launch.run import run
from srl.recipes import recipe

RESULTS = Path(__file__).parent / "results"


def experiment() -> srl.Experiment:
    base = recipe("cartpole-dqn")
    algorithm = replace(base.algorithms["default"], replay_steps=20_000, anneal_steps=0)
    actors = srl.Actors(count=2, envs=8, ring=2, inference="remote")
    return replace(base, algorithm=algorithm, actors=actors, steps=10**12)


def processes() -> list[int]:
    """This process and all it has started, directly or through the fork server."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def look() -> dict[str, float]:
    """Memory, shared memory (MB) and descriptors of all processes."""
    rss = shared = files = 0.0
    pids = processes()
    for pid in pids:
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            rss += int(status["RssAnon"].split()[0]) / 1000
            shared = max(shared, int(status["RssShmem"].split()[0]) / 1000)
            files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except (OSError, KeyError):
            continue
    return {"processes": len(pids), "private_mb": round(rss, 1), "shared_mb": round(shared, 1), "descriptors": files}


def soak(minutes: float) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    over = threading.Event()

    def watch() -> None:
        begin = time.monotonic()
        while not over.wait(5):
            found = look()
            if not over.is_set():  # not while the workers are ending
                rows.append({"seconds": round(time.monotonic() - begin), **found})

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = run(experiment(), Path(folder) / "run", seconds=60 * minutes)
    finally:
        over.set()
        thread.join()
    print(f"{result.steps:,} steps")
    return rows


def judge(rows: list[dict[str, float]]) -> dict[str, float]:
    """Growth between the second minute and the end, in percent."""
    if len(rows) > 1 and rows[-1]["processes"] < rows[-2]["processes"]:
        rows = rows[:-1]  # taken while the run ended
    settled = [row for row in rows if row["seconds"] >= min(120, rows[-1]["seconds"] / 3)]
    third = max(1, len(settled) // 3)
    growth = {}
    for name in ("private_mb", "shared_mb", "descriptors"):
        early, late = (sum(row[name] for row in part) / third for part in (settled[:third], settled[-third:]))
        growth[name] = round(100 * (late - early) / max(early, 1), 2)
    return growth


def cycles(count: int) -> dict[str, object]:
    """Start and stop; what is left afterwards.

    One cycle comes first that does not count: Python's fork server, which it starts, stays until this process ends.
    """
    cycle(0)
    before = look()
    litter = set(Path(tempfile.gettempdir()).iterdir()) | set(Path("/dev/shm").iterdir())
    for number in range(count):
        cycle(number + 1)
    after = look()
    left = (set(Path(tempfile.gettempdir()).iterdir()) | set(Path("/dev/shm").iterdir())) - litter
    mine = [path for path in left if not path.name.startswith("torchinductor_")]
    print(f"left: {mine}")
    more = {f"{name}_more": round(after[name] - before[name], 1) for name in before}
    return {"cycles": count, "litter": len(mine), **more}


def cycle(number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = run(replace(experiment(), steps=500), Path(folder) / "run", seconds=60)
    print(f"cycle {number}: {result.steps} steps in {result.seconds:.1f} s", flush=True)


def draw(rows: list[dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    for name, text in (
        ("private_mb", "private memory, MB"),
        ("shared_mb", "shared memory, MB"),
        ("descriptors", "open files"),
    ):
        axes.plot([row["seconds"] / 60 for row in rows], [row[name] for row in rows], label=text)
    axes.set(title="DQN on CartPole, 7 processes", xlabel="minutes", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "soak.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--cycles", type=int, default=100)
    given = parser.parse_args()
    if given.minutes:
        rows = soak(given.minutes)
        with open(RESULTS / "soak.csv", "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        draw(rows)
        keep("soak.json", {"minutes": given.minutes, "growth_percent": judge(rows)})
    if given.cycles:
        keep("cycles.json", cycles(given.cycles))


def keep(name: str, found: dict[str, object]) -> None:
    whole = json.dumps({**found, "machine": machine()}, indent=1)
    (RESULTS / name).write_text(whole + "\n")
    print(whole)


if __name__ == "__main__":
    main()
