"""The local launcher: one process per worker on this machine, watched, restarted within a budget, always cleaned up."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec

from srl.core.errors import ConfigError, WorkerError
from srl.experiment import Node
from srl.launch.child import worker_main

Feed = Callable[[str, str, dict[str, Any]], None]
"""(worker's name, kind, report)"""

_PRELOAD = ["srl.launch.child", "srl.experiment", "srl.envs", "gymnasium.vector"]
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
    ) -> None:
        self.nodes, self.feed, self.logs, self.restarts, self.incarnation = nodes, feed, logs, restarts, incarnation
        self.say = say
        self.context = multiprocessing.get_context("forkserver")
        self.children: dict[str, Child] = {}

    def run(self, ending: Callable[[], float | None]) -> None:
        """Keep the graph running until its trainers are done or the run is ending."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.context.set_forkserver_preload(_PRELOAD)
        try:
            for node in reversed(self.nodes):
                self._start(node, 0)
            while ending() is None and not self._trained():
                self._watch(0.2)
            self._stop()
            failed = next((child for child in self.children.values() if child.state == "failed"), None)
            if failed is not None:
                raise WorkerError(f"{failed.node.name} failed while ending: {failed.cause}")
        finally:
            self.kill()

    def _trained(self) -> bool:
        trainers = [child for child in self.children.values() if child.node.worker.kind == "trainer"]
        return all(child.state == "done" for child in trainers)

    def _start(self, node: Node, starts: int) -> None:
        ours, theirs = self.context.Pipe()
        log = str(self.logs / f"{node.name}.log")
        litter = multiprocessing.util.get_temp_dir()  # where the fork server has its socket
        arguments = (pickle.dumps(node), theirs, log, litter, self.incarnation + starts, starts > 0)
        process = self.context.Process(target=worker_main, args=arguments, name=node.name, daemon=True)
        with _interrupts_blocked(), _main_hidden(arguments[0]):
            process.start()
        theirs.close()
        self.children[node.name] = Child(node, process, ours, starts)

    def _watch(self, timeout: float) -> None:
        """Take in what workers report for up to ``timeout`` seconds, and replace those that died."""
        pipes = {child.pipe: child for child in self.children.values() if not child.pipe.closed}
        for pipe in wait(list(pipes), timeout):
            self._receive(pipes[pipe])  # type: ignore[index]
        for child in list(self.children.values()):
            if child.state != "done" and not child.process.is_alive():
                self._drain(child)
                if child.state != "done":
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
        else:
            self.feed(child.node.name, child.node.worker.kind, message)

    def _replace(self, child: Child) -> None:
        child.process.join()
        name, code = child.node.name, child.process.exitcode
        how = child.cause or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")
        used = sum(each.starts for each in self.children.values())
        if child.final or used >= self.restarts:
            spent = "" if child.final else f" after {used} restarts"
            log = self.logs / f"{name}.log"
            hint = (
                f"see {log}" if log.exists() else 'a script that is run must call run() under if __name__ == "__main__"'
            )
            raise WorkerError(f"{name} failed{spent}: {how}; {hint}")
        self.say(f"{name} {how}; started again ({used + 1} of {self.restarts} restarts used)")
        child.pipe.close()
        self._start(child.node, child.starts + 1)

    def _stop(self) -> None:
        """Tell every worker to stop and wait until it has."""
        for child in self.children.values():
            with contextlib.suppress(OSError):
                child.pipe.send_bytes(b"stop")
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
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C stays blocked in processes started inside."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


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
