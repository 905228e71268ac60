"""The life of one worker process.

The main thread builds the worker and polls it. A second thread talks to the controller: it sends the worker's
metrics a few times a second and listens for the order to stop. If the controller is gone the pipe ends, and so does
this process, whatever the main thread is doing.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from srl.core.errors import SrlError
from srl.core.worker import Worker

REPORT_EVERY = 0.25
_POLL = 0.1
_GRACE = 4.0
"""Seconds a worker has to end by itself once the controller is gone."""


class Link:
    """The worker's side of the pipe to the controller."""

    def __init__(self, pipe: Connection, litter: str) -> None:
        """``litter`` is a folder the controller removes when it ends; we do if it is killed."""
        self.pipe, self.litter = pipe, litter
        self.ending_since: float | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="link", daemon=True)
        self.worker: Worker | None = None

    def start(self) -> None:
        """Begin to report and to listen."""
        self._thread.start()

    def ending(self) -> float | None:
        """Since when the run is ending."""
        return self.ending_since

    def end(self) -> None:
        """The run is ending from now on."""
        if self.ending_since is None:
            self.ending_since = time.monotonic()

    def send(self, **message: Any) -> None:
        """Tell the controller something; a controller that is gone ends the run instead."""
        try:
            with self._lock:
                self.pipe.send_bytes(msgspec.msgpack.encode(message))
        except (BrokenPipeError, ConnectionResetError):
            self.end()

    def report(self, state: str) -> None:
        """Send the worker's metrics."""
        if self.worker is not None:
            self.send(state=state, **self.worker.metrics.report())

    def close(self) -> None:
        """Stop reporting."""
        self._done.set()
        self._thread.join(timeout=1)

    def _listen(self) -> None:
        try:
            while not self._done.is_set():
                if self.pipe.poll(REPORT_EVERY):
                    self.pipe.recv_bytes()  # the only order there is: stop
                    self.end()
                self.report("running")
        except (EOFError, OSError):
            self.end()
            shutil.rmtree(self.litter, ignore_errors=True)
            if not self._done.wait(_GRACE):
                os._exit(1)


def worker_main(payload: bytes, pipe: Connection, log: str, litter: str, incarnation: int, restarted: bool) -> None:
    """Run the worker that ``payload`` describes until it is told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the controller decides
    link = Link(pipe, litter)
    signal.signal(signal.SIGTERM, lambda *_: link.end())
    _redirect(log)
    faulthandler.enable()
    link.start()
    code = 0
    started: Worker | None = None
    try:
        worker: Worker = pickle.loads(payload).build()  # bytes the controller made for its own child, over no socket
        worker.ending, worker.incarnation, worker.restarted = link.ending, incarnation, restarted
        worker.start()
        link.worker = started = worker
        link.report("ready")
        while link.ending_since is None and not worker.poll(_POLL).done:
            pass
        worker.stop()
        link.close()  # before the last word: a late report would take it back
        link.report("done")
    except BaseException as error:
        code = 1
        traceback.print_exc()
        known = isinstance(error, SrlError)
        cause = str(error) if known else f"{type(error).__name__}: {error}"
        link.send(state="failed", cause=cause, final=known)
    finally:
        link.close()
        if started is not None:
            _close(started)
    sys.stderr.flush()
    os._exit(code)  # no waiting for threads of libraries


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
