"""The sample stream within one host: blocks in a slab, and a board of indices that says whose they are.

The consumer owns the free list. It *grants* blocks to producers (that is admission and back-pressure in one),
producers fill granted blocks in place and *commit* them, the consumer takes them and later releases them::

    FREE --grant--> GRANTED --commit--> FULL --take--> HELD --release--> FREE

(OFFERED is a block in the middle of being granted.)

The board is a few integer arrays. Each is written by one side only and there is no lock, so a process killed at
any instruction leaves nothing locked: a new producer raises its *epoch*, the consumer takes back what the old
epoch had not committed; a new consumer finds every block's state on the board. In private memory this is the
``inline`` transport, in shared memory it is ``shm``; remote producers reach a board through ``tcp_samples``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, Never

import numpy as np

from srl.core.errors import StreamClosed, StreamError
from srl.core.memory import Doorbell, Segment
from srl.core.slab import BlockSpec, Layout, Slab
from srl.core.specs import Array
from srl.core.worker import State
from srl.streams.protocols import Full, Grant

FREE, OFFERED, GRANTED, FULL, HELD = range(5)
_AHEAD = 2
"""Blocks that a producer may always have: the one it fills and the next."""
_MOST = 64
"""Blocks, if not four times its share, that a producer may have at most: the board has places for as many."""


class SampleBoard:
    """A slab and the state of its blocks, for ``producers`` producers and one consumer."""

    def __init__(self, spec: BlockSpec, blocks: int, bells: Sequence[Doorbell], *, shared: bool) -> None:
        """``bells`` has one doorbell per producer (several producers of one worker may share theirs)."""
        self.producers = len(bells)
        self.most = min(blocks, max(_MOST, 4 * -(-blocks // self.producers)))
        self.slab = Slab(spec, blocks, shared=shared)
        self.consumer_bell = Doorbell()
        self.bells = list(bells)
        self.segment = Segment(self._layout().nbytes, shared=shared)
        self._map()

    def _layout(self) -> Layout:
        producers, ring = self.producers, 2 * self.most
        integers: dict[str, tuple[int, ...]] = {
            "closed": (1,),
            "wake": (1,),  # commits of all producers together from which on they ring, written by the consumer
            "epoch": (producers,),  # written by the producer: how often it has come and gone
            "present": (producers,),
            "grants": (producers, ring, 3),  # (block, epoch, version), written by the consumer
            "granted": (producers,),
            "accepted": (producers,),  # how many grants the producer has seen
            "fulls": (producers, ring, 3),  # (block, incarnation, sequence), written by the producer
            "committed": (producers,),
            "collected": (producers,),  # how many commits the consumer has seen
            "state": (self.slab.blocks,),
            "owner": (self.slab.blocks,),  # producer a block was last granted to, and in which of its epochs
            "owner_epoch": (self.slab.blocks,),
        }
        return Layout.of({name: (shape, "<i8") for name, shape in integers.items()})

    def _map(self) -> None:
        views = self._layout().views(self.segment)
        self.closed, self.wake = views["closed"], views["wake"]
        self.epoch, self.present = views["epoch"], views["present"]
        self.grants, self.granted, self.accepted = views["grants"], views["granted"], views["accepted"]
        self.fulls, self.committed, self.collected = views["fulls"], views["committed"], views["collected"]
        self.state, self.owner, self.owner_epoch = views["state"], views["owner"], views["owner_epoch"]
        self.ring: int = self.grants.shape[1]

    def producer(self, index: int, incarnation: int) -> BoardProducer:
        """See :class:`~srl.streams.protocols.SampleStream`."""
        return BoardProducer(self, index, incarnation)

    def consumer(self) -> BoardConsumer:
        """See :class:`~srl.streams.protocols.SampleStream`."""
        return BoardConsumer(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("producers", "most", "slab", "consumer_bell", "bells", "segment")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


class BoardProducer:
    """One producer's end of a :class:`SampleBoard`."""

    def __init__(self, board: SampleBoard, index: int, incarnation: int) -> None:
        self.board, self.index, self.incarnation = board, index, incarnation
        self.slab = board.slab
        self._sequence, self._ring = 0, board.ring
        self._open: set[int] = set()
        # Single integers are read and written in half the time where numpy has no part in it.
        self._closed, self._wake, self._epochs = board.closed.data, board.wake.data, board.epoch.data
        self._granted, self._accepted, self._committed = board.granted.data, board.accepted.data, board.committed.data
        self._grants, self._fulls = (each[index].reshape(-1).data for each in (board.grants, board.fulls))
        board.accepted[index] = board.granted[index]
        board.epoch[index] += 1
        board.present[index] = 1
        self._epoch = int(board.epoch[index])
        board.consumer_bell.ring()

    def acquire(self) -> Grant | None:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        me = self.index
        if self._closed[0] or self._epochs[me] != self._epoch:
            self._refuse()
        while (accepted := self._accepted[me]) < self._granted[me]:
            at, grants = accepted % self._ring * 3, self._grants
            block, epoch, version = grants[at], grants[at + 1], grants[at + 2]
            self._accepted[me] = accepted + 1
            if epoch == self._epoch:
                self._open.add(block)
                return Grant(block, version)
        return None

    def commit(self, block: int, sequence: int | None = None) -> None:
        """See :class:`~srl.streams.protocols.SampleProducer`; who numbers blocks itself gives their ``sequence``."""
        me, fulls, committed = self.index, self._fulls, self._committed
        if self._closed[0] or self._epochs[me] != self._epoch:
            self._refuse()
        if block not in self._open:
            raise StreamError(f"block {block} was not granted to producer {me}")
        self._open.remove(block)
        number = self._sequence if sequence is None else sequence
        before = committed[me]
        at = before % self._ring * 3
        fulls[at], fulls[at + 1], fulls[at + 2] = block, self.incarnation, number
        self._sequence = number + 1
        committed[me] = before + 1
        if sum(committed) >= self._wake[0]:
            self.board.consumer_bell.ring()

    def _refuse(self) -> Never:
        if self._closed[0]:
            raise StreamClosed("the consumer has closed the sample stream")
        raise StreamClosed(f"another worker has taken the place of producer {self.index}")

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.SampleProducer`."""
        return self.board.bells[self.index]

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.SampleProducer`: a new epoch gives all blocks back."""
        if self.board.epoch[self.index] != self._epoch:
            return
        self.board.present[self.index] = 0
        self.board.epoch[self.index] += 1
        self.board.consumer_bell.ring()


class _Free:
    """Free blocks. Who had one before gets it again: what it has mapped of the slab stays small."""

    def __init__(self, blocks: Array, owners: Array) -> None:
        """``owners`` had these blocks last. A replay has many thousands, of which few are ever asked for."""
        self.count = len(blocks)
        self._blocks, self._owners = blocks, owners
        self._all = iter(blocks)
        self._by_owner: dict[int, Iterator[Any]] = {}
        self._gone: set[int] = set()

    def take(self, producer: int) -> int:
        """One for ``producer``."""
        self.count -= 1
        if producer not in self._by_owner:
            self._by_owner[producer] = iter(self._blocks[self._owners == producer][::-1])
        block = next(each for each in chain(self._by_owner[producer], self._all) if each not in self._gone)
        self._gone.add(block)
        return int(block)


class BoardConsumer:
    """The consumer's end of a :class:`SampleBoard`."""

    def __init__(self, board: SampleBoard) -> None:
        self.board, self.slab = board, board.slab
        self.reclaimed = 0
        self._ready: deque[Full] = deque()
        self._epochs: list[int] = []  # when it was last looked for blocks whose producer is gone
        board.closed[0] = board.wake[0] = 0
        # What an earlier consumer held or had collected is not trained again: its outcome is unknown.
        board.state[(board.state == HELD) | (board.state == FULL)] = FREE
        for block in np.flatnonzero(board.state == OFFERED).tolist():  # it died in the middle of granting this one
            owner = int(board.owner[block])
            told = board.granted[owner] and board.grants[owner, (board.granted[owner] - 1) % board.ring, 0] == block
            board.state[block] = GRANTED if told else FREE

    def grant(self, count: int, version: int) -> int:
        """See :class:`~srl.streams.protocols.SampleConsumer`; next is who fills fewest blocks, then who got fewest."""
        board = self.board
        self._collect()
        epochs = board.epoch.tolist()  # read before `present`: who leaves meanwhile gets a grant of a past epoch
        present = board.present.tolist()
        filling = np.bincount(board.owner[board.state == GRANTED], minlength=board.producers).tolist()
        share = self._share(present, epochs)
        granted = board.granted.tolist()
        heap = [(n, granted[each], each) for each, n in enumerate(filling) if present[each] and n < share]
        heapify(heap)
        blocks = np.flatnonzero(board.state == FREE)
        free = _Free(blocks, board.owner[blocks])
        given: list[int] = []
        while heap and free.count and len(given) < count:
            fills, got, producer = heappop(heap)
            self._give(free.take(producer), producer, epochs[producer], version)
            given.append(producer)
            if fills + 1 < share:
                heappush(heap, (fills + 1, got + 1, producer))
        for bell in {board.bells[producer] for producer in given}:
            bell.ring()
        return len(given)

    def _share(self, present: list[int], epochs: list[int]) -> int:
        """How many blocks one producer may have: who is there first leaves theirs to those who are still to come."""
        board = self.board
        expected = sum(1 for here, epoch in zip(present, epochs, strict=True) if here or not epoch)
        return min(max(_AHEAD, -(-board.slab.blocks // max(expected, 1))), board.most)

    def take(self, count: int, wake: int = 0) -> list[Full] | None:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        self._collect()
        board, ready = self.board, self._ready
        taken = [ready.popleft() for _ in range(count)] if len(ready) >= count else None
        for full in taken or ():
            board.state[full.block] = HELD
        # After some of a batch its rest is wanted, after a whole one as many again: nobody rings before that.
        wanted = max(wake, count) if taken is None else wake - count if wake > count else count
        due = sum(board.collected.tolist()) - len(ready) + wanted
        if due < board.wake[0]:  # who commits meanwhile goes by what was agreed before: look once more before sleeping
            board.consumer_bell.ring()
        board.wake[0] = due
        return taken

    def release(self, blocks: Sequence[Full]) -> None:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        for full in blocks:
            self.board.state[full.block] = FREE

    def free(self) -> list[int]:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        found: list[int] = np.flatnonzero(self.board.state == FREE).tolist()
        return found

    def hold(self, blocks: Sequence[int]) -> list[Full]:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        self.board.state[list(blocks)] = HELD
        return [Full(block, -1, 0, block) for block in blocks]

    def levels(self) -> tuple[int, int]:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        self._collect()
        return int(np.count_nonzero(self.board.state == GRANTED)), len(self._ready)

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        return self.board.consumer_bell

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.SampleConsumer`."""
        self.board.closed[0] = 1
        for bell in self.board.bells:
            bell.ring()

    def state(self) -> State:
        """The full blocks that wait, and who was granted how much: what an exact resume needs."""
        self._collect()
        filling = np.bincount(self.board.owner[self.board.state == GRANTED], minlength=self.board.producers)
        whole = State({"granted": self.board.granted.copy(), "filling": filling})
        for place, full in enumerate(self._ready):
            content = {name: array.copy() for name, array in self.slab.block(full.block).items()}
            whole.put(f"full/{place}", State(content))
        return whole

    def load_state(self, state: State, version: int) -> None:
        """Go on where ``state`` was taken: all producers are there and nothing has been granted yet."""
        board = self.board
        waiting = state.under("full")
        for place in range(len({name.split("/")[0] for name in waiting.arrays})):
            for name, value in waiting.under(str(place)).arrays.items():
                self.slab.arrays[name][place] = value
            board.state[place] = FULL
            self._ready.append(Full(place, -1, 0, place))
        filling = state.arrays["filling"]
        board.granted[:] = board.accepted[:] = state.arrays["granted"] - filling
        free = iter(np.flatnonzero(board.state == FREE).tolist())
        for producer in np.repeat(np.arange(board.producers), filling).tolist():
            self._give(next(free), producer, int(board.epoch[producer]), version)

    def _give(self, block: int, producer: int, epoch: int, version: int) -> None:
        board = self.board
        board.owner[block], board.owner_epoch[block], board.state[block] = producer, epoch, OFFERED
        board.grants[producer, board.granted[producer] % board.ring] = (block, epoch, version)
        board.granted[producer] += 1
        board.state[block] = GRANTED

    def _collect(self) -> None:
        """Take notice of commits, then of producers that started anew or left."""
        board = self.board
        epochs = board.epoch.tolist()  # read before the commits, so that none of an old epoch is missed
        counts = zip(board.committed.tolist(), board.collected.tolist(), strict=True)
        for producer, (committed, collected) in enumerate(counts):
            for entry in range(collected, committed):
                block, incarnation, sequence = board.fulls[producer, entry % board.ring].tolist()
                board.state[block] = FULL
                self._ready.append(Full(block, producer, incarnation, sequence))
                board.collected[producer] = entry + 1
        if epochs != self._epochs:
            self._epochs = epochs
            lost = (board.state == GRANTED) & (board.owner_epoch != np.asarray(epochs)[board.owner])
            self.reclaimed += int(np.count_nonzero(lost))
            board.state[lost] = FREE
