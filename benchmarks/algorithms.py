"""What algorithms learn on a budget of steps, beside Stable-Baselines3's on the same budget or published figures.

python benchmarks/algorithms.py [CASE …] [--seeds 3] [--core 0] [--json benchmarks/results/algorithms.json]

Ours and theirs in turn, seed by seed, on the same machine; with ``--core`` each run has that core to itself, and
another comparison may go on beside it on the other. What counts is the mean return of greedy episodes at the end;
curves and seconds are kept too. Results are kept run by run: an interrupted comparison goes on. MinAtar games need
``pip install minatar``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from dataclasses import dataclass, replace
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
from srl.recipes import recipe

FOLDER = Path(__file__).parent
POINTS = 40


@dataclass(frozen=True)
class Case:
    """What is trained, and what it is held against."""

    ours: srl.Experiment
    theirs: tuple[str, str, dict[str, Any]] | None = None
    """Stable-Baselines3's algorithm, its environment, and what differs from its own hyper-parameters."""
    published: tuple[str, float] | None = None
    """Who has published a figure, and the return that it is."""
    beside: str = ""
    """Another case of ours that it is held against."""
    episodes: int = 20
    """Of the evaluation at the end."""


def _sac(env: str, steps: int) -> Case:
    """SAC with the hyper-parameters that Stable-Baselines3 has by itself."""
    x = srl.Experiment(envs.gym(env), srl.SAC(warmup=1_000), actors=srl.Actors(count=1, envs=1), steps=steps)
    return Case(x, ("sac", env, {"learning_starts": 1_000}))


def _spread(x: srl.Experiment, published: float) -> Case:
    """A team on MPE's simple spread, beside what Papoudakis et al. (2021, table 3) have published.

    Their return is the sum over the agents, each paid -1 at every step for touching itself: 75 an episode. Ours is the
    mean over the agents of half the reward for places and half that for collisions.
    """
    return Case(x, published=("Papoudakis et al.", (published + 75) / 6), episodes=300)


def _team(algorithm: srl.QMIX) -> srl.Experiment:
    return srl.Experiment(envs.spread(state=True), algorithm, actors=srl.Actors(envs=32), steps=6_000_000)


def _minatar(game: str, algorithm: Any, steps: int, beside: str = "") -> Case:
    """A MinAtar game, beside Stable-Baselines3's DQN with its one gradient step on 32 samples every four steps."""
    x = srl.Experiment(envs.gym(f"minatar.gym:MinAtar/{game}-v1"), algorithm, actors=srl.Actors(envs=8), steps=steps)
    given = {"learning_rate": 2.5e-4, "buffer_size": 100_000, "learning_starts": 2_000, "target_update_interval": 1_000}
    theirs = "dqn", f"MinAtar/{game}-v1", {**given, "policy_kwargs": {"net_arch": [128, 128]}}
    return Case(x, None if beside else theirs, beside=beside)


def _pong(algorithm: type[srl.PPO], epochs: int, beside: str = "", **more: Any) -> Case:
    """Pong as in its recipe, but for the algorithm and the passes over a batch; samples at most one version old."""
    x = recipe("pong")
    assert isinstance(x.algorithm, srl.PPO)
    given = {name: getattr(x.algorithm, name) for name in ("lr", "horizon", "minibatch", "entropy", "precision")}
    chosen = algorithm(**given, epochs=epochs, max_staleness=1, **more)
    return Case(replace(x, algorithm=chosen, steps=800_000), beside=beside)


TEAM = {
    "hidden": (128, 128),
    "activation": "relu",
    "replay_steps": 300_000,
    "warmup": 10_000,
    "epsilon": 0.05,
    "epsilon_steps": 100_000,
    "epsilon_spread": 0.0,
    "samples_per_insert": 32,
    "anneal_steps": 6_000_000,
}
VDN = srl.VDN(lr=5e-4, gamma=0.95, **TEAM)
QMIX = srl.QMIX(lr=3e-4, gamma=0.9, minibatch=64, target_every=200, normalize_reward=True, **TEAM)
DQN = {"lr": 2.5e-4, "hidden": (128, 128), "activation": "relu", "replay_steps": 100_000}

CASES = {
    "sac-pendulum": _sac("Pendulum-v1", 10_000),
    "sac-halfcheetah": _sac("HalfCheetah-v5", 30_000),
    "sac-hopper": _sac("Hopper-v5", 30_000),
    "mappo-spread": _spread(recipe("spread-mappo"), -133.54),
    "qmix-spread": _spread(_team(QMIX), -126.62),
    "vdn-spread": _spread(_team(VDN), -131.03),
    "ppo-pong": _pong(srl.PPO, 3, clip=0.1),
    "ppo-kl-pong": _pong(srl.PPO, 3, "ppo-pong", kl_coef=10.0),
    "appo-pong": _pong(srl.APPO, 3, "ppo-pong", correction="decoupled", kl_coef=10.0),
    "appo-clip-pong": _pong(srl.APPO, 3, "ppo-pong", clip=0.1, correction="decoupled"),
    "appo-vtrace-pong": _pong(srl.APPO, 3, "ppo-pong", clip=0.1, correction="vtrace"),
    "impala-pong": _pong(srl.IMPALA, 3, "ppo-pong", lam=0.95, normalize_advantage=True, kl_coef=10.0),
    "dqn-minatar": _minatar("Breakout", srl.DQN(minibatch=32, samples_per_insert=8, **DQN), 300_000),
    "r2d2-minatar": _minatar("Breakout", srl.R2D2(minibatch=8, samples_per_insert=16, **DQN), 300_000, "dqn-minatar"),
}


