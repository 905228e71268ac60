"""Sleeping until one of several endpoints has something."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any

from srl.core.memory import Doorbell


def wait(pollables: Sequence[Any], timeout: float) -> bool:
    """Sleep until one of ``pollables`` (doorbells, ZeroMQ sockets, None) is ready or ``timeout`` has passed.

    Rings of the doorbells are cleared, so look at everything the bell may announce after this returns.
    """
    if timeout <= 0:
        return False
    bells = {p.fileno(): p for p in pollables if isinstance(p, Doorbell)}
    sockets = [p for p in pollables if p is not None and not isinstance(p, Doorbell)]
    if sockets:
        import zmq

        poller = zmq.Poller()
        for pollable in [*bells, *sockets]:
            poller.register(pollable, zmq.POLLIN)
        ready = {key for key, _ in poller.poll(int(timeout * 1000) or 1)}
    else:
        plain = select.poll()
        for fd in bells:
            plain.register(fd, select.POLLIN)
        ready = {fd for fd, _ in plain.poll(timeout * 1000)}
    for fd, bell in bells.items():
        if fd in ready:
            bell.clear()
    return bool(ready)
