"""What workers know of streams: two small protocols for samples, two for inference, two for parameters.

An actor, per policy and per vector of its ring::

    grant = samples.acquire()                # a block to fill, or None: not admitted yet
    inference.submit(step, grant.version)    # "there is an observation in this step of this block"
    inference.ready()                        # actions, log-probs and values are in the block now
    samples.commit(grant.block)              # the block is full

A trainer::

    samples.grant(capacity, version)         # admission: nothing is started that was not granted
    blocks = samples.take(n)                 # n full blocks, or None
    samples.release(blocks)                  # trained; the memory may be written again

Every endpoint has ``pollable()``, something :func:`srl.streams.wait.wait` can sleep on, and no call blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from srl.core.slab import Slab
from srl.core.specs import Array, Arrays
from srl.core.worker import State


class Grant(NamedTuple):
    """Leave to fill one block with samples of policy version ``version`` or newer."""

    block: int
    version: int


class Full(NamedTuple):
    """A full block. (producer, incarnation, sequence) names it uniquely for the whole run."""

    block: int
    producer: int
    incarnation: int
    sequence: int


class SampleProducer(Protocol):
    """The actor's end of a sample stream. Blocks are filled in place in ``slab``."""

    slab: Slab

    def acquire(self) -> Grant | None:
        """A block to fill, or None while none is granted. Raises StreamClosed when there will be none."""

    def commit(self, block: int) -> None:
        """The block is full: hand it over."""

    def pollable(self) -> Any:
        """Readable when :meth:`acquire` may have something new."""

    def close(self) -> None:
        """Give everything back."""


class SampleConsumer(Protocol):
    """The trainer's (or buffer's) end of a sample stream."""

    slab: Slab

    def grant(self, count: int, version: int) -> int:
        """Let producers start up to ``count`` blocks; the number really granted (free memory bounds it)."""

    def take(self, count: int, wake: int = 0) -> list[Full] | None:
        """The ``count`` oldest full blocks, or None while there are fewer.

        Who gets None is not woken before there are ``count``, or ``wake`` if that is more; who gets some, not before
        there is the rest of ``wake``, or as many again.
        """

    def release(self, blocks: Sequence[Full]) -> None:
        """These blocks may be written again."""

    def free(self) -> list[int]:
        """Blocks that nobody has."""

    def hold(self, blocks: Sequence[int]) -> list[Full]:
        """Take free blocks as if they had come full, for contents restored from elsewhere."""

    def state(self) -> State:
        """What an exact resume needs: full blocks that wait, and how much was granted to whom."""

    def load_state(self, state: State, version: int) -> None:
        """Go on where ``state`` was taken, before anything is granted."""

    def levels(self) -> tuple[int, int]:
        """(blocks being filled, full blocks waiting)."""

    def pollable(self) -> Any:
        """Readable when :meth:`take` may have something new."""

    def close(self) -> None:
        """No more samples are wanted: producers get StreamClosed."""


class InferenceClient(Protocol):
    """The end of an inference stream for one vector of an actor's ring: one request at a time."""

    def submit(self, step: int, version: int) -> None:
        """Ask for actions for one (block, step) of the slab from a policy of at least ``version``."""

    def ready(self) -> bool:
        """True once the outputs of the last request are in the slab; may do the work that takes."""

    def waiting(self) -> bool:
        """True while a request is open. Does nothing else, unlike :meth:`ready`."""

    def ended(self, rows: Array, returns: Array) -> None:
        """The episodes of these rows have ended with these returns, before the next request."""

    def pollable(self) -> Any:
        """Readable when :meth:`ready` may have changed; None if submit answers at once."""

    def close(self) -> None:
        """Leave the stream."""


@dataclass
class Requests:
    """Pending requests as one batch: ``obs`` fields are ``[requests * rows, …]``."""

    clients: Array
    sequences: Array
    steps: Array
    marks: Array
    """What each request's step is to a policy with memory: PLAIN, KEEP or PEEK."""
    version: int
    obs: Arrays


class InferenceServer(Protocol):
    """The policy worker's end of an inference stream."""

    def take(self) -> Requests | None:
        """Everything pending, as one batch; None if nothing is."""

    def reply(self, requests: Requests, outputs: Arrays, version: int) -> None:
        """Write ``outputs`` (``[requests * rows, …]``) where the requests said and wake their senders."""

    def pollable(self) -> Any:
        """Readable when :meth:`take` may have something new."""

    def close(self) -> None:
        """Leave the stream."""


class SampleStream(Protocol):
    """A sample stream as the graph knows it; workers open their ends in their own process."""

    def producer(self, index: int, incarnation: int) -> SampleProducer:
        """The end of producer ``index``; ``incarnation`` is new with every start of its worker."""

    def consumer(self) -> SampleConsumer:
        """The consumer's end."""


class InferenceStream(Protocol):
    """An inference stream as the graph knows it."""

    def client(self, index: int, slab: Slab, incarnation: int) -> InferenceClient:
        """The end of client slot ``index``, whose observations lie in ``slab``."""

    def server(self, index: int) -> InferenceServer:
        """The end of policy worker ``index``."""


class ParameterStream(Protocol):
    """A parameter stream as the graph knows it."""

    def writer(self) -> ParameterWriter:
        """The trainer's end."""

    def reader(self) -> ParameterReader:
        """The end of any other worker."""


class ParameterWriter(Protocol):
    """The trainer's end of a parameter stream."""

    @property
    def version(self) -> int:
        """The newest version published so far (-1: none)."""

    def publish(self, arrays: Arrays, version: int) -> None:
        """Make ``arrays`` visible as ``version``; versions only grow."""

    def close(self) -> None:
        """Leave the stream."""


class ParameterReader(Protocol):
    """Any other worker's end of a parameter stream."""

    def newest(self) -> int:
        """The newest version there is (-1: none yet). Costs one read of an integer."""

    def read(self, like: Arrays, load: Callable[[Arrays], None]) -> int:
        """Call ``load`` with the newest arrays (laid out as ``like``) until it saw them whole; their version."""

    def pollable(self) -> Any:
        """Readable when :meth:`newest` may have changed; None where there is no way to tell."""

    def close(self) -> None:
        """Leave the stream."""
