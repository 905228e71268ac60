"""The local launcher: one process per worker on this machine, watched, restarted within a budget, always cleaned up."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec

from srl.core.errors import ConfigError, WorkerError
from srl.core.worker import WAITS
from srl.experiment import Experiment, Node
from srl.launch import interrupts_blocked, prepare_workers
from srl.launch.child import STACK_SIGNAL, answer_main, worker_main

Feed = Callable[[str, str, dict[str, Any]], None]
"""(worker's name, kind, report)"""

_STOP_SECONDS = 4.5


@dataclass
class Child:
    """A worker process as the controller sees it."""

    node: Node
    process: Any
    pipe: Connection
    starts: int
    state: str = "new"
    cause: str = ""
    final: bool = False
    polls: int = -1
    moved: float = field(default_factory=time.monotonic)
    """When it last came back from a poll."""
    worked: float = field(default_factory=time.monotonic)
    """When it last got something done."""
    counters: dict[str, float] = field(default_factory=dict)
    waits_for: str = ""


class LocalLauncher:
    """Starts the nodes of a graph as processes and keeps them running."""

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
        self.context = multiprocessing.get_context("forkserver")
        self.children: dict[str, Child] = {}
        self.spent = 0
        """Restarts used of the budget."""
        self._order: dict[str, Any] = {}
        self._told = time.monotonic()

    def run(self, ending: Callable[[], float | None]) -> None:
        """Keep the graph running until its trainers are done, a target is reached, or the run is ending."""
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for node in reversed(self.nodes):
                self._start(node, 0)
            while ending() is None and not self._finished():
                self._watch(0.2)
                self._look_for_stalls()
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

    def _start(self, node: Node, starts: int) -> None:
        ours, theirs = self.context.Pipe()
        log = str(self.logs / f"{node.name}.log")
        litter = multiprocessing.util.get_temp_dir()  # where the fork server has its socket
        arguments = (pickle.dumps(node), theirs, log, litter, self.incarnation + starts, starts > 0)
        process = _start_process(worker_main, arguments, node.name, self.preload)
        theirs.close()
        child = self.children[node.name] = Child(node, process, ours, starts)
        if self._order:
            self._tell(child, self._order)

    def _watch(self, timeout: float) -> None:
        """Take in what workers report for up to ``timeout`` seconds, and replace those that died."""
        pipes = {child.pipe: child for child in self.children.values() if not child.pipe.closed}
        for pipe in wait(list(pipes), timeout):
            self._receive(pipes[pipe])  # type: ignore[index]
        for child in list(self.children.values()):
            if not child.process.is_alive():
                self._drain(child)
                self._replace(child)

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
        child.state = message.pop("state")
        if child.state == "failed":
            child.cause, child.final = message["cause"], message["final"]
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
            stack = self._stack(child)
            what = "has not come back" if child.polls >= 0 else "has been starting"
            self.say(f"{child.node.name} {what} for {now - child.moved:.0f} s; it is here:\n{stack}")
            # An update, or a start, may take as long as it takes; a step may not.
            if child.node.worker.kind == "actor" and child.polls >= 0:
                child.process.kill()

    def _stack(self, child: Child) -> str:
        """The Python stack of a worker's main thread, from its log."""
        log = self.logs / f"{child.node.name}.log"
        before = log.stat().st_size if log.exists() else 0
        try:
            os.kill(child.process.pid, STACK_SIGNAL)
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
        name, code = child.node.name, child.process.exitcode
        how = child.cause or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")
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
            open_pipes = {self.children[n].pipe: n for n in waiting if not self.children[n].pipe.closed}
            for pipe in wait(list(open_pipes), 0.1):
                self._receive(self.children[open_pipes[pipe]])  # type: ignore[index]
            waiting = {n for n in waiting if self.children[n].process.is_alive()}
        for child in self.children.values():
            self._drain(child)

    def kill(self) -> None:
        """End whatever still runs, at once."""
        for child in self.children.values():
            if child.process.is_alive():
                child.process.kill()
        for child in self.children.values():
            child.process.join(timeout=5)
            child.pipe.close()


def preload(x: Experiment) -> list[str]:
    """Modules that all workers of ``x`` need; with remote inference actors stay light."""
    return ["torch"] if x.actors.inference == "inline" else []


def ask(function: Callable[[Any], Any], argument: Any, preload: Sequence[str], seconds: int) -> Any:
    """``function(argument)``, plain data, from a process started as workers are; or a WorkerError that says why not."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    payload = pickle.dumps((function, argument))
    process = _start_process(answer_main, (payload, theirs, seconds), function.__name__, preload)
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise WorkerError(f"it took longer than {seconds} s")
        answer = msgspec.msgpack.decode(ours.recv_bytes())
    except EOFError:
        raise WorkerError("its process ended") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if "cause" in answer:
        raise WorkerError(answer["cause"])
    return answer["found"]


def _start_process(target: Callable[..., None], arguments: tuple[Any, ...], name: str, preload: Sequence[str]) -> Any:
    """Start ``target``, whose first argument is a pickle, in a process forked from one that imported ``preload``."""
    prepare_workers(*preload)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=target, args=arguments, name=name, daemon=True)
    with interrupts_blocked(), _main_hidden(arguments[0]):
        process.start()
    return process


def check_portable(thing: Any, what: str) -> None:
    """Refuse what cannot be handed to a worker process."""
    try:
        pickle.dumps(thing)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{what} cannot be handed to another process ({error}): define it at the top level of a module, "
            "or use the inline launcher"
        ) from error


@contextlib.contextmanager
def _main_hidden(payload: bytes) -> Iterator[None]:
    """Keep the child from importing the user's script again, unless something in ``payload`` is defined there.

    So a script needs ``if __name__ == "__main__"`` only if it defines its own environment or algorithm.
    """
    main = sys.modules["__main__"]
    path, spec = getattr(main, "__file__", None), main.__spec__
    if b"__main__" in payload:
        yield
        return
    try:
        main.__file__, main.__spec__ = None, None
        yield
    finally:
        main.__file__, main.__spec__ = path, spec
