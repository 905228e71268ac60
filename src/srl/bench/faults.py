"""Recorded runs (:mod:`srl.bench.recorded`) watched from outside while they are disturbed, and what that cost them.

A worker is *back* when, in a later life than the one that was disturbed, it has got something done that it had not done
at its start: an actor has stepped its environments, a policy worker has answered, a trainer has trained on a batch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from srl import config
from srl.bench.recorded import COMMAND, REPORTS, SAMPLED, TRAINED
from srl.experiment import Experiment

_MARK = "SRL_RECORDED"
"""Variable in the environment of all processes of a local run, by which they are found again."""
Start = Callable[..., subprocess.Popen[Any]]
"""Starts a command, with options of :class:`subprocess.Popen`."""


@dataclass
class Life:
    """One life of one worker, as its controller has seen it."""

    name: str
    kind: str
    number: int
    pid: int
    first: float
    """What it had done when it was first heard of."""
    done: float
    last: float
    """When it was last heard of."""
    back: float | None = None
    """When it was first seen to have done more than at first."""


class Published(NamedTuple):
    """A version, when it was published."""

    t: float
    run: int
    """Process of the controller."""
    life: int
    """Of the trainer."""
    version: int
    trained: int
    """Steps trained on in all."""


@dataclass
class Trained:
    """What the trainers of a run have written down."""

    batches: list[tuple[float, int]] = field(default_factory=list)
    """(time, steps)"""
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """(producer, incarnation, sequence)"""
    versions: list[Published] = field(default_factory=list)

    @property
    def twice(self) -> int:
        """Blocks that were trained on more than once."""
        return len(self.blocks) - len(set(self.blocks))

    @property
    def backwards(self) -> int:
        """Versions that were not greater than one published before; a run that is resumed may do some again."""
        count, highest = 0, (-1, -1)
        for each in self.versions:
            count += each.run == highest[0] and each.version <= highest[1]
            highest = each.run, max(each.version, highest[1] if each.run == highest[0] else -1)
        return count

    def steps(self, begin: float, end: float) -> int:
        """Steps trained on between two times."""
        return sum(steps for t, steps in self.batches if begin <= t < end)

    def rate(self, begin: float, end: float) -> float:
        """Steps trained on per second between two times."""
        return self.steps(begin, end) / (end - begin)

    def pause(self, begin: float, end: float) -> float:
        """The longest time between two batches."""
        times = [begin, *(t for t, _ in self.batches if begin <= t < end), end]
        return max(after - before for before, after in itertools.pairwise(times))

    def undone(self, kill: float) -> tuple[int, float]:
        """Steps, and seconds of training, that the trainer killed then had to do again: what no checkpoint had."""
        before = [each for each in self.versions if each.t <= kill]
        who = before[-1].run, before[-1].life
        after = next((each for each in self.versions if each.t > kill and (each.run, each.life) != who), None)
        if after is None:
            return 0, 0.0
        saved = max((each.t for each in before if each.trained <= after.trained), default=before[0].t)
        return max(0, before[-1].trained - after.trained), kill - saved


def prepared(x: Experiment, run_dir: Path) -> list[str]:
    """The command that runs ``x`` in a folder, and writes down what happens."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config.save(x, run_dir)
    return [*COMMAND, str(run_dir)]


