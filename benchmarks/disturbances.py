"""Ways to disturb a run, and what each of them costs; for ``faults.py``, where they are named.

A run is left alone for a while, disturbed again and again, and left alone once more. Where it is: ``local`` on this
machine; ``ray`` on a cluster of network namespaces, each a host with an address of its own; ``alike`` on this machine,
doing what RLlib is asked to do; ``rllib`` is RLlib.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

import srl
from srl.bench.cluster import KINDS, LABELS, Cluster, cluster
from srl.bench.faults import Life, Run, kill, local, prepared, processes_of
from srl.bench.hosts import Host, obstacle
from srl.bench.rivals import install
from srl.bench.throughput import BenchOptions
from srl.bench.throughput import experiment as work
from srl.recipes import recipe

CHECKPOINT = 5.0
"""Seconds between checkpoints."""
CUT, LONG = 20.0, 90.0


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
    """Steps that were made and never trained on, a fault, beyond those that a run loses anyway."""
    undoes: bool = False
    """Whether the trainer itself is hit."""
    undone: list[int] = field(default_factory=list)
    """Steps that were trained on but in no checkpoint when the trainer was killed."""
    undone_seconds: list[float] = field(default_factory=list)
    rate: float = 0.0
    """Undisturbed steps per second."""
    twice: int | None = None
    """Blocks that were trained on more than once."""
    backwards: int | None = None
    """Versions that were not greater than one before."""
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


def alike() -> srl.Experiment:
    """What RLlib is asked to do, by SRL: the same network, batches, passes and copies of the environment."""
    x = work("cartpole", BenchOptions())
    trainer = srl.Trainer(checkpoint_seconds=CHECKPOINT)
    return replace(x, actors=srl.Actors(count=2, envs=32), trainer=trainer, restarts=10**6, steps=10**12)


NAMES = {
    "local": ["actor-0", "actor-1", "policy-default-0", "trainer-default", "evaluator"],
    "ray": ["actor-0", "actor-1", "policy-default-0", "trainer-default"],
    "alike": ["actor-0", "actor-1", "trainer-default"],
    "rllib": ["actor-1", "actor-2", "learner", "algorithm"],
}
"""The workers of a run."""


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
        """A run at work."""
        with tempfile.TemporaryDirectory(prefix="srl-faults-", ignore_cleanup_errors=True) as folder:
            run_dir = Path(folder) / "run"
            if where == "ray":
                started = self._on_cluster(run_dir, **changes)
            else:
                started = local(self._command(where, run_dir, **changes), run_dir, Path(folder) / "tmp")
            with started as run:
                run.working(NAMES[where], 120)
                run.wait(lambda: saved(run), 60, "a checkpoint")
                yield run

    def _command(self, where: str, run_dir: Path, **changes: object) -> list[str]:
        if where == "rllib":
            folder = Path(__file__).parent / "rivals"
            return [str(install(folder, "rllib", print).absolute()), str(folder / "rllib_faults.py"), str(run_dir)]
        return prepared(replace(alike(), **changes) if where == "alike" else experiment(**changes), run_dir)

    @contextlib.contextmanager
    def _on_cluster(self, run_dir: Path, **changes: object) -> Iterator[Run]:
        ours = self.cluster()
        run = Run(prepared(experiment(f"ray://{ours.address}", **changes), run_dir), run_dir, ours.start)
        try:
            yield run
        finally:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()


def saved(run: Run) -> bool:
    """Whether a run has a checkpoint."""
    return any(run.run_dir.glob("checkpoints/*/v*")) or any(run.run_dir.glob("tune/*/checkpoint_*"))


def rest(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


@dataclass
class Peace:
    """What a run does when it is left alone, before it is disturbed and afterwards."""

    run: Run
    seconds: float
    rates: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Steps that are made and not trained on for every step that is: some are too old when their turn comes."""

    def keep(self) -> None:
        """Leave the run alone for a while."""
        begin, lost = time.monotonic(), self.run.lost()
        rest(begin + self.seconds)
        lost, steps = self.run.lost() - lost, self.run.trained().steps(begin, time.monotonic())
        self.rates.append(steps / self.seconds)
        self.shares.append(lost / max(1, steps))

    @property
    def rate(self) -> float:
        """Steps trained on per second."""
        return mean(self.rates)

    def lost(self, begin: float, lost: int) -> float:
        """Steps lost since ``begin``, when it was ``lost``, beyond those that a run loses anyway."""
        return self.run.lost() - lost - mean(self.shares) * self.run.trained().steps(begin, time.monotonic())


