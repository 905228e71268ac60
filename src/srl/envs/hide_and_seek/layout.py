"""Where walls, agents, boxes and ramps are at the beginning of an episode: drawn anew for each.

The floor is a grid of cells. Walls stand on lines of cells, then agents, boxes and ramps are put, one after the other,
on cells that are free. What finds no place in ten tries makes everything start over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from srl.core.specs import Array
from srl.envs.hide_and_seek.scenario import (
    AGENT,
    BOX,
    CELL,
    CELLS,
    DOOR,
    FLOOR,
    HIGH,
    LONG,
    LOW,
    QUADRANT,
    ROOM,
    THIN,
    WALL,
    Scenario,
)

TRIES = 10
TOGETHER = 3
"""How many cells from the first of a team the others begin, where there are rooms."""
SHAPES = np.array([(BOX, BOX, BOX), (LONG, THIN, BOX), (THIN, LONG, BOX)])
"""A box, and the two ways a long one lies."""


@dataclass
class Layout:
    """One layout, as arrays of the scenario's greatest size. Bodies are the agents, then boxes, then ramps."""

    walls: Array
    """Middle (x, y, z) and half of the size of each wall; zero where there is none."""
    places: Array
    """Middle (x, y) of each body."""
    boxes: Array
    """Size of each box."""
    there: Array
    """Which bodies there are."""


@dataclass
class Wall:
    """A wall on a line of cells, from one cell to another."""

    axis: int
    """Which coordinate is the same all along it: 0 for x, 1 for y."""
    line: int
    start: int
    end: int
    height: float = LOW
    joints: list[int] = field(default_factory=list)
    """Where other walls end at it."""
    door: int | None = None
    """The first of the cells that are left out."""

    def cut(self, rng: np.random.Generator) -> None:
        """Leave a door somewhere between two joints."""
        ends = sorted({self.start, *self.joints, self.end})
        spans = [(a, b) for a, b in pairwise(ends) if b - a > DOOR]
        first, last = spans[int(rng.integers(len(spans)))]
        self.door = first + int(rng.integers(1, last - first - DOOR + 1))

    def cells(self) -> list[tuple[int, int]]:
        """First and last cell of every piece."""
        if self.door is None:
            return [(self.start, self.end)]
        return [(self.start, self.door - 1), (self.door + DOOR, self.end)]

    def pieces(self) -> list[list[float]]:
        """Middle and half of the size of every piece. Beside a door one ends before the middle of its last cell."""
        found = []
        edges = [_middle(self.start) - WALL / 2, _middle(self.end) + WALL / 2]
        if self.door is not None:
            edges[1:1] = [_middle(self.door - 1) - WALL / 2, _middle(self.door + DOOR) + WALL / 2]
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            if end - begin > WALL / 2:
                along, half = (begin + end) / 2, (end - begin) / 2
                across, thin = _middle(self.line), WALL / 2
                flat = [across, along, thin, half] if self.axis == 0 else [along, across, half, thin]
                found.append([*flat[:2], self.height / 2, *flat[2:], self.height / 2])
        return found


def draw(scenario: Scenario, rng: np.random.Generator) -> Layout:
    """A layout at random."""
    while True:
        found = _try(scenario, rng)
        if found is not None:
            return found


def _middle(cell: int) -> float:
    return (cell + 0.5) * CELL


def _between(rng: np.random.Generator, least: int, most: int) -> int:
    return int(rng.integers(least, most + 1))


def _try(scenario: Scenario, rng: np.random.Generator) -> Layout | None:
    walls = _rooms(rng) if scenario.rooms else _quadrant(rng)
    hiders, seekers = _between(rng, *scenario.hiders), _between(rng, *scenario.seekers)
    shapes = _shapes(scenario, rng)
    grid = Grid(walls, rng)
    agents = _teams(grid, hiders, seekers) if scenario.rooms else _around(grid, hiders, seekers)
    inside = (QUADRANT, 1), (CELLS - 1, QUADRANT - 1)
    boxes = [grid.put(shape[:2], *(() if scenario.rooms else inside)) for shape in shapes]
    ramps = [grid.put((BOX, BOX)) for _ in range(scenario.ramps)]
    placed = [*agents, *boxes, *ramps]
    if any(place is None for place in placed):
        return None
    first_box, first_ramp = len(scenario.agents), len(scenario.agents) + scenario.boxes[1]
    numbers = [*range(hiders), *range(scenario.hiders[1], scenario.hiders[1] + seekers)]
    numbers += [*range(first_box, first_box + len(boxes)), *range(first_ramp, first_ramp + len(ramps))]
    layout = Layout(
        np.zeros((scenario.walls, 6)),
        np.full((len(scenario.agents) + scenario.objects, 2), FLOOR / 2),
        np.full((scenario.boxes[1], 3), BOX),
        np.zeros(len(scenario.agents) + scenario.objects, bool),
    )
    pieces = [piece for wall in walls for piece in wall.pieces()]
    layout.walls[: len(pieces)] = np.reshape(pieces, (-1, 6))
    layout.places[numbers], layout.there[numbers] = placed, True
    layout.boxes[: len(shapes)] = shapes
    return layout


