"""Hide and seek as an environment: seeds, copies, groups, rows, states, statistics, pictures, PettingZoo."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("mujoco")
from hiding import RIGHT, Game, chosen
from srl import envs
from srl.core.errors import ConfigError, UnknownName
from srl.envs.hide_and_seek import HideAndSeek

SCENARIOS = ("quadrant", "randomwalls")


def all_of(views, rows=slice(None)):
    flags = views.after.first, views.after.acts, views.reward, views.truncated, views.valid
    return [each[rows].copy() for each in (*views.after.obs.values(), *flags)]


def equal(found, expected):
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_copy_goes_the_same_way_whatever_is_stepped_beside_it(scenario):
    alone, crowd = Game(scenario, 1, seed=5), Game(scenario, 3, seed=5)
    agents = len(alone.env.agents)
    assert equal(all_of(alone.views), all_of(crowd.views, slice(0, agents)))
    rng = np.random.default_rng(0)
    for _ in range(90):
        actions = chosen(rng, 3 * agents)
        alone.step(actions[:agents])
        crowd.step(actions)
        assert equal(all_of(alone.views), all_of(crowd.views, slice(0, agents)))
    other = Game(scenario, 1, seed=6)
    assert not equal(all_of(other.views), all_of(Game(scenario, 1, seed=5).views))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_saved_state_goes_on_to_the_bit(scenario):
    first, second = Game(scenario, 2, seed=1), Game(scenario, 2, seed=2)
    rng, rows = np.random.default_rng(3), 2 * len(first.env.agents)
    horizon = first.env.scenario.horizon
    for _ in range(horizon - 40):
        first.step(chosen(rng, rows))
        second.step(chosen(rng, rows))
    second.env.load_state(first.env.state())
    for games in (first, second):
        games.views.after.acts[:] = first.env.there[:, : len(first.env.agents)].reshape(-1)
    for _ in range(60):  # through an end and a beginning
        actions = chosen(rng, rows)
        first.step(actions)
        second.step(actions)
        assert equal(all_of(first.views), all_of(second.views))
    assert len(first.env.measured) == 22
    assert first.env.measured == second.env.measured


def test_a_saved_state_keeps_what_is_held_and_locked():
    first, second = Game(), Game(seed=1)
    around = {"hider-0": (3.0, 3.0, RIGHT), "hider-1": (1.0, 1.0, RIGHT), "seeker-0": (5.0, 5.0)}
    first.arrange({**around, "box-0": (3.45, 3.0), "box-1": (1.45, 1.0)}, [(2.0, 2.0, 1.0, 0.1)])
    first.act(2, hider_0=(5, 5, 5, 0, 1), hider_1=(0, 5, 5, 1, 0))
    second.env.load_state(first.env.state())
    for game in (first, second):
        game.act(8, hider_0=(10, 5, 5, 0, 1), hider_1=(0, 10, 5, 1, 0))
    assert np.array_equal(first.env.position, second.env.position)
    assert first.at("box-0")[0] == pytest.approx(3.45, abs=0.01)
    assert first.at("box-1")[1] > 1.2


def test_agents_can_be_in_groups_of_their_own():
    names = HideAndSeek().make(1).agents
    seekers, hiders = names[:1:-1], names[:2]
    one, two = Game(copies=2), Game(copies=2, groups=[seekers, hiders])
    rng = np.random.default_rng(0)
    for _ in range(40):
        actions = chosen(rng, 8)
        one.step(actions)
        two.step(actions)
        for group, views in zip((seekers, hiders), two.out, strict=True):
            rows = [copy * 4 + names.index(name) for copy in range(2) for name in group]
            assert equal(all_of(views), all_of(one.views, rows))
    with pytest.raises(ConfigError, match="every agent"):
        one.env.bind([hiders])


def test_agents_that_are_not_there_have_rows_that_say_nothing():
    game = Game("randomwalls", 8)
    there = game.env.there[:, :6].reshape(-1)
    assert 16 <= there.sum() < 48
    ends = np.zeros(48, bool)
    rng = np.random.default_rng(0)
    for _ in range(240):
        game.step(chosen(rng, 48))
        for field in (*game.views.after.obs.values(), game.views.reward, game.views.after.acts):
            assert not field[~there].any()
        ends |= game.views.truncated
    assert ends.tolist() == there.tolist()
    obs = game.views.after.obs
    assert (obs["obs/others_exist"].sum(1)[there] == np.repeat(game.env.there[:, :6].sum(1), 6)[there] - 1).all()
    for kind in ("others", "boxes", "ramps"):
        exist = obs[f"obs/{kind}_exist"].astype(bool)
        assert not obs[f"obs/{kind}"][~exist].any()
        assert (obs[f"obs/{kind}"][exist] != 0).any(-1).all()
        assert (obs[f"obs/{kind}_seen"] <= exist).all()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_observations_are_finite_and_of_their_space(scenario):
    game = Game(scenario)
    space = game.env.spaces("hider-0").observation
    others, boxes, ramps = (3, 2, 1) if scenario == "quadrant" else (5, 9, 2)
    assert space["self"].shape == (10,) and space["lidar"].shape == (30,)
    assert space["others"].shape == (others, 10)
    assert space["boxes"].shape == (boxes, 15) and space["ramps"].shape == (ramps, 15)
    rng = np.random.default_rng(0)
    for _ in range(30):
        game.step(chosen(rng, others + 1))
        row = {name: game.seen("hider-0", name) for name in space}
        assert space.contains(row)
        assert all(np.isfinite(value).all() for value in row.values())


def test_statistics_of_an_episode_are_reported_at_its_end():
    game = Game()
    game.arrange({"hider-0": (3.0, 3.0, RIGHT), "seeker-0": (1.0, 3.0, RIGHT), "box-0": (3.45, 3.0), "box-1": (1, 1)})
    game.act(hider_0=(5, 5, 5, 0, 1))
    game.act(31, hider_0=(5, 5, 5, 0, 1))
    start = game.at("box-0").copy()
    game.act(hider_0=(5, 5, 5, 0, 0))
    game.act(2, hider_0=(10, 5, 5, 0, 0))
    assert not game.env.measured
    game.act(45)
    told = dict(game.env.measured)
    moved = np.linalg.norm((game.at("box-0") - start)[:2])
    assert told["boxes_locked_in_preparation"] == 1 and told["boxes_locked"] == 0
    assert told["box_moved_in_preparation"] < 0.01 < moved
    assert told["box_moved"] == pytest.approx(moved)
    assert told["ramp_moved"] == told["ramps_locked"] == 0
    assert told["hiders_seen"] == 1 and told["seekers_return"] == 48 and told["hiders_return"] == -48


def test_a_simulation_that_fails_begins_anew_and_its_step_does_not_count(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes a log
    game = Game(copies=2)
    game.env.worlds[1].velocity[0, 0] = np.nan
    still = np.tile((5, 5, 5, 0, 0), (8, 1))
    game.step(still)
    assert game.views.valid.tolist() == [True] * 4 + [False] * 4
    assert game.views.truncated.tolist() == [False] * 4 + [True] * 4
    assert game.views.after.first.tolist() == [False] * 4 + [True] * 4
    assert game.views.after.acts.all()
    assert all(np.isfinite(field).all() for field in game.views.after.obs.values())
    assert "copy 1" in game.env.notes[0]


def test_a_picture_shows_what_moves():
    for scenario in SCENARIOS:
        game = Game(scenario)
        before = game.env.render()
        assert before.shape == (480, 480, 3) and before.dtype == np.uint8
        game.step(np.full((len(game.env.agents), 5), (10, 5, 5, 0, 0)))
        assert not np.array_equal(before, game.env.render())
        assert len(np.unique(before.reshape(-1, 3), axis=0)) > 5


def test_it_is_found_again_in_a_saved_configuration():
    for config in (envs.hide_and_seek(), envs.hide_and_seek("randomwalls")):
        assert envs.from_json(config.describe()) == config


def test_what_cannot_be_made_is_told_in_one_line(monkeypatch):
    with pytest.raises(UnknownName, match="did you mean 'quadrant'"):
        HideAndSeek("quadrants")
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(ConfigError, match=r"reallyscalablerl\[mujoco\]"):
        HideAndSeek().make(1)


def test_mujoco_is_not_imported_before_it_is_needed():
    code = "import sys, srl.envs; srl.envs.hide_and_seek(); sys.exit('mujoco' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_pettingzoo_finds_nothing_wrong(scenario):
    pytest.importorskip("pettingzoo")
    from pettingzoo.test import parallel_api_test

    from srl.envs.hide_and_seek.zoo import HideAndSeekZoo

    env = HideAndSeekZoo(scenario, render_mode="rgb_array")
    parallel_api_test(env, num_cycles=100)
    first, _ = env.reset(seed=3)
    assert set(first) == set(env.agents) <= set(env.possible_agents)
    again, _ = env.reset(seed=3)
    assert all(np.array_equal(first[a][name], again[a][name]) for a in first for name in first[a])
    while env.agents:
        *_, truncated, infos = env.step({agent: env.action_space(agent).sample() for agent in env.agents})
    assert all(truncated.values())
    assert "hiders_seen" in infos["hider-0"]
    assert env.render().shape == (480, 480, 3)
