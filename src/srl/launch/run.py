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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from srl import config
from srl.core.errors import ConfigError, UnknownName
from srl.core.seeding import derive
from srl.core.specs import is_image
from srl.core.worker import State, Worker
from srl.envs.base import StepViews
from srl.experiment import Experiment, Plan, check, checkpoint_store, trainer_threads, wire
from srl.monitor.monitor import Monitor, Sink
from srl.monitor.sinks import JsonLines, TensorBoard, draw_curve, read_metrics

EVAL_EPISODES = 20
_ENOUGH = 20
"""Episodes that it takes to call a checkpoint the best so far."""
EVAL_STEPS = 100_000
"""An episode longer than this counts as it is: an environment may have no end at all."""


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
) -> Result:
    """Run ``x`` in the folder ``out`` (made up if None), for ``seconds`` at most.

    ``display`` makes a sink that shows progress, from a title and the number of steps.
    """
    plans = check(x)
    if x.launcher == "local":
        from srl.launch.local import LocalLauncher, check_portable

        check_portable(x.env, "the environment")
        check_portable(x.algorithms, "the algorithm")
    run_dir = Path(out) if out is not None else _new_folder(x)
    version, first = _starting_point(x, run_dir, plans, resume_from)
    if x.transport == "tcp" and x.port:
        _check_ports(x, len(plans))
    config.save(x, run_dir)
    before = read_metrics(run_dir)
    elapsed = before[-1]["time"] if before else 0.0
    with _signals() as signalled:
        deadline = time.monotonic() + seconds

        def ending() -> float | None:
            return signalled() or (deadline if time.monotonic() > deadline else None)

        sinks: list[Sink] = [JsonLines(run_dir), TensorBoard(run_dir)]
        if display is not None:
            sinks.append(display(f"{title(x)}  →  {run_dir}", x.steps))
        monitor = Monitor(sinks, elapsed=elapsed, steps=first)
        best = BestTag(run_dir, plans, monitor)
        begin = time.monotonic()
        shutil.rmtree(run_dir / "names", ignore_errors=True)  # of a run that was killed
        nodes = wire(x, plans, run_dir, resume_from)
        try:
            if x.launcher == "inline":
                from srl.launch.inline import run_inline

                def feed_worker(worker: Worker) -> None:
                    best.feed(worker.name, worker.kind, worker.metrics.report())

                run_inline(nodes, feed_worker, ending, version)
            else:
                LocalLauncher(nodes, best.feed, run_dir / "logs", x.restarts, version, monitor.say).run(ending)
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
    **changes: Any,
) -> Result:
    """Go on with the run in ``run_dir``, with ``changes`` to its experiment (such as ``steps``)."""
    run_dir = Path(run_dir)
    x = replace(config.load(run_dir), **changes)
    return run(x, run_dir, resume_from=tag, display=display)


def evaluate(
    run_dir: str | Path,
    *,
    tag: str = "latest",
    episodes: int = EVAL_EPISODES,
    policy: str = "default",
    seed: int = 0,
    sample: bool | None = None,
) -> Evaluation:
    """Play ``episodes`` episodes with the saved policy.

    With ``sample`` its actions are drawn at random as in training, without it they are its likeliest ones. The default
    is to sample where observations are images: emulators are deterministic, and the likeliest actions would play the
    same few episodes over and over.
    """
    if episodes < 1:
        raise ConfigError(f"episodes must be at least 1, got {episodes}")
    run_dir = Path(run_dir)
    x = config.load(run_dir)
    plans = {plan.policy: plan for plan in check(x)}
    if policy not in plans:
        raise UnknownName("policy", policy, plans)
    plan = plans[policy]
    store = checkpoint_store(run_dir, plan)
    state = store.load(tag)
    if sample is None:
        sample = any(is_image(leaf) for leaf in plan.spaces.observation_spec().values())
    returns, lengths = _play(x, plan, state, episodes, seed, sample)
    return Evaluation(
        return_mean=float(np.mean(returns)),
        return_std=float(np.std(returns)),
        return_min=float(np.min(returns)),
        return_max=float(np.max(returns)),
        length_mean=float(np.mean(lengths)),
        episodes=len(returns),
        version=state.values["version"],
        tag=tag,
        sampled=sample,
    )


