"""Hide and seek from above."""

from __future__ import annotations

import numpy as np

from srl.core.specs import Array
from srl.envs.hide_and_seek.layout import Layout
from srl.envs.hide_and_seek.scenario import AGENT, BOX, FLOOR, VIEW, Scenario

PIXELS = 480
"""Width and height of a picture."""
GLANCE = 1.2
"""How far cones of view are drawn; agents see farther."""
Colour = tuple[int, int, int]
GROUND, FLAT, STONE = (205, 205, 205), (240, 240, 236), (95, 95, 100)
HIDER, SEEKER, NOSE = (60, 120, 220), (215, 60, 60), (30, 30, 30)
WOOD, SLOPE = (225, 175, 90), (120, 185, 120)
LOCKED, HELD = (110, 70, 150), (255, 235, 120)


class Canvas:
    """A picture of a square of the world, drawn with its lowest row first."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.scale = low, PIXELS / (high - low)
        self.pixels: Array = np.full((PIXELS, PIXELS, 3), GROUND, np.float32)

    def paint(
        self, x: float, y: float, turn: float, half: tuple[float, float], colour: Colour, slope: float = 0
    ) -> None:
        """Paint a rectangle, the darker by ``slope`` the farther it goes along its own y."""
        patch, right, up = self._around(x, y, float(np.hypot(*half)))
        cos, sin = np.cos(turn), np.sin(turn)
        across, along = right * cos + up * sin, up * cos - right * sin
        inside = (np.abs(across) <= half[0]) & (np.abs(along) <= half[1])
        shade = 1 - slope * (along[inside] / half[1] + 1) / 2
        patch[inside] = np.array(colour) * shade[:, None]

    def disc(self, x: float, y: float, radius: float, colour: Colour) -> None:
        """Paint a disc."""
        patch, right, up = self._around(x, y, radius)
        patch[np.hypot(right, up) <= radius] = colour

    def cone(self, x: float, y: float, ahead: float, colour: Colour) -> None:
        """Tint what an agent looks at."""
        patch, right, up = self._around(x, y, GLANCE)
        far = np.hypot(right, up)
        inside = (far <= GLANCE) & (right * np.cos(ahead) + up * np.sin(ahead) >= far * np.cos(np.radians(VIEW / 2)))
        patch[inside] = 0.8 * patch[inside] + 0.2 * np.array(colour)

    def _around(self, x: float, y: float, radius: float) -> tuple[Array, Array, Array]:
        """The pixels around a place, and how far right and up of it they are."""
        cuts, aways = [], []
        for middle in (y, x):
            begin = max(0, int((middle - radius - self.low) * self.scale))
            end = min(PIXELS, int((middle + radius - self.low) * self.scale) + 2)
            cuts.append(slice(begin, max(begin, end)))
            aways.append((np.arange(begin, max(begin, end)) + 0.5) / self.scale + self.low - middle)
        up, right = np.meshgrid(*aways, indexing="ij")
        return self.pixels[cuts[0], cuts[1]], right, up


def picture(layout: Layout, position: Array, held: Array, locked: Array, scenario: Scenario) -> Array:
    """A picture ``[height, width, 3]`` of one copy; what is held or locked has a colour of its own."""
    margin = 0.1 if scenario.objects_bound else 1.5
    canvas = Canvas(-margin, FLOOR + margin)
    canvas.paint(FLOOR / 2, FLOOR / 2, 0, (FLOOR / 2, FLOOR / 2), FLAT)
    agents, boxes = len(scenario.agents), scenario.boxes[1]
    present = np.flatnonzero(layout.there).tolist()
    colours = [HIDER if agent < scenario.hiders[1] else SEEKER for agent in range(agents)]
    for agent in (body for body in present if body < agents):
        x, y, _, turn = position[agent]
        canvas.cone(x, y, turn - np.pi / 2, colours[agent])
    for x, y, _, wide, deep, _ in layout.walls[layout.walls[:, 3] > 0]:
        canvas.paint(x, y, 0, (wide, deep), STONE)
    for thing in (body - agents for body in present if body >= agents):
        x, y, _, turn = position[agents + thing]
        ramp = thing >= boxes
        colour = LOCKED if locked[thing] else HELD if thing in held else SLOPE if ramp else WOOD
        wide, deep, _ = (BOX, BOX, BOX) if ramp else layout.boxes[thing]
        canvas.paint(x, y, turn, (wide / 2, deep / 2), colour, 0.5 if ramp else 0)
    for agent in (body for body in present if body < agents):
        x, y, _, turn = position[agent]
        canvas.disc(x, y, AGENT / 2, colours[agent])
        canvas.disc(x + 0.1 * np.sin(turn), y - 0.1 * np.cos(turn), 0.04, NOSE)
    return np.ascontiguousarray(canvas.pixels[::-1]).astype(np.uint8)
