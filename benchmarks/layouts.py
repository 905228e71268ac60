"""What the decoupled layout costs, and what the ring of vectors brings: training throughput of the same run in turn.

python benchmarks/layouts.py [halfcheetah pong sampling] [--rounds 3] [--seconds 20] [--warmup 10]

Every work is run with the policy in the actors (inline) and in a worker of its own (remote) with a ring of 1, 2 and 4
vectors; the copies of the environment are always as many in all. "sampling" is Pong with one actor, one policy worker
and a trainer that learns nothing from its batches: nobody takes the time in which an actor waits for actions, so what
the ring is for can be seen by itself. Results and picture go to benchmarks/results/ and docs/img/.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from srl.algorithms.ppo import PPO, PPOLearner
from srl.bench.machine import machine
from srl.bench.throughput import BenchOptions, experiment, measure
from srl.core.specs import Spaces
from srl.experiment import Experiment

ROOT = Path(__file__).parent.parent
LAYOUTS = {"inline": ("inline", 1), "ring 1": ("remote", 1), "ring 2": ("remote", 2), "ring 4": ("remote", 4)}
SAMPLING = "sampling"


class Idle(PPO):
    """Takes batches and learns nothing from them."""

    def learner(self, spaces: Spaces, seed: int, device: str) -> PPOLearner:
        return IdleLearner(self, self.policy(spaces).to(device), seed, device)


class IdleLearner(PPOLearner):
    def train(self, *_: Any) -> dict[str, float]:
        return {}


def sampling() -> Experiment:
    x = experiment("pong", BenchOptions())
    ppo: Any = x.algorithms["default"]
    return replace(x, algorithm={"default": Idle(**vars(ppo))})


def layout(x: Experiment, inference: str, ring: int, count: int) -> Experiment:
    copies = x.actors.envs * max(x.actors.count, 1)
    actors = replace(x.actors, count=count, envs=copies // count // ring, ring=ring, inference=inference)
    return replace(x, actors=actors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", default=["halfcheetah", "pong", SAMPLING])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--warmup", type=float, default=10)
    options = parser.parse_args()
    rates: dict[str, dict[str, list[float]]] = {work: {name: [] for name in LAYOUTS} for work in options.work}
    for number in range(options.rounds):
        for work in options.work:
            for name, (inference, ring) in LAYOUTS.items():
                base = sampling() if work == SAMPLING else experiment(work, BenchOptions())
                x = layout(base, inference, ring, count=1 if work == SAMPLING else 2)
                rates[work][name].append(measure(x, options.warmup, options.seconds))
                print(f"{work:12} round {number + 1}, {name:8} {rates[work][name][-1]:>9,.0f} steps/s", flush=True)
        write(rates, options)
    for work, found in rates.items():
        for name, each in found.items():
            shares = ", ".join(share(each, found[other], other) for other in ("inline", "ring 1"))
            print(f"{work:12} {name:8} {median(each):>9,.0f} steps/s: {shares}")


def share(mine: list[float], others: list[float], name: str) -> str:
    against = [one / other for one, other in zip(mine, others, strict=True)]
    return f"{median(against):.2f} of {name} ({min(against):.2f}-{max(against):.2f})"


def write(rates: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> None:
    found = {"machine": machine(), "options": vars(options), "steps/s": rates}
    (ROOT / "benchmarks" / "results" / "layouts.json").write_text(json.dumps(found, indent=1) + "\n")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(rates), figsize=(4 * len(rates), 3), squeeze=False)
    for place, (work, by_name) in zip(axes[0], rates.items(), strict=True):
        middle = [median(each) for each in by_name.values()]
        reach = [[m - min(e) for m, e in zip(middle, by_name.values(), strict=True)]]
        reach += [[max(e) - m for m, e in zip(middle, by_name.values(), strict=True)]]
        colours = ["#4c72b0", *["#55a868"] * (len(by_name) - 1)]
        place.bar(list(by_name), middle, yerr=reach, color=colours, capsize=3)
        place.set_title(work)
        place.set_ylabel("steps/s")
    figure.suptitle("policy inline, or remote with a ring of vectors", fontsize=10)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "img" / "layouts.png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
