"""Launchers: what runs a graph."""

import contextlib
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_PRELOAD = ("srl.launch.child", "srl.experiment", "srl.envs", "gymnasium.vector")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FILES = 65_536
"""Files that a process may have open, where the system lets it: a controller needs a few for every worker."""


def share_the_machine() -> None:
    """For processes started from here on, and this one where numpy and torch are not imported yet.

    numpy has one thread in each, threads of torch do not spin while they wait, and enough files may be open.
    """
    for name, value in _THREADS.items():
        os.environ.setdefault(name, value)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def prepare_workers(*modules: str) -> None:
    """Start the process that workers are forked from, which imports ``modules``, unless it runs already.

    Importing torch is most of what a start takes: the sooner it begins, the more of it is done beside other things.
    """
    share_the_machine()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *modules])
    with interrupts_blocked():
        resource_tracker.ensure_running()  # before the next one, which starts it too: it ends with signals unblocked
    with interrupts_blocked():
        forkserver.ensure_running()


@contextlib.contextmanager
def workers_prepared(*modules: str) -> Iterator[None]:
    """:func:`prepare_workers`, taken back if an exception says that they are not needed."""
    before = _forkserver_pid()
    prepare_workers(*modules)
    try:
        yield
    except BaseException:
        pid = _forkserver_pid()
        if pid is not None and pid != before:  # it would live on until it has imported everything
            os.kill(pid, signal.SIGKILL)
        raise


def _forkserver_pid() -> int | None:
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return pid


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Ctrl-C and SIGTERM stay blocked in processes started inside: a group may be signalled as a whole."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hears_sigterm() -> bool:
    """Whether SIGTERM reaches this process, or was blocked when it was started."""
    return signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