def _shapes(scenario: Scenario, rng: np.random.Generator) -> Array:
    """The sizes of the boxes: first those that lie along x, then along y, then cubes."""
    count = _between(rng, *scenario.boxes)
    kinds = np.zeros(count, int)
    if scenario.long_boxes:
        long = _between(rng, scenario.long_boxes, count)
        along = _between(rng, 0, long)
        kinds[:along], kinds[along:long] = 1, 2
    return np.asarray(SHAPES[kinds])


def _outer() -> list[Wall]:
    return [Wall(axis, line, 0, CELLS - 1, HIGH) for axis in (0, 1) for line in (0, CELLS - 1)]


def _quadrant(rng: np.random.Generator) -> list[Wall]:
    """One room in a corner, with a door in both of its walls or, half of the time, in one of them."""
    line, last = CELLS - QUADRANT, QUADRANT
    inner = [Wall(0, line, 0, last), Wall(1, last, line, CELLS - 1)]
    dropped = int(rng.integers(2)) if rng.random() < 0.5 else None
    for number, wall in enumerate(inner):
        if number != dropped:
            wall.cut(rng)
    return _outer() + inner


def _rooms(rng: np.random.Generator) -> list[Wall]:
    """One to four rooms: one is split again and again, and every wall that does that has a door."""
    rooms = [((0, CELLS - 1), (0, CELLS - 1))]
    inner: list[Wall] = []
    for _ in range(int(rng.integers(4))):
        wide = [(room, axis) for room in rooms for axis in (0, 1) if room[axis][1] - room[axis][0] >= 2 * (ROOM + 1)]
        room, axis = wide[int(rng.integers(len(wide)))]
        (low, high), (start, end) = room[axis], room[1 - axis]
        line = _between(rng, low + ROOM + 1, high - ROOM - 1)
        for other in inner:
            if other.axis != axis and other.line in (start, end) and other.start < line < other.end:
                other.joints.append(line)
        inner.append(Wall(axis, line, start, end))
        rooms.remove(room)
        for half in ((low, line), (line, high)):
            rooms.append((half, (start, end)) if axis == 0 else ((start, end), half))
    for wall in inner:
        wall.cut(rng)
    return _outer() + inner if rng.random() < 0.5 else inner


class Grid:
    """Which cells are taken."""

    def __init__(self, walls: Sequence[Wall], rng: np.random.Generator) -> None:
        self.rng = rng
        self.taken: Array = np.zeros((CELLS, CELLS), bool)
        self.last = (0, 0)
        """The first cell of what was put last."""
        for wall in walls:
            for start, end in wall.cells():
                span = slice(start, end + 1)
                self.taken[(wall.line, span) if wall.axis == 0 else (span, wall.line)] = True

    def put(
        self, size: Sequence[float], low: tuple[int, int] = (1, 1), high: tuple[int, int] = (CELLS - 1, CELLS - 1)
    ) -> tuple[float, float] | None:
        """Take free cells from ``low`` to before ``high`` for something; its middle, or None if none were found."""
        wide, deep = (int(np.ceil(side / CELL - 1e-9)) for side in size)
        for _ in range(TRIES):
            x = int(self.rng.integers(low[0], max(low[0] + 1, high[0] - wide)))
            y = int(self.rng.integers(low[1], max(low[1] + 1, high[1] - deep)))
            cells = self.taken[x : x + wide, y : y + deep]
            if cells.shape == (wide, deep) and not cells.any():
                cells[:] = True
                self.last = x, y
                room = self.rng.random(2) * (wide * CELL - size[0], deep * CELL - size[1])
                return float(x * CELL + room[0] + size[0] / 2), float(y * CELL + room[1] + size[1] / 2)
        return None


def _around(grid: Grid, hiders: int, seekers: int) -> list[tuple[float, float] | None]:
    """Hiders anywhere, seekers outside of the room in the corner."""
    middle, end = QUADRANT, CELLS - 1
    areas = [((1, 1), (middle, middle - 1)), ((1, middle), (middle, end)), ((middle, middle), (end, end))]
    found = [grid.put((AGENT, AGENT)) for _ in range(hiders)]
    for _ in range(seekers):
        found.append(grid.put((AGENT, AGENT), *areas[int(grid.rng.integers(3))]))
    return found


def _teams(grid: Grid, *teams: int) -> list[tuple[float, float] | None]:
    """Teams anywhere, but the members of each close together."""
    found = []
    for members in teams:
        found.append(grid.put((AGENT, AGENT)))
        low = tuple(max(1, first - TOGETHER) for first in grid.last)
        high = tuple(min(CELLS - 1, first + TOGETHER + 2) for first in grid.last)
        found += [grid.put((AGENT, AGENT), low, high) for _ in range(members - 1)]  # type: ignore[arg-type]
    return found
