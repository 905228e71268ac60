"""How old may samples be? Learning against ``max_staleness``, with and without correction.

python benchmarks/staleness.py [--seeds 3] [--env CartPole-v1] [--steps 300000] [--json FILE]

One run each for max_staleness 0, 1, 4 and 16 and each correction of APPO (none is PPO), with several seeds. Actors are
faster than the trainer and the slab has room for all that the bound allows, so samples really are that old: the mean
age is written down. What counts is the return over steps. Results are kept run by run; an interrupted study goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import srl
from srl import envs
from srl.bench.machine import machine
from srl.launch.run import run
from srl.monitor.sinks import read_metrics

BOUNDS = (0, 1, 4, 16)
CORRECTIONS = ("none", "vtrace", "decoupled")
POINTS = 40
"""Places along a run at which the return is written down."""


def experiment(env: str, bound: int, correction: str, seed: int, steps: int) -> srl.Experiment:
    """One run. Eight passes over small minibatches: it is training that takes the time, not acting."""
    algorithm = srl.APPO(
        lr=3e-4, horizon=32, epochs=8, minibatch=128, max_staleness=bound, correction=correction, hidden=(64, 64)
    )
    return srl.Experiment(
        envs.gym(env),
        algorithm,
        actors=srl.Actors(count=1, envs=32),
        trainer=srl.Trainer(batch=1, slab=bound + 2, threads=1),
        steps=steps,
        seed=seed,
    )


def one(x: srl.Experiment) -> dict[str, object]:
    """The returns of a run along its steps, and how old its samples were."""
    with TemporaryDirectory(prefix="srl-staleness-") as folder:
        run(x, Path(folder) / "run", every=0.1)
        rows = [row for row in read_metrics(Path(folder) / "run") if row.get("return_mean") is not None]
    steps, returns = (np.array([row[name] for row in rows]) for name in ("steps", "return_mean"))
    at = np.linspace(0, x.steps, POINTS + 1)[1:]
    ages = [row["train/staleness"] for row in rows if "train/staleness" in row]
    return {
        "steps": at.astype(int).tolist(),
        "returns": np.interp(at, steps, returns).round(2).tolist(),
        "age": round(float(np.mean(ages)), 2) if ages else None,
        "seconds": round(rows[-1]["time"], 1),
    }


def key(correction: str, bound: int, seed: int) -> str:
    return f"{correction} {bound} {seed}"


def draw(found: dict[str, dict[str, list[float]]], seeds: int, picture: Path) -> None:
    """A panel for every correction: the mean return over steps, and its spread over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CORRECTIONS), figsize=(12, 3.4), sharey=True, layout="constrained")
    for axis, correction in zip(axes, CORRECTIONS, strict=True):
        for bound in BOUNDS:
            runs = [found[k] for s in range(1, seeds + 1) if (k := key(correction, bound, s)) in found]
            if runs:
                curves = np.array([each["returns"] for each in runs])
                age = np.mean([each["age"] for each in runs])
                axis.plot(runs[0]["steps"], curves.mean(0), label=f"max_staleness {bound} (mean age {age:.1f})")
                axis.fill_between(runs[0]["steps"], curves.min(0), curves.max(0), alpha=0.15)
        axis.set(title=f"correction={correction}", xlabel="steps")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("return (mean and range over seeds)")
    figure.savefig(picture, dpi=110)


def table(found: dict[str, dict[str, list[float]]], seeds: int) -> str:
    """The mean return over a whole run (how fast it was learned) and at its end."""
    lines = ["| correction | max_staleness | mean age | return over the run | return at the end |", "|" + "---|" * 5]
    for correction in CORRECTIONS:
        for bound in BOUNDS:
            runs = [found[k] for s in range(1, seeds + 1) if (k := key(correction, bound, s)) in found]
            if runs:
                over = [float(np.mean(each["returns"])) for each in runs]
                last = [float(np.mean(each["returns"][-4:])) for each in runs]
                age = np.mean([each["age"] for each in runs])
                cells = (f"{np.mean(v):.0f} ({min(v):.0f}–{max(v):.0f})" for v in (over, last))
                lines.append(f"| {correction} | {bound} | {age:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "staleness.json")
    given = parser.parse_args()
    about = {"env": given.env, "steps": given.steps}
    kept = json.loads(given.json.read_text()) if given.json.is_file() else {}
    found = kept["runs"] if kept.get("about") == about else {}
    for seed in range(1, given.seeds + 1):
        for bound in BOUNDS:
            for correction in CORRECTIONS:
                name = key(correction, bound, seed)
                if name not in found:
                    found[name] = one(experiment(given.env, bound, correction, seed, given.steps))
                    print(
                        name, found[name]["age"], found[name]["returns"][-1], f"{found[name]['seconds']} s", flush=True
                    )
                    whole = {"machine": machine(), "about": about, "runs": found}
                    given.json.write_text(json.dumps(whole, indent=1) + "\n")
    draw(found, given.seeds, given.json.with_suffix(".png"))
    print(table(found, given.seeds))


if __name__ == "__main__":
    main()
