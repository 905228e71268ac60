"""How fast blocks travel from an actor to a trainer.

What is timed, from the arrival of one block to the arrival of another many blocks later:

``shm``           The producer is granted a block, copies the arrays of an environment into its fields (that is the one
                  copy), and commits it. The consumer is woken when a batch is there, takes it as a ``Batch`` of views,
                  reads a word of each block, releases all and grants others, as a trainer does.
``shm + gather``  The same, and the consumer also gathers all that a PPO trainer wants of the batch into new tensors, in
                  shuffled minibatches of 256 as the trainer does. Producer and consumer overlap.
``memcpy``        ``np.copyto`` of as many bytes in one piece, in the producer's process, in turn into as many places of
                  shared memory as the slab has blocks, so that it finds what the producer finds.
``memcpy, own``   The same into memory of the process's own, which has large pages where numpy asks for them.
``memcpy, hot``   The same, always into the same place.
``tcp``           As ``shm``, with the consumer across a socket: one copy into the producer's block, one out of the
                  socket into the consumer's.
``ZeroMQ``        PUSH to PULL of as many bytes in one frame, always the same, sent from and received in place
                  (``copy=False``), in processes of their own.
``ZeroMQ, kept``  The same in our processes, where a consumer has had freed memory kept.
``ZeroMQ, anew``  PUSH as one calls it by default (``send(array)``): every message is written before it is sent, as it
                  must be where contents change, and as the producer of ``tcp`` does it.
``…, keys``       The same two, encrypted (CURVE), as between hosts.
``mp.Queue``      ``put`` and ``get`` of the fields as a dictionary of arrays.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from srl.bench.stream_peers import POLL, Clock, Held, Inbox, Lane, Peer, Queue, Values, listener, noise
from srl.core.memory import Doorbell, Segment
from srl.core.slab import STEP_FIELDS, Batch, BlockSpec
from srl.core.specs import Array, ArraySpec
from srl.services.names import FileNames
from srl.services.network import Keys, Network
from srl.streams.protocols import SampleStream
from srl.streams.samples import SampleBoard
from srl.streams.tcp_samples import TcpSamples
from srl.streams.wait import wait

BLOCKS, BATCH = 8, 4
"""Blocks of a slab, which are messages that may be under way, and of a batch: as for PPO with four actors."""
_STEPS = 16
_LARGE = 500_000
"""Blocks of at least as many bytes hold images, smaller ones vectors."""
_MINIBATCH = 256

Times = tuple[float, float]
"""Seconds and processor seconds per message."""


def block_of(nbytes: int) -> BlockSpec:
    """A block of PPO's fields with at least ``nbytes`` bytes, and not many more."""
    obs = ArraySpec((4, 84, 84), "|u1") if nbytes >= _LARGE else ArraySpec((32,), "<f4")
    scalars = {"action": "<i8", "log_prob": "<f4", "value": "<f4"}
    fields = {"obs": obs, **{name: ArraySpec((), dtype) for name, dtype in scalars.items()}, **STEP_FIELDS}
    row = sum(each.nbytes for each in fields.values())
    return BlockSpec(fields, _STEPS - 1, math.ceil(nbytes / row / _STEPS))


def size_of(spec: BlockSpec) -> int:
    """Bytes of a block's fields."""
    return sum(each.nbytes for each in spec.fields.values()) * _STEPS * spec.rows


def contents(spec: BlockSpec) -> dict[str, Any]:
    """What an environment and a policy have to put into a block."""
    found = {}
    for name, each in spec.fields.items():
        found[name] = (
            (noise(each.nbytes * _STEPS * spec.rows) & 1).view(each.dtype).reshape(_STEPS, spec.rows, *each.shape)
        )
    return found


class Timed(Held, ABC):
    """Handles messages one by one, and times them."""

    @abstractmethod
    def one(self) -> None:
        """Send or receive a message."""

    def timed(self, count: int, first: int) -> Times:
        """Handle ``count`` messages after the ``first`` few; the times per message."""
        for _ in range(first):
            self.one()
        clock = Clock()
        for _ in range(count):
            self.one()
        seconds, processor = clock.read()
        return seconds / count, processor / count


