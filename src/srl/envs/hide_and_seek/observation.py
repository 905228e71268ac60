"""What agents are shown: everything about every body, and masks that say which bodies they see and which there are.

Whoever acts should look at what it sees only; whoever judges in training may look at all there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium import spaces

from srl.core.specs import Array, Arrays
from srl.envs.base import Observed
from srl.envs.hide_and_seek.hands import Hands
from srl.envs.hide_and_seek.scenario import LIDAR, Scenario
from srl.envs.hide_and_seek.sight import Sight

AGENT_NUMBERS = 10
"""Position and turn 4, velocities 4, whether it is a hider, how much of the preparation is over."""
OBJECT_NUMBERS = 15
"""Position 3, cosine and sine of its turn, velocities 4, size 3, whether you, your team, the other team locked it."""
KINDS = "others", "boxes", "ramps"


def space(scenario: Scenario) -> spaces.Dict:
    """The space of one agent's observations."""
    counts = len(scenario.agents) - 1, scenario.boxes[1], scenario.ramps
    shapes: dict[str, tuple[int, ...]] = {"self": (AGENT_NUMBERS,), "lidar": (LIDAR,)}
    for kind, count in zip(KINDS, counts, strict=True):
        shapes[kind] = (count, AGENT_NUMBERS if kind == "others" else OBJECT_NUMBERS)
    found: dict[str, spaces.Space[Array]] = {
        name: spaces.Box(-np.inf, np.inf, shape, np.float32) for name, shape in shapes.items()
    }
    for kind, count in zip(KINDS, counts, strict=True):
        found[f"{kind}_seen"] = found[f"{kind}_exist"] = spaces.MultiBinary(count)
    return spaces.Dict(found)


class Observations:
    """The observations of all agents in all copies: ``fields`` are ``[copies, agents, …]``."""

    def __init__(self, scenario: Scenario, copies: int) -> None:
        self.agents, self.boxes = len(scenario.agents), scenario.boxes[1]
        described = space(scenario).spaces
        self.fields: Arrays = {
            f"obs/{name}": np.zeros((copies, self.agents, *(each.shape or ())), each.dtype)
            for name, each in described.items()
        }
        self._agents: Array = np.zeros((copies, self.agents, AGENT_NUMBERS), np.float32)
        self._agents[..., 8] = np.arange(self.agents) < scenario.hiders[1]
        self._things: Array = np.zeros((copies, scenario.objects, OBJECT_NUMBERS - 3), np.float32)
        self._number: Array = np.arange(self.agents)[:, None]
        self._groups: list[Array | slice] = []

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        """Say which agents, by number, are in which group."""
        whole = list(range(self.agents))
        self._groups = [slice(None) if list(group) == whole else np.array(group) for group in groups]

    def update(
        self, position: Array, velocity: Array, progress: Array, there: Array, sight: Sight, hands: Hands
    ) -> None:
        """Take in what is now; ``progress`` is the part of the preparation that is over."""
        count, fields = self.agents, self.fields
        agents, things = self._agents, self._things
        agents[..., :4], agents[..., 4:8] = position[:, :count], velocity[:, :count]
        agents[..., 9] = progress[:, None]
        things[..., :3], things[..., 5:9] = position[:, count:, :3], velocity[:, count:]
        turn = position[:, count:, 3]
        np.cos(turn, out=things[..., 3], casting="same_kind")
        np.sin(turn, out=things[..., 4], casting="same_kind")
        np.multiply(hands.half, 2, out=things[..., 9:], casting="same_kind")
        peers = sight.peers
        fields["obs/self"][:] = agents
        np.take(agents, peers[:, : count - 1], axis=1, out=fields["obs/others"], mode="clip")
        fields["obs/lidar"][:] = sight.lidar
        seen = np.take_along_axis(sight.sees, peers[None], -1)
        exist = there[:, peers]
        cuts = {"others": slice(0, count - 1), "boxes": slice(count - 1, count - 1 + self.boxes)}
        cuts["ramps"] = slice(count - 1 + self.boxes, None)
        for kind, cut in cuts.items():
            fields[f"obs/{kind}_seen"][:] = seen[..., cut]
            fields[f"obs/{kind}_exist"][:] = exist[..., cut]
        locks = self._locks(hands)
        for kind, cut in (("boxes", slice(0, self.boxes)), ("ramps", slice(self.boxes, None))):
            field = fields[f"obs/{kind}"]
            field[..., : OBJECT_NUMBERS - 3] = things[:, None, cut]
            field[..., OBJECT_NUMBERS - 3 :] = locks[:, :, cut]
        if not there.all():
            self._blank(there)

    def _locks(self, hands: Hands) -> Array:
        """Whether an agent, its team and the other team locked an object: ``[copies, agents, objects, 3]``."""
        locked, owner = hands.locked[:, None], hands.owner[:, None]
        own = hands.team[:, None] == hands.owners()[:, None]
        return np.stack([locked & (owner == self._number), locked & own, locked & ~own], -1)

    def _blank(self, there: Array) -> None:
        """Zero what is about bodies that are not there, and all that they would be shown."""
        for kind in KINDS:
            self.fields[f"obs/{kind}"] *= self.fields[f"obs/{kind}_exist"][..., None]
        for field in self.fields.values():
            field[~there[:, : self.agents]] = 0

    def write(self, out: Sequence[Observed]) -> None:
        """Write the observations of each group."""
        for group, observed in zip(self._groups, out, strict=True):
            for name, field in self.fields.items():
                target = observed.obs[name]
                target[:] = field[:, group].reshape(target.shape)
