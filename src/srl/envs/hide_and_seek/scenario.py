"""The two scenarios in numbers, and the sizes that both have in common. Lengths are in metres."""

from __future__ import annotations

from dataclasses import dataclass

FLOOR = 6.0
CELLS = 30
"""Cells along a side of the floor; everything is placed on them."""
CELL = FLOOR / CELLS
WALL = 0.1
"""How thick walls are."""
LOW, HIGH = 0.5, 4.0
"""How high inner and outer walls are."""
DOOR = 2
"""How many cells wide doors are."""
ROOM = 6
"""How many cells wide rooms are at least."""
QUADRANT = CELLS // 2
"""How many cells wide the room of the quadrant is."""
AGENT = 0.3
"""How wide agents are."""
BOX, LONG, THIN = 0.5, 1.65, 0.15
"""The side of a box and of a ramp, and the length and width of a long box."""
REACH = 0.25
"""How far the surface of what is grabbed or locked may be from an agent's middle."""
VIEW = 135.0
"""Degrees an agent sees in front of it."""
LIDAR = 30
"""Rays of an agent's lidar."""
MISS = 6.0
"""What a ray of the lidar that hits nothing reads."""
FORCES = 11
"""Strengths that a force or a torque can have."""
STRONGEST = 0.9
SECONDS, FRAMES = 0.005, 15
"""What MuJoCo steps by, and how often in one of our steps."""


@dataclass(frozen=True)
class Scenario:
    """What one scenario has; of a pair the first is the least and the second the most."""

    hiders: tuple[int, int]
    seekers: tuple[int, int]
    boxes: tuple[int, int]
    long_boxes: int
    """How many of the boxes are long, at least."""
    ramps: int
    ramps_lock: bool
    walls: int
    """The most pieces of wall there can be."""
    wall_friction: float
    rooms: bool
    """Whether there are rooms at random, instead of one in a corner."""
    horizon: int
    preparation: int
    """Steps in which seekers do nothing and nobody is rewarded."""
    bounds: tuple[float, float]
    """Where everybody has to stay, along both axes."""
    objects_bound: bool
    """Whether objects have to stay there too."""

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of all agents there can be."""
        hiders, seekers = self.hiders[1], self.seekers[1]
        return *(f"hider-{i}" for i in range(hiders)), *(f"seeker-{i}" for i in range(seekers))

    @property
    def objects(self) -> int:
        """How many boxes and ramps there can be."""
        return self.boxes[1] + self.ramps


SCENARIOS = {
    "quadrant": Scenario(
        hiders=(2, 2),
        seekers=(2, 2),
        boxes=(2, 2),
        long_boxes=0,
        ramps=1,
        ramps_lock=False,
        walls=8,
        wall_friction=0.01,
        rooms=False,
        horizon=80,
        preparation=32,
        bounds=(0.1, 5.9),
        objects_bound=True,
    ),
    "randomwalls": Scenario(
        hiders=(1, 3),
        seekers=(1, 3),
        boxes=(3, 9),
        long_boxes=3,
        ramps=2,
        ramps_lock=True,
        walls=10,
        wall_friction=1.0,
        rooms=True,
        horizon=240,
        preparation=96,
        bounds=(-6.0, 12.0),
        objects_bound=False,
    ),
}
