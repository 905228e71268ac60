"""The simulation of one copy. There is one model for a scenario, with everything there can be in it.

A new layout does not compile a new model. Walls are bodies that do not move: they are moved and resized in the model,
with all that MuJoCo keeps about their extent. What an episode does not have lies in the middle, touches nothing, is not
hit by rays and does not move. Held objects are welded to who holds them, locked ones are kept where they are by limits
of their joints.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from srl.core.errors import ConfigError
from srl.core.specs import Array
from srl.envs.hide_and_seek.layout import Layout
from srl.envs.hide_and_seek.scenario import AGENT, BOX, FLOOR, FRAMES, LOW, SCENARIOS, SECONDS, Scenario

RISE = AGENT / 2, BOX / 2
"""How high the middles of agents and of objects are when they stand on the floor."""
_STILL = 1e10
"""Damping of what is not there."""
_FIRM = "solreflimit='0.01 1' solimplimit='0.99 0.999 0.001'"
"""Limits as firm as MuJoCo's steps allow: locked objects give way by millimetres."""
_MOVES = {
    "x": "type='slide' axis='1 0 0'",
    "y": "type='slide' axis='0 1 0'",
    "z": "type='slide' axis='0 0 1'",
    "turn": "type='hinge' axis='0 0 1'",
}
_ARMS = "".join(
    f"<geom type='sphere' size='0.05' pos='{x} -0.075 -0.05' mass='0' friction='0.01'/>" for x in (-0.13, 0.13)
)


def mujoco() -> Any:
    """The package."""
    try:
        import mujoco
    except ImportError as error:
        raise ConfigError("hide and seek needs the package mujoco: pip install 'reallyscalablerl[mujoco]'") from error
    return mujoco


def _joints(body: str, *damping: float) -> str:
    moves = zip(_MOVES.items(), damping, strict=True)
    return "".join(f"<joint name='{body}{name}' {kind} damping='{each}' {_FIRM}/>" for (name, kind), each in moves)


def _bodies(scenario: Scenario) -> Iterator[str]:
    """Walls, then agents, boxes and ramps."""
    for i in range(scenario.walls):
        yield (
            f"<body name='wall{i}' pos='{FLOOR / 2} {FLOOR / 2} {LOW / 2}'>"
            f"<geom type='box' size='0.1 0.1 0.1' friction='{scenario.wall_friction}'/></body>"
        )
    for i in range(len(scenario.agents)):
        joints = _joints(f"agent{i}", 10, 10, 1, 10)
        body = f"<geom type='sphere' size='{AGENT / 2}' mass='1' friction='0.01'/>{_ARMS}"
        yield f"<body name='agent{i}' pos='0 0 {RISE[0]}'>{joints}{body}</body>"
    for i in range(scenario.boxes[1]):
        joints, half = _joints(f"box{i}", *[0.01] * 4), BOX / 2
        body = f"<geom type='box' size='{half} {half} {half}' mass='1' friction='0.2'/>"
        yield f"<body name='box{i}' pos='0 0 {RISE[1]}'>{joints}{body}</body>"
    for i in range(scenario.ramps):
        joints = _joints(f"ramp{i}", *[0.1] * 4)
        body = "<geom type='mesh' mesh='ramp' mass='1' friction='0.01'/>"
        yield f"<body name='ramp{i}' pos='0 0 {RISE[1]}'>{joints}{body}</body>"


def description(scenario: Scenario) -> str:
    """The model of a scenario as MJCF."""
    half = BOX / 2
    # high where y is low
    corners = [(x, y, z) for x in (-half, half) for y, z in ((-half, -half), (-half, half), (half, -half))]
    vertices = " ".join(str(number) for corner in corners for number in corner)
    agents = [f"agent{i}" for i in range(len(scenario.agents))]
    objects = [f"box{i}" for i in range(scenario.boxes[1])] + [f"ramp{i}" for i in range(scenario.ramps)]
    welds = "".join(f"<weld body1='{a}' body2='{o}' active='false'/>" for a in agents for o in objects)
    motors = "".join(f"<motor joint='{a}{joint}' gear='100'/>" for a in agents for joint in ("x", "y", "turn"))
    return f"""
    <mujoco model="hide and seek">
      <option timestep="{SECONDS}" gravity="0 0 -50"><flag midphase="disable"/></option>
      <asset><mesh name="ramp" vertex="{vertices}"/></asset>
      <worldbody>
        <geom name="floor" type="plane" size="{FLOOR} {FLOOR} 1" friction="0.2"/>
        {"".join(_bodies(scenario))}
      </worldbody>
      <equality>{welds}</equality>
      <actuator>{motors}</actuator>
    </mujoco>
    """


@functools.cache
def _model(name: str) -> Any:
    return mujoco().MjModel.from_xml_string(description(SCENARIOS[name]))


