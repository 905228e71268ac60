"""What agents see of each other and of objects, and what their lidars read: one call of MuJoCo for each agent.

An agent sees a body if its middle is in the cone of view, and if a ray from middle to middle hits nothing before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from srl.core.specs import Array
from srl.envs.hide_and_seek.scenario import BOX, LIDAR, MISS, VIEW
from srl.envs.hide_and_seek.world import RISE, World

_WEDGE = BOX / 6
"""How far the middle of a ramp's mass is behind and below the middle of the box around it."""
_FAR = 1e10


class Sight:
    """The eyes of all agents in all copies."""

    def __init__(self, worlds: Sequence[World]) -> None:
        scenario = worlds[0].scenario
        copies, agents = len(worlds), len(scenario.agents)
        bodies = agents + scenario.objects
        self.agents, self._ramps = agents, agents + scenario.boxes[1]
        #: the other bodies of each agent, by number
        self.peers: Array = np.array([[e for e in range(bodies) if e != a] for a in range(agents)])
        self._rows: Array = np.arange(agents)[:, None]
        self.middles: Array = np.zeros((copies, bodies, 3))
        self.sees: Array = np.zeros((copies, agents, bodies), bool)
        self.lidar: Array = np.zeros((copies, agents, LIDAR))
        self._targets = worlds[0].bodies[self.peers]
        self._body: Array = np.append(worlds[0].model.geom_bodyid, -1)  # a ray that hits nothing says -1
        rise = np.zeros((bodies, 3))
        rise[:agents, 2], rise[agents:, 2] = RISE
        rise[self._ramps :, 2] -= _WEDGE
        self._rise = rise
        rays = bodies - 1 + LIDAR
        self._vectors: Array = np.zeros((copies, agents, rays, 3))
        around = np.linspace(0, 2 * np.pi, LIDAR, endpoint=False)
        self._vectors[:, :, bodies - 1 :, 0] = np.cos(around)
        self._vectors[:, :, bodies - 1 :, 1] = np.sin(around)
        self._hits: Array = np.full((copies, agents, rays), -1, np.int32)
        self._distances: Array = np.zeros((copies, agents, rays))
        self._cast = worlds[0].mujoco.mj_multiRay
        self._calls = [[self._call(world, copy, agent) for agent in range(agents)] for copy, world in enumerate(worlds)]

    def _call(self, world: World, copy: int, agent: int) -> tuple[Any, ...]:
        """The arguments of the call for one agent."""
        rays = self._hits.shape[-1]
        what = world.model, world.data, self.middles[copy, agent], self._vectors[copy, agent].reshape(-1)
        found = self._hits[copy, agent], self._distances[copy, agent]
        normals = (None,) if "normal:" in (self._cast.__doc__ or "") else ()  # MuJoCo 3.3 does not know them
        return *what, None, True, int(world.bodies[agent]), *found, *normals, rays, _FAR

    def look(self, position: Array, there: Array) -> None:
        """Look around; ``position`` is ``[copies, bodies, 4]``, ``there`` says which bodies there are."""
        agents, middles, peers = self.agents, self.middles, self.peers
        targets = peers.shape[1]
        np.add(position[..., :3], self._rise, out=middles)
        turn = position[:, self._ramps :, 3]
        middles[:, self._ramps :, 0] += _WEDGE * np.sin(turn)
        middles[:, self._ramps :, 1] -= _WEDGE * np.cos(turn)
        away = self._vectors[:, :, :targets]
        np.subtract(middles[:, peers], middles[:, :agents, None], out=away)
        for calls, awake in zip(self._calls, there[:, :agents].tolist(), strict=True):
            for call in itertools.compress(calls, awake):
                self._cast(*call)
        hit = self._body[self._hits[..., :targets]] == self._targets
        hit &= there[:, peers]
        hit &= there[:, :agents, None]
        hit &= self._ahead(away[..., :2], position[:, :agents, 3])
        self.sees[:, self._rows, peers] = hit
        read = self._distances[..., targets:]
        np.copyto(self.lidar, np.where(read < 0, MISS, read))

    @staticmethod
    def _ahead(away: Array, turn: Array) -> Array:
        """Whether what is ``away`` from an agent is in its cone of view; one without a turn looks along -y."""
        across, along = away[..., 0], away[..., 1]
        front = across * np.sin(turn)[..., None] - along * np.cos(turn)[..., None]
        return np.asarray(front >= np.cos(np.radians(VIEW / 2)) * np.hypot(across, along))
