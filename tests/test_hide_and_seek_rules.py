"""Hide and seek: sight, hands, walls, phases, rewards and ends."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mujoco")
from hiding import DOWN, LEFT, RIGHT, STILL, UP, Game, chosen

PUSH_RIGHT, PUSH_LEFT = (10, 5, 5, 0, 0), (0, 5, 5, 0, 0)
LOCK, GRAB = (5, 5, 5, 0, 1), (5, 5, 5, 1, 0)
FAR = {"hider-0": (1.0, 5.0), "seeker-0": (5.0, 5.0)}


@pytest.fixture
def game():
    return Game()


def test_a_wall_that_was_moved_stops_a_box_that_is_pushed_and_a_wall_that_is_gone_does_not(game):
    bodies = {**FAR, "hider-0": (2.0, 3.0, RIGHT), "box-0": (2.5, 3.0)}
    reached = []
    for walls in ([(3.6, 3.0, 0.1, 2.0)], [(4.6, 3.0, 0.1, 1.0)], []):
        game.arrange(bodies, walls)
        game.act(25, hider_0=PUSH_RIGHT)
        reached.append(game.at("box-0")[0])
    assert reached[0] == pytest.approx(3.55 - 0.25, abs=0.03)
    assert reached[1] == pytest.approx(4.55 - 0.25, abs=0.03)
    assert reached[2] > 5.5


def test_a_long_box_is_as_long_for_those_who_touch_it_as_it_looks(game):
    game.arrange({**FAR, "hider-0": (2.0, 3.0, RIGHT), "box-0": (3.0, 3.0)}, sizes={"box-0": (0.15, 1.65, 0.5)})
    assert game.seen("hider-0", "lidar")[0] == pytest.approx(0.925, abs=1e-6)
    assert game.seen("hider-0", "boxes")[0, 9:12] == pytest.approx((0.15, 1.65, 0.5))
    game.arrange({**FAR, "hider-0": (2.0, 3.7, RIGHT), "box-0": (3.0, 3.0)}, sizes={"box-0": (0.15, 1.65, 0.5)})
    game.act(6, hider_0=PUSH_RIGHT)
    assert abs(game.at("box-0")[3]) > 0.1  # pushed at its end, it turns


def test_lidar_reads_the_distance_of_walls_and_bodies_and_of_nothing_six_metres(game):
    bodies = {**FAR, "hider-0": (3.0, 3.0), "seeker-0": (3.0, 2.0), "box-0": (1.0, 3.0), "ramp-0": (3.0, 5.0)}
    game.arrange(bodies, [(4.0, 3.0, 0.1, 0.8)])
    read = game.seen("hider-0", "lidar")
    assert read[0] == pytest.approx(0.95, abs=1e-6)  # the wall, along x
    assert read[15] == pytest.approx(1.75, abs=1e-6)  # the box, against x
    angle = 2 * np.pi / 30
    assert read[1] == pytest.approx(0.95 / np.cos(angle), abs=1e-6)
    assert read[3] == 6.0 and read[10] == 6.0
    beside = np.sin(angle / 2)
    assert read[22:24] == pytest.approx(np.cos(angle / 2) - np.sqrt(0.15**2 - beside**2), abs=1e-6)  # the seeker


def test_a_ramp_against_a_wall_leads_over_it(game):
    wall, bodies = [(4.0, 3.0, 0.1, 4.0)], {**FAR, "hider-0": (2.9, 3.0, RIGHT)}
    game.arrange(bodies, wall)
    game.act(30, hider_0=PUSH_RIGHT)
    assert game.at("hider-0")[0] < 3.9
    game.arrange({**bodies, "ramp-0": (3.7, 3.0, RIGHT)}, wall)
    heights = []
    for _ in range(30):
        game.act(hider_0=PUSH_RIGHT)
        heights.append(game.at("hider-0")[2])
    assert max(heights) > 0.4
    assert game.at("hider-0")[0] > 4.2


@pytest.mark.parametrize(
    ("walls", "seen"),
    [
        ([], True),
        ([(3.0, 3.0, 0.1, 2.0)], False),
        ([(3.0, 2.0, 0.1, 1.3), (3.0, 4.0, 0.1, 1.3)], True),  # a door between them
        ([(3.0, 2.5, 0.1, 1.3), (3.0, 4.5, 0.1, 1.3)], False),  # a door beside them
    ],
)
def test_walls_hide_and_doors_show(game, walls, seen):
    game.arrange({"hider-0": (4.0, 3.0), "seeker-0": (2.0, 3.0, RIGHT), "box-0": (4.7, 3.0), "ramp-0": (4, 4)}, walls)
    assert game.sees("seeker-0", "hider-0") == seen
    assert not game.sees("hider-0", "seeker-0")  # it looks elsewhere
    assert not game.sees("seeker-0", "box-0")  # behind the hider
    others = [name for name in game.env.agents if name != "seeker-0"]
    assert game.seen("seeker-0", "others_seen").tolist() == [name == "hider-0" and seen for name in others]


@pytest.mark.parametrize("scenario", ["quadrant", "randomwalls"])
def test_many_rays_at_once_hit_what_each_of_them_hits_alone(scenario):
    import mujoco

    normal = (None,) if "normal:" in mujoco.mj_ray.__doc__ else ()
    game = Game(scenario, 6)
    sight, rng, hit = game.env.sight, np.random.default_rng(0), np.zeros(1, np.int32)
    for _ in range(3):
        for _ in range(20):
            game.step(chosen(rng, 6 * len(game.env.agents)))
        for copy, agent in np.argwhere(game.env.there[:, : len(game.env.agents)]):
            world = game.env.worlds[copy]
            exact = world.data.geom_xpos[world.model.body_geomadr[world.bodies]][game.env.there[copy]]
            assert np.allclose(sight.middles[copy][game.env.there[copy]], exact)
            for ray, vector in enumerate(sight._vectors[copy, agent]):
                what = world.model, world.data, sight.middles[copy, agent], vector, None, True
                alone = mujoco.mj_ray(*what, int(world.bodies[agent]), hit, *normal)
                assert sight._distances[copy, agent, ray] == pytest.approx(alone)
                assert sight._hits[copy, agent, ray] == hit[0]


@pytest.mark.parametrize(("degrees", "seen"), [(0, True), (66, True), (69, False), (180, False), (-66, True)])
def test_the_cone_of_view_is_135_degrees_wide(game, degrees, seen):
    game.arrange({"hider-0": (4.0, 3.0), "seeker-0": (2.0, 3.0, RIGHT + np.radians(degrees))})
    assert game.sees("seeker-0", "hider-0") == seen


def test_boxes_hide_too_unless_one_stands_above_them(game):
    game.arrange({"hider-0": (4.0, 3.0), "seeker-0": (2.0, 3.0, RIGHT), "box-0": (3.0, 3.0)})
    assert game.sees("seeker-0", "box-0")
    assert not game.sees("seeker-0", "hider-0")
    world = game.env.worlds[0]
    world.position[game.number("seeker-0"), 2] = 1.0
    world.mujoco.mj_kinematics(world.model, world.data)
    game.env.position[0] = world.position
    game.env.sight.look(game.env.position, game.env.there)
    assert game.sees("seeker-0", "hider-0")


def test_a_held_box_is_pulled_along_until_it_is_let_go(game):
    game.arrange({**FAR, "hider-0": (3.0, 3.0, RIGHT), "box-0": (3.45, 3.0)})
    game.act(10, hider_0=(0, 5, 5, 1, 0))
    assert game.env.hands.held[0].tolist() == [0, -1, -1, -1]
    pulled = game.at("box-0")[0]
    assert pulled < 2.0
    assert pulled - game.at("hider-0")[0] == pytest.approx(0.45, abs=0.05)
    game.act(hider_0=STILL)
    assert (game.env.hands.held == -1).all()
    game.act(15, hider_0=PUSH_LEFT)
    assert game.at("box-0")[0] - game.at("hider-0")[0] > 1.0


def test_a_held_box_keeps_its_side_when_its_holder_turns(game):
    game.arrange({**FAR, "hider-0": (3.0, 3.0, RIGHT), "box-0": (3.45, 3.0)})
    game.act(12, hider_0=(5, 5, 6, 1, 0))
    x, y, _, turn = game.at("box-0") - game.at("hider-0")
    ahead = game.at("hider-0")[3] - RIGHT
    assert ahead > 0.5
    assert (x, y) == pytest.approx((0.45 * np.cos(ahead), 0.45 * np.sin(ahead)), abs=0.08)
    assert turn == pytest.approx(-RIGHT, abs=0.1)


@pytest.mark.parametrize(
    ("x", "turn", "grabbed"),
    [
        (3.49, RIGHT, True),
        (3.51, RIGHT, False),  # the surface is 0.26 away
        (3.45, LEFT, False),  # behind its back
    ],
)
def test_only_what_is_seen_and_within_reach_can_be_grabbed(game, x, turn, grabbed):
    game.arrange({**FAR, "hider-0": (3.0, 3.0, turn), "box-0": (x, 3.0)})
    game.act(hider_0=GRAB)
    assert (game.env.hands.held[0, 0] == 0) == grabbed


def test_the_nearest_object_is_grabbed_and_several_can_hold_it(game):
    bodies = {"hider-0": (3.0, 3.0, RIGHT), "hider-1": (3.9, 3.0, LEFT), "seeker-0": (5.0, 5.0)}
    game.arrange({**bodies, "box-0": (3.3, 3.48), "box-1": (3.45, 2.94), "ramp-0": (1.0, 1.0)})
    game.act(hider_0=GRAB, hider_1=GRAB)
    assert game.env.hands.held[0].tolist() == [1, 1, -1, -1]


def test_a_ramp_is_grabbed_as_if_it_filled_the_box_around_it(game):
    game.arrange({**FAR, "hider-0": (3.0, 3.0, RIGHT), "ramp-0": (3.45, 3.0, UP)})
    game.act(8, hider_0=(0, 5, 5, 1, 0))
    assert game.env.hands.held[0, 0] == 2
    assert game.at("ramp-0")[0] < 2.6


def test_a_locked_box_stays_however_it_is_pushed_and_pulled(game):
    game.arrange({**FAR, "hider-0": (3.0, 3.0, RIGHT), "hider-1": (3.9, 3.1, LEFT), "box-0": (3.45, 3.0)})
    game.act(hider_0=LOCK, hider_1=LOCK)
    assert game.env.hands.locked[0].tolist() == [True, False, False]
    begin = game.at("box-0").copy()
    game.act(20, hider_0=(10, 5, 5, 0, 1), hider_1=(10, 0, 10, 1, 1))
    away = np.abs(game.at("box-0") - begin)
    assert away[:3].max() < 0.005 and away[3] < 0.01
    game.act(hider_0=STILL, hider_1=STILL)
    assert not game.env.hands.locked.any()
    game.act(10, hider_0=PUSH_RIGHT)
    assert game.at("box-0")[0] - begin[0] > 0.2


def test_a_lock_is_a_teams_own(game):
    around = {"hider-0": (3.0, 3.0, RIGHT), "hider-1": (3.45, 3.45, DOWN), "seeker-0": (3.9, 3.0, LEFT)}
    game.arrange({**around, "box-0": (3.45, 3.0)})
    game.after_preparation()
    game.act(hider_0=LOCK, hider_1=LOCK)
    game.act(hider_0=LOCK, hider_1=LOCK, seeker_0=STILL)  # its lock is 0, but it cannot unlock
    assert game.env.hands.locked[0, 0]
    game.act(hider_0=LOCK, hider_1=LOCK, seeker_0=LOCK)
    assert [game.seen(name, "boxes")[0, 12:].tolist() for name in around] == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]
    game.act(hider_0=LOCK, hider_1=STILL)  # one of the team does not want it
    assert not game.env.hands.locked.any()
    assert not game.seen("hider-0", "boxes")[0, 12:].any()


def test_seekers_can_lock_what_hiders_cannot_unlock(game):
    game.arrange({"hider-0": (3.0, 3.0, RIGHT), "seeker-0": (3.9, 3.0, LEFT), "box-0": (3.45, 3.0)})
    game.after_preparation()
    game.act(seeker_0=LOCK)
    game.act(3, seeker_0=LOCK, hider_0=STILL)
    assert game.env.hands.locked[0, 0]
    game.act(hider_0=LOCK)  # the seeker lets go; nobody else may keep it locked against its team
    assert not game.env.hands.locked[0, 0]


def test_ramps_are_locked_among_random_walls_only():
    for scenario, locked in (("quadrant", False), ("randomwalls", True)):
        game = Game(scenario)
        game.arrange({**FAR, "hider-0": (3.0, 3.0, RIGHT), "ramp-0": (3.45, 3.0, UP)})
        game.act(hider_0=LOCK)
        assert game.env.hands.locked[0, game.env.scenario.boxes[1]] == locked


def test_seekers_do_nothing_and_nobody_is_rewarded_before_preparation_is_over(game):
    game.arrange({"hider-0": (2.0, 3.0, RIGHT), "seeker-0": (2.6, 3.5, LEFT), "box-0": (2.9, 3.0)})
    start = game.at("seeker-0").copy()
    preparation = game.env.scenario.preparation
    assert preparation == 32
    for step in range(preparation):
        assert game.seen("seeker-0", "self")[9] == pytest.approx(step / preparation)
        game.act(seeker_0=(0, 5, 10, 1, 1))
        assert (game.views.reward == 0).all()
    assert np.abs(game.at("seeker-0") - start).max() < 1e-3
    assert (game.env.hands.held == -1).all() and not game.env.hands.locked.any()
    game.act(seeker_0=(0, 5, 5, 0, 0))
    assert game.seen("seeker-0", "self")[9] == 1
    assert game.at("seeker-0")[0] < start[0] - 0.05
    assert abs(game.views.reward).tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(("turn", "hiders"), [(RIGHT, -1.0), (LEFT, 1.0)])
def test_hiders_lose_when_any_of_them_is_seen_by_any_seeker(game, turn, hiders):
    bodies = {"hider-0": (4.0, 3.0), "hider-1": (2.0, 1.0), "seeker-0": (2.0, 3.0, turn), "seeker-1": (1.0, 5.0, UP)}
    game.arrange(bodies)
    game.after_preparation()
    game.act()
    assert game.views.reward.tolist() == [hiders, hiders, -hiders, -hiders]
    names = {"hider-0": [1, 0, 0], "seeker-0": [1, 1, 0]}
    for name, flags in names.items():  # in the order of the other agents
        assert game.seen(name, "others")[:, 8].tolist() == flags
        assert game.seen(name, "self")[8] == (name == "hider-0")


def test_who_is_out_of_bounds_is_given_minus_ten(game):
    bodies = {"hider-0": (4.0, 3.0), "hider-1": (5.95, 1.0), "seeker-0": (2.0, 3.0, LEFT), "seeker-1": (1.0, 5.0, UP)}
    game.arrange(bodies)
    game.act()
    assert (game.views.reward == 0).all()  # not in preparation
    game.after_preparation()
    game.act()
    assert game.views.reward.tolist() == [1, -10, -1, -1]
    game.arrange({**bodies, "hider-1": (5.0, 1.0), "box-0": (3.0, 0.05)})
    game.after_preparation()
    game.act()
    assert game.views.reward.tolist() == [-10, -10, -10, -10]
    large = Game("randomwalls")
    large.arrange({"hider-0": (12.1, 3.0), "hider-1": (6.5, 3.0), "seeker-0": (0.0, 0.0), "box-0": (14.0, 3.0)})
    large.after_preparation()
    large.act()
    assert large.views.reward.tolist() == [-10, 1, 0, -1, 0, 0]


@pytest.mark.parametrize(("scenario", "horizon"), [("quadrant", 80), ("randomwalls", 240)])
def test_an_episode_is_cut_short_not_terminated_and_the_next_step_begins_another(scenario, horizon):
    game = Game(scenario)
    there = game.views.after.acts.copy()
    assert game.views.after.first.tolist() == there.tolist()
    for _ in range(horizon - 1):
        game.act()
        assert not game.views.truncated.any()
        assert game.views.after.acts.tolist() == there.tolist()
        assert not game.views.after.first.any()
    game.act()
    assert game.views.truncated.tolist() == there.tolist()
    assert not game.views.terminated.any() and not game.views.after.acts.any()
    assert game.seen("hider-0", "self").any()  # the last observation
    game.act()
    again = game.views.after.acts
    assert again.any() and game.views.after.first.tolist() == again.tolist()
    assert not game.views.truncated.any() and not game.views.reward.any()
    assert game.seen("hider-0", "self")[9] == 0
