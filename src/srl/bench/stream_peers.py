"""Processes that hold ends of streams for ``srl bench streams``, and what all of its measurements share.

A *lane* is one way to bring something from one process to another: one of our streams, or something to compare it with.
Its ends live in other processes, so the process that directs them sleeps while they are measured. All lanes of a case
are opened side by side, each is run once without counting (that touches every page and connects every socket), and then
they take turns: what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import zmq

from srl.core.errors import SrlError
from srl.core.specs import Array
from srl.services.network import LOOPBACK, Network

_PATIENCE = 30.0
"""Seconds after which a measurement that has not ended is given up."""
POLL = 0.1
"""Seconds workers sleep at most before they look again, as in ``srl.launch.child``."""

Values = dict[str, float]


class Queue(Protocol):
    """What is used of a ``multiprocessing.Queue``."""

    def put(self, thing: Any) -> None:
        """Send a thing."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Receive a thing."""


@dataclass(frozen=True)
class Inbox:
    """Stands for a process's queue in what is sent to a process: queues themselves can be inherited only."""

    place: int


class Held:
    """What a peer holds: something around an end of a stream, or a socket."""

    end: Any = None

    def close(self) -> None:
        """Let go of it."""
        if self.end is not None:
            self.end.close()


def hold(pipe: Connection, queues: Sequence[Queue]) -> None:
    """The life of a peer: make ends, call their methods, let go of them."""
    held: dict[int, Held] = {}
    while True:
        try:
            key, name, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            found = None
            if name == "make":
                make, rest = arguments[0], arguments[1:]
                held[key] = make(*(queues[a.place] if isinstance(a, Inbox) else a for a in rest))
            elif name == "drop":
                held.pop(key).close()
            else:
                found = getattr(held[key], name)(*arguments)
            pipe.send((found, None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


class Peer:
    """Another process."""

    def __init__(self, context: Any, queues: Sequence[Queue]) -> None:
        self._keys = count()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(theirs, queues), daemon=True)
        self.process.start()
        theirs.close()

    def make(self, kind: Callable[..., Any], *arguments: Any) -> End:
        """An end that lives in that process."""
        end = End(self, next(self._keys))
        end.call("make", kind, *arguments)
        return end

    def stop(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as gone:
        raise SrlError("a process of the benchmark has died") from gone


@dataclass(frozen=True)
class End:
    """One end of a lane, in some peer."""

    peer: Peer
    key: int

    def tell(self, name: str, *arguments: Any) -> None:
        """Have a method called; :meth:`hear` waits for what it returns."""
        with _alive():
            self.peer.pipe.send((self.key, name, arguments))

    def hear(self) -> Any:
        """What the method last called has returned."""
        with _alive():
            if not self.peer.pipe.poll(_PATIENCE):
                raise SrlError(f"a process of the benchmark did not answer within {_PATIENCE:.0f} s")
            found, error = self.peer.pipe.recv()
        if error is not None:
            raise SrlError(f"a process of the benchmark failed: {error}")
        return found

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method and wait for what it returns."""
        self.tell(name, *arguments)
        return self.hear()


@contextmanager
def peers(number: int) -> Iterator[list[Peer]]:
    """``number`` processes, each of which can reach the queues of all."""
    context = multiprocessing.get_context("forkserver")
    here = f"{__package__}."
    preload = [here + name for name in ("stream_samples", "stream_inference", "stream_parameters")]
    context.set_forkserver_preload(["__main__", *preload])
    queues = [context.Queue() for _ in range(number)]
    found: list[Peer] = []
    try:
        for _ in range(number):
            found.append(Peer(context, queues))
        yield found
    finally:
        for peer in found:
            peer.stop()
        for each in queues:
            each.close()


@dataclass
class Lane:
    """One way from process to process: its ends, and how it is run once."""

    name: str
    run: Callable[[], Values]
    ends: Sequence[End]
    keep: Any = None
    """What must live as long as the lane does: streams, whose memory this process owns."""


@dataclass
class Case:
    """One size of message, and what was measured with it: for each lane a list of values per quantity."""

    about: dict[str, int]
    lanes: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def median(self, lane: str, quantity: str) -> float | None:
        """The median over the rounds, if that lane was measured."""
        values = self.lanes.get(lane, {}).get(quantity)
        return float(np.median(values)) if values else None

    def ratio(self, lane: str, base: str, quantity: str) -> float | None:
        """The median over the rounds of ``lane`` divided by ``base``, both of the same round."""
        ours, theirs = (self.lanes.get(name, {}).get(quantity) for name in (lane, base))
        return float(np.median(np.divide(ours, theirs))) if ours and theirs and len(ours) == len(theirs) else None


def alternate(case: Case, lanes: Sequence[Lane], rounds: int) -> None:
    """Run all lanes in turn, ``rounds`` times, and enter what they found."""
    for number in range(rounds + 1):
        for lane in lanes:
            try:
                values = lane.run()
            except SrlError as error:  # who does not answer could not let go of its ends either
                raise SrlError(f"{lane.name}, {case.about}: {error}") from error
            for quantity, value in values.items() if number else ():
                case.lanes.setdefault(lane.name, {}).setdefault(quantity, []).append(value)
    for lane in lanes:
        for end in lane.ends:
            end.call("drop")


class Clock:
    """Wall-clock and processor time of this process since it was made."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds and processor seconds."""
        return time.perf_counter() - self._wall, time.process_time() - self._processor


def listener(kind: int, messages: int = 1000, network: Network | None = None) -> zmq.Socket[bytes]:
    """A ZeroMQ socket for a yardstick that listens on loopback, as the streams do, and queues so many messages."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(messages)
    (network or Network()).protect_server(socket)
    socket.bind(f"tcp://{LOOPBACK}:*")
    return socket


def noise(nbytes: int) -> Array:
    """Bytes that nothing can guess, in memory that has been touched."""
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
