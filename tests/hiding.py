"""Hide and seek with bodies where a test wants them."""

from __future__ import annotations

import numpy as np

from srl.envs.base import StepViews
from srl.envs.hide_and_seek import HideAndSeek
from srl.envs.hide_and_seek.layout import Layout
from srl.envs.hide_and_seek.scenario import BOX

STILL = (5, 5, 5, 0, 0)
RIGHT, LEFT, UP, DOWN = np.pi / 2, -np.pi / 2, np.pi, 0.0
"""Turns that look along x, against it, along y and against it."""


class Game:
    """Copies of hide and seek; unless said otherwise all agents are in one group."""

    def __init__(self, scenario="quadrant", copies=1, seed=0, groups=None):
        self.env = HideAndSeek(scenario).make(copies)
        self.groups = groups or [self.env.agents]
        self.env.bind(self.groups)
        spaces = self.env.spaces(self.env.agents[0])
        self.out = [StepViews.zeros(spaces, copies * len(group)) for group in self.groups]
        self.env.reset(seed, [views.after for views in self.out])

    @property
    def views(self):
        return self.out[0]

    def number(self, name):
        """A body's number; they are called like agents: ``box-0``, ``ramp-1``."""
        kind, _, index = name.partition("-")
        agents, boxes = len(self.env.agents), self.env.scenario.boxes[1]
        return (
            {"box": agents, "ramp": agents + boxes}[kind] + int(index)
            if kind in ("box", "ramp")
            else (self.env.agents.index(name))
        )

    def arrange(self, bodies, walls=(), sizes=None):
        """Begin with these bodies, by name (x, y) or (x, y, turn), and these walls, (x, y, length x, length y)."""
        env = self.env
        count = len(env.agents) + env.scenario.objects
        layout = Layout(np.zeros((env.scenario.walls, 6)), np.full((count, 2), 3.0), None, np.zeros(count, bool))
        layout.boxes = np.full((env.scenario.boxes[1], 3), BOX)
        for name, size in (sizes or {}).items():
            layout.boxes[int(name[4:])] = size
        for i, (x, y, wide, deep) in enumerate(walls):
            layout.walls[i] = x, y, 0.25, wide / 2, deep / 2, 0.25
        for name, (x, y, *_) in bodies.items():
            layout.places[self.number(name)], layout.there[self.number(name)] = (x, y), True
        world = env.worlds[0]
        world.place(layout)
        for name, (_, _, *turn) in bodies.items():
            world.position[self.number(name), 3] = turn[0] if turn else 0.0
        world.mujoco.mj_kinematics(world.model, world.data)
        env.position[0], env.velocity[0] = world.position, world.velocity
        env.there[0], env.time[0], env.over[0] = layout.there, 0, False
        env.hands.forget(0)
        env.statistics.begin(0, env.position[0, len(env.agents) :, :2])
        env._observe(np.ones(env.copies, bool), [views.after for views in self.out])

    def after_preparation(self):
        self.env.time[:] = self.env.scenario.preparation

    def act(self, count=1, **wants):
        """Step with what these agents do (``hider_0``), the others nothing."""
        action = np.full((len(self.env.agents), 5), STILL)
        for name, each in wants.items():
            action[self.number(name.replace("_", "-"))] = each
        for _ in range(count):
            self.step(action)

    def step(self, action):
        """Step with actions ``[copies * agents, 5]`` in the order of the agents."""
        per_copy = action.reshape(self.env.copies, len(self.env.agents), 5)
        given = []
        for group, views in zip(self.groups, self.out, strict=True):
            numbers = [self.env.agents.index(agent) for agent in group]
            given.append({"action": per_copy[:, numbers].reshape(-1, 5)})
            views.valid[:] = views.after.acts
        self.env.step(given, self.out)

    def at(self, name):
        return self.env.position[0, self.number(name)]

    def sees(self, one, other):
        return bool(self.env.sight.sees[0, self.number(one), self.number(other)])

    def seen(self, name, field):
        """A field of what an agent in the first copy is shown."""
        return self.views.after.obs[f"obs/{field}"][self.env.agents.index(name)]


def chosen(rng, rows):
    """Actions at random, that grab and lock often."""
    return rng.integers(0, (11, 11, 11, 2, 2), (rows, 5))
