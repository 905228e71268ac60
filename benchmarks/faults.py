"""Faults: workers and hosts are killed, stopped and cut off while a run trains, and what that costs is written down.

python benchmarks/faults.py [FAULT …] [--quick] [--again] [--json benchmarks/results/faults.json] [--table]

Every fault is a run of its own (PPO on CartPole, two actors with remote inference, a policy worker, a trainer and, on
one machine, an evaluator) that is left alone for a while, then disturbed again and again. What is known already is not
measured again. Faults that start with ``ray`` need root: a Ray cluster is made of network namespaces, each a host with
an address of its own. --table prints what is known as Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean

import srl
from srl.bench.cluster import KINDS, LABELS, Cluster, cluster
from srl.bench.faults import Life, Run, kill, local, processes_of, quantiles
from srl.bench.hosts import Host, obstacle
from srl.bench.machine import machine
from srl.recipes import recipe

RESULTS = Path(__file__).parent / "results" / "faults.json"
CHECKPOINT = 5.0
"""Seconds between checkpoints."""
CUT = 20.0


@dataclass
class Row:
    """What one fault did."""

    fault: str
    times: int = 0
    """How often it happened."""
    back: list[float] = field(default_factory=list)
    """Seconds until those it hit were back, or went on."""
    kept: float | None = None
    """Share of the undisturbed throughput that was left, in ``window`` seconds from each fault on."""
    window: float = 0.0
    pause: list[float] = field(default_factory=list)
    """The longest time without an update, after each fault."""
    lost: float | None = None
    """Steps that were made and never trained on, a fault."""
    undone: list[int] = field(default_factory=list)
    """Steps that were trained on but in no checkpoint when the trainer was killed."""
    undone_seconds: list[float] = field(default_factory=list)
    rate: float = 0.0
    """Undisturbed steps per second."""
    twice: int = 0
    backwards: int = 0
    restarts: int = 0
    """Workers started anew, in all."""
    leftovers: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def experiment(launcher: str = "local", **changes: object) -> srl.Experiment:
    on = {kind: "" if launcher == "local" else f"{kind}=yes" for kind in KINDS}
    return replace(
        recipe("cartpole"),
        actors=srl.Actors(count=2, envs=16, ring=2, inference="remote", on=on["actor"]),
        policies=srl.Policies(on=on["policy"]),
        trainer=srl.Trainer(checkpoint_seconds=CHECKPOINT, on=on["trainer"]),
        evaluator=srl.Evaluator(count=int(launcher == "local"), seconds=CHECKPOINT),
        launcher=launcher,
        restarts=10**6,
        steps=10**12,
        **changes,
    )


class Bench:
    """One invocation."""

    def __init__(self, quick: bool) -> None:
        self.rounds, self.quiet = (2, 4.0) if quick else (10, 10.0)
        self.quick = quick
        self.stack = contextlib.ExitStack()
        self._cluster: Cluster | None = None

    def cluster(self) -> Cluster:
        """The cluster, made when it is first needed."""
        if self._cluster is None:
            if obstacle():
                raise SystemExit(obstacle())
            self._cluster = self.stack.enter_context(cluster(LABELS, cpus=2, spares=1))
        return self._cluster

    @contextlib.contextmanager
    def run(self, where: str, **changes: object) -> Iterator[Run]:
        """A run at work on this machine (``local``) or on the cluster (``ray``)."""
        with tempfile.TemporaryDirectory(prefix="srl-faults-") as folder:
            run_dir = Path(folder) / "run"
            if where == "local":
                with local(experiment(**changes), run_dir, Path(folder) / "tmp") as run:
                    yield self._at_work(run)
            else:
                ours = self.cluster()
                run = Run(experiment(f"ray://{ours.address}", **changes), run_dir, ours.start)
                try:
                    yield self._at_work(run)
                finally:
                    if run.process.poll() is None:
                        run.process.kill()
                        run.process.wait()

    def _at_work(self, run: Run) -> Run:
        names = ["actor-0", "actor-1", "policy-default-0", "trainer-default"]
        run.working([*names, *(["evaluator"] if run.x.evaluator.count else [])], 120)
        run.wait(lambda: any((run.run_dir / "checkpoints").glob("*/v*")), 60, "a checkpoint")
        return run


def rest(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


def quiet(run: Run, seconds: float) -> tuple[float, float]:
    """Leave the run alone for a while; when that was."""
    begin = time.monotonic()
    rest(begin + seconds)
    return begin, time.monotonic()


def undisturbed(run: Run, before: tuple[float, float], seconds: float) -> float:
    """Steps per second of the run when it is left alone, before it was disturbed and now."""
    after = quiet(run, seconds)
    trained = run.trained()
    return mean([trained.rate(*before), trained.rate(*after)])


def repeated(bench: Bench, run: Run, row: Row, rounds: int, disturb: Callable[[int], tuple[float, float]]) -> Row:
    """Disturb a run again and again; ``disturb`` gets the round and says when it struck and how long that took."""
    alone = quiet(run, bench.quiet)
    before, struck, lives = run.lost(), [], len(run.lives)
    for number in range(rounds):
        at, took = disturb(number)
        rest(at + row.window)
        struck.append(at)
        row.back.append(round(took, 2))
        print(f"  {row.fault}: back after {took:.2f} s", flush=True)
    row.lost = round((run.lost() - before) / rounds)
    rate = undisturbed(run, alone, bench.quiet)
    trained = run.trained()
    row.times, row.rate = rounds, round(rate)
    row.kept = round(mean(trained.rate(at, at + row.window) for at in struck) / rate, 3)
    row.pause = [round(trained.pause(at, at + row.window), 2) for at in struck]
    for at in struck if "trainer killed" in row.fault else ():
        steps, seconds = trained.undone(at)
        row.undone.append(steps)
        row.undone_seconds.append(round(seconds, 2))
    row.restarts = len(run.lives) - lives
    return ended(run, row)


def ended(run: Run, row: Row) -> Row:
    """Let a run end, and look at what it leaves."""
    run.stop()
    trained = run.trained()
    row.twice, row.backwards, row.said = trained.twice, trained.backwards, [text for _, text in run.said][:20]
    return row


def killed(bench: Bench, where: str, kind: str) -> Row:
    """A worker's process is killed."""
    with bench.run(where) as run:
        row = Row(f"{where}: {kind} killed", window=10.0)

        def strike(number: int) -> tuple[float, float]:
            found = run.workers(kind)
            life = found[number % len(found)]
            at = kill(life)
            return at, run.back(life, at)

        row = repeated(bench, run, row, bench.rounds, strike)
        row.leftovers = leftovers(bench, run, where)
        return row


