"""The inference stream within one host: requests are (block, step) indices on a board.

A request says where in a slab the observation lies; the reply is written beside it. Every client slot has one
pair of counters, ``asked`` and ``answered``, each written by one side only. A policy worker serves everything
pending as one batch; killed and started again it finds the same requests still pending. With ``inline``
inference the policy sits in the actor and :class:`LocalInference` asks it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from srl.core.memory import Doorbell, Segment
from srl.core.slab import KEEP, BlockSpec, Layout, Slab
from srl.core.specs import Array, Arrays
from srl.streams.protocols import Requests

Act = Callable[[Arrays, int, int], tuple[Arrays, Any] | None]
"""(inputs ``[rows, …]``, what the step is, least version) -> (outputs, version used), None: no such version yet"""


def mark(spec: BlockSpec, step: Any) -> Any:
    """What the (block, step) entry or entries ``step`` are to a policy with memory."""
    return spec.kinds[step % (spec.horizon + 1)]


class InferenceBoard:
    """Requests of ``len(bells)`` client slots on one slab, to be served by ``servers`` policy workers."""

    def __init__(self, slab: Slab, bells: Sequence[Doorbell], servers: int, *, shared: bool) -> None:
        self.slab, self.bells = slab, list(bells)
        self.server_bells = [Doorbell() for _ in range(servers)]
        self.segment = Segment(self._layout().nbytes, shared=shared)
        self._map()

    def _layout(self) -> Layout:
        names = ("asked", "answered", "step", "version")
        return Layout.of({name: ((len(self.bells),), "<i8") for name in names})

    def _map(self) -> None:
        views = self._layout().views(self.segment)
        self.asked, self.answered = views["asked"], views["answered"]
        self.step, self.version = views["step"], views["version"]

    def client(self, index: int, slab: Slab, incarnation: int) -> BoardClient:
        """See :class:`~srl.streams.protocols.InferenceStream`; ``slab`` is the board's own."""
        return BoardClient(self, index)

    def server(self, index: int) -> BoardServer:
        """See :class:`~srl.streams.protocols.InferenceStream`."""
        return BoardServer(self, index)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("slab", "bells", "server_bells", "segment")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


class BoardClient:
    """The end of client slot ``index``."""

    def __init__(self, board: InferenceBoard, index: int) -> None:
        self.board, self.index = board, index
        board.answered[index] = board.asked[index]  # what a former owner of the slot asked is not wanted any more

    def submit(self, step: int, version: int) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        board, client = self.board, self.index
        board.step[client], board.version[client] = step, version
        board.asked[client] += 1
        board.server_bells[client % len(board.server_bells)].ring()

    def ready(self) -> bool:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        return bool(self.board.answered[self.index] == self.board.asked[self.index])

    def waiting(self) -> bool:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        return not self.ready()

    def ended(self, rows: Array, returns: Array) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        return self.board.bells[self.index]

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""


class BoardServer:
    """Policy worker ``index``'s end: it serves every ``servers``-th client slot."""

    def __init__(self, board: InferenceBoard, index: int) -> None:
        self.board, self.index = board, index
        mine = slice(index, None, len(board.server_bells))
        self._mine = np.arange(len(board.bells))[mine]
        self._asked, self._answered = board.asked[mine], board.answered[mine]

    def take(self) -> Requests | None:
        """See :class:`~srl.streams.protocols.InferenceServer`."""
        board = self.board
        pending = (self._asked != self._answered).nonzero()[0]
        if not len(pending):
            return None
        asked, clients = self._asked[pending], self._mine[pending]  # read before the steps, which are written before
        steps = board.step[clients]
        obs = {name: read_rows(board.slab.steps[name], steps) for name in board.slab.spec.inputs}
        marks = mark(board.slab.spec, steps)
        return Requests(clients, asked, steps, marks, int(board.version[clients].max()), obs)

    def reply(self, requests: Requests, outputs: Arrays, version: int) -> None:
        """See :class:`~srl.streams.protocols.InferenceServer`."""
        board = self.board
        write_rows(board.slab, requests.steps, outputs, version)
        write_states(board.slab, requests, outputs)
        board.answered[requests.clients] = requests.sequences
        for bell in {board.bells[client] for client in requests.clients.tolist()}:
            bell.ring()

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.InferenceServer`."""
        return self.board.server_bells[self.index]

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.InferenceServer`."""


class LocalInference:
    """Inline inference: the policy sits in the actor and works on views of the block itself."""

    def __init__(
        self,
        slab: Slab,
        act: Act,
        pollable: Callable[[], Any] = lambda: None,
        ended: Callable[[Array, Array], None] = lambda *_: None,
    ) -> None:
        """``pollable`` says what to wait for while the weights are yet to come."""
        self.slab, self._act, self._pollable, self._ended = slab, act, pollable, ended
        self._pending: tuple[int, int] | None = None

    def submit(self, step: int, version: int) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        self._pending = step, version

    def ready(self) -> bool:
        """See :class:`~srl.streams.protocols.InferenceClient`: answers now, unless the weights are yet to come."""
        if self._pending is None:
            return True
        step, version = self._pending
        kind = int(mark(self.slab.spec, step))
        answer = self._act({name: self.slab.steps[name][step] for name in self.slab.spec.inputs}, kind, version)
        if answer is None:
            return False
        write_step(self.slab, step, kind, *answer)
        self._pending = None
        return True

    def waiting(self) -> bool:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        return self._pending is not None

    def ended(self, rows: Array, returns: Array) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        self._ended(rows, returns)

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        return self._pollable()

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""


def read_rows(field: Any, steps: Any) -> Any:
    """The rows of some (block, step) entries as one array; a view if there is only one entry."""
    if len(steps) == 1:
        return field[steps[0]]
    return field[steps].reshape(-1, *field.shape[2:])


def write_rows(slab: Slab, steps: Any, outputs: Arrays, version: int) -> None:
    """Write ``outputs`` (``[len(steps) * rows, …]``) and the version beside the observations."""
    one = len(steps) == 1  # a number as an index takes a quarter of the time that an array of one takes
    for name, field in slab.steps.items():
        if name in outputs:
            found = outputs[name]
            field[steps[0] if one else steps] = found if one else found.reshape(len(steps), *field.shape[1:])
    slab.steps["version"][steps[0] if one else steps] = version


def write_states(slab: Slab, requests: Requests, outputs: Arrays) -> None:
    """Write the memory the policy had where a chunk begins."""
    for name in slab.spec.state:
        if not (requests.marks == KEEP).any():
            return
        parts = outputs[name].reshape(len(requests.steps), *slab.arrays[name].shape[2:])
        for i in np.flatnonzero(requests.marks == KEEP).tolist():
            state_at(slab, name, int(requests.steps[i]))[...] = parts[i]


def write_step(slab: Slab, step: int, kind: int, outputs: Arrays, version: Any) -> None:
    """Write the ``outputs`` (``[rows, …]``) of one request."""
    fields = slab.steps
    for name in slab.spec.outputs:
        if name in outputs:
            fields[name][step] = outputs[name]
    fields["version"][step] = version
    for name in slab.spec.state if kind == KEEP else ():
        state_at(slab, name, step)[...] = outputs[name]


def state_at(slab: Slab, name: str, step: int) -> Array:
    """Where a block keeps the memory of the chunk that begins at (block, step) entry ``step``."""
    block, place = divmod(step, slab.spec.horizon + 1)
    found: Array = slab.arrays[name][block, place // slab.spec.chunk]
    return found
