"""Faults: workers and hosts are killed, stopped and cut off while a run trains, and what that costs is written down.

python benchmarks/faults.py [FAULT …] [--quick] [--again] [--json benchmarks/results/faults.json] [--table]

Every fault is a run of its own: PPO on CartPole, two actors with remote inference, a policy worker, a trainer and, on
one machine, an evaluator (``local-…``, ``ray-…``); or two actors that have the policy themselves, and the batches and
passes that RLlib is given too (``alike-…``, ``rllib-…``). What is known already is not measured again. Faults that
start with ``ray`` need root. --table prints what is known as Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from disturbances import (
    Bench,
    Row,
    bad_network,
    controller_killed,
    cut,
    cut_for_long,
    every_three_seconds,
    frozen,
    host_killed,
    killed,
    stopped,
)

from srl.bench.cluster import KINDS
from srl.bench.faults import quantiles
from srl.bench.machine import machine

RESULTS = Path(__file__).parent / "results" / "faults.json"

FAULTS: dict[str, Callable[[Bench], Row]] = {
    **{f"{w}-{k}": lambda b, w=w, k=k: killed(b, w, k) for w in ("local", "ray") for k in KINDS},
    "local-evaluator": lambda b: killed(b, "local", "evaluator"),
    **{f"{w}-every-3s": lambda b, w=w: every_three_seconds(b, w) for w in ("local", "ray")},
    **{f"local-stop-{k}": lambda b, k=k: stopped(b, "local", k) for k in KINDS},
    **{f"{w}-freeze-{k}": lambda b, w=w, k=k: frozen(b, w, k) for w in ("local", "ray") for k in KINDS},
    **{f"{w}-controller": lambda b, w=w: controller_killed(b, w) for w in ("local", "ray")},
    **{f"ray-host-{k}": lambda b, k=k: host_killed(b, k) for k in KINDS},
    **{f"ray-cut-{k}": lambda b, k=k: cut(b, k) for k in KINDS},
    "ray-cut-long": lambda b: cut_for_long(b, "trainer"),
    "ray-bad-network": bad_network,
    **{f"{w}-every-3s": lambda b, w=w: every_three_seconds(b, w) for w in ("alike", "rllib")},
    **{f"{w}-trainer": lambda b, w=w: killed(b, w, "trainer", 20.0) for w in ("alike", "rllib")},
    "rllib-algorithm": lambda b: killed(b, "rllib", "algorithm", 20.0),
    **{f"{w}-controller": lambda b, w=w: controller_killed(b, w) for w in ("alike", "rllib")},
}


def table(rows: dict[str, Row]) -> str:
    """What is known, as Markdown."""
    head = ["fault", "times", "back p50 / p95", "throughput kept", "longest pause", "steps lost", "steps undone"]
    head += ["trained twice", "versions backwards", "left over"]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for row in rows.values():
        half, most = quantiles(row.back)
        cells = [row.fault, str(row.times), f"{half:.1f} / {most:.1f} s"]
        cells.append("" if row.kept is None else f"{100 * row.kept:.0f} % of {row.rate:,.0f}/s in {row.window:.0f} s")
        cells.append(f"{max(row.pause):.1f} s" if row.pause else "")
        cells.append("" if row.lost is None else f"{row.lost:,}")
        undone = f"{max(row.undone):,} ({max(row.undone_seconds):.1f} s)" if row.undone else ""
        cells += [undone, *("" if each is None else str(each) for each in (row.twice, row.backwards))]
        cells.append(str(len(row.leftovers)))
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--quick", action="store_true", help="a few times each; nothing is kept")
    parser.add_argument("--again", action="store_true", help="measure what is known already")
    parser.add_argument("--table", action="store_true", help="print what is known")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    unknown = [name for name in given.faults if name not in FAULTS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    whole = json.loads(given.json.read_text()) if given.json.is_file() else {"rows": {}}
    rows = {} if given.quick else {name: Row(**row) for name, row in whole["rows"].items()}
    bench = Bench(given.quick)
    with bench.stack:
        for name in () if given.table else given.faults or FAULTS:
            if name in rows and not given.again:
                continue
            print(name, flush=True)
            rows[name] = FAULTS[name](bench)
            print(json.dumps(asdict(rows[name])), flush=True)
            if not given.quick:
                ordered = {each: asdict(rows[each]) for each in FAULTS if each in rows}
                given.json.write_text(json.dumps({"machine": machine(), "rows": ordered}, indent=1) + "\n")
    print(table({name: rows[name] for name in FAULTS if name in rows}))


if __name__ == "__main__":
    sys.exit(main())