def _play(
    x: Experiment, plan: Plan, state: State, episodes: int, seed: int, sample: bool
) -> tuple[list[float], list[int]]:
    """The first episode of each of ``episodes`` environment copies, so that short ones are not favoured."""
    import torch

    from srl.core.slab import Slab
    from srl.policies.host import PolicyHost

    copies = min(episodes, 20)
    torch.set_num_threads(trainer_threads(replace(x, launcher="inline"), [plan]))
    host = PolicyHost(plan.algorithm, plan.spaces, derive(seed, "evaluation"), explore=sample)
    host.load(state.under("learner").under("policy").arrays, state.values["version"])
    returns: list[float] = []
    lengths: list[int] = []
    env = x.env.make(copies)
    env.bind([plan.agents])
    slab = Slab(plan.algorithm.block(plan.spaces, copies * len(plan.agents)), 1, shared=False)
    block = {name: field[0, 0] for name, field in slab.arrays.items()}
    obs = {name: block[name] for name in slab.spec.observations}
    actions = [name for name in slab.spec.outputs if name.split("/")[0] == "action"]
    views = StepViews(obs, block["reward"], block["terminated"], block["truncated"], block["valid"])
    try:
        while len(returns) < episodes:
            env.reset(derive(seed, "evaluation", len(returns)), [obs])
            total, length = np.zeros(slab.spec.rows), np.zeros(slab.spec.rows, np.int64)
            running = np.ones(slab.spec.rows, bool)
            while running.any() and length.max() < EVAL_STEPS:
                outputs = host.act(obs)
                env.step([{name: outputs[name] for name in actions}], [views])
                total += views.reward * running
                length += running
                running &= ~(views.terminated | views.truncated)
            returns += total.tolist()
            lengths += length.tolist()
    finally:
        env.close()
    return returns[:episodes], lengths[:episodes]


class BestTag:
    """Passes reports on, and tags a checkpoint ``best`` if the return was never higher when it was saved."""

    def __init__(self, run_dir: Path, plans: list[Plan], monitor: Monitor) -> None:
        self.stores = {plan.policy: checkpoint_store(run_dir, plan) for plan in plans}
        self.monitor = monitor
        self._seen: dict[str, float] = {}
        earlier = [row["return_mean"] for row in read_metrics(run_dir) if "return_mean" in row]
        self._best = dict.fromkeys(self.stores, max(earlier)) if earlier else {}

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
    about = x.env.describe()
    names = "+".join(sorted({each.name for each in x.algorithms.values()}))
    return f"{names} on {about.get('gym', 'environment')}"


def _new_folder(x: Experiment) -> Path:
    name = str(x.env.describe().get("gym", "run")).split(":")[-1].split("/")[-1].rstrip("()").lower()
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _refuse_used(run_dir: Path) -> None:
    if (run_dir / config.CONFIG).exists():
        raise ConfigError(
            f"{run_dir} holds another run; go on with it by `srl resume {run_dir}` or choose another --out"
        )
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError(f"{run_dir} is not an empty folder; choose another --out")


def _starting_point(x: Experiment, run_dir: Path, plans: list[Plan], tag: str | None) -> tuple[int, int]:
    """Version and steps the run starts from, after checking that the folder is new or its checkpoints are whole."""
    if tag is None:
        _refuse_used(run_dir)
        return 0, 0
    found = [checkpoint_store(run_dir, plan).load(tag).values for plan in plans]
    steps = min(values["steps"] for values in found)
    if steps >= x.steps:
        raise ConfigError(f"{run_dir} is complete: it was trained on {steps:,} steps; give more --steps to go on")
    return max(values["version"] for values in found), steps


def _check_ports(x: Experiment, policies: int) -> None:
    import socket

    for port in range(x.port, x.port + policies * (2 + x.policies.count)):
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
        if since:
            raise KeyboardInterrupt
        since.append(time.monotonic())

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
