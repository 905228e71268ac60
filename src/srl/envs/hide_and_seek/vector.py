"""Hide and seek: the rules of a step, for many copies in one process.

MuJoCo steps one copy after the other and casts the rays of one agent after the other. All else is computed for all
copies at once, over arrays ``[copies, agents, …]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium import spaces

from srl.core.errors import ConfigError
from srl.core.seeding import derive
from srl.core.specs import Array, Arrays, Spaces
from srl.core.worker import State
from srl.envs.base import Environment, Observed, StepViews
from srl.envs.hide_and_seek.hands import Hands
from srl.envs.hide_and_seek.layout import Layout, draw
from srl.envs.hide_and_seek.observation import Observations, space
from srl.envs.hide_and_seek.render import picture
from srl.envs.hide_and_seek.scenario import FORCES, SCENARIOS, STRONGEST
from srl.envs.hide_and_seek.sight import Sight
from srl.envs.hide_and_seek.statistics import Statistics
from srl.envs.hide_and_seek.world import World

CHOICES = FORCES, FORCES, FORCES, 2, 2
"""Of an action: force along x, along y, torque, whether to grab, whether to lock."""
OUT = -10.0
"""The reward of who is out of bounds."""


class HideAndSeekVector(Environment):
    """``copies`` copies of the scenario ``name``."""

    def __init__(self, name: str, copies: int) -> None:
        super().__init__()
        self.scenario = scenario = SCENARIOS[name]
        self.copies, self.agents = copies, scenario.agents
        self.worlds = [World(name) for _ in range(copies)]
        self.sight, self.hands = Sight(self.worlds), Hands(self.worlds)
        self.observations = Observations(scenario, copies)
        self.statistics = Statistics(scenario, copies, self.measured)
        count, bodies = len(self.agents), len(self.agents) + scenario.objects
        self.position: Array = np.zeros((copies, bodies, 4))
        self.velocity: Array = np.zeros((copies, bodies, 4))
        self.there: Array = np.zeros((copies, bodies), bool)
        self.time: Array = np.zeros(copies, np.int64)
        self.over: Array = np.zeros(copies, bool)  # the next step is a reset
        self.rngs = [np.random.default_rng() for _ in range(copies)]
        self._action: Array = np.zeros((copies, count, len(CHOICES)), np.int64)
        self._rows: list[list[int]] = []
        self._hiders = scenario.hiders[1]

    def spaces(self, agent: str) -> Spaces:
        """See :class:`~srl.envs.base.Environment`."""
        return Spaces(space(self.scenario), spaces.MultiDiscrete(list(CHOICES)))

    def bind(self, groups: Sequence[Sequence[str]]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        if sorted(agent for group in groups for agent in group) != sorted(self.agents):
            raise ConfigError(f"hide and seek: every agent of {self.agents} must be in one group, got {groups}")
        self._rows = [[self.agents.index(agent) for agent in group] for group in groups]
        self.observations.bind(self._rows)

    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self.rngs = [np.random.default_rng(derive(seed, "copy", copy)) for copy in range(self.copies)]
        self.over[:] = False
        for copy in range(self.copies):
            self._begin(copy)
        self._observe(np.ones(self.copies, bool), out)

    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        fresh = self.over.copy()
        going = ~fresh
        self._take(actions)
        self.hands.use(self.position, self.sight.sees, self._action[..., 3] > 0, self._action[..., 4] > 0)
        control = ((self._action[..., :3] - FORCES // 2) * (STRONGEST / (FORCES // 2))).reshape(self.copies, -1)
        failed = [copy for copy in np.flatnonzero(going).tolist() if not self._move(copy, control[copy])]
        going[failed] = False
        self.over[:] = False
        self.time += going
        for copy in (*np.flatnonzero(fresh).tolist(), *failed):
            self._begin(copy)
        self.over |= self.time == self.scenario.horizon
        self._observe(~going, [views.after for views in out])
        self._account(going, failed, out)

    def _take(self, actions: Sequence[Arrays]) -> None:
        """Take the actions of those who act: not of seekers in preparation, nor of who is not there or starts anew."""
        for rows, fields in zip(self._rows, actions, strict=True):
            self._action[:, rows] = fields["action"].reshape(self.copies, len(rows), len(CHOICES))
        idle = ~self.there[:, : len(self.agents)] | self.over[:, None]
        idle[:, self._hiders :] |= (self.time < self.scenario.preparation)[:, None]
        self._action[idle] = (FORCES // 2, FORCES // 2, FORCES // 2, 0, 0)

    def _move(self, copy: int, control: Array) -> bool:
        world = self.worlds[copy]
        whole = world.step(control)
        self.position[copy], self.velocity[copy] = world.position, world.velocity
        return whole

    def _begin(self, copy: int) -> None:
        """Start an episode."""
        world, count = self.worlds[copy], len(self.agents)
        world.place(draw(self.scenario, self.rngs[copy]))
        self.position[copy], self.velocity[copy] = world.position, world.velocity
        self.there[copy], self.time[copy] = world.layout.there, 0
        self.hands.forget(copy)
        self.statistics.begin(copy, self.position[copy, count:, :2])

    def _observe(self, first: Array, out: Sequence[Observed]) -> None:
        self.sight.look(self.position, self.there)
        progress = np.minimum(1.0, self.time / self.scenario.preparation)
        self.observations.update(self.position, self.velocity, progress, self.there, self.sight, self.hands)
        self.observations.write(out)
        there = self.there[:, : len(self.agents)]
        acts = there & ~self.over[:, None]
        for rows, observed in zip(self._rows, out, strict=True):
            observed.acts[:] = acts[:, rows].reshape(-1)
            observed.first[:] = (there & first[:, None])[:, rows].reshape(-1)

    def _account(self, going: Array, failed: list[int], out: Sequence[StepViews]) -> None:
        """Write rewards and ends, and keep the books of episodes."""
        count = len(self.agents)
        there = self.there[:, :count]
        after = going & (self.time > self.scenario.preparation)
        seen = np.asarray(self.sight.sees[:, self._hiders :, : self._hiders].any((1, 2)))
        reward = self._rewards(seen) * (there & after[:, None])
        ends = there & self.over[:, None]
        for rows, views in zip(self._rows, out, strict=True):
            views.reward[:] = reward[:, rows].reshape(-1)
            views.truncated[:] = ends[:, rows].reshape(-1)
            views.terminated[:] = False
        self.statistics.step(seen & after, reward, there)
        places, objects = self.position[:, count:, :2], self.there[:, count:]
        for phase, ended in enumerate((going & (self.time == self.scenario.preparation), self.over)):
            copies = np.flatnonzero(ended).tolist()
            if copies:
                self.statistics.end_phase(copies, phase, places, objects, self.hands.locked)
        for copy in np.flatnonzero(self.over).tolist():
            self.statistics.end(copy)
        for copy in failed:
            self._cut_short(copy, out)

    def _rewards(self, seen: Array) -> Array:
        """The rewards of all agents, ``[copies, agents]``, if preparation is over."""
        count, (low, high) = len(self.agents), self.scenario.bounds
        hiders = np.arange(count) < self._hiders
        reward = np.where(seen[:, None] == hiders, -1.0, 1.0)
        away = ((self.position[..., :2] < low) | (self.position[..., :2] > high)).any(-1) & self.there
        out = away[:, :count]
        if self.scenario.objects_bound:
            out = out | away[:, count:].any(1, keepdims=True)
        return np.where(out, OUT, reward)

    def _cut_short(self, copy: int, out: Sequence[StepViews]) -> None:
        """The simulation of a copy failed: its step does not count, and another episode has begun."""
        self.notes.append(f"hide and seek, copy {copy}: MuJoCo's numbers were not finite; the copy began anew")
        for rows, views in zip(self._rows, out, strict=True):
            mine = slice(copy * len(rows), (copy + 1) * len(rows))
            views.truncated[mine], views.valid[mine] = views.valid[mine], False

    def render(self) -> Array:
        """See :class:`~srl.envs.base.Environment`: from above; hiders are blue, seekers red."""
        return picture(self.worlds[0].layout, self.position[0], self.hands.held[0], self.hands.locked[0], self.scenario)

    def state(self) -> State:
        """See :class:`~srl.envs.base.Environment`."""
        whole = State({name: getattr(self, name).copy() for name in ("time", "over")})
        whole.arrays["sees"] = self.sight.sees.copy()
        whole.arrays["physics"] = np.stack([world.state() for world in self.worlds])
        layouts = [vars(world.layout) for world in self.worlds]
        whole.put("layout", State({name: np.stack([each[name] for each in layouts]) for name in layouts[0]}))
        whole.put("hands", State(self.hands.state()))
        whole.put("statistics", State(self.statistics.state()))
        whole.values["rng"] = [rng.bit_generator.state for rng in self.rngs]
        return whole

    def load_state(self, state: State) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        layouts = state.under("layout").arrays
        for copy, world in enumerate(self.worlds):
            world.place(Layout(**{name: value[copy].copy() for name, value in layouts.items()}))
            self.there[copy] = world.layout.there
            self.rngs[copy].bit_generator.state = state.values["rng"][copy]
        self.hands.load_state(state.under("hands").arrays)
        for copy, world in enumerate(self.worlds):
            world.load_state(state.arrays["physics"][copy])
            self.position[copy], self.velocity[copy] = world.position, world.velocity
        self.statistics.load_state(state.under("statistics").arrays)
        self.sight.sees[:] = state.arrays["sees"]
        self.time[:], self.over[:] = state.arrays["time"], state.arrays["over"]

    def close(self) -> None:
        """See :class:`~srl.envs.base.Environment`."""
