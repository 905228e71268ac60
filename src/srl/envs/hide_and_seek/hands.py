"""What agents do with objects: hold them and lock them, in all copies at once.

Both need an object that the agent saw in its last observation and whose surface is within reach. An agent that wants to
hold something holds the nearest such object, for as long as that is so. Locking is a state too: an agent that wants to
lock locks all such objects, and one that does not unlocks those of its own team. Nobody else can unlock them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from srl.core.specs import Array, Arrays
from srl.envs.hide_and_seek.scenario import BOX, REACH
from srl.envs.hide_and_seek.world import RISE, World


class Hands:
    """What is held and what is locked in all copies."""

    def __init__(self, worlds: Sequence[World]) -> None:
        self.worlds, scenario = worlds, worlds[0].scenario
        copies, agents, objects = len(worlds), len(scenario.agents), scenario.objects
        self.agents = agents
        #: of hiders 0, of seekers 1; nobody's objects are of team -1
        self.team: Array = (np.arange(agents) >= scenario.hiders[1]).astype(int)
        self.can_lock: Array = (np.arange(objects) < scenario.boxes[1]) | scenario.ramps_lock
        self.half: Array = np.full((copies, objects, 3), BOX / 2)
        #: the object each agent holds, or -1
        self.held: Array = np.full((copies, agents), -1)
        self.grips: Array = np.zeros((copies, agents, 7))
        self.locked: Array = np.zeros((copies, objects), bool)
        self.frozen: Array = np.zeros((copies, objects, 4))
        #: the agent that locked each object last, or -1
        self.owner: Array = np.full((copies, objects), -1)

    def forget(self, copy: int) -> None:
        """Begin with the layout of a new episode, in which nothing is held or locked."""
        boxes = self.worlds[copy].layout.boxes
        self.half[copy, : len(boxes)] = boxes / 2
        self.held[copy], self.locked[copy], self.owner[copy] = -1, False, -1

    def owners(self) -> Array:
        """The team that locked each object last, or -1: ``[copies, objects]``."""
        return np.where(self.owner < 0, -1, self.team[self.owner])

    def use(self, position: Array, sees: Array, grab: Array, lock: Array) -> None:
        """Do what agents want: ``grab`` and ``lock`` are flags ``[copies, agents]``, ``sees`` is what they saw."""
        distance = self._distances(position)
        can = sees[:, :, self.agents :] & (distance <= REACH)
        if can.any() or (self.held >= 0).any():
            self._hold(position, np.where(can & grab[..., None], distance, np.inf))
        if can.any():
            self._lock(position, can, lock[..., None], distance)

    def _distances(self, position: Array) -> Array:
        """How far the surface of each object is from the middle of each agent."""
        agents, objects = position[:, : self.agents, None], position[:, None, self.agents :]
        x, y = agents[..., 0] - objects[..., 0], agents[..., 1] - objects[..., 1]
        cos, sin = np.cos(objects[..., 3]), np.sin(objects[..., 3])
        z = agents[..., 2] - objects[..., 2] + (RISE[0] - RISE[1])
        away = np.abs(np.stack([x * cos + y * sin, y * cos - x * sin, z], -1)) - self.half[:, None]
        return np.asarray(np.linalg.norm(np.maximum(away, 0), axis=-1))

    def _hold(self, position: Array, distance: Array) -> None:
        wanted = np.where(np.isfinite(distance.min(-1)), distance.argmin(-1), -1)
        for copy, agent in np.argwhere(wanted != self.held).tolist():
            before, after = int(self.held[copy, agent]), int(wanted[copy, agent])
            if before >= 0:
                self.worlds[copy].release(agent, before)
            if after >= 0:
                self.grips[copy, agent] = _grip(position[copy, agent], position[copy, self.agents + after])
                self.worlds[copy].hold(agent, after, self.grips[copy, agent])
        self.held = wanted

    def _lock(self, position: Array, can: Array, wants: Array, distance: Array) -> None:
        can = can & self.can_lock
        refused = (can & ~wants & (self.team[:, None] == self.owners()[:, None])).any(1)
        wanted = can & wants
        locked = (self.locked & ~refused) | (wanted.any(1) & ~refused)
        nearest = np.where(wanted, distance, np.inf).argmin(1)
        for copy, thing in np.argwhere(locked != self.locked).tolist():
            if locked[copy, thing]:
                self.owner[copy, thing] = nearest[copy, thing]
                self.frozen[copy, thing] = position[copy, self.agents + thing]
                self.worlds[copy].lock(thing, self.frozen[copy, thing])
                self.worlds[copy].halt(thing)
            else:
                self.worlds[copy].unlock(thing)
        self.locked = locked

    def state(self) -> Arrays:
        """What is held and locked, and how."""
        return {name: getattr(self, name).copy() for name in ("held", "grips", "locked", "frozen", "owner")}

    def load_state(self, state: Arrays) -> None:
        """Go on from ``state``, in worlds that have their layouts."""
        for copy in range(len(self.worlds)):
            self.forget(copy)
        for name, value in state.items():
            getattr(self, name)[...] = value
        for copy, agent in np.argwhere(self.held >= 0).tolist():
            self.worlds[copy].hold(agent, int(self.held[copy, agent]), self.grips[copy, agent])
        for copy, thing in np.argwhere(self.locked).tolist():
            self.worlds[copy].lock(thing, self.frozen[copy, thing])


def _grip(agent: Array, thing: Array) -> Array:
    """Place and turn (a quaternion) of an object as an agent sees them."""
    x, y, z, turn = thing - agent
    cos, sin = np.cos(agent[3]), np.sin(agent[3])
    return np.array(
        [x * cos + y * sin, y * cos - x * sin, z + RISE[1] - RISE[0], np.cos(turn / 2), 0, 0, np.sin(turn / 2)]
    )
