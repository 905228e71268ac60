"""The controller: watches the workers of a run, starts those anew that died, within a budget, and ends them all.

It is the same wherever they run. A worker is a process that reports a few times a second over a line of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from srl.core.errors import WorkerError
from srl.core.worker import WAITS
from srl.experiment import Node
from srl.launch.child import STACK_SIGNAL

Feed = Callable[[str, str, dict[str, Any]], None]
"""(worker's name, kind, report)"""

_STOP_SECONDS = 4.5
_KILL_SECONDS = 5.0


class Process(Protocol):
    """A worker's process, wherever it is: what the controller needs of multiprocessing's processes."""

    @property
    def pid(self) -> int | None:
        """Its number on its host."""

    @property
    def exitcode(self) -> int | None:
        """How it ended; -N: by signal N."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""

    def kill(self) -> None:
        """End it at once."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""


class Line(Protocol):
    """The controller's end of the line to a worker: what it needs of multiprocessing's connections."""

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    def poll(self) -> bool:
        """Whether there is something to receive."""

    def recv_bytes(self) -> bytes:
        """The next message. Raises EOFError or OSError if there will be none."""

    def send_bytes(self, message: bytes) -> None:
        """Send a message."""

    def close(self) -> None:
        """Hear nothing more."""


@dataclass
class Child:
    """A worker process as the controller sees it."""

    node: Node
    process: Process
    pipe: Line
    starts: int
    state: str = "new"
    cause: str = ""
    final: bool = False
    blameless: bool = False
    """Whether it ended because another worker had."""
    polls: int = -1
    heard: float = field(default_factory=time.monotonic)
    """When it last reported."""
    moved: float = field(default_factory=time.monotonic)
    """When it last came back from a poll."""
    worked: float = field(default_factory=time.monotonic)
    """When it last got something done."""
    counters: dict[str, float] = field(default_factory=dict)
    waits_for: str = ""
    leaving: bool = False
    """Whether it was told that it is not needed any more."""


class Controller(ABC):
    """Keeps the nodes of a graph running; how a process is started is the launcher's business."""

    def __init__(
        self,
        nodes: Sequence[Node],
        feed: Feed,
        logs: Path,
        restarts: int,
        incarnation: int,
        say: Callable[[str], None],
        stall_seconds: float = 60.0,
        memory_mb: int = 0,
        preload: Sequence[str] = (),
    ) -> None:
        """``memory_mb`` is what an actor may hold before it is started anew (0: anything).

        ``preload`` are modules that all workers need, imported once for all of them.
        """
        self.preload = preload
        self.nodes, self.feed, self.logs, self.restarts, self.incarnation = nodes, feed, logs, restarts, incarnation
        self.say, self.stall_seconds, self.memory_mb = say, stall_seconds, memory_mb
        self.children: dict[str, Child] = {}
        self.spent = 0
        """Restarts used of the budget."""
        self.lives: dict[str, int] = {}
        """How often workers that have left had been started."""
        self._order: dict[str, Any] = {}
        self._told = time.monotonic()

    def run(self, ending: Callable[[], float | None]) -> None:
        """Keep the graph running until its trainers are done, a target is reached, or the run is ending."""
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for node in reversed(self.nodes):
                if not node.spare:
                    self._start(node, 0)
            while ending() is None and not self._finished():
                self._watch(0.2)
                self._look_for_stalls()
                self._scale()
            self._stop()
            failed = next((child for child in self.children.values() if child.state == "failed"), None)
            if failed is not None:
                raise WorkerError(f"{failed.node.name} failed while ending: {failed.cause}")
        finally:
            self.kill()

    def _finished(self) -> bool:
        states: dict[str, list[str]] = {}
        for child in self.children.values():
            states.setdefault(child.node.worker.kind, []).append(child.state)
        return all(state == "done" for state in states["trainer"]) or "done" in states.get("evaluator", [])

    @abstractmethod
    def begin(self, node: Node, log: Path, incarnation: int, restarted: bool) -> tuple[Process, Line]:
        """Start a worker's process."""

    def spares(self, child: Child) -> bool:
        """Whether a worker died of something that does not count against the budget."""
        return child.blameless

    def absent(self, child: Child) -> str:
        """Why nothing can be heard of a worker, whatever it does; nothing if it can."""
        return ""

    @abstractmethod
    def heard(self, timeout: float) -> Iterable[Child]:
        """The children of which there is something to receive, after up to ``timeout`` seconds."""

    @abstractmethod
    def signal(self, process: Any, number: int) -> None:
        """Send a signal to a worker's process. Raises ProcessLookupError if it is gone."""

    def _start(self, node: Node, starts: int) -> None:
        process, line = self.begin(node, self.logs / f"{node.name}.log", self.incarnation + starts, starts > 0)
        child = self.children[node.name] = Child(node, process, line, starts)
        if self._order:
            self._tell(child, self._order)

    def _watch(self, timeout: float) -> None:
        """Take in what workers report for up to ``timeout`` seconds, and replace those that died."""
        for child in self.heard(timeout):
            self._receive(child)
        for child in list(self.children.values()):
            if not child.process.is_alive():
                self._drain(child)
                if child.leaving:
                    child.process.join()
                    child.pipe.close()
                    del self.children[child.node.name]
                else:
                    self._replace(child)

    def _scale(self) -> None:
        """Start and stop actors until there are as many as ``srl scale`` has asked for."""
        wanted = read_scale(self.logs.parent)
        if wanted is None:
            return
        actors = [node for node in self.nodes if node.worker.kind == "actor"]
        for place, node in enumerate(actors):
            child = self.children.get(node.name)
            if place < wanted and child is None:
                self.lives[node.name] = self.lives.get(node.name, 0) + 1
                self._start(node, self.lives[node.name])
                self.say(f"{node.name} joins")
            elif place >= wanted and child is not None and not child.leaving:
                child.leaving = True
                self.lives[node.name] = child.starts
                self._tell(child, None)
                self.say(f"{node.name} leaves")

    def _drain(self, child: Child) -> None:
        """Take in the last words of a worker that has ended."""
        while not child.pipe.closed and child.pipe.poll():
            self._receive(child)

    def _receive(self, child: Child) -> None:
        try:
            message = msgspec.msgpack.decode(child.pipe.recv_bytes())
        except (EOFError, OSError):
            child.pipe.close()
            return
        child.state, child.heard = message.pop("state"), time.monotonic()
        if child.state == "failed":
            child.cause, child.final = message["cause"], message["final"]
            child.blameless = message.get("blameless", False)
        if "counters" not in message:  # last words
            return
        self._note(child, message)
        self.feed(child.node.name, child.node.worker.kind, message)
        for order in message["orders"]:
            self._order = order
            for each in self.children.values():
                self._tell(each, order)

    def _note(self, child: Child, message: dict[str, Any]) -> None:
        """Keep what a report says about how a worker is getting on."""
        now, polls, rss = time.monotonic(), message.pop("polls"), message.pop("rss")
        message["gauges"]["rss"] = rss
        if polls != child.polls:
            child.polls, child.moved = polls, now
        counters = message["counters"]
        grown = {name for name, value in counters.items() if value > child.counters.get(name, 0.0)}
        if any(not name.startswith("wait/") and name != "alive" for name in grown):
            child.worked = now
        waits = [name.removeprefix("wait/") for name in grown if name.startswith("wait/")]
        child.waits_for, child.counters = waits[0] if waits else "", counters
        if self.memory_mb and child.node.worker.kind == "actor" and rss > self.memory_mb:
            self.say(f"{child.node.name} holds {rss:,.0f} MB, more than {self.memory_mb:,}; started again")
            self._restart(child)

    def _tell(self, child: Child, order: dict[str, Any] | None) -> None:
        with contextlib.suppress(OSError):
            child.pipe.send_bytes(msgspec.msgpack.encode(order))

    def _look_for_stalls(self) -> None:
        """If nothing gets done any more, say who waits for whom, and where the one that waits for nobody is stuck."""
        now = time.monotonic()
        stuck = [child for child in self.children.values() if now - child.moved > self.stall_seconds]
        idle = min(now - child.worked for child in self.children.values())
        if now - self._told < self.stall_seconds or not (stuck or idle > self.stall_seconds):
            return
        self._told = now
        for child in self.children.values():
            if child.waits_for and child not in stuck:
                self.say(f"{child.node.name}: {WAITS[child.waits_for]}")
        for child in stuck:
            self._look_at(child, now)

    def _look_at(self, child: Child, now: float) -> None:
        """Say where a worker is stuck, and end it if that is no way to work."""
        name, away = child.node.name, self.absent(child)
        if away:
            self.say(f"{name} has not been heard of for {now - child.heard:.0f} s: {away}")
            return
        if child.polls >= 0 and now - child.heard > self.stall_seconds:  # not even its second thread has come through
            self.say(f"{name} has not been heard of for {now - child.heard:.0f} s")
            child.process.kill()
            return
        what = "has not come back" if child.polls >= 0 else "has been starting"
        self.say(f"{name} {what} for {now - child.moved:.0f} s; it is here:\n{self._stack(child)}")
        # An update, or a start, may take as long as it takes; a step may not.
        if child.node.worker.kind == "actor" and child.polls >= 0:
            child.process.kill()

    def _stack(self, child: Child) -> str:
        """The Python stack of a worker's main thread, from its log."""
        log = self.logs / f"{child.node.name}.log"
        before = log.stat().st_size if log.exists() else 0
        try:
            self.signal(child.process, STACK_SIGNAL)
        except ProcessLookupError:
            return "  (it is gone)"
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and (not log.exists() or log.stat().st_size == before):
            time.sleep(0.02)
        with open(log, "rb") as lines:
            lines.seek(before)
            found = lines.read().decode(errors="replace")
        main = found.split("Current thread")[-1].splitlines()[1:] or found.splitlines()
        return "\n".join(line for line in main if line.strip())

    def _replace(self, child: Child) -> None:
        """Start a worker that died anew, if the budget allows."""
        child.process.join()
        name, code = child.node.name, child.process.exitcode or 0
        how = child.cause or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")
        if self.spares(child):
            self._restart(child)
            return
        if child.final or self.spent >= self.restarts:
            spent = "" if child.final else f" after {self.spent} restarts"
            log = self.logs / f"{name}.log"
            hint = (
                f"see {log}" if log.exists() else 'a script that is run must call run() under if __name__ == "__main__"'
            )
            raise WorkerError(f"{name} failed{spent}: {how}; {hint}")
        self.spent += 1
        self.say(f"{name} {how}; started again ({self.spent} of {self.restarts} restarts used)")
        self._restart(child)

    def _restart(self, child: Child) -> None:
        child.process.kill()
        child.process.join()
        child.pipe.close()
        self._start(child.node, child.starts + 1)

    def _stop(self) -> None:
        """Tell every worker to stop and wait until it has."""
        self.memory_mb = 0  # nobody is started anew any more
        for child in self.children.values():
            self._tell(child, None)
        deadline = time.monotonic() + _STOP_SECONDS
        waiting = set(self.children)
        while waiting and time.monotonic() < deadline:
            for child in self.heard(0.1):
                self._receive(child)
            waiting = {n for n in waiting if self.children[n].process.is_alive()}
        for child in self.children.values():
            self._drain(child)

    def kill(self) -> None:
        """End whatever still runs, at once."""
        for child in self.children.values():
            if child.process.is_alive():
                child.process.kill()
        deadline = time.monotonic() + _KILL_SECONDS
        for child in self.children.values():
            child.process.join(timeout=max(0.0, deadline - time.monotonic()))
            child.pipe.close()


SCALE = "scale.json"


def read_scale(run_dir: Path) -> int | None:
    """How many actors a run should have, if somebody has said so."""
    try:
        return msgspec.json.decode((run_dir / SCALE).read_bytes(), type=int)
    except (OSError, msgspec.DecodeError):
        return None


def write_scale(run_dir: Path, actors: int) -> None:
    """Say how many actors a run should have."""
    partial = run_dir / f".{SCALE}.{os.getpid()}"
    partial.write_bytes(msgspec.json.encode(actors))
    partial.replace(run_dir / SCALE)
