"""A run from beginning to end: check, wire, launch, watch, save, evaluate, draw.

The run directory holds ``config.json``, ``metrics.jsonl``, TensorBoard events, ``checkpoints/``, ``logs/`` and
``curve.png``; ``srl resume`` and ``srl eval`` need nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from srl import config
from srl.core.errors import ConfigError, UnknownName
from srl.core.worker import Worker
from srl.experiment import Experiment, evaluated, wire
from srl.launch import share_the_machine
from srl.launch.controller import SCALE
from srl.monitor.exporters import exporting
from srl.monitor.monitor import Monitor, Sink
from srl.monitor.sinks import JsonLines, TensorBoard, draw_curve, read_metrics
from srl.plan import Plan, check, checkpoint_store, opponent_store, planned, seats
from srl.tune import tuned
from srl.workers.evaluator import read_evaluations, sampled, summary
from srl.workers.player import Player, Scores, Seat, play

EVAL_EPISODES = 20
_ENOUGH = 20
"""Episodes that it takes to call a checkpoint the best so far."""
_AGAIN = 0.1
"""Seconds between two signals that are meant as two."""
_COPIES = 20
"""Environment copies an evaluation plays at the same time."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run_dir: Path
    steps: int
    """Agent steps trained on, in all."""
    trained: int
    """Agent steps trained on by this call."""
    seconds: float
    interrupted: bool
    return_mean: float | None
    """Mean return of the last 100 training episodes."""


@dataclass(frozen=True)
class Evaluation:
    """What a saved policy is worth."""

    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float
    episodes: int
    version: int
    policy: str
    tag: str
    sampled: bool
    """Whether actions were drawn at random as in training, or the likeliest ones."""

    def as_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


def run(
    x: Experiment,
    out: str | Path | None = None,
    *,
    resume_from: str | None = None,
    display: Callable[[str, int], Sink] | None = None,
    seconds: float = float("inf"),
    enough: Callable[[], bool] = lambda: False,
    sinks: Sequence[Sink] = (),
    every: float = 1.0,
) -> Result:
    """Run ``x`` in the folder ``out`` (made up if None), for ``seconds`` at most and until ``enough`` says so.

    ``display`` makes a sink that shows progress, from a title and the number of steps; ``sinks`` get every row too.
    There is a row of metrics ``every`` so many seconds.
    """
    policies = seats(x)
    plans = planned(x, policies)
    if x.launcher != "inline":
        from srl.launch.local import LocalLauncher, check_portable, preload

        share_the_machine()
        check_portable(x.env, "the environment")
        check_portable(x.algorithms, "the algorithm")
    run_dir = Path(out) if out is not None else new_folder(x)
    version, first = _starting_point(x, run_dir, plans, resume_from)
    if x.transport == "tcp" and x.port:
        _check_ports(x, plans)
    before = read_metrics(run_dir)
    elapsed = before[-1]["time"] if before else 0.0
    with contextlib.ExitStack() as cleanup:
        hosts = None
        if x.launcher.startswith("ray"):
            from srl.launch.ray import RayLauncher, joined

            run_dir = run_dir.absolute()
            hosts = cleanup.enter_context(joined(x.launcher, run_dir))  # before signals are ours: Ray wants them too
        signalled = cleanup.enter_context(_signals())
        x, chosen = tuned(x, plans, hosts.cores() if hosts is not None else 0)
        plans = planned(x, policies)
        cleanup.enter_context(exporting(sinks, run_dir, config.to_json(x)))
        config.save(x, run_dir)
        deadline: float = time.monotonic() + seconds

        def ending() -> float | None:
            nonlocal deadline
            if enough():
                deadline = min(deadline, time.monotonic())
            return signalled() or (deadline if time.monotonic() >= deadline else None)

        writers: list[Sink] = [JsonLines(run_dir), TensorBoard(run_dir), *sinks]
        if display is not None:
            writers.append(display(f"{title(x)}  →  {run_dir}", x.steps))
        monitor = Monitor(writers, every=every, elapsed=elapsed, steps=first, opponents=tuple(x.opponents))
        if chosen:
            monitor.say(chosen)
        feed = monitor.feed if evaluated(x) else BestTag(run_dir, plans, monitor).feed
        begin = time.monotonic()
        shutil.rmtree(run_dir / "names", ignore_errors=True)  # of a run that was killed
        (run_dir / SCALE).unlink(missing_ok=True)
        several = hosts is not None and not hosts.alone  # on one machine workers share memory, whoever starts them
        nodes = wire(x, plans, run_dir, resume_from, hosts.names if several and hosts is not None else None)
        try:
            if x.launcher == "inline":
                from srl.launch.inline import run_inline

                def feed_worker(worker: Worker) -> None:
                    feed(worker.name, worker.kind, worker.metrics.report())

                run_inline(nodes, feed_worker, ending, version)
            else:
                watched: dict[str, Any] = {"stall_seconds": x.stall_seconds, "memory_mb": x.actors.memory_mb}
                watched["preload"] = preload(x)
                given = nodes, feed, run_dir / "logs", x.restarts, version, monitor.say
                if hosts is None:
                    LocalLauncher(*given, **watched).run(ending)
                else:
                    RayLauncher(*given, hosts=hosts, experiment=x, **watched).run(ending)
        finally:
            monitor.tick(force=True)
            monitor.close()
            shutil.rmtree(run_dir / "names", ignore_errors=True)
    draw_curve(run_dir, title(x))
    values = monitor.row.values
    interrupted = signalled() is not None
    steps = int(values["steps"])
    return Result(run_dir, steps, steps - first, time.monotonic() - begin, interrupted, values.get("return_mean"))


