"""Tic-tac-toe against perfect play: every line of play in which the opponent makes only perfect moves, from both seats.

python benchmarks/perfect_play.py RUN_DIR [TAG]
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np

from srl.config import load
from srl.plan import check, checkpoint_store
from srl.policies.host import PolicyHost

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
Board = tuple[int, ...]
"""Nine cells: 0 free, 1 the one to move, -1 the other."""


def lost(board: Board) -> bool:
    """Whether the one to move has already lost."""
    return any(all(board[cell] == -1 for cell in line) for line in LINES)


def after(board: Board, cell: int) -> Board:
    """The board as the other one sees it once ``cell`` is taken."""
    return tuple(-1 if i == cell else -value for i, value in enumerate(board))


@cache
def worth(board: Board) -> int:
    """1, 0 or -1: what perfect play of both sides brings the one to move."""
    if lost(board):
        return -1
    return max((-worth(after(board, cell)) for cell in free(board)), default=0)


def free(board: Board) -> list[int]:
    return [cell for cell in range(9) if board[cell] == 0]


class Player:
    """The greedy policy of a run. Cells are numbered row by row, as in PettingZoo's tictactoe_v3."""

    def __init__(self, run_dir: Path, tag: str) -> None:
        plan = next(plan for plan in check(load(run_dir)) if not plan.opponent)
        state = checkpoint_store(run_dir, plan).load(tag)
        self.host = PolicyHost(plan.algorithm, plan.spaces, 0, clients=1, rows=1, explore=False)
        self.host.load(state.under("learner").under("policy").arrays, state.values["version"])
        self.move = cache(self._move)

    def _move(self, board: Board) -> int:
        cells = np.array(board).reshape(3, 3)
        obs = np.stack([cells == 1, cells == -1], -1).astype(np.int8)[None]
        mask = np.array(board)[None] == 0
        outputs = self.host.act({"obs": obs, "mask": mask}, np.zeros(1, int), np.zeros(1, bool))
        return int(outputs["action"][0])


def losses_to_perfect_play(run_dir: Path, tag: str = "latest") -> tuple[int, int]:
    """(lines of play that the policy lost, all lines of play)."""
    player, found = Player(run_dir, tag), [0, 0]

    def play(board: Board, ours: bool) -> None:
        if lost(board) or not free(board):
            found[0] += lost(board) and ours
            found[1] += 1
        elif ours:
            play(after(board, player.move(board)), False)
        else:
            best = worth(board)
            for cell in free(board):
                if -worth(after(board, cell)) == best:
                    play(after(board, cell), True)

    for ours in (True, False):
        play((0,) * 9, ours)
    return found[0], found[1]


if __name__ == "__main__":
    lost_lines, lines = losses_to_perfect_play(Path(sys.argv[1]), *sys.argv[2:3])
    print(f"{lines} lines of perfect play, {lost_lines} lost")
