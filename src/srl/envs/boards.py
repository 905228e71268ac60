"""Tic-tac-toe and Connect Four as native vectors: all boards are one array, so self-play takes minutes.

They are also examples of environments written for SRL: one gets the rows of every policy's agents and writes
observations, rewards and flags for all copies at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import gymnasium
import numpy as np

from srl.core.specs import Array, Arrays, Spaces
from srl.core.worker import State
from srl.envs.base import EnvConfig, Environment, Observed, StepViews

_PIXELS = 64


@dataclass(frozen=True)
class Board(EnvConfig):
    """Two agents in turn; who begins is drawn anew in every episode. 1 for a win, -1 for a loss, 0 for a draw."""

    roles: tuple[str, str] = ("learner", "opponent")

    height: ClassVar[int]
    width: ClassVar[int]
    connect: ClassVar[int]
    """How many in a row, a column or a diagonal win."""
    falls: ClassVar[bool]
    """Whether one chooses a column, and a stone falls to its lowest free cell."""

    def make(self, copies: int, *, render: bool = False) -> Boards:
        """See :class:`~srl.envs.base.EnvConfig`."""
        return Boards(self, copies)

    def lines(self) -> Array:
        """The cells of every line that wins, ``[lines, connect]``."""
        found = []
        for row in range(self.height):
            for column in range(self.width):
                for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                    cells = [(row + i * down, column + i * right) for i in range(self.connect)]
                    if all(0 <= r < self.height and 0 <= c < self.width for r, c in cells):
                        found.append([r * self.width + c for r, c in cells])
        return np.array(found)


class TicTacToe(Board):
    """Three in a row on nine cells."""

    height, width, connect, falls = 3, 3, 3, False


class ConnectFour(Board):
    """Four in a row on seven columns of six cells."""

    height, width, connect, falls = 6, 7, 4, True


class Boards(Environment):
    """``copies`` boards, cells row by row: 0 free, 1 taken by the first role, -1 by the second."""

    def __init__(self, game: Board, copies: int) -> None:
        super().__init__()
        self.game, self.agents, self.copies = game, tuple(game.roles), copies
        self.shape = (game.height, game.width)
        self.cells: Array = np.zeros((copies, game.height * game.width), np.int8)
        self.lines = game.lines()
        self.turn: Array = np.zeros(copies, np.int64)  # which role moves
        self.over: Array = np.zeros(copies, bool)  # the next step is a reset
        self.rng = np.random.default_rng()
        self.places: list[tuple[int, Array]] = []

    def spaces(self, agent: str) -> Spaces:
        """See :class:`~srl.envs.base.Environment`."""
        seen = gymnasium.spaces.Box(0, 1, (*self.shape, 2), np.int8)
        return Spaces(seen, gymnasium.spaces.Discrete(self._free().shape[1]), masked=True)

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
        self.over[:] = False
        self._look(out)

    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        playing, mover = ~self.over, self.turn.copy()
        (first, rows), (second, others) = self.places
        chosen = np.where(mover == 0, actions[first]["action"][rows], actions[second]["action"][others])
        self._begin()
        copies = np.flatnonzero(playing)
        self.cells[copies, self._cell(copies, chosen[copies])] = 1 - 2 * mover[copies]
        won = (np.abs(self.cells[:, self.lines].sum(-1)) == self.game.connect).any(-1) & playing
        self.over[:] = won | ((self.cells != 0).all(-1) & playing)
        self.turn[playing] = 1 - mover[playing]
        for role, (group, mine) in enumerate(self.places):
            views = out[group]
            views.reward[mine] = np.where(won, np.where(mover == role, 1, -1), 0)
            views.terminated[mine], views.truncated[mine] = self.over, False
        self._look([views.after for views in out])

    def _free(self) -> Array:
        """Which actions are allowed, ``[copies, actions]``."""
        return np.asarray((self.cells[:, : self.game.width] if self.game.falls else self.cells) == 0)

    def _cell(self, copies: Array, action: Array) -> Array:
        """The cell that an action takes."""
        if not self.game.falls:
            return action
        columns = self.cells[copies].reshape(-1, *self.shape)[np.arange(len(copies)), :, action]
        return np.asarray(((columns == 0).sum(-1) - 1) * self.game.width + action)

    def _begin(self) -> None:
        """Clear the boards whose game is over."""
        self.cells[self.over] = 0
        self.turn[self.over] = self.rng.integers(2, size=int(self.over.sum()))

    def _look(self, out: Sequence[Observed]) -> None:
        """Show the board to whose turn it is."""
        taken, free = np.count_nonzero(self.cells, -1), self._free()
        for role, (group, mine) in enumerate(self.places):
            acts = ~self.over & (self.turn == role)
            seen = self.cells.reshape(-1, *self.shape) * (1 - 2 * role) * acts[:, None, None]
            out[group].obs["obs"][mine] = np.stack([seen == 1, seen == -1], -1)
            out[group].obs["mask"][mine] = free | ~acts[:, None]
            out[group].first[mine], out[group].acts[mine] = acts & (taken < 2), acts

    def render(self) -> Array | None:
        """See :class:`~srl.envs.base.Environment`: green is the first role, red the second."""
        colours = np.array([(235, 235, 235), (70, 160, 90), (200, 70, 70)], np.uint8)  # cells -1 index the last
        picture = colours[self.cells[0].reshape(self.shape)].repeat(_PIXELS, 0).repeat(_PIXELS, 1)
        picture[::_PIXELS], picture[:, ::_PIXELS] = 90, 90
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