def resume(
    run_dir: str | Path,
    *,
    tag: str = "latest",
    display: Callable[[str, int], Sink] | None = None,
    sinks: Sequence[Sink] = (),
    **changes: Any,
) -> Result:
    """Go on with the run in ``run_dir``, with ``changes`` to its experiment (such as ``steps``)."""
    run_dir = Path(run_dir)
    x = replace(config.load(run_dir), **changes)
    return run(x, run_dir, resume_from=tag, display=display, sinks=sinks)


def evaluate(
    run_dir: str | Path,
    *,
    tag: str = "latest",
    episodes: int = EVAL_EPISODES,
    policy: str = "",
    versus: str = "",
    seed: int = 0,
    sample: bool | None = None,
) -> Evaluation:
    """Play ``episodes`` episodes with the saved policy.

    With ``sample`` its actions are drawn at random as in training, without it they are its likeliest ones; the default
    is to sample where observations are images. The other policies of the run play along with the version ``versus``
    (default: the same tag; opponents play their latest).
    """
    if episodes < 1:
        raise ConfigError(f"episodes must be at least 1, got {episodes}")
    run_dir = Path(run_dir)
    x = config.load(run_dir)
    plans = check(x)
    by_name = {plan.policy: plan for plan in plans if plan.agents and not plan.opponent}
    policy = policy or next(iter(by_name))
    if policy not in by_name:
        raise UnknownName("policy", policy, by_name)
    seats = saved_seats(plans, run_dir, tag, versus, sample, policy)
    copies = min(episodes, _COPIES)
    player = Player(x.env, seats, copies, seed)
    orders = [found["order"] for found in read_evaluations(run_dir) if found.get("order")]
    if orders:  # as hard as a curriculum has made it
        player.env.configure(orders[-1])
    try:
        scores = play(player, episodes, copies, seed)[policy]
    finally:
        player.close()
    mine = next(seat for seat in seats if seat.policy == policy)
    kept = episodes * len(mine.agents)
    found = summary(policy, mine.version, Scores(scores.returns[:kept], scores.lengths[:kept]))
    return Evaluation(tag=tag, sampled=mine.sample, **found)


def saved_seats(
    plans: Sequence[Plan], run_dir: Path, tag: str, versus: str, sample: bool | None, policy: str = ""
) -> list[Seat]:
    """Every policy of a run that acts, with its weights under ``tag``.

    The others than ``policy`` (or, without one, opponents) have those under ``versus``, if it is given.
    """
    seats = []
    for plan in plans:
        if plan.agents:
            store = opponent_store(plan, plans, run_dir) if plan.opponent else checkpoint_store(run_dir, plan)
            plays_along = plan.policy != policy if policy else plan.opponent is not None
            other = versus or ("latest" if plan.opponent else tag)
            state = store.load(other if plays_along else tag)
            weights, version = state.under("learner").under("policy").arrays, state.values["version"]
            drawn = sampled(plan.spaces, sample)
            seats.append(Seat(plan.policy, plan.agents, plan.spaces, plan.algorithm, weights, version, drawn))
    return seats