def host_killed(bench: Bench, kind: str) -> Row:
    """All processes of a host are killed at once; afterwards it joins again, as the new spare."""
    ours, spare = bench.cluster(), len(LABELS) - 1
    with bench.run("ray") as run:
        ours.join(spare)  # now, so that nobody is on it yet
        row = Row(f"ray: host of the {kind} killed", window=15.0)

        def strike(number: int) -> tuple[float, float]:
            host, lives = victims(ours, run, kind)
            at = time.monotonic()
            host.kill()
            took = max(run.back(life, at) for life in lives)
            ours.join(ours.hosts.index(host))
            return at, took

        row = repeated(bench, run, row, 2 if bench.quick else 6, strike)
        row.leftovers = leftovers(bench, run, "ray")
        ours.leave(spare)
        return row


def victims(ours: Cluster, run: Run, kind: str) -> tuple[Host, list[Life]]:
    """The host that has the first worker of a kind, and all workers on it."""
    first = run.workers(kind)[0]
    host = next(host for host in ours.hosts[1:] if host.has(first.pid))
    return host, [life for life in run.workers() if host.has(life.pid)]


def every_three_seconds(bench: Bench, where: str) -> Row:
    """One actor is killed every three seconds for a minute."""
    kills = 5 if bench.quick else 20
    with bench.run(where) as run:
        row = Row(f"{where}: an actor killed every 3 s", times=kills, window=3.0 * kills)
        alone = quiet(run, bench.quiet)
        before, lives, start, hit = run.lost(), len(run.lives), time.monotonic(), []
        for number in range(kills):
            rest(start + 3 * number)
            found = run.workers("actor")
            life = found[number % len(found)]
            hit.append((life, kill(life)))
        rest(start + row.window)
        row.lost, row.back = round((run.lost() - before) / kills), [round(run.back(life, at), 2) for life, at in hit]
        row.rate = round(undisturbed(run, alone, bench.quiet))
        trained = run.trained()
        row.kept = round(trained.rate(start, start + row.window) / row.rate, 3)
        row.pause = [round(trained.pause(start, start + row.window), 2)]
        row.restarts = len(run.lives) - lives
        row = ended(run, row)
        row.leftovers = leftovers(bench, run, where)
        return row


def stopped(bench: Bench, where: str, kind: str) -> Row:
    """A worker's process is stopped (SIGSTOP) for five seconds."""
    with bench.run(where) as run:
        row = Row(f"{where}: {kind} stopped for 5 s", window=15.0)

        def strike(number: int) -> tuple[float, float]:
            life = run.workers(kind)[0]
            at = kill(life, signal.SIGSTOP)
            rest(at + 5)
            again = kill(life, signal.SIGCONT)
            return at, run.goes_on(life.name, again)

        row = repeated(bench, run, row, 2 if bench.quick else 5, strike)
        row.leftovers = leftovers(bench, run, where)
        return row


def frozen(bench: Bench, where: str, kind: str) -> Row:
    """A worker's process is stopped for good; the run finds that out after ``stall_seconds``, here five."""
    with bench.run(where, stall_seconds=5.0) as run:
        row = Row(f"{where}: {kind} stopped for good (stall_seconds 5)", window=20.0)

        def strike(number: int) -> tuple[float, float]:
            life = run.workers(kind)[0]
            at = kill(life, signal.SIGSTOP)
            return at, run.back(life, at)

        row = repeated(bench, run, row, 1 if bench.quick else 5, strike)
        row.leftovers = leftovers(bench, run, where)
        return row


