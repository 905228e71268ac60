"""How long an actor waits for its actions: round trips through the inference stream.

A client's clock runs from ``submit`` until ``ready``; the observation lies in the block already, where the environment
wrote it. The server takes all that is pending as one batch, as a policy worker does, and answers with arrays that were
made before, so that no policy is measured. Every client is a process that asks again as soon as it is answered.

``shm``, ``tcp``  Our streams.
``doorbell``      Two processes that ring each other's doorbell and do nothing else, whatever the case.
``ZeroMQ``        DEALER to ROUTER and back, as many bytes as ``tcp`` sends, one frame each way.
``mp.Queue``      One queue to the server, one back to each client, with dictionaries of arrays.

Two processes that wake each other take several times as long on two cores as on one, and the scheduler puts them here
or there as it likes. So with one row and one client ``doorbell`` and ``shm`` are also run bound to one core and to two.
"""

from __future__ import annotations

import os
import queue as queues
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from srl.bench.stream_peers import POLL, Clock, End, Held, Inbox, Lane, Peer, Queue, Values, listener
from srl.bench.stream_samples import block_of
from srl.core.memory import Doorbell
from srl.core.slab import BlockSpec, Slab
from srl.core.specs import Arrays
from srl.services.names import FileNames
from srl.streams.inference import InferenceBoard
from srl.streams.protocols import InferenceStream
from srl.streams.tcp_inference import TcpInference
from srl.streams.wait import wait

_HORIZON = 15
_IDLE = 0.02
"""Seconds without a request after which a server looks whether the measurement is over."""
_LEAD = 0.01
"""Seconds until the clients begin, all at once."""


def spec_of(rows: int) -> BlockSpec:
    """Blocks whose observation is a vector of 32 floats."""
    return BlockSpec(block_of(0).fields, _HORIZON, rows)


def outputs_for(spec: BlockSpec, rows: int) -> Arrays:
    """What the policy answers: an action, its log-probability and a value for each row."""
    return {name: np.ones((rows, *spec.fields[name].shape), spec.fields[name].dtype) for name in spec.outputs}


class Asker(Held, ABC):
    """A client: asks, waits for the answer, asks again."""

    @abstractmethod
    def one(self) -> None:
        """Make one round trip."""

    def ask(self, start: float, end: float) -> tuple[list[float], float]:
        """Make round trips from one moment to another; how long each took, and processor time."""
        time.sleep(max(0.0, start - time.monotonic()))
        clock, found = Clock(), []
        while (begin := time.monotonic()) < end:
            self.one()
            found.append(time.monotonic() - begin)
        return found, clock.read()[1]


class Answerer(Held, ABC):
    """The server: answers what comes until all is over."""

    @abstractmethod
    def some(self) -> bool:
        """Answer all that is there; False if nothing came for a while."""

    def serve(self, over: Doorbell) -> float:
        """Answer until nobody asks any more and ``over`` was rung; the processor time it took."""
        clock = Clock()
        while self.some() or not over.wait(0):
            pass
        over.clear()
        return clock.read()[1]


class StreamAsker(Asker):
    """An actor with one vector, as far as the inference stream sees it."""

    def __init__(self, stream: InferenceStream, index: int, spec: BlockSpec) -> None:
        self.slab: Slab = stream.slab if isinstance(stream, InferenceBoard) else Slab(spec, 1, shared=False)
        self.end = stream.client(index, self.slab, 1)
        # Over shared memory every client has a block of its own.
        self.first = index * (_HORIZON + 1) if isinstance(stream, InferenceBoard) else 0
        self.step = 0

    def one(self) -> None:
        """Ask for the actions of the next step."""
        self.step = (self.step + 1) % _HORIZON
        self.end.submit(self.first + self.step, 0)
        while not self.end.ready():
            wait([self.end.pollable()], POLL)


class StreamAnswerer(Answerer):
    """A policy worker, as far as the inference stream sees it."""

    def __init__(self, stream: InferenceStream, spec: BlockSpec, clients: int) -> None:
        self.end = stream.server(0)
        self.outputs = [outputs_for(spec, number * spec.rows) for number in range(clients + 1)]

    def some(self) -> bool:
        """Answer all that is pending as one batch."""
        requests = self.end.take()
        if requests is None:
            return wait([self.end.pollable()], _IDLE)
        self.end.reply(requests, self.outputs[len(requests.clients)], 0)
        return True


class BellAsker(Asker):
    """Rings and waits to be rung."""

    def __init__(self, theirs: Doorbell, mine: Doorbell) -> None:
        self.theirs, self.mine = theirs, mine

    def one(self) -> None:
        """There and back."""
        self.theirs.ring()
        while not self.mine.wait(POLL):
            pass
        self.mine.clear()


class BellAnswerer(Answerer):
    """Rings whenever it is rung."""

    def __init__(self, theirs: Doorbell, mine: Doorbell) -> None:
        self.theirs, self.mine = theirs, mine

    def some(self) -> bool:
        """Ring back."""
        if not self.mine.wait(_IDLE):
            return False
        self.mine.clear()
        self.theirs.ring()
        return True


class ZmqAsker(Asker):
    """A DEALER."""

    def __init__(self, endpoint: str, spec: BlockSpec) -> None:
        self.end = zmq.Context.instance().socket(zmq.DEALER)
        self.end.connect(endpoint)
        self.obs = bytes(sum(spec.fields[name].nbytes for name in spec.inputs) * spec.rows)

    def one(self) -> None:
        """Send a frame, receive a frame."""
        self.end.send(self.obs)
        self.end.recv()


