"""The life of one worker process.

The main thread builds the worker and polls it. A second thread talks to the controller: it sends the worker's
metrics a few times a second and listens for the order to stop. If the controller is gone the pipe ends, and so does
this process, whatever the main thread is doing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import platform
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from srl.core.errors import SrlError, StreamClosed, Unreachable
from srl.core.worker import Worker

REPORT_EVERY = 0.25
_POLL = 0.1
STACK_SIGNAL = signal.SIGUSR1
"""Makes a worker write the Python stacks of its threads into its log."""
_GRACE = 4.0
"""Seconds a worker has to end by itself once the controller is gone."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SHORT = 100_000
"""Nanoseconds of a short turn: the kernel's least."""


class Link:
    """The worker's side of the pipe to the controller."""

    def __init__(self, pipe: Connection, litter: str) -> None:
        """``litter`` is a folder the controller removes when it ends; we do if it is killed."""
        self.pipe, self.litter = pipe, litter
        self.ending_since: float | None = None
        self.state = "running"
        self.orders: deque[dict[str, Any]] = deque()
        self.polls = 0
        self._done = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._listen, name="link", daemon=True)
        self.worker: Worker | None = None

    def start(self) -> None:
        """Begin to report and to listen."""
        self._thread.start()

    def ending(self) -> float | None:
        """Since when the run is ending."""
        return self.ending_since

    def is_ending_soon(self) -> bool:
        """Whether the run is ending, or is said to be within a moment."""
        deadline = time.monotonic() + 2 * REPORT_EVERY
        while self.ending_since is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.ending_since is not None

    def end(self) -> None:
        """The run is ending from now on."""
        if self.ending_since is None:
            self.ending_since = time.monotonic()

    def orphaned(self) -> None:
        """The controller is gone, and so is the run."""
        self.end()
        shutil.rmtree(self.litter, ignore_errors=True)

    def send(self, **message: Any) -> None:
        """Tell the controller something; a controller that is gone ends the run instead."""
        try:
            with self._lock:
                self.pipe.send_bytes(msgspec.msgpack.encode(message))
        except (BrokenPipeError, ConnectionResetError):
            self.orphaned()

    def report(self, state: str) -> None:
        """Send the worker's metrics."""
        if self.worker is not None:
            with self._lock:  # both threads report
                self.send(state=state, polls=self.polls, rss=resident_mb(), **self.worker.metrics.report())

    def close(self) -> None:
        """Stop reporting."""
        self._done.set()
        self._thread.join(timeout=1)

    def _listen(self) -> None:
        try:
            while not self._done.is_set():
                if self.pipe.poll(REPORT_EVERY):
                    order = msgspec.msgpack.decode(self.pipe.recv_bytes())
                    if order is None:  # stop
                        self.end()
                    else:
                        self.orders.append(order)
                self.report(self.state)
        except (EOFError, OSError):
            self.orphaned()
            if not self._done.wait(_GRACE):
                os._exit(1)


def take_short_turns() -> None:
    """Ask the kernel for short turns on a processor, which then come at once (Linux 6.12; others take no notice).

    By itself a worker that is woken waits until others have had their turns, of some milliseconds each.
    """
    call = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if call is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        wanted = struct.pack("IIQiIQQQII", 56, os.SCHED_OTHER, 0, nice, 0, _SHORT, 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(call, 0, wanted, 0)


def worker_main(
    payload: bytes, pipe: Connection, log: str, litter: str, incarnation: int, restarted: bool, hears_sigterm: bool
) -> None:
    """Run the worker that ``payload`` describes until it is told to stop.

    Without ``hears_sigterm`` only the controller tells it: a signal may go to all processes of a cluster, and those it
    reaches first must not end before the controller knows why.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the controller decides
    link = Link(pipe, litter)
    if hears_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: link.end())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _redirect(log)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)  # the controller asks where we are stuck
    link.start()
    code = 0
    started: Worker | None = None
    try:
        worker: Worker = pickle.loads(payload).build()  # made by the controller for its own child
        worker.ending, worker.incarnation, worker.restarted = link.ending, incarnation, restarted
        os.nice(worker.niceness)  # of this thread and those that it starts
        if worker.prompt:
            take_short_turns()
        worker.start()
        link.worker = started = worker
        link.report("ready")
        idle = True
        while link.ending_since is None:
            while link.orders:
                worker.tell(link.orders.popleft())
            progress = worker.poll(_POLL)
            if progress.done and link.state != "done":
                link.state = "done"  # others may not be, so it goes on until it is told to stop
                link.send(state="done")  # at once: much would be trained until the next report
            link.polls += 1
            if progress.work and idle:
                idle = False
                link.report(link.state)  # the first update is shown at once
        worker.stop()
        link.close()  # before the last word: a late report would take it back
        link.report("done")
    except StreamClosed:
        code = 0 if link.is_ending_soon() else 1  # the trainer may have heard of the end before us
        link.close()
        # Whoever closed it has ended, and that has been counted.
        link.send(state="ended" if code == 0 else "failed", cause="its stream was closed", final=False, blameless=True)
    except BaseException as error:
        code = 1
        traceback.print_exc()
        known = isinstance(error, SrlError)
        cause = str(error) if known else f"{type(error).__name__}: {error}"
        link.close()  # before the last word, as above
        link.send(state="failed", cause=cause, final=known and not isinstance(error, Unreachable))
    finally:
        link.close()
        if started is not None:
            _close(started)
    sys.stderr.flush()
    os._exit(code)  # no waiting for threads of libraries


def answer_main(payload: bytes, pipe: Connection, seconds: int) -> None:
    """Send what the function in ``payload`` returns for its argument, within so many seconds; say nothing else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.alarm(seconds)  # the controller may be gone by then
    _redirect(os.devnull)
    try:
        function, argument = pickle.loads(payload)  # as above
        answer = {"found": function(argument)}
    except Exception as error:  # whatever code of the user's may raise
        answer = {"cause": " ".join(f"{type(error).__name__}: {error}".split())}
    pipe.send_bytes(msgspec.msgpack.encode(answer))
    os._exit(0)


def resident_mb() -> float:
    """Memory this process holds, in MB."""
    try:
        with open("/proc/self/statm", encoding="ascii") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def _close(worker: Worker) -> None:
    try:
        worker.close()
    except Exception:  # it is going away anyway; the log keeps the reason
        traceback.print_exc()


def _redirect(log: str) -> None:
    """Send all output of this process, also that of C libraries, to its log file."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
