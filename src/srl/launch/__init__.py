"""Launchers: what runs a graph."""

import os

_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def share_the_machine() -> None:
    """For processes started from here on, and this one where numpy and torch are not imported yet.

    numpy has one thread in each, and threads of torch do not spin while they wait.
    """
    for name, value in _THREADS.items():
        os.environ.setdefault(name, value)
