"""Layouts of hide and seek: nothing overlaps, everything is inside, and every room can be reached."""

from __future__ import annotations

import numpy as np
import pytest

from srl.envs.hide_and_seek.layout import Grid, _quadrant, _rooms, draw
from srl.envs.hide_and_seek.scenario import AGENT, BOX, CELLS, SCENARIOS, WALL

SEEDS = 200


def rectangles(layout, scenario):
    """Middle and half of the size of every body there is."""
    agents, boxes = len(scenario.agents), scenario.boxes[1]
    half = np.full((len(layout.there), 2), BOX / 2)
    half[:agents] = AGENT / 2
    half[agents : agents + boxes] = layout.boxes[:, :2] / 2
    return layout.places[layout.there], half[layout.there]


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_overlaps_and_all_is_on_the_floor(name):
    scenario = SCENARIOS[name]
    for seed in range(SEEDS):
        layout = draw(scenario, np.random.default_rng(seed))
        places, half = rectangles(layout, scenario)
        assert (places - half > 0.2 - 1e-9).all() and (places + half < 5.8 + 1e-9).all()
        walls = layout.walls[layout.walls[:, 3] > 0]
        middles = np.concatenate([places, walls[:, :2]])
        halves = np.concatenate([half, walls[:, 3:5]])
        gap = np.abs(middles[:, None] - middles[None]) - halves[:, None] - halves[None]
        apart = (gap > -1e-9).any(-1)
        np.fill_diagonal(apart, True)
        apart[len(places) :, len(places) :] = True  # walls meet
        assert apart.all(), seed
        assert (walls[:, 2] == walls[:, 5]).all()  # they stand on the floor


@pytest.mark.parametrize("name", SCENARIOS)
def test_there_is_as_much_of_everything_as_the_scenario_says(name):
    scenario = SCENARIOS[name]
    agents, hiders, boxes = len(scenario.agents), scenario.hiders[1], scenario.boxes[1]
    counts, long = [], []
    for seed in range(SEEDS):
        layout = draw(scenario, np.random.default_rng(seed))
        parts = np.split(layout.there, [hiders, agents, agents + boxes])
        counts.append([part.sum() for part in parts])
        long.append(((layout.boxes.max(1) > 1) & parts[2]).sum())
    limits = scenario.hiders, scenario.seekers, scenario.boxes, (scenario.ramps, scenario.ramps)
    assert list(zip(np.min(counts, 0), np.max(counts, 0), strict=True)) == list(limits)
    assert min(long) == scenario.long_boxes
    assert all(most <= count[2] for most, count in zip(long, counts, strict=True))


@pytest.mark.parametrize("draw_walls", [_quadrant, _rooms])
def test_every_cell_without_a_wall_can_be_reached_from_every_other(draw_walls):
    rooms = set()
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        walls = draw_walls(rng)
        free = ~Grid(walls, rng).taken
        rooms.add(len([wall for wall in walls if wall.height < 1]))
        reached = np.zeros_like(free)
        reached[tuple(np.argwhere(free)[0])] = True
        for _ in range(CELLS * CELLS):
            grown = reached.copy()
            grown[1:] |= reached[:-1]
            grown[:-1] |= reached[1:]
            grown[:, 1:] |= reached[:, :-1]
            grown[:, :-1] |= reached[:, 1:]
            grown &= free
            if (grown == reached).all():
                break
            reached = grown
        assert (reached == free).all(), seed
    assert rooms == ({2} if draw_walls is _quadrant else {0, 1, 2, 3})


def test_doors_let_agents_pass_but_not_beside_a_box():
    for seed in range(20):
        for wall in _rooms(np.random.default_rng(seed)):
            pieces = wall.pieces()
            if wall.door is not None and len(pieces) == 2:
                along = 1 - wall.axis
                gap = (pieces[1][along] - pieces[1][3 + along]) - (pieces[0][along] + pieces[0][3 + along])
                assert gap == pytest.approx(0.7)
                assert BOX < gap < BOX + AGENT
            for piece in pieces:
                assert 2 * piece[3 + wall.axis] == pytest.approx(WALL)


def test_quadrants_have_one_door_or_two_and_boxes_lie_inside():
    doors = []
    for seed in range(SEEDS):
        doors.append(sum(wall.door is not None for wall in _quadrant(np.random.default_rng(seed))))
        layout = draw(SCENARIOS["quadrant"], np.random.default_rng(seed))
        boxes, seekers = layout.places[4:6], layout.places[2:4]
        assert (boxes[:, 0] > 3.1).all() and (boxes[:, 1] < 3.1).all()
        assert ((seekers[:, 0] < 3.1) | (seekers[:, 1] > 3.1)).all()
    assert set(doors) == {1, 2}
    assert 0.35 < np.mean(np.array(doors) == 1) < 0.65


def test_teams_begin_together_among_random_walls():
    scenario = SCENARIOS["randomwalls"]
    for seed in range(50):
        layout = draw(scenario, np.random.default_rng(seed))
        for team in (slice(0, 3), slice(3, 6)):
            members = layout.places[team][layout.there[team]]
            assert np.abs(members - members[0]).max() <= 0.8