def ours(x: srl.Experiment, episodes: int) -> dict[str, Any]:
    """One run of ours."""
    with TemporaryDirectory(prefix="srl-algorithms-") as folder:
        done = run(x, Path(folder) / "run")
        if done.interrupted:
            raise SystemExit(f"interrupted after {done.steps:,} of {x.steps:,} steps; nothing is kept of this run")
        rows = [row for row in read_metrics(Path(folder) / "run") if row.get("return_mean") is not None]
        greedy = evaluate(Path(folder) / "run", episodes=episodes, seed=7, sample=False).return_mean
    return {
        "curve": thinned([row["steps"] for row in rows], [row["return_mean"] for row in rows], x.steps),
        "greedy": greedy,
        "seconds": round(rows[-1]["time"], 1),
    }


def theirs(case: Case, seed: int) -> dict[str, Any]:
    """One run of theirs."""
    assert case.theirs is not None
    *which, given = case.theirs
    steps = case.ours.steps
    python = install(FOLDER / "rivals", "sb3", print)
    with TemporaryDirectory(prefix="srl-algorithms-") as folder:
        path = Path(folder) / "found.json"
        command = [str(python.absolute()), str(FOLDER / "rivals" / "sb3_learn.py"), *which, str(steps), str(seed)]
        subprocess.run([*command, str(path), json.dumps(given)], check=True)
        found: dict[str, Any] = json.loads(path.read_text())
    at, returns = zip(*found["curve"], strict=True)
    means = [float(np.mean(returns[max(0, i - 99) : i + 1])) for i in range(len(returns))]
    return {**found, "curve": thinned(at, means, steps)}


def known(path: Path) -> dict[str, Any]:
    """What has been measured so far."""
    found: dict[str, Any] = json.loads(path.read_text())["runs"] if path.is_file() else {}
    return found


def sides(case: Case) -> tuple[str, ...]:
    return ("srl", "sb3") if case.theirs else ("srl",)


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
    lines = [(name, "srl", name if CASES[name].beside else "SRL"), (CASES[name].beside, "srl", CASES[name].beside)]
    lines += [(each, "sb3", "Stable-Baselines3") for each in (name, CASES[name].beside)]
    for case, who, label in lines:
        runs = [each for key, each in found.items() if case and key.startswith(f"{case} {who} ")]
        if runs:
            curves, seconds = np.array([each["curve"] for each in runs]), np.mean([each["seconds"] for each in runs])
            axis.plot(curves[0, :, 0], curves[:, :, 1].mean(0), label=f"{label} ({seconds:,.0f} s)")
            axis.fill_between(curves[0, :, 0], curves[:, :, 1].min(0), curves[:, :, 1].max(0), alpha=0.2)
    if CASES[name].published is not None:
        who, value = CASES[name].published
        axis.axhline(value, color="grey", linestyle="--", label=f"{who}, published")
    axis.set(title=name, xlabel="steps", ylabel="return of training episodes")
    axis.legend()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--core", type=int, help="run on this core only")
    parser.add_argument("--only", choices=("srl", "sb3"), help="only ours, or only theirs")
    parser.add_argument("--json", type=Path, default=FOLDER / "results" / "algorithms.json")
    given = parser.parse_args()
    unknown = [name for name in given.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CASES)}")
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    found = known(given.json)
    wanted = list(dict.fromkeys(each for name in given.cases or CASES for each in (CASES[name].beside, name) if each))
    for name in wanted:
        case = CASES[name]
        for seed in range(1, given.seeds + 1):
            for who in sides(case):
                key = f"{name} {who} {seed}"
                if key not in found and given.only in (None, who):
                    x = replace(case.ours, seed=seed)
                    found[key] = ours(x, case.episodes) if who == "srl" else theirs(case, seed)
                    print(key, f"greedy {found[key]['greedy']:.2f}, {found[key]['seconds']} s", flush=True)
                    found = {**known(given.json), key: found[key]}  # others may have added theirs meanwhile
                    given.json.write_text(json.dumps({"machine": machine(), "runs": found}, indent=1) + "\n")
        draw(found, name, FOLDER.parent / "docs" / "curves" / f"{name}.png")
    for name in wanted:
        case = CASES[name]
        for who in sides(case):
            runs = [found[key] for key in found if key.startswith(f"{name} {who} ")]
            if not runs:
                continue
            greedy = [each["greedy"] for each in runs]
            seconds = np.mean([each["seconds"] for each in runs])
            print(
                f"| {name} | {who} | {np.mean(greedy):.2f} ({min(greedy):.2f} to {max(greedy):.2f}) | {seconds:.0f} s |"
            )
        if case.published is not None:
            print(f"| {name} | {case.published[0]} | {case.published[1]:.2f} | |")


if __name__ == "__main__":
    main()