class World:
    """The simulation of one copy of the scenario ``name``; nothing is there before a layout is placed."""

    layout: Layout

    def __init__(self, name: str) -> None:
        self.mujoco = mujoco()
        self.scenario = scenario = SCENARIOS[name]
        self.model = copy.copy(_model(name))
        self.data = self.mujoco.MjData(self.model)
        agents, count = len(scenario.agents), len(scenario.agents) + scenario.objects
        #: numbers of bodies; the world's is 0
        self.walls: Array = np.arange(1, 1 + scenario.walls)
        self.bodies: Array = np.arange(1 + scenario.walls, 1 + scenario.walls + count)
        self.boxes: Array = self.bodies[agents : agents + scenario.boxes[1]]
        #: by body, four joints each
        self.position: Array = self.data.qpos.reshape(count, 4)
        self.velocity: Array = self.data.qvel.reshape(count, 4)
        self._damping: Array = self.model.dof_damping.copy()
        self._welds = self.data.eq_active.reshape(agents, scenario.objects)
        self._grips = self.model.eq_data.reshape(agents, scenario.objects, -1)
        self._limited = self.model.jnt_limited.reshape(count, 4)[agents:]
        self._range = self.model.jnt_range.reshape(count, 4, 2)[agents:]

    def place(self, layout: Layout) -> None:
        """Begin with this layout."""
        model, there = self.model, layout.there
        self.layout = layout
        standing = layout.walls[:, 3] > 0
        model.body_pos[self.walls[standing]] = layout.walls[standing, :3]
        self._resize(self.walls[standing], layout.walls[standing, 3:])
        self._show(self.walls, standing)
        self._resize(self.boxes, layout.boxes / 2)
        square = layout.boxes**2
        model.body_inertia[self.boxes] = (square.sum(1, keepdims=True) - square) / 12  # of a mass of 1
        self._show(self.bodies, there)
        model.dof_damping[:] = np.where(there.repeat(4), self._damping, _STILL)
        self._limited[:] = 0
        self.mujoco.mj_setConst(model, self.data)
        self.mujoco.mj_resetData(model, self.data)
        self.position[:, :2] = layout.places
        self.mujoco.mj_kinematics(model, self.data)

    def _resize(self, bodies: Array, half: Array) -> None:
        """Give bodies of one box each another size, with all that MuJoCo bounds them by."""
        model = self.model
        geoms, volumes = model.body_geomadr[bodies], model.body_bvhadr[bodies]
        model.geom_size[geoms] = half
        model.geom_rbound[geoms] = np.linalg.norm(half, axis=1)
        model.geom_aabb[geoms, 3:] = half
        model.bvh_aabb[volumes, 3:] = half

    def _show(self, bodies: Array, there: Array) -> None:
        """Let bodies touch others and be hit by rays, or not."""
        model = self.model
        shown = np.zeros(model.nbody, bool)
        shown[bodies] = there
        model.body_contype[bodies] = model.body_conaffinity[bodies] = there
        geoms = np.isin(model.geom_bodyid, bodies)
        of = shown[model.geom_bodyid[geoms]]
        model.geom_contype[geoms] = model.geom_conaffinity[geoms] = of
        model.geom_rgba[geoms, 3] = of

    def step(self, control: Array) -> bool:
        """Take one step with these forces; False if the simulation failed."""
        data = self.data
        data.ctrl[:] = control
        data.time = 1.0
        self.mujoco.mj_step(self.model, data, FRAMES)
        self.mujoco.mj_kinematics(self.model, data)
        return bool(data.time > 1.0)  # when numbers are not finite MuJoCo begins anew, at 0

    def hold(self, agent: int, thing: int, grip: Array) -> None:
        """Weld an object to an agent; ``grip`` is its place and its turn as the agent sees them."""
        self._grips[agent, thing, 3:10] = grip
        self._welds[agent, thing] = 1

    def release(self, agent: int, thing: int) -> None:
        """Let go of an object."""
        self._welds[agent, thing] = 0

    def lock(self, thing: int, position: Array) -> None:
        """Keep an object at ``position``."""
        self._range[thing] = position[:, None]
        self._limited[thing] = 1

    def halt(self, thing: int) -> None:
        """Take away the velocity of an object, which would carry it beyond the place where it is locked."""
        self.velocity[len(self.scenario.agents) + thing] = 0

    def unlock(self, thing: int) -> None:
        """Let an object move."""
        self._limited[thing] = 0

    def state(self) -> Array:
        """What the simulation goes on from."""
        parts = self.mujoco.mjtState.mjSTATE_INTEGRATION
        found: Array = np.zeros(self.mujoco.mj_stateSize(self.model, parts))
        self.mujoco.mj_getState(self.model, self.data, found, parts)
        return found

    def load_state(self, state: Array) -> None:
        """Go on from ``state``; the layout, what is held and what is locked are told besides."""
        self.mujoco.mj_setState(self.model, self.data, state, self.mujoco.mjtState.mjSTATE_INTEGRATION)
        self.mujoco.mj_kinematics(self.model, self.data)
