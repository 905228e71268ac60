"""Learning curves of the recipes: train (or go on), evaluate, and keep curve, raw numbers and results in docs/curves/.

python benchmarks/learn.py                    all recipes, one after the other; interrupted runs are resumed
python benchmarks/learn.py cartpole pong      these
python benchmarks/learn.py --collect pong DIR keep the results of a run that was made by hand

Recipes of several agents are run with three seeds, and every policy is also measured against the others as they were
before training ("untrained"), which act at random. Players of board games meet their own past, that of tic-tac-toe also
a perfect player.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

from perfect_play import losses_to_perfect_play

from srl.bench.machine import machine
from srl.config import CONFIG, load
from srl.envs.boards import TicTacToe
from srl.launch.run import evaluate, resume, run, saved_seats
from srl.monitor.console import on_console
from srl.monitor.sinks import CURVE, draw_curve, read_metrics
from srl.plan import check, checkpoint_store
from srl.recipes import RECIPES, recipe
from srl.workers.opponents import PAST
from srl.workers.player import Player, play

KEPT = Path(__file__).parent.parent / "docs" / "curves"
RUNS = Path("runs") / "learn"
COLUMNS = ("time", "steps", "length_mean", "episodes", "steps_per_second", "version")
ROWS = 400
THREE = (1, 2, 3)
SEEDS = {"simple-spread": THREE, "simple-tag": THREE, "cartpole-dqn": THREE, "tictactoe": THREE}
UNTRAINED = f"{PAST}{0:09d}"
TAGS = {"trained": "latest", "untrained": UNTRAINED}
EPISODES = 100
GAMES = 1000
OUTCOMES = {"won": 1, "drawn": 0, "lost": -1}


def learn(name: str) -> None:
    for seed in SEEDS.get(name, (1,)):
        run_dir = RUNS / f"{name}-{seed}"
        x = recipe(name)
        # Keeps the untrained version, to compare with.
        x = replace(x, seed=seed, trainer=replace(x.trainer, past_every=x.trainer.past_every or 10**9))
        if not (run_dir / CONFIG).exists():
            result = run(x, run_dir, display=on_console)
        elif (read_metrics(run_dir) or [{"steps": 0}])[-1]["steps"] < x.steps:
            result = resume(run_dir, display=on_console)
        else:
            continue
        if result.interrupted:
            sys.exit(130)
    collect(name, [RUNS / f"{name}-{seed}" for seed in SEEDS.get(name, (1,))])


def collect(name: str, run_dirs: list[Path]) -> None:
    """Keep what the runs show, small."""
    KEPT.mkdir(parents=True, exist_ok=True)
    runs = []
    for i, run_dir in enumerate(run_dirs):
        x, rows = load(run_dir), read_metrics(run_dir)
        rows = [row for row in rows if any(column.startswith("return_mean") for column in row)]
        suffix = f"-seed{x.seed}" if len(run_dirs) > 1 else ""
        write_table(KEPT / f"{name}{suffix}.csv", rows)
        if i == 0:
            draw_curve(run_dir, f"srl train {name}")
            shutil.copy(run_dir / CURVE, KEPT / f"{name}.png")
        about = {"seed": x.seed, "steps": rows[-1]["steps"], "minutes": round(rows[-1]["time"] / 60, 1)}
        runs.append({**about, "evaluation": measure(name, run_dir)})
    found = {"command": f"srl train {name}", "runs": runs, "machine": machine()}
    (KEPT / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["runs"], indent=1))


def write_table(path: Path, rows: list[dict[str, float]]) -> None:
    returns = sorted({c for row in rows for c in row if c.split("/")[0] in ("return_mean", "eval")})
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*COLUMNS, *returns], extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows[:: max(1, len(rows) // ROWS)])


def measure(name: str, run_dir: Path) -> dict[str, object]:
    """What the trained policies are worth, and what they were worth before training."""
    found: dict[str, object] = {}
    plans = [plan for plan in check(load(run_dir)) if plan.agents and not plan.opponent]
    episodes = EPISODES if len(plans) > 1 or name in SEEDS or name == "recall" else 20
    for plan in plans:
        tags = checkpoint_store(run_dir, plan).tags()
        found[plan.policy] = asdict(evaluate(run_dir, policy=plan.policy, episodes=episodes))
        if UNTRAINED in tags and len(load(run_dir).agents) == 1:
            before = evaluate(run_dir, policy=plan.policy, episodes=episodes, tag=UNTRAINED, sample=True)
            found[f"{plan.policy}, untrained"] = asdict(before)
        elif UNTRAINED in tags:
            for ours in ("trained", "untrained"):
                for theirs in ("trained", "untrained"):
                    tags = {"tag": TAGS[ours], "versus": TAGS[theirs]}
                    scores = evaluate(run_dir, policy=plan.policy, episodes=episodes, sample=True, **tags)
                    found[f"{ours} {plan.policy} against {theirs}"] = asdict(scores)
    if name in ("tictactoe", "connect-four"):
        found.update(judge_player(run_dir))
    return found


def judge_player(run_dir: Path) -> dict[str, object]:
    """The player against the version it was after a quarter of its training, and against perfect play."""
    plans = check(load(run_dir))
    plan = next(plan for plan in plans if not plan.opponent)
    store = checkpoint_store(run_dir, plan)
    final = store.resolve("latest")
    past = sorted(version for tag, version in store.tags().items() if tag.startswith(PAST))
    quarter = min(past, key=lambda version: abs(version - final / 4))
    games = {}
    for ours, theirs in (("greedy", "sampled"), ("sampled", "sampled"), ("greedy", "greedy")):
        seats = saved_seats(plans, run_dir, "latest", f"v{quarter}", None, plan.policy)
        for seat in seats:
            seat.sample = (ours if seat.policy == plan.policy else theirs) == "sampled"
        player = Player(load(run_dir).env, seats, GAMES, 1)
        returns = play(player, GAMES, GAMES, 1)[plan.policy].returns
        shares = {text: sum(value == sign for value in returns) / GAMES for text, sign in OUTCOMES.items()}
        games[f"{ours} against {theirs}"] = shares
    found: dict[str, object] = {f"against v{quarter}, a quarter of the training": games}
    if isinstance(load(run_dir).env, TicTacToe):
        lost, played = losses_to_perfect_play(run_dir)
        found["perfect play"] = {"lines of play": played, "lost": lost}
    return found


def main() -> None:
    if sys.argv[1:2] == ["--collect"]:
        collect(sys.argv[2], [Path(folder) for folder in sys.argv[3:]])
    else:
        for name in sys.argv[1:] or RECIPES:
            learn(name)


if __name__ == "__main__":
    main()
