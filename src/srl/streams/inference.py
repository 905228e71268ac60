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
from srl.core.slab import Layout, Slab
from srl.core.specs import Arrays
from srl.streams.protocols import Requests

Act = Callable[[Arrays, int], tuple[Arrays, int] | None]
"""(observations ``[rows, …]``, least version) -> (outputs ``[rows, …]``, version used), None: no such version yet"""


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

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        return self.board.bells[self.index]

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""


class BoardServer:
    """Policy worker ``index``'s end: it serves every ``servers``-th client slot."""

    def __init__(self, board: InferenceBoard, index: int) -> None:
        self.board, self.index = board, index
        self._mine = np.arange(index, len(board.bells), len(board.server_bells))

    def take(self) -> Requests | None:
        """See :class:`~srl.streams.protocols.InferenceServer`."""
        board, mine = self.board, self._mine
        asked = board.asked[mine]
        pending = asked != board.answered[mine]
        if not pending.any():
            return None
        clients = mine[pending]
        steps = board.step[clients]
        obs = {name: read_rows(board.slab.steps[name], steps) for name in board.slab.spec.observations}
        return Requests(clients, asked[pending], steps, int(board.version[clients].max()), obs)

    def reply(self, requests: Requests, outputs: Arrays, version: int) -> None:
        """See :class:`~srl.streams.protocols.InferenceServer`."""
        board = self.board
        write_rows(board.slab, requests.steps, outputs, version)
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

    def __init__(self, slab: Slab, act: Act, pollable: Any) -> None:
        self.slab, self._act, self._pollable = slab, act, pollable
        self._pending: tuple[int, int] | None = None

    def submit(self, step: int, version: int) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        self._pending = step, version

    def ready(self) -> bool:
        """See :class:`~srl.streams.protocols.InferenceClient`: answers now, unless the weights are yet to come."""
        if self._pending is None:
            return True
        step, version = self._pending
        answer = self._act({name: self.slab.steps[name][step] for name in self.slab.spec.observations}, version)
        if answer is None:
            return False
        outputs, used = answer
        for name, value in outputs.items():
            self.slab.steps[name][step] = value
        self.slab.steps["version"][step] = used
        self._pending = None
        return True

    def waiting(self) -> bool:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        return self._pending is not None

    def pollable(self) -> Any:
        """See :class:`~srl.streams.protocols.InferenceClient`."""
        return self._pollable

    def close(self) -> None:
        """See :class:`~srl.streams.protocols.InferenceClient`."""


def read_rows(field: Any, steps: Any) -> Any:
    """The rows of some (block, step) entries as one array; a view if there is only one entry."""
    if len(steps) == 1:
        return field[steps[0]]
    return field[steps].reshape(-1, *field.shape[2:])


def write_rows(slab: Slab, steps: Any, outputs: Arrays, version: int) -> None:
    """Write ``outputs`` (``[len(steps) * rows, …]``) and the version beside the observations."""
    for name, value in outputs.items():
        field = slab.steps[name]
        field[steps] = value.reshape(len(steps), *field.shape[1:])
    slab.steps["version"][steps] = version
