"""Load: many actors, huge observations, crowds of agents, trainers and actors that take their time.

python benchmarks/load.py [actors tcp ring huge crowd slow-trainer slow-actor link] [--counts 1 8 32 64 128 200]
    [--latency 0.1] [--seconds 20] [--json benchmarks/results/load.json]

actors         Light actors (remote inference, no torch) whose environment is somewhere else: a step sleeps for
               --latency seconds and takes no processor time. Ideal are actors / latency steps a second. On two cores
               0.1 s leaves 1 ms of processor time a step for 200 actors: to act, to answer, to train and to watch. With
               less latency the processor would be the limit, which is not what is asked here; with more, nothing would.
tcp, ring      The largest number of them, with TCP between all of them; with two vectors in an actor's ring.
huge           Observations of 64 MiB. The trainer looks at every byte before it trains.
crowd          10,000 agents in one environment, which PettingZoo and which our own interface bring.
slow-trainer   Updates that sleep: actors must stand still, queues stay bounded and memory flat.
slow-actor     Steps that sleep for a second: nobody may spin.
link           Blocks of Pong frames from one host to another (network namespaces, which need root), over links of 100
               Mbit/s and 1 Gbit/s and as fast as it goes: as they are, and as the producer thinks best.

Steps a second are steps trained on. RSS counts what processes share once for each of them, PSS divides it among them.
Results are added to those in the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

import srl
from srl.bench.hosts import hosts
from srl.bench.load_crowd import Zoo
from srl.bench.load_link import Order, spec
from srl.bench.load_watch import CONTROLLER, Look, Script, Watched, cost
from srl.bench.load_work import Checked, Crowd, Huge, Sleeper, Slow
from srl.bench.machine import machine
from srl.services.network import Keys
from srl.streams.cargo import sizes

RESULTS = Path(__file__).parent / "results" / "load.json"
LIMIT = 180.0
HUGE = 2**26
AGENTS = 10_000
KINDS = ("actor", "policy", "trainer", CONTROLLER)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), choices=[*CASES, []], metavar="case")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 32, 64, 128, 200])
    parser.add_argument("--latency", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    for name in given.cases:
        for row in CASES[name](given):
            if given.json is not None:
                keep(given.json, name, row)


def measured(name: str, x: srl.Experiment, script: Callable[[Watched], Script[Row]]) -> Row:
    """Run ``x`` along with ``script``; what that found is shown and returned."""
    print(f"{name} …", flush=True)
    with tempfile.TemporaryDirectory(prefix="srl-load-") as folder:
        found = Watched(replace(x, steps=10**12), Path(folder) / "run", LIMIT).run(script)
    row = {"name": name, **found}
    print("  " + ", ".join(f"{key} {shown(value)}" for key, value in row.items() if not isinstance(value, dict)))
    for kind in KINDS:
        if kind in row:
            print(f"  {kind:10} " + ", ".join(f"{key} {shown(value)}" for key, value in row[kind].items()), flush=True)
    return row


def shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def keep(path: Path, case: str, row: Row) -> None:
    whole = json.loads(path.read_text()) if path.exists() else {}
    whole["machine"] = machine()
    rows = [each for each in whole.setdefault(case, []) if each["name"] != row["name"]]
    whole[case] = [*rows, row]
    path.write_text(json.dumps(whole, indent=1) + "\n")


def light(count: int, latency: float, **changes: Any) -> srl.Experiment:
    """So many light actors that wait."""
    ppo = srl.PPO(horizon=32, epochs=1, minibatch=min(1024, 32 * count))
    actors = srl.Actors(count=count, envs=1, inference="remote")
    return replace(srl.Experiment(srl.envs.gym(Sleeper, seconds=latency), ppo, actors=actors), **changes)


def waiting(count: int, latency: float, seconds: float) -> Callable[[Watched], Script[Row]]:
    """How much of the ideal rate so many actors deliver, and what that costs."""

    def script(watched: Watched) -> Script[Row]:
        yield from watched.until(lambda: watched.having("actor", "steps") == count)
        began = watched.age
        yield from watched.until(lambda: watched.count("trainer", "updates") >= 2)
        before, counted, since = watched.look(), counts(watched), time.monotonic()
        trained = [(since, watched.count("trainer", "steps"))]
        while time.monotonic() < since + seconds or len(trained) < 3:  # from update to update, so two at least
            steps = watched.count("trainer", "steps")
            if steps != trained[-1][1]:
                trained.append((time.monotonic(), steps))
            yield
        after, later, passed = watched.look(), counts(watched), time.monotonic() - since
        (start, first), (end, last) = trained[1], trained[-1]
        ideal = count / latency
        return {
            "actors": count,
            "latency": latency,
            "ideal": ideal,
            "steps/s": (last - first) / (end - start),
            "share": (last - first) / (end - start) / ideal,
            "acted/s": (later["steps"] - counted["steps"]) / passed,
            "batch": (later["rows"] - counted["rows"]) / (later["batches"] - counted["batches"]),
            "cores": sum(after[name].cpu - before[name].cpu for name in after) / passed,
            "all actors there, s": max(t for name, t in watched.heard.items() if watched.kinds[name] == "actor"),
            "all actors at work, s": began,
            **costs(before, after),
        }

    return script


def counts(watched: Watched) -> dict[str, float]:
    found = {"steps": watched.count("actor", "steps")}
    return found | {name: watched.count("policy", name) for name in ("rows", "batches")}


def costs(before: dict[str, Look], after: dict[str, Look]) -> Row:
    return {kind: asdict(cost(before, after, kind)) for kind in KINDS}


def actors(given: argparse.Namespace) -> list[Row]:
    found = []
    for count in given.counts:
        script = waiting(count, given.latency, given.seconds)
        found.append(measured(f"{count} actor{'s' if count > 1 else ''}", light(count, given.latency), script))
    print(f"\n{'actors':>6} {'ideal':>7} {'steps/s':>8} {'share':>6} {'batch':>6} {'start s':>8}", end="")
    print(f" {'% core an actor':>16} {'policy':>7} {'trainer':>8} {'controller':>11} {'RSS MB':>7} {'PSS MB':>7}")
    for row in found:
        print(f"{row['actors']:>6} {row['ideal']:>7.0f} {row['steps/s']:>8.0f} {row['share']:>6.1%}", end="")
        print(f" {row['batch']:>6.1f} {row['all actors at work, s']:>8.1f} {row['actor']['cpu']:>16.2%}", end="")
        print(f" {row['policy']['cpu']:>7.1%} {row['trainer']['cpu']:>8.1%} {row[CONTROLLER]['cpu']:>11.1%}", end="")
        print(f" {row['actor']['rss_most']:>7.1f} {row['actor']['pss']:>7.1f}")
    return found


def tcp(given: argparse.Namespace) -> list[Row]:
    count = max(given.counts)
    x = light(count, given.latency, transport="tcp")
    return [measured(f"{count} actors over tcp", x, waiting(count, given.latency, given.seconds))]


def ring(given: argparse.Namespace) -> list[Row]:
    count = max(given.counts)
    x = light(count, given.latency)
    x = replace(x, actors=replace(x.actors, ring=2))
    return [measured(f"{count} actors, ring 2", x, waiting(count, given.latency, given.seconds))]


def huge(given: argparse.Namespace) -> list[Row]:
    """Observations of 64 MiB, three steps a block, over shared memory and over TCP."""

    def script(watched: Watched) -> Script[Row]:
        yield from watched.until(lambda: watched.count("trainer", "updates") >= 2)
        before, since, first = watched.look(), time.monotonic(), watched.gauge("trainer", "train/checked")
        yield from watched.wait(given.seconds)
        checked = watched.gauge("trainer", "train/checked")
        rate = (checked - first) / (time.monotonic() - since)
        after = watched.look()
        return {"MB": HUGE / 1e6, "checked": checked, "observations/s": rate, **costs(before, after)}

    x = srl.Experiment(
        srl.envs.gym(Huge, nbytes=HUGE),
        Checked(horizon=3, minibatch=3, epochs=1),
        actors=srl.Actors(count=1, envs=1, inference="remote"),
    )
    return [
        measured(f"64 MiB over {transport}", replace(x, transport=transport), script) for transport in ("shm", "tcp")
    ]


def crowd(given: argparse.Namespace) -> list[Row]:
    """10,000 agents that all act by one policy."""

    def script(watched: Watched) -> Script[Row]:
        yield from watched.until(lambda: watched.count("trainer", "updates") >= 2)
        began, before, since = watched.age, watched.look(), time.monotonic()
        first, acted = watched.count("trainer", "steps"), watched.count("actor", "steps")
        yield from watched.wait(given.seconds)
        passed, after = time.monotonic() - since, watched.look()
        returns = list(watched.monitor.returns.get("default", ()))
        return {
            "agents": AGENTS,
            "until two updates, s": began,
            "trained/s": (watched.count("trainer", "steps") - first) / passed,
            "acted/s": (watched.count("actor", "steps") - acted) / passed,
            "return, best 25": sum(returns) / max(len(returns), 1),
            **costs(before, after),
        }

    ppo = srl.PPO(horizon=8, epochs=1, minibatch=4000, lr=3e-3)
    alone = srl.Actors(count=1, envs=1, inference="remote")
    found = []
    for name, env in (("PettingZoo", srl.envs.pettingzoo(Zoo, count=AGENTS)), ("own interface", Crowd(AGENTS))):
        found.append(measured(f"10,000 agents, {name}", srl.Experiment(env, ppo, actors=alone), script))
    return found


def slow_trainer(given: argparse.Namespace) -> list[Row]:
    """Actors that could go on for ever, and updates that sleep."""

    def script(watched: Watched) -> Script[Row]:
        yield from watched.until(lambda: watched.count("trainer", "updates") >= 3)
        begin, since, most, ahead = watched.look(), time.monotonic(), 0.0, 0.0
        while time.monotonic() < since + given.seconds:
            filling, full = (watched.gauge("trainer", f"queue/{name}") for name in ("filling", "full"))
            most = max(most, filling + full)
            ahead = max(ahead, watched.count("actor", "steps") - watched.count("trainer", "steps"))
            yield
        end = watched.look()
        private = [sum(each.private for each in looks.values()) for looks in (begin, end)]
        waits = watched.count("actor", "wait/parameters") / watched.count("actor", "alive")
        return {
            "updates": watched.count("trainer", "updates"),
            "blocks at most": most,
            "blocks there are": 2 * 4,
            "steps ahead at most": ahead,
            "actors wait": waits,
            "MB before": private[0],
            "MB after": private[1],
            "growth": private[1] / private[0] - 1,
            **costs(begin, end),
        }

    x = srl.Experiment(
        srl.envs.gym("CartPole-v1"),
        Slow(horizon=64, pause=2.0),
        actors=srl.Actors(count=4, envs=16, inference="remote"),
    )
    return [
        measured(f"slow trainer, {transport}", replace(x, transport=transport), script) for transport in ("shm", "tcp")
    ]


def slow_actor(given: argparse.Namespace) -> list[Row]:
    """Two actors whose steps take a second."""

    def script(watched: Watched) -> Script[Row]:
        yield from watched.until(lambda: watched.count("trainer", "updates") >= 1)
        before = watched.look()
        yield from watched.wait(given.seconds)
        return costs(before, watched.look())

    x = srl.Experiment(
        srl.envs.gym(Sleeper, seconds=1.0),
        srl.PPO(horizon=4, minibatch=8),
        actors=srl.Actors(count=2, envs=1, inference="remote"),
    )
    return [
        measured(f"slow actor, {transport}", replace(x, transport=transport), script) for transport in ("shm", "tcp")
    ]


def link(given: argparse.Namespace) -> list[Row]:
    """Sample streams between two hosts."""
    found = []
    for rate in (100, 1000, 0):
        for packing in ("never", "auto"):
            row = {"name": f"{rate or 'unlimited'} Mbit/s, compressed: {packing}", "Mbit/s": rate, "packing": packing}
            print(f"{row['name']} …", flush=True)
            row |= across(rate, packing, given.seconds)
            print("  " + ", ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)
            found.append(row)
    return found


def across(rate: float, packing: str, seconds: float) -> Row:
    """Blocks a second from one host to another."""
    with tempfile.TemporaryDirectory(prefix="srl-load-") as folder, hosts(2) as (near, far):
        Keys.make().save(Path(folder) / "keys")
        if rate:
            far.limit(rate)
        ends = []
        for which, host in (("consumer", near), ("producer", far)):
            order = Order(folder, host.address, seconds + 6, packing)
            command = [sys.executable, "-m", "srl.bench.load_link", which, msgspec.json.encode(order).decode()]
            ends.append(host.start(command, stdout=subprocess.PIPE, text=True))
        came, sent = ([json.loads(line) for line in end.communicate(timeout=60)[0].splitlines()] for end in ends)
        if any(end.returncode for end in ends):
            raise SystemExit("an end of the stream failed")
    counted = [row for row in came if row["blocks"]][2:]  # two seconds to find out what the link carries
    blocks, passed = (counted[-1][name] - counted[0][name] for name in ("blocks", "time"))
    size = sum(sizes(spec()))
    about = {"blocks/s": blocks / passed, "MB/s of samples": blocks / passed * size / 1e6, "wrong": came[-1]["wrong"]}
    return {**about, "block MB": size / 1e6, "link MB/s": sent[-1]["link"] / 1e6, "used": sent[-1]["used"]}


CASES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "actors": actors,
    "tcp": tcp,
    "ring": ring,
    "huge": huge,
    "crowd": crowd,
    "slow-trainer": slow_trainer,
    "slow-actor": slow_actor,
    "link": link,
}

if __name__ == "__main__":
    main()