def repeated(bench: Bench, run: Run, row: Row, rounds: int, disturb: Callable[[int], tuple[float, float]]) -> Row:
    """Disturb a run again and again; ``disturb`` gets the round and says when it struck and how long that took."""
    peace = Peace(run, bench.quiet)
    peace.keep()
    begin, before, struck, lives = time.monotonic(), run.lost(), [], len(run.lives)
    for number in range(rounds):
        at, took = disturb(number)
        rest(at + row.window)
        struck.append(at)
        row.back.append(round(took, 2))
        print(f"  {row.fault}: back after {took:.2f} s", flush=True)
    peace.keep()
    trained = run.trained()
    row.times, row.rate, row.lost = rounds, round(peace.rate), round(peace.lost(begin, before) / rounds)
    row.kept = round(mean(trained.rate(at, at + row.window) for at in struck) / peace.rate, 3)
    row.pause = [round(trained.pause(at, at + row.window), 2) for at in struck]
    for at in struck if row.undoes else ():
        steps, seconds = trained.undone(at)
        row.undone.append(steps)
        row.undone_seconds.append(round(seconds, 2))
    row.restarts = len(run.lives) - lives
    return ended(run, row)


def ended(run: Run, row: Row) -> Row:
    """Let a run end, and look at what it leaves."""
    with contextlib.suppress(subprocess.TimeoutExpired):  # what does not end is left over
        run.stop()
    trained = run.trained()
    row.said = [text for _, text in run.said][:20]
    if row.fault.startswith("rllib"):  # does not say which samples it makes and trains on
        row.lost = None
    else:
        row.twice, row.backwards = trained.twice, trained.backwards
    return row


def killed(bench: Bench, where: str, kind: str, window: float = 10.0) -> Row:
    """A worker's process is killed."""
    with bench.run(where) as run:
        row = Row(f"{where}: {kind} killed", window=window, undoes=kind in ("trainer", "algorithm"))

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
        row = Row(f"ray: host of the {kind} killed", window=15.0, undoes=kind == "trainer")

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
        row = Row(f"{where}: an actor killed every 3 s", window=3.0 * kills)
        peace = Peace(run, bench.quiet)
        peace.keep()
        before, lives, start, hit = run.lost(), len(run.lives), time.monotonic(), []
        for number in range(kills):
            rest(start + 3 * number)
            found = [life for life in run.workers("actor") if Path(f"/proc/{life.pid}").exists()]
            if found:
                life = found[number % len(found)]
                hit.append((life, kill(life)))
        rest(start + row.window)
        row.back = [round(run.back(life, at), 2) for life, at in hit]
        peace.keep()
        trained = run.trained()
        row.times, row.rate, row.lost = len(hit), round(peace.rate), round(peace.lost(start, before) / len(hit))
        row.kept = round(trained.rate(start, start + row.window) / peace.rate, 3)
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
        row = Row(f"{where}: {kind} stopped for good (stall_seconds 5)", window=20.0, undoes=kind == "trainer")

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
            run.working(NAMES[where], 120)
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


def cut_for_long(bench: Bench, kind: str) -> Row:
    """The network of a host is cut until Ray has given the host up, and for a while longer."""
    ours, spare = bench.cluster(), len(LABELS) - 1
    with bench.run("ray") as run:
        ours.join(spare)
        row = Row(f"ray: network of the {kind}'s host cut for {LONG:.0f} s", window=LONG + 15, undoes=kind == "trainer")
        given_up = []

        def strike(number: int) -> tuple[float, float]:
            host, lives = victims(ours, run, kind)
            given_up.append(host)
            at = time.monotonic()
            host.cut()
            took = max(run.back(life, at, LONG) for life in lives)
            rest(at + LONG)
            host.heal()
            return at, took

        row = repeated(bench, run, row, 1, strike)
        row.leftovers = leftovers(bench, run, "ray")
        ours.leave(spare)
        for host in given_up:  # Ray does not take it back as it is
            host.kill()
            ours.join(ours.hosts.index(host))
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
    if where != "ray":
        pids = processes_of(run.run_dir)
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
