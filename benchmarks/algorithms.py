"""What algorithms learn on a budget of steps, beside Stable-Baselines3's on the same budget.

python benchmarks/algorithms.py [CASE …] [--seeds 3] [--json benchmarks/results/algorithms.json]

Ours and theirs in turn, seed by seed, on the same machine with nothing beside them. What counts is the mean return of
20 greedy episodes at the end; curves and seconds are kept too. Results are kept run by run: an interrupted comparison
goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import srl
from srl import envs
from srl.bench.machine import machine
from srl.bench.rivals import install
from srl.launch.run import evaluate, run
from srl.monitor.sinks import read_metrics

FOLDER = Path(__file__).parent
POINTS = 40


def _sac(env: str, steps: int) -> srl.Experiment:
    """SAC with the hyper-parameters that Stable-Baselines3 has by itself."""
    algorithm = srl.SAC(warmup=1_000)
    return srl.Experiment(envs.gym(env), algorithm, actors=srl.Actors(count=1, envs=1), steps=steps)


CASES: dict[str, tuple[srl.Experiment, tuple[str, str], dict[str, Any]]] = {
    "sac-pendulum": (_sac("Pendulum-v1", 10_000), ("sac", "Pendulum-v1"), {"learning_starts": 1_000}),
    "sac-halfcheetah": (_sac("HalfCheetah-v5", 100_000), ("sac", "HalfCheetah-v5"), {"learning_starts": 1_000}),
    "sac-hopper": (_sac("Hopper-v5", 100_000), ("sac", "Hopper-v5"), {"learning_starts": 1_000}),
}


def ours(x: srl.Experiment) -> dict[str, Any]:
    """One run of ours."""
    with TemporaryDirectory(prefix="srl-algorithms-") as folder:
        run(x, Path(folder) / "run")
        rows = [row for row in read_metrics(Path(folder) / "run") if row.get("return_mean") is not None]
        greedy = evaluate(Path(folder) / "run", episodes=20, seed=7, sample=False).return_mean
    return {
        "curve": thinned([row["steps"] for row in rows], [row["return_mean"] for row in rows], x.steps),
        "greedy": greedy,
        "seconds": round(rows[-1]["time"], 1),
    }


def theirs(which: tuple[str, str], given: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """One run of theirs."""
    python = install(FOLDER / "rivals", "sb3", print)
    with TemporaryDirectory(prefix="srl-algorithms-") as folder:
        path = Path(folder) / "found.json"
        command = [str(python.absolute()), str(FOLDER / "rivals" / "sb3_learn.py"), *which, str(steps), str(seed)]
        subprocess.run([*command, str(path), json.dumps(given)], check=True)
        found: dict[str, Any] = json.loads(path.read_text())
    at, returns = zip(*found["curve"], strict=True)
    means = [float(np.mean(returns[max(0, i - 99) : i + 1])) for i in range(len(returns))]
    return {**found, "curve": thinned(at, means, steps)}


def thinned(steps: Any, returns: Any, budget: int) -> list[list[float]]:
    """The curve at a few places."""
    at = np.linspace(0, budget, POINTS + 1)[1:]
    return [[int(x), round(float(y), 2)] for x, y in zip(at, np.interp(at, steps, returns), strict=True)]


def draw(found: dict[str, Any], name: str, picture: Path) -> None:
    """Both curves: mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for who, label in (("srl", "SRL"), ("sb3", "Stable-Baselines3")):
        curves = np.array([found[key]["curve"] for key in found if key.startswith(f"{name} {who} ")])
        if len(curves):
            seconds = np.mean([found[key]["seconds"] for key in found if key.startswith(f"{name} {who} ")])
            axis.plot(curves[0, :, 0], curves[:, :, 1].mean(0), label=f"{label} ({seconds:,.0f} s)")
            axis.fill_between(curves[0, :, 0], curves[:, :, 1].min(0), curves[:, :, 1].max(0), alpha=0.2)
    axis.set(title=name, xlabel="steps", ylabel="return of training episodes")
    axis.legend()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=FOLDER / "results" / "algorithms.json")
    given = parser.parse_args()
    unknown = [name for name in given.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CASES)}")
    found = json.loads(given.json.read_text())["runs"] if given.json.is_file() else {}
    for name in given.cases or CASES:
        x, which, options = CASES[name]
        for seed in range(1, given.seeds + 1):
            ways = {
                "srl": lambda x=x, seed=seed: ours(replace(x, seed=seed)),
                "sb3": lambda x=x, seed=seed, w=which, o=options: theirs(w, o, x.steps, seed),
            }
            for who, way in ways.items():
                key = f"{name} {who} {seed}"
                if key not in found:
                    found[key] = way()
                    print(key, f"greedy {found[key]['greedy']:.1f}, {found[key]['seconds']} s", flush=True)
                    given.json.write_text(json.dumps({"machine": machine(), "runs": found}, indent=1) + "\n")
        draw(found, name, FOLDER.parent / "docs" / "curves" / f"{name}.png")
    for name in given.cases or CASES:
        for who in ("srl", "sb3"):
            runs = [found[key] for key in found if key.startswith(f"{name} {who} ")]
            greedy = [each["greedy"] for each in runs]
            seconds = np.mean([each["seconds"] for each in runs])
            print(f"| {name} | {who} | {np.mean(greedy):.0f} ({min(greedy):.0f}–{max(greedy):.0f}) | {seconds:.0f} s |")


if __name__ == "__main__":
    main()
