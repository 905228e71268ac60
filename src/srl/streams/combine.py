"""Sample streams made of others: none at all, and several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from srl.core.errors import ConfigError
from srl.core.slab import BlockSpec, Slab
from srl.streams.protocols import Grant, SampleConsumer, SampleProducer, SampleStream


class NullSamples:
    """Takes every block and forgets it: for agents whose samples nobody trains on."""

    def __init__(self, spec: BlockSpec, producers: int, *, shared: bool) -> None:
        self.slab = Slab(spec, producers, shared=shared)

    def producer(self, index: int, incarnation: int) -> NullProducer:
        """See :class:`~srl.streams.protocols.SampleStream`."""
        return NullProducer(self.slab, index)

    def consumer(self) -> SampleConsumer:
        """There is none."""
        raise ConfigError("nobody can train on a null stream")


class NullProducer:
    """Fills one block over and over."""

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab, self._block = slab, index

    def acquire(self) -> Grant | None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        return Grant(self._block, 0)

    def commit(self, block: int) -> None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        return None

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""


class TeeSamples:
    """Gives every block to each of several streams. It is filled in the first; the others get a copy.

    Only if the first stream is the acting policy's ``own`` do its versions mean something to that policy.
    """

    def __init__(self, streams: Sequence[SampleStream], *, own: bool = True) -> None:
        self.streams, self.own = streams, own

    def producer(self, index: int, incarnation: int) -> TeeProducer:
        """See :class:`~srl.streams.protocols.SampleStream`."""
        return TeeProducer([stream.producer(index, incarnation) for stream in self.streams], own=self.own)

    def consumer(self) -> SampleConsumer:
        """There is none."""
        raise ConfigError("each of the streams behind a tee has a consumer of its own")


class TeeProducer:
    """Has leave to fill a block once every stream has given it."""

    def __init__(self, producers: Sequence[SampleProducer], *, own: bool = True) -> None:
        self.producers, self.own = producers, own
        self.slab = producers[0].slab
        self._given: list[Grant | None] = [None] * len(producers)

    def acquire(self) -> Grant | None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        for i, producer in enumerate(self.producers):
            if self._given[i] is None:
                self._given[i] = producer.acquire()
        if any(grant is None for grant in self._given):
            return None
        first = self._given[0]
        assert first is not None
        return first if self.own else Grant(first.block, 0)

    def commit(self, block: int) -> None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        source = self.slab.block(block)
        for producer, grant in zip(self.producers, self._given, strict=True):
            assert grant is not None
            if producer is not self.producers[0]:
                for name, target in producer.slab.block(grant.block).items():
                    target[...] = source[name]
            producer.commit(grant.block)
        self._given = [None] * len(self.producers)

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.SampleProducer`: of the stream that has not given leave yet."""
        missing = (p for p, grant in zip(self.producers, self._given, strict=True) if grant is None)
        return next(missing, self.producers[0]).pollable()

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        for producer in self.producers:
            producer.close()
