"""How long it takes from ``publish`` until another process has the new weights.

The clock starts in the writer's process before ``publish`` and ends in the reader's, which looks for a new version all
the time (on Linux both read the same clock). The weights are eight matrices and eight small vectors. The reader
has them

``shm view``  when ``read`` has shown it views of the new version in the shared segment: it can compute with them.
``shm copy``  when it has copied them from there into weights of its own, as a policy worker does.
``tcp view``, ``tcp copy``  The same with the reader across a socket.
``memcpy``    ``np.copyto`` of as many bytes in one piece in the writer's process, in turn into two places, as many as
              the stream has, and after a pause, as versions come (``memcpy, hot``: one after the other).
``ZeroMQ``    PUSH to PULL of as many bytes in one frame, sent from and received in place, then read as an array.

Processor time counts ``publish``, ``read`` and the threads that send and receive, not the looking.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from srl.bench.stream_peers import POLL, End, Held, Lane, Peer, Values
from srl.bench.stream_samples import Memcpy, ZmqReceiver, ZmqSender
from srl.core.specs import Arrays
from srl.services.names import FileNames
from srl.services.network import Network
from srl.streams.parameters import ParameterBoard
from srl.streams.protocols import ParameterStream
from srl.streams.tcp_parameters import TcpParameters
from srl.streams.wait import wait

_LAYERS = 8
_BIAS = 256
_PAUSE = 0.001


def weights(nbytes: int) -> Arrays:
    """Parameters of about ``nbytes`` bytes."""
    each = max(1, nbytes // 4 // _LAYERS - _BIAS)
    numbers = np.arange(each, dtype=np.float32)
    layers = {f"{i}/weight": numbers + i for i in range(_LAYERS)}
    return {**layers, **{f"{i}/bias": np.ones(_BIAS, np.float32) for i in range(_LAYERS)}}


class Publisher(Held):
    """A trainer, as far as the parameter stream sees it."""

    def __init__(self, stream: ParameterStream, nbytes: int) -> None:
        self.end, self.arrays = stream.writer(), weights(nbytes)

    def publish(self, version: int) -> tuple[float, float]:
        """Publish; when it began, and processor time."""
        self.arrays["0/bias"][:] = version
        begin, self.used = time.monotonic(), time.process_time()
        self.end.publish(self.arrays, version)
        return begin, time.process_time() - self.used

    def processor(self) -> float:
        """Processor time since the last publication began, that of threads that send it included."""
        return time.process_time() - self.used


class Subscriber(Held):
    """A policy worker, as far as the parameter stream sees it."""

    def __init__(self, stream: ParameterStream, nbytes: int, copy: bool) -> None:
        self.end, self.mine = stream.reader(), weights(nbytes)
        self.load: Callable[[Arrays], None] = self._copy if copy else self._look
        self.seen: Arrays = {}

    def see(self, version: int) -> tuple[float, float]:
        """Wait for a version and read it; when that was done, and processor time of reading."""
        processor = time.process_time()
        while self.end.newest() < version:
            if self.end.pollable() is None:
                os.sched_yield()  # the writer may be on this core
                processor = time.process_time()  # nothing can be waited for: what is spent so far was for looking
            else:
                wait([self.end.pollable()], POLL)
        self.end.read(self.mine, self.load)
        found = time.monotonic(), time.process_time() - processor
        assert self.seen["0/bias"][0] == version, "these are weights of another version"
        return found

    def _copy(self, arrays: Arrays) -> None:
        for name, value in arrays.items():
            np.copyto(self.mine[name], value)
        self.seen = self.mine

    def _look(self, arrays: Arrays) -> None:
        self.seen = arrays


class FrameSender(ZmqSender):
    """PUSH of one frame."""

    def publish(self, _: int) -> tuple[float, float]:
        """Send; when it began, and processor time."""
        begin, self.used = time.monotonic(), time.process_time()
        self.one()
        return begin, time.process_time() - self.used

    def processor(self) -> float:
        """Processor time since the last publication began, that of the sending thread included."""
        return time.process_time() - self.used


class FrameReceiver(ZmqReceiver):
    """PULL of one frame."""

    def see(self, _: int) -> tuple[float, float]:
        """Receive; when that was done, and processor time."""
        processor = time.process_time()
        assert np.frombuffer(self.end.recv(copy=False).buffer, np.uint8).size > 0
        return time.monotonic(), time.process_time() - processor


def seen_after(name: str, writer: End, reader: End, count: int, *, threads: bool, keep: Any = None) -> Lane:
    """A lane on which ``count`` versions are published, each after the one before was seen."""
    version = 0

    def run() -> Values:
        nonlocal version
        times = []
        for _ in range(count):
            version += 1
            reader.tell("see", version)
            time.sleep(_PAUSE)  # it looks already when the version comes
            writer.tell("publish", version)
            (end, theirs), (begin, mine) = reader.hear(), writer.hear()
            times.append((end - begin, writer.call("processor") if threads else mine, theirs))
        elapsed, mine, theirs = np.median(times, axis=0) * 1e6
        return {"us": float(elapsed), "sender_us": float(mine), "receiver_us": float(theirs)}

    return Lane(name, run, [reader, writer], keep)


def parameter_lanes(found: list[Peer], nbytes: int, seconds: float, folder: Path) -> list[Lane]:
    """All ways to bring about ``nbytes`` bytes of weights from the first to the second process."""
    near, far = found[:2]
    size = sum(array.nbytes for array in weights(nbytes).values())
    count = max(3, min(20, int(seconds / (size / 1e9 + 2e-3))))

    def ours(name: str, copy: bool) -> Lane:
        stream: ParameterStream
        if name.startswith("tcp"):
            stream = TcpParameters(f"parameters/{nbytes}/{copy}", FileNames(folder))
        else:
            stream = ParameterBoard(shared=True)
        ends = near.make(Publisher, stream, nbytes), far.make(Subscriber, stream, nbytes, copy)
        return seen_after(name, *ends, count, threads=name.startswith("tcp"), keep=stream)

    def memcpy(name: str, each: int, pause: float) -> Lane:
        copier = near.make(Memcpy, size, 2)

        def run() -> Values:
            times = []
            for _ in range(count // each):
                time.sleep(pause)
                times.append(copier.call("send", each, 0))
            elapsed, processor = np.median(times, axis=0) * 1e6
            return {"us": float(elapsed), "sender_us": float(processor), "receiver_us": 0.0}

        return Lane(name, run, [copier])

    receiver = far.make(FrameReceiver, Network())
    sender = near.make(FrameSender, receiver.call("endpoint"), size, Network())
    return [
        memcpy("memcpy, hot", count, 0.0),
        memcpy("memcpy", 1, _PAUSE),
        ours("shm view", copy=False),
        ours("shm copy", copy=True),
        seen_after("ZeroMQ", sender, receiver, count, threads=True),
        ours("tcp view", copy=False),
        ours("tcp copy", copy=True),
    ]