class Receiver(Timed):
    """Receives messages."""

    def receive(self, count: int) -> Times:
        """Receive ``count`` messages after the first few; the times per message."""
        return self.timed(count, BLOCKS)


class Sender(Timed):
    """Sends messages."""

    def send(self, count: int, first: int = BLOCKS) -> Times:
        """Send ``count`` messages after the first few; the times per message."""
        self.clock = Clock()
        return self.timed(count, first)

    def processor(self) -> float:
        """Processor time since sending began, that of threads that go on sending included."""
        return self.clock.read()[1]


class BlockSender(Sender):
    """An actor, as far as the sample stream sees it."""

    def __init__(self, stream: SampleStream, spec: BlockSpec) -> None:
        self.end = stream.producer(0, 1)
        self.source = contents(spec)
        self.places = [self._places(block) for block in range(self.end.slab.blocks)]  # an actor keeps them too
        self.number = 0

    def _places(self, block: int) -> list[tuple[Array, Array]]:
        fields = self.end.slab.block(block)
        return [(field, self.source[name]) for name, field in fields.items()]

    def one(self) -> None:
        """Fill a block and commit it."""
        self.number += 1
        self.source["version"][-1, -1] = self.number
        while (grant := self.end.acquire()) is None:
            wait([self.end.pollable()], POLL)
        for field, source in self.places[grant.block]:
            field[...] = source
        self.end.commit(grant.block)


class BlockReceiver(Receiver):
    """A trainer, as far as the sample stream sees it."""

    def __init__(self, stream: SampleStream, gather: bool) -> None:
        self.end = stream.consumer()
        self.gather, self.number, self.left = gather, 0, 0

    def one(self) -> None:
        """A block of a batch that is there, or of the next one."""
        if not self.left:
            self._batch()
            self.left = BATCH
        self.left -= 1

    def _batch(self) -> None:
        """Take a batch, look at it, release it, grant others."""
        while (taken := self.end.take(BATCH)) is None:
            if not wait([self.end.pollable()], POLL):
                self.end.grant(BLOCKS, 0)  # the producer was not there yet
        batch = Batch(self.end.slab, [full.block for full in taken])
        if self.gather:
            for _ in gathered(batch):
                pass
        for block in batch.blocks:
            self.number += 1
            assert self.end.slab.arrays["version"][block, -1, -1] == self.number, "a block was lost"
        self.end.release(taken)
        self.end.grant(BLOCKS, 0)


def gathered(batch: Batch) -> Iterator[dict[str, Any]]:
    """The batch in shuffled minibatches of tensors, as a PPO learner gathers them."""
    import torch

    torch.set_num_threads(1)
    flat = {name: torch.from_numpy(array) for name, array in batch.slab.flat.items()}
    spec, positions = batch.slab.spec, torch.from_numpy(batch.positions)
    wanted = [name for name in (*spec.inputs, *spec.outputs) if name != "value"]
    for part in torch.split(torch.randperm(len(positions)), _MINIBATCH):
        where = positions.index_select(0, part)
        yield {name: flat[name].index_select(0, where) for name in wanted}


class Memcpy(Sender):
    """Copies within one process."""

    def __init__(self, nbytes: int, places: int, shared: bool = False) -> None:
        self.source = noise(nbytes)
        self.targets = [np.ones_like(self.source) for _ in range(places)]
        if shared:
            self.segment = Segment(places * nbytes, shared=True)
            self.targets = [self.segment.array(i * nbytes, (nbytes,), "|u1") for i in range(places)]

    def one(self) -> None:
        """Copy once, to the place that was longest not written."""
        self.targets.append(self.targets.pop(0))
        np.copyto(self.targets[-1], self.source)


class ZmqSender(Sender):
    """PUSH of one frame."""

    def __init__(self, endpoint: str, nbytes: int, network: Network, anew: bool = False) -> None:
        self.anew = anew
        self.end = zmq.Context.instance().socket(zmq.PUSH)
        self.end.set_hwm(BLOCKS)
        network.protect_client(self.end)
        self.end.connect(endpoint)
        self.source = noise(nbytes)

    def one(self) -> None:
        """Send from where the bytes are, or from a copy that ZeroMQ makes."""
        self.end.send(self.source, copy=self.anew)


