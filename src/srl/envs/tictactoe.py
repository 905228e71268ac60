"""Tic-tac-toe as a native vector: all boards are one array, so self-play takes a minute.

It is also an example of an environment that is written for SRL: it gets the rows of every policy's agents and writes
observations, rewards and flags for all copies at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import gymnasium
import numpy as np

from srl.core.specs import Array, Arrays, Spaces
from srl.core.worker import State
from srl.envs.base import EnvConfig, Environment, Observed, StepViews

_LINES = np.array([(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)])
_SPACES = Spaces(gymnasium.spaces.Box(0, 1, (3, 3, 2), np.int8), gymnasium.spaces.Discrete(9), masked=True)
_CELL = 64


@dataclass(frozen=True)
class TicTacToe(EnvConfig):
    """Two agents in turn; who begins is drawn anew in every episode. 1 for a win, -1 for a loss, 0 for a draw."""

    roles: tuple[str, str] = ("learner", "opponent")

    def make(self, copies: int, *, render: bool = False) -> Boards:
        """See :class:`~srl.envs.base.EnvConfig`."""
        return Boards(self.roles, copies)


class Boards(Environment):
    """``copies`` boards of nine cells: 0 free, 1 taken by the first role, -1 by the second."""

    def __init__(self, roles: tuple[str, str], copies: int) -> None:
        super().__init__()
        self.agents, self.copies = tuple(roles), copies
        self.cells: Array = np.zeros((copies, 9), np.int8)
        self.turn: Array = np.zeros(copies, np.int64)  # which role moves
        self.over: Array = np.zeros(copies, bool)  # the next step is a reset
        self.rng = np.random.default_rng()
        self.places: list[tuple[int, Array]] = []

    def spaces(self, agent: str) -> Spaces:
        """See :class:`~srl.envs.base.Environment`."""
        return _SPACES

    def bind(self, groups: Sequence[Sequence[str]]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self.places = []
        for role in self.agents:
            group = next(g for g, names in enumerate(groups) if role in names)
            names = list(groups[group])
            self.places.append((group, np.arange(self.copies) * len(names) + names.index(role)))

    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self.rng = np.random.default_rng(seed)
        self.over[:] = True
        self._begin()
        self._look(out)

    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        playing, mover = ~self.over, self.turn.copy()
        (first, rows), (second, others) = self.places
        chosen = np.where(mover == 0, actions[first]["action"][rows], actions[second]["action"][others])
        self._begin()
        copies = np.flatnonzero(playing)
        self.cells[copies, chosen[copies]] = 1 - 2 * mover[copies]
        won = (np.abs(self.cells[:, _LINES].sum(-1)) == 3).any(-1) & playing
        self.over[:] = won | ((self.cells != 0).all(-1) & playing)
        self.turn[playing] = 1 - mover[playing]
        for role, (group, mine) in enumerate(self.places):
            views = out[group]
            views.reward[mine] = np.where(won, np.where(mover == role, 1, -1), 0)
            views.terminated[mine], views.truncated[mine] = self.over, False
        self._look([views.after for views in out])

    def _begin(self) -> None:
        """Clear the boards whose game is over."""
        self.cells[self.over] = 0
        self.turn[self.over] = self.rng.integers(2, size=int(self.over.sum()))

    def _look(self, out: Sequence[Observed]) -> None:
        """Show the board to whose turn it is."""
        taken = np.count_nonzero(self.cells, -1)
        for role, (group, mine) in enumerate(self.places):
            acts = ~self.over & (self.turn == role)
            seen = self.cells.reshape(-1, 3, 3) * (1 - 2 * role) * acts[:, None, None]
            out[group].obs["obs"][mine] = np.stack([seen == 1, seen == -1], -1)
            out[group].obs["mask"][mine] = (self.cells == 0) | ~acts[:, None]
            out[group].first[mine], out[group].acts[mine] = acts & (taken < 2), acts

    def render(self) -> Array | None:
        """See :class:`~srl.envs.base.Environment`: green is the first role, red the second."""
        colours = np.array([(235, 235, 235), (70, 160, 90), (200, 70, 70)], np.uint8)  # cells -1 index the last
        picture = colours[self.cells[0].reshape(3, 3)].repeat(_CELL, 0).repeat(_CELL, 1)
        picture[::_CELL], picture[:, ::_CELL] = 90, 90
        return np.ascontiguousarray(picture)

    def state(self) -> State:
        """See :class:`~srl.envs.base.Environment`."""
        kept = {name: getattr(self, name).copy() for name in ("cells", "turn", "over")}
        return State(kept, {"rng": self.rng.bit_generator.state})

    def load_state(self, state: State) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        for name, value in state.arrays.items():
            getattr(self, name)[...] = value
        self.rng.bit_generator.state = state.values["rng"]

    def close(self) -> None:
        """See :class:`~srl.envs.base.Environment`."""
