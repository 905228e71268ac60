"""The local launcher: one process per worker on this machine, forked from one that has imported what they need."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from srl.core.errors import ConfigError, WorkerError
from srl.experiment import Experiment, Node
from srl.launch import hears_sigterm, interrupts_blocked, prepare_workers
from srl.launch.child import answer_main, worker_main
from srl.launch.controller import Child, Controller

_MOMENT = 0.00025
"""Seconds, for every worker, in which all that is reported is taken in at once: a turn for every report of hundreds of
workers would keep a core busy."""


class LocalProcess:
    """A process of multiprocessing's, of which it can be asked hundreds of times a second whether it lives."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self._ended = select.poll()
        self._ended.register(process.sentinel, select.POLLIN)
        self.kill, self.join = process.kill, process.join

    @property
    def pid(self) -> int | None:
        """See :class:`~srl.launch.controller.Process`."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """See :class:`~srl.launch.controller.Process`."""
        return self._process.exitcode

    def is_alive(self) -> bool:
        """See :class:`~srl.launch.controller.Process`."""
        return not self._ended.poll(0)


class LocalLauncher(Controller):
    """Starts workers on this machine."""

    _last = 0.0

    def begin(self, node: Node, log: Path, incarnation: int, restarted: bool) -> tuple[LocalProcess, Connection]:
        """See :class:`~srl.launch.controller.Controller`."""
        process, pipe = start_worker(pickle.dumps(node), node.name, log, incarnation, restarted, self.preload)
        return LocalProcess(process), pipe

    def heard(self, timeout: float) -> list[Child]:
        """See :class:`~srl.launch.controller.Controller`."""
        lines: dict[Any, Child] = {child.pipe: child for child in self.children.values() if not child.pipe.closed}
        ready = wait(list(lines), timeout)
        early = self._last + _MOMENT * len(lines) - time.monotonic()
        if ready and early > 0:
            time.sleep(early)
            ready = wait(list(lines), 0)
        self._last = time.monotonic()
        return [lines[line] for line in ready]

    def signal(self, process: Any, number: int) -> None:
        """See :class:`~srl.launch.controller.Controller`."""
        os.kill(process.pid, number)


def start_worker(
    payload: bytes, name: str, log: Path, incarnation: int, restarted: bool, preload: Sequence[str]
) -> tuple[BaseProcess, Connection]:
    """Start the worker that ``payload``, a pickled node, describes; its process and our end of its line.

    It hears SIGTERM if this process does.
    """
    ours, theirs = multiprocessing.Pipe()
    litter = multiprocessing.util.get_temp_dir()  # where the fork server has its socket
    arguments = (payload, theirs, str(log), litter, incarnation, restarted, hears_sigterm())
    process = _start_process(worker_main, arguments, name, preload)
    theirs.close()
    return process, ours


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


def _start_process(
    target: Callable[..., None], arguments: tuple[Any, ...], name: str, preload: Sequence[str]
) -> BaseProcess:
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