class ZmqAnswerer(Answerer):
    """A ROUTER."""

    def __init__(self, spec: BlockSpec) -> None:
        self.end = listener(zmq.ROUTER)
        self.end.setsockopt(zmq.RCVTIMEO, int(_IDLE * 1000))
        self.answer = bytes(sum(spec.fields[name].nbytes for name in spec.outputs) * spec.rows)

    def endpoint(self) -> str:
        """Where it listens."""
        found: str = self.end.getsockopt_string(zmq.LAST_ENDPOINT)
        return found

    def some(self) -> bool:
        """Answer one request."""
        with suppress(zmq.Again):
            self.end.send_multipart([self.end.recv_multipart()[0], self.answer])
            return True
        return False


class QueueAsker(Asker):
    """Puts into the server's queue, gets from its own."""

    def __init__(self, theirs: Queue, mine: Queue, index: int, spec: BlockSpec) -> None:
        self.theirs, self.mine, self.index = theirs, mine, index
        shapes = {name: (spec.rows, *spec.fields[name].shape) for name in spec.inputs}
        self.obs = {name: np.ones(shape, spec.fields[name].dtype) for name, shape in shapes.items()}

    def one(self) -> None:
        """Put and get."""
        self.theirs.put((self.index, self.obs))
        self.mine.get()


class QueueAnswerer(Answerer):
    """Gets from its own queue, puts into the asker's."""

    def __init__(self, spec: BlockSpec, mine: Queue, *theirs: Queue) -> None:
        self.mine, self.theirs, self.outputs = mine, theirs, outputs_for(spec, spec.rows)

    def some(self) -> bool:
        """Answer one request."""
        with suppress(queues.Empty):
            self.theirs[self.mine.get(timeout=_IDLE)[0]].put(self.outputs)
            return True
        return False


class Place(Held):
    """Binds a process to cores."""

    def stay(self, cores: set[int]) -> None:
        """Run on these cores only."""
        os.sched_setaffinity(0, cores)


def bound(lanes: Sequence[Lane], found: Sequence[Peer]) -> list[Lane]:
    """The same lanes with their two processes bound to one core, and to one each."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        return []
    free = os.sched_getaffinity(0)
    first, second, *_ = sorted(free)
    places = [peer.make(Place) for peer in found]

    def on(lane: Lane, cores: Sequence[int]) -> Values:
        for place, core in zip(places, cores, strict=True):
            place.call("stay", {core})
        try:
            return lane.run()
        finally:
            for place in places:
                place.call("stay", free)

    layouts = {"one core": (first, first), "two cores": (first, second)}
    return [
        Lane(f"{lane.name}, {name}", partial(on, lane, cores), []) for name, cores in layouts.items() for lane in lanes
    ]


def round_trips(name: str, server: End, clients: Sequence[End], seconds: float, keep: Any = None) -> Lane:
    """A lane on which all ``clients`` ask for some seconds."""
    over = Doorbell()

    def run() -> Values:
        start = time.monotonic() + _LEAD
        for client in clients:
            client.tell("ask", start, start + seconds)
        server.tell("serve", over)
        answers = [client.hear() for client in clients]
        over.ring()  # not before all were answered
        times = np.concatenate([found for found, _ in answers]) * 1e6
        processor = server.hear() + sum(used for _, used in answers)
        p50, p99 = np.percentile(times, [50, 99])
        rate = len(times) / seconds
        return {"p50_us": float(p50), "p99_us": float(p99), "requests/s": rate, "cpu_us": processor / len(times) * 1e6}

    return Lane(name, run, [*clients, server], keep)


def inference_lanes(found: list[Peer], rows: int, clients: int, seconds: float, folder: Path) -> list[Lane]:
    """All ways for the first ``clients`` processes after the first to be answered by the first."""
    spec = spec_of(rows)
    host, guests = found[0], list(enumerate(found[1 : clients + 1]))
    bells = [Doorbell() for _ in guests]
    board = InferenceBoard(Slab(spec, clients, shared=True), bells, 1, shared=True)
    network = TcpInference(f"inference/{rows}/{clients}", FileNames(folder), spec, clients, 1)

    def ours(name: str, stream: InferenceStream) -> Lane:
        server = host.make(StreamAnswerer, stream, spec, clients)
        askers = [guest.make(StreamAsker, stream, i, spec) for i, guest in guests]
        return round_trips(name, server, askers, seconds, (stream, bells))

    pair = Doorbell(), Doorbell()
    rung = host.make(BellAnswerer, *pair), [found[1].make(BellAsker, *reversed(pair))]
    router = host.make(ZmqAnswerer, spec)
    dealers = [guest.make(ZmqAsker, router.call("endpoint"), spec) for _, guest in guests]
    waiter = host.make(QueueAnswerer, spec, Inbox(0), *(Inbox(i + 1) for i, _ in guests))
    callers = [guest.make(QueueAsker, Inbox(0), Inbox(i + 1), i, spec) for i, guest in guests]
    local = [round_trips("doorbell", *rung, seconds, pair), ours("shm", board)]
    return [
        *local,
        *(bound(local, found[:2]) if (rows, clients) == (1, 1) else ()),
        round_trips("ZeroMQ", router, dealers, seconds),
        ours("tcp", network),
        round_trips("mp.Queue", waiter, callers, seconds),
    ]
