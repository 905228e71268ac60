"""How training scales with the number of trainers on this machine's cores: training alone, and whole runs.

python benchmarks/trainers.py --json benchmarks/results/trainers.json

Alone: one trainer, and two that sum their gradients, each bound to a core, pass over what copies of the environment
show, in minibatches of 256 in all. Whole runs: Pong with four passes by one trainer of one thread, by one of two,
and by two of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from srl.bench.machine import machine
from srl.bench.throughput import BenchOptions, experiment, measure

MINIBATCH = 256


def train_alone(work: Any, rank: int, size: int, folder: Path, seconds: float) -> None:
    """Train on one's share of a batch for a while; print samples per second of all passes."""
    import torch

    from srl.bench.parts import AGENT, Stepping, play, training
    from srl.services.names import FileNames
    from srl.workers.group import Group

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    x = experiment(work, BenchOptions())
    algorithm: Any = replace(x.algorithms["default"], minibatch=MINIBATCH // size)
    rows = x.actors.envs // size
    played = play(Stepping(x.env, (AGENT,), rows, algorithm), algorithm.horizon + 1)
    group = Group("trainers", rank, size, FileNames(folder), folder) if size > 1 else None
    if group is not None:
        group.join(1, "gloo")
        while not group.form(1.0):
            pass
    train, batch = training(algorithm, x.env.make(1).spaces(AGENT), rows, played, peers=group)
    train()
    begin, passes = time.perf_counter(), 0
    enough = torch.zeros(1)
    while not enough:
        train()
        passes += 1
        enough[0] = time.perf_counter() - begin > seconds
        if group is not None:
            group.sum(enough)
    print(json.dumps(passes * algorithm.epochs * len(batch.positions) / (time.perf_counter() - begin)), flush=True)


def alone(work: str, size: int, seconds: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        roles = [[work, str(rank), str(size), folder, str(seconds)] for rank in range(size)]
        running = [subprocess.Popen([sys.executable, __file__, *role], stdout=subprocess.PIPE) for role in roles]
        return sum(json.loads(process.communicate(timeout=300)[0]) for process in running)


def whole(work: Any, count: int, threads: int, seconds: float) -> float:
    x = experiment(work, BenchOptions())
    algorithm: Any = replace(x.algorithms["default"], minibatch=MINIBATCH // count)
    actors = replace(x.actors, count=2, envs=x.actors.envs // 2)
    trainer = replace(x.trainer, count=count, threads=threads)
    return measure(replace(x, algorithm={"default": algorithm}, actors=actors, trainer=trainer), 10.0, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    said = parser.parse_args()
    cases: dict[str, Any] = {}
    for work in ("pong-4", "halfcheetah"):
        for size in (1, 2):
            cases[f"{work}, training alone, {size}"] = lambda work=work, size=size: alone(work, size, said.seconds)
    for name, count, threads in (("1 × 1 thread", 1, 1), ("1 × 2 threads", 1, 2), ("2 × 1 thread", 2, 1)):
        cases[f"pong-4, whole run, {name}"] = lambda c=count, t=threads: whole("pong-4", c, t, 2 * said.seconds)
    found: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(said.rounds):
        for case, run in cases.items():
            found[case].append(run())
            print(f"round {number + 1}: {case:32} {found[case][-1]:>10,.0f} samples/s", file=sys.stderr, flush=True)
    print("| trainers | samples/s | of one |\n|---|---|---|")
    base = 0
    for case, rates in found.items():
        if case.endswith((", 1", "1 × 1 thread")):
            base = found[case]
        ratios = [rate / one for rate, one in zip(rates, base, strict=True)]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        print(f"| {case} | {median(rates):,.0f} | {spread} |")
    if said.json:
        said.json.write_text(json.dumps({"machine": machine(), "samples/s": found}, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 6 and sys.argv[2].isdigit():
        train_alone(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), float(sys.argv[5]))
    else:
        main()