class ZmqReceiver(Receiver):
    """PULL of one frame."""

    def __init__(self, network: Network) -> None:
        self.end = listener(zmq.PULL, BLOCKS, network)

    def endpoint(self) -> str:
        """Where it listens."""
        found: str = self.end.getsockopt_string(zmq.LAST_ENDPOINT)
        return found

    def one(self) -> None:
        """Receive a frame."""
        assert len(self.end.recv(copy=False)) > 0


class QueueSender(Sender):
    """``multiprocessing.Queue.put``."""

    def __init__(self, queue: Queue, spec: BlockSpec) -> None:
        self.queue, self.source = queue, contents(spec)

    def one(self) -> None:
        """Put the fields of a block."""
        self.queue.put(self.source)


class QueueReceiver(Receiver):
    """``multiprocessing.Queue.get``."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def one(self) -> None:
        """Get the fields of a block."""
        assert len(self.queue.get()) > 1


def sample_lanes(found: list[Peer], nbytes: int, seconds: float, folder: Path) -> list[Lane]:
    """All ways to bring a block of about ``nbytes`` bytes from one process to another.

    Ours have two processes, yardsticks that are not ours two others: how ours keep memory would help those as well.
    """
    near, far, near_plain, far_plain = found[:4]
    spec = block_of(nbytes)
    size = size_of(spec)
    # At 2 GB/s and 100 µs a message: how many make about as many seconds as wanted.
    count = BATCH * max(6 // BATCH, int(seconds / (size / 2e9 + 1e-4) / BATCH))

    def shm(name: str, gather: bool) -> Lane:
        stream = SampleBoard(spec, BLOCKS, [Doorbell()], shared=True)
        return lane(name, far.make(BlockReceiver, stream, gather), near.make(BlockSender, stream, spec), stream)

    def lane(name: str, receiver: Any, sender: Any, keep: Any = None) -> Lane:
        def run() -> Values:
            receiver.tell("receive", count)
            sender.tell("send", count)
            (elapsed, theirs), _ = receiver.hear(), sender.hear()
            ours = sender.call("processor") / (count + BLOCKS)
            return {"GB/s": size / elapsed / 1e9, "sender_us": ours * 1e6, "receiver_us": theirs * 1e6}

        return Lane(name, run, [sender, receiver], keep)

    def copy(name: str, places: int, shared: bool = False) -> Lane:
        copier = near.make(Memcpy, size, places, shared)

        def run() -> Values:
            elapsed, processor = copier.call("send", count)
            return {"GB/s": size / elapsed / 1e9, "sender_us": processor * 1e6, "receiver_us": 0.0}

        return Lane(name, run, [copier])

    def tcp(name: str, network: Network) -> Lane:
        stream = TcpSamples(f"samples/{nbytes}/{name}", FileNames(folder, network), spec, BLOCKS, 1)
        return lane(name, far.make(BlockReceiver, stream, False), near.make(BlockSender, stream, spec))

    def raw(name: str, network: Network, ends: tuple[Peer, Peer] = (near_plain, far_plain), anew: bool = False) -> Lane:
        puller = ends[1].make(ZmqReceiver, network)
        return lane(name, puller, ends[0].make(ZmqSender, puller.call("endpoint"), size, network, anew))

    plain, sealed = Network(), Network(keys=Keys.make())
    queue = far_plain.make(QueueReceiver, Inbox(1)), near_plain.make(QueueSender, Inbox(1), spec)
    return [
        copy("memcpy, hot", 1),
        copy("memcpy, own", BLOCKS),
        copy("memcpy", BLOCKS, shared=True),
        shm("shm", gather=False),
        shm("shm + gather", gather=True),
        raw("ZeroMQ", plain),
        tcp("tcp", plain),
        raw("ZeroMQ, kept", plain, (near, far)),
        raw("ZeroMQ, anew", plain, anew=True),
        raw("ZeroMQ, keys", sealed),
        tcp("tcp, keys", sealed),
        lane("mp.Queue", *queue),
    ]