def controller_killed(bench: Bench, where: str) -> Row:
    """The controller is killed, and the run resumed."""
    rounds = 1 if bench.quick else 5
    with bench.run(where) as run:
        row = Row(f"{where}: controller killed, then resumed", times=rounds)
        for _ in range(rounds):
            run.process.kill()
            at = time.monotonic()
            run.process.wait()
            row.leftovers += leftovers(bench, run, where)
            begin = time.monotonic()
            run.resume()
            run.wait(lambda: run.trained().batches[-1][0] > begin, 120, "training after a resume")  # noqa: B023
            first = next(t for t, _ in run.trained().batches if t > begin)
            steps, seconds = run.trained().undone(at)
            row.undone.append(steps)
            row.undone_seconds.append(round(seconds, 2))
            row.back.append(round(first - begin, 2))
            print(f"  {row.fault}: first step after {first - begin:.2f} s", flush=True)
            bench._at_work(run)
            rest(time.monotonic() + bench.quiet / 3)
        return ended(run, row)


def cut(bench: Bench, kind: str) -> Row:
    """The network of a host is cut for twenty seconds."""
    ours = bench.cluster()
    with bench.run("ray") as run:
        row = Row(f"ray: network of the {kind}'s host cut for {CUT:.0f} s", window=CUT + 15)

        def strike(number: int) -> tuple[float, float]:
            host, lives = victims(ours, run, kind)
            at = time.monotonic()
            host.cut()
            rest(at + CUT)
            host.heal()
            healed = time.monotonic()
            return at, max(run.goes_on(life.name, healed) for life in lives)

        row = repeated(bench, run, row, 1 if bench.quick else 3, strike)
        row.leftovers = leftovers(bench, run, "ray")
        return row


def bad_network(bench: Bench) -> Row:
    """Every packet between two hosts takes 50 ms longer, and one in a hundred is lost."""
    ours, seconds = bench.cluster(), 15 if bench.quick else 60
    with bench.run("ray") as run:
        row = Row("ray: 50 ms delay and 1 % loss between all hosts", window=float(seconds))
        try:

            def strike(number: int) -> tuple[float, float]:
                at = time.monotonic()
                for host in ours.hosts:
                    host.slow(25, 0.5)  # a packet passes two cards
                rest(at + seconds)
                return at, run.goes_on("trainer-default", at + seconds)

            row = repeated(bench, run, row, 1, strike)
        finally:
            for host in ours.hosts:
                host.slow()
        row.leftovers = leftovers(bench, run, "ray")
        return row


def leftovers(bench: Bench, run: Run, where: str) -> list[str]:
    """Processes and files of a run that has ended, if they are still there after a few seconds."""
    deadline = time.monotonic() + 8
    while (found := left(bench, run, where)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def left(bench: Bench, run: Run, where: str) -> list[str]:
    files = [path for name in ("names", "keys.json") for path in run.run_dir.glob(name)]
    files += [*Path("/dev/shm").glob("*srl*"), *Path("/dev/shm").glob("psm_*")]
    if where == "local":
        pids = processes_of(run.process.pid)
        temporary = run.run_dir.parent / "tmp"
        files += [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    else:
        ours = bench.cluster()
        pids = [pid for host in ours.hosts for pid in host.pids() if _is_ours(pid)]
        files += [path for index in range(len(ours.hosts)) for path in ours.temporary(index).glob("pymp-*")]
    return [*(f"process {pid} {_command(pid)}" for pid in pids), *map(str, files)]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""


def _is_ours(pid: int) -> bool:
    return "forkserver" in _command(pid) or "Site" in _command(pid) or "srl.bench" in _command(pid)


FAULTS: dict[str, Callable[[Bench], Row]] = {
    **{f"{w}-{k}": lambda b, w=w, k=k: killed(b, w, k) for w in ("local", "ray") for k in KINDS},
    "local-evaluator": lambda b: killed(b, "local", "evaluator"),
    **{f"{w}-every-3s": lambda b, w=w: every_three_seconds(b, w) for w in ("local", "ray")},
    **{f"local-stop-{k}": lambda b, k=k: stopped(b, "local", k) for k in KINDS},
    **{f"{w}-freeze-{k}": lambda b, w=w, k=k: frozen(b, w, k) for w in ("local", "ray") for k in KINDS},
    **{f"{w}-controller": lambda b, w=w: controller_killed(b, w) for w in ("local", "ray")},
    **{f"ray-host-{k}": lambda b, k=k: host_killed(b, k) for k in KINDS},
    **{f"ray-cut-{k}": lambda b, k=k: cut(b, k) for k in KINDS},
    "ray-bad-network": bad_network,
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
        cells += [undone, str(row.twice), str(row.backwards), str(len(row.leftovers))]
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