class Run:
    """A recorded run in a process of its own."""

    def __init__(self, command: Sequence[str], run_dir: Path, start: Start, **options: Any) -> None:
        """``start`` gets the command and the ``options``; ``resume`` added to the command goes on with the run."""
        self.command, self.run_dir, self._start, self._options = command, run_dir, start, options
        self.lives: list[Life] = []
        self.said: list[tuple[float, str]] = []
        self._offset = 0
        self.process = self._launch()

    def _launch(self, *more: str) -> subprocess.Popen[Any]:
        with open(self.run_dir / "output.txt", "ab") as output:
            given = {"stdout": output, "stderr": output, **self._options}
            return self._start([*self.command, *more], **given)

    def resume(self) -> None:
        """Go on from the newest checkpoint, after the controller has ended."""
        for life in self.lives:
            life.number -= 10**6  # of the past, all of them
        self.process = self._launch("resume")

    def look(self) -> None:
        """Take in what was written since the last look."""
        path = self.run_dir / REPORTS
        if not path.exists():
            return
        with open(path, "rb") as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        if "said" in event:
            self.said.append((event["t"], event["said"]))
            return
        life = self.life(event["name"], look=False)
        if life is None or life.number != event["life"]:
            life = Life(event["name"], event["kind"], event["life"], event["pid"], event["done"], event["done"], 0.0)
            self.lives.append(life)
        life.pid, life.done, life.last = event["pid"], event["done"], event["t"]
        if life.back is None and life.done > life.first:
            life.back = life.last

    def life(self, name: str, look: bool = True) -> Life | None:
        """The newest life of a worker."""
        if look:
            self.look()
        return next((life for life in reversed(self.lives) if life.name == name), None)

    def workers(self, kind: str = "") -> list[Life]:
        """The newest lives of all workers (of one kind)."""
        self.look()
        newest = {life.name: life for life in self.lives}
        return [life for life in newest.values() if kind in ("", life.kind)]

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """Look until ``condition()`` is true; its value."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            found = condition()
            if found:
                return found
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended: {self.tail()}")
            time.sleep(0.02)
        raise TimeoutError(f"{what}: not within {seconds:.0f} s; {self.tail()}")

    def tail(self) -> str:
        """The last words of a run, for errors."""
        output = (self.run_dir / "output.txt").read_text(errors="replace")[-2000:]
        return f"{[text for _, text in self.said[-5:]]} {self.workers()} {output}"

    def working(self, names: Sequence[str], seconds: float = 60.0) -> None:
        """Wait until all of these workers have got something done."""
        self.wait(lambda: all((life := self.life(n)) and life.back for n in names), seconds, f"{names} at work")

    def back(self, old: Life, since: float, seconds: float = 60.0) -> float:
        """Wait until a worker has got something done in a later life; how long that took."""

        def later() -> float | None:
            lives = (life for life in self.lives if life.name == old.name and life.number > old.number)
            return next((life.back for life in lives if life.back), None)

        found: float = self.wait(later, seconds, f"{old.name} back")
        return found - since

    def goes_on(self, name: str, since: float, seconds: float = 60.0) -> float:
        """Wait until a worker gets something done after ``since``, in whichever life; how long that took."""
        begun = self.life(name)
        before = (begun.number, begun.done) if begun is not None else (-1, 0.0)

        def more() -> float | None:
            life = self.life(name)
            moved = life is not None and life.last > since and life.back and (life.number, life.done) > before
            return life.last if moved and life is not None else None

        found: float = self.wait(more, seconds, f"{name} going on")
        return found - since

    def trained(self) -> Trained:
        """What was trained on and published so far."""
        found, path = Trained(), self.run_dir / TRAINED
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # cut off: its writer was killed
                event = json.loads(line)
                if "blocks" in event:
                    found.batches.append((event["t"], sum(block[3] for block in event["blocks"])))
                    found.blocks += [(block[0], block[1], block[2]) for block in event["blocks"]]
                else:
                    found.versions.append(Published(**event))
        return found

    def sampled(self) -> int:
        """Steps that all actors have made so far, in all lives."""
        return sum(int(np.fromfile(path, "<i8", 1)[0]) for path in (self.run_dir / SAMPLED).glob("*"))

    def lost(self) -> int:
        """Steps that were made and not trained on so far; some of them still wait for that."""
        return self.sampled() - sum(steps for _, steps in self.trained().batches)

    def stop(self, seconds: float = 30.0) -> int:
        """Let the run end; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=seconds)


def kill(life: Life, number: int = signal.SIGKILL) -> float:
    """Send a signal to a worker's process; when."""
    now = time.monotonic()
    os.kill(life.pid, number)
    return now


@contextlib.contextmanager
def local(command: Sequence[str], run_dir: Path, temporary: Path) -> Iterator[Run]:
    """A run on this machine, in a session of its own; nothing of it is left afterwards."""
    temporary.mkdir(parents=True, exist_ok=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "TMPDIR": str(temporary), _MARK: str(run_dir)}
    run = Run(command, run_dir, subprocess.Popen, start_new_session=True, env=env)
    try:
        yield run
    finally:
        while pids := processes_of(run_dir):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        run.process.wait()


def processes_of(run_dir: Path) -> list[int]:
    """The processes of a local run that have not ended, whoever their parents are."""
    mark, found = f"{_MARK}={run_dir}\0".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and 95th percentile."""
    half, most = np.percentile(values, [50, 95])
    return float(half), float(most)