class BestTag:
    """Passes reports on, and tags a checkpoint ``best`` if the return was never higher when it was saved."""

    def __init__(self, run_dir: Path, plans: list[Plan], monitor: Monitor) -> None:
        self.stores = {plan.policy: checkpoint_store(run_dir, plan) for plan in plans if not plan.opponent}
        self.monitor = monitor
        self._seen: dict[str, float] = {}
        self._best: dict[str, float] = {}
        for row in read_metrics(run_dir):
            for policy in self.stores:
                found = row.get(f"return_mean/{policy}", row.get("return_mean"))
                if found is not None:
                    self._best[policy] = max(found, self._best.get(policy, float("-inf")))

    def feed(self, name: str, kind: str, report: dict[str, Any]) -> None:
        """Take one report."""
        self.monitor.feed(name, kind, report)
        saved = report["gauges"].get("saved")
        policy = name.removeprefix("trainer-")
        found = self.monitor.returns.get(policy)
        if kind != "trainer" or saved is None or saved == self._seen.get(policy) or not found:
            return
        self._seen[policy] = saved
        value = sum(found) / len(found) if len(found) >= _ENOUGH else float("-inf")  # a few lucky episodes say little
        if value > self._best.get(policy, float("-inf")) or policy not in self._best:
            self._best[policy] = value
            self.stores[policy].tag("best", int(saved))


def title(x: Experiment) -> str:
    """The experiment in a few words."""
    names = "+".join(sorted({each.name for each in x.algorithms.values()}))
    return f"{names} on {x.env.name}"


def new_folder(x: Experiment) -> Path:
    """A folder for a run of which nobody has said where to keep it."""
    name = x.env.name.split(":")[-1].split("/")[-1].rstrip("()").lower()
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def refuse_used(run_dir: Path) -> None:
    """Refuse a folder for a new run in which there is something already."""
    if (run_dir / config.CONFIG).exists():
        raise ConfigError(
            f"{run_dir} holds another run; go on with it by `srl resume {run_dir}` or choose another --out"
        )
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError(f"{run_dir} is not an empty folder; choose another --out")


def _starting_point(x: Experiment, run_dir: Path, plans: list[Plan], tag: str | None) -> tuple[int, int]:
    """Version and steps the run starts from, after checking that the folder is new or its checkpoints are whole."""
    if tag is None:
        refuse_used(run_dir)
        return 0, 0
    stores = [checkpoint_store(run_dir, plan) for plan in plans if not plan.opponent]
    found = [store.load(tag, lambda _: None).values for store in stores]  # its trainer gives the warning
    steps = min(values["steps"] for values in found)
    if steps >= x.steps:
        raise ConfigError(f"{run_dir} is complete: it was trained on {steps:,} steps; give more --steps to go on")
    return max(values["version"] for values in found), steps


def _check_ports(x: Experiment, plans: Sequence[Plan]) -> None:
    import socket

    servers = 1 + x.trainer.count + (x.policies.count if x.actors.inference == "remote" else 0)
    trained = [plan for plan in plans if not plan.opponent]
    count = sum(servers + (2 * x.trainer.count if plan.algorithm.replay() else 0) for plan in trained)
    for port in range(x.port, x.port + count):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"TCP port {port} cannot be used ({error}); choose another port or 0 for any"
                ) from error


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], float | None]]:
    """Catch Ctrl-C and SIGTERM: the first asks the run to save and end, the second ends it at once."""
    since: list[float] = []

    def on_signal(number: int, _: Any) -> None:
        if not since:
            since.append(time.monotonic())
        elif time.monotonic() - since[0] > _AGAIN:  # some tools signal a process and its group in one go
            raise KeyboardInterrupt

    def ending() -> float | None:
        return since[0] if since else None

    if threading.current_thread() is not threading.main_thread():
        yield ending
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
