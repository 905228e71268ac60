"""Our board games are the games that PettingZoo knows, move by move."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from srl import envs
from srl.core.slab import STEP_FIELDS
from srl.envs.base import Observed, StepViews
from srl.envs.boards import ConnectFour, TicTacToe

pytest.importorskip("pettingzoo")
ROLES = ("learner", "opponent")


class Table:
    """One board, and what each of the two agents is shown."""

    def __init__(self, config, copies=1):
        self.env = config.make(copies)
        self.env.bind([(role,) for role in ROLES])
        spaces = self.env.spaces(ROLES[0])
        fields = {**spaces.observation_spec(), **spaces.mask_spec(), **STEP_FIELDS}
        self.views = []
        for _ in ROLES:
            part = {name: np.zeros((copies, *spec.shape), spec.dtype) for name, spec in fields.items()}
            seen = Observed({"obs": part["obs"], "mask": part["mask"]}, part["first"], np.zeros(copies, bool))
            self.views.append(StepViews(seen, part["reward"], part["terminated"], part["truncated"], part["valid"]))

    def reset(self, seed):
        self.env.reset(seed, [views.after for views in self.views])

    def mover(self):
        acting = [i for i, views in enumerate(self.views) if views.after.acts[0]]
        return acting[0] if acting else None

    def step(self, action):
        self.env.step([{"action": np.array([action])}] * 2, self.views)


@pytest.mark.parametrize(("config", "module"), [(TicTacToe(), "tictactoe_v3"), (ConnectFour(), "connect_four_v3")])
def test_every_move_of_random_games_is_as_in_pettingzoo(config, module):
    real = importlib.import_module(f"pettingzoo.classic.{module}").env()
    rng = np.random.default_rng(0)
    table = Table(config)
    results = []
    for game in range(60):
        if game == 0:
            table.reset(0)
        else:
            table.step(0)  # the reset after an end
        real.reset()
        seats = {table.mover(): 0, 1 - table.mover(): 1}  # role -> who moves first, who second
        moves = 0
        while table.mover() is not None:
            mover = table.mover()
            shown = real.observe(real.agent_selection)
            assert real.possible_agents.index(real.agent_selection) == seats[mover]
            assert np.array_equal(table.views[mover].after.obs["obs"][0], shown["observation"])
            assert np.array_equal(table.views[mover].after.obs["mask"][0], shown["action_mask"].astype(bool))
            assert table.views[mover].after.first[0] == (moves < 2)
            assert table.views[1 - mover].after.obs["obs"].sum() == 0
            action = int(rng.choice(np.flatnonzero(shown["action_mask"])))
            table.step(action)
            real.step(action)
            moves += 1
            for role in (0, 1):
                agent = real.possible_agents[seats[role]]
                assert table.views[role].reward[0] == real.rewards[agent]
                assert table.views[role].terminated[0] == real.terminations[agent]
        results.append(table.views[0].reward[0])
    assert {-1, 1} <= set(results)


def test_saved_boards_go_on_as_they_were():
    first, second = Table(ConnectFour(), 8), Table(ConnectFour(), 8)
    first.reset(3)
    rng = np.random.default_rng(1)

    def play(table, choices):
        table.env.step([{"action": choices}] * 2, table.views)
        return [views.after.obs["obs"].copy() for views in table.views]

    for _ in range(4):
        play(first, np.array([rng.choice(np.flatnonzero(free)) for free in first.env._free()]))
    second.reset(4)
    second.env.load_state(first.env.state())
    for _ in range(20):
        choices = np.array([rng.choice(np.flatnonzero(free)) for free in first.env._free()])
        assert all(np.array_equal(a, b) for a, b in zip(play(first, choices), play(second, choices), strict=True))


def test_board_games_are_found_again_in_a_saved_configuration():
    for config in (TicTacToe(), ConnectFour(("black", "white"))):
        assert envs.from_json(config.describe()) == config


def test_a_board_can_draw_itself():
    table = Table(TicTacToe())
    table.reset(0)
    empty = table.env.render().copy()
    table.step(4)
    assert empty.shape == (192, 192, 3)
    assert not np.array_equal(empty, table.env.render())
