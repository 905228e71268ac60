"""Gymnasium's running robots, many copies at a time.

The copies are Gymnasium's own environments: they are made, reset and saved by Gymnasium. Only their step is ours: the
physics of one copy after the other, then observations, rewards and ends of all copies at once, to the bit what
Gymnasium computes copy by copy. What MuJoCo does besides and these robots have no use for is switched off.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from srl.core import native
from srl.core.specs import Array, Arrays
from srl.core.worker import State
from srl.envs.base import Observed, StepViews
from srl.envs.loop import Env, GymLoop
from srl.envs.single import Watch


class Robot:
    """The rules of one kind of robot, over the positions and velocities ``[copies, …]`` of all copies."""

    fastest = np.inf
    """Velocities are clipped to this in observations."""

    def __init__(self, env: Any) -> None:
        self.env, self.dt = env, env.dt
        self.forward, self.effort = env._forward_reward_weight, env._ctrl_cost_weight
        self.hidden = int(env._exclude_current_positions_from_observation)

    def observation(self, position: Array, velocity: Array) -> Array:
        """What policies see."""
        if self.fastest < np.inf:
            velocity = np.clip(velocity, -self.fastest, self.fastest)
        return np.concatenate((position[:, self.hidden :], velocity), 1)

    def outcome(self, before: Array, position: Array, velocity: Array, control: Array) -> tuple[Array, Array]:
        """Rewards and whether episodes end; ``before`` is where the robots were along their way."""
        forward = self.forward * ((position[:, 0] - before) / self.dt)
        return forward - self.effort * np.sum(np.square(control), 1), np.zeros(len(before), bool)


class Walker(Robot):
    """A robot that may fall."""

    fastest = 10.0

    def healthy(self, position: Array, velocity: Array) -> Array:
        """Which robots have not fallen."""
        (low, high), (left, right) = self.env._healthy_z_range, self.env._healthy_angle_range
        height, angle = position[:, 1], position[:, 2]
        found: Array = (low < height) & (height < high) & (left < angle) & (angle < right)
        return found

    def outcome(self, before: Array, position: Array, velocity: Array, control: Array) -> tuple[Array, Array]:
        """See :class:`Robot`."""
        well = self.healthy(position, velocity)
        forward = self.forward * ((position[:, 0] - before) / self.dt)
        reward = (forward + well * self.env._healthy_reward) - self.effort * np.sum(np.square(control), 1)
        return reward, ~well & self.env._terminate_when_unhealthy


class Hopper(Walker):
    """One that may also break."""

    def healthy(self, position: Array, velocity: Array) -> Array:
        """See :class:`Walker`."""
        low, high = self.env._healthy_state_range
        state = np.concatenate((position[:, 2:], velocity), 1)
        whole: Array = ((low < state) & (state < high)).all(1)
        return whole & super().healthy(position, velocity)


_ROBOTS = {"half_cheetah_v5": Robot, "walker2d_v5": Walker, "hopper_v5": Hopper}
_MODULES = "gymnasium.envs.mujoco."


def robot_of(env: Env) -> Robot | None:
    """The rules of ``env``, if it is one of Gymnasium's robots as Gymnasium makes them."""
    base = env.unwrapped
    kind = _ROBOTS.get(type(base).__module__.removeprefix(_MODULES))
    wrapped = type(env) is TimeLimit and type(env.env) is OrderEnforcing and env.env.env is base
    return kind(base) if kind is not None and wrapped and base.render_mode is None else None


_FEW = 32
"""Pairs of geoms that are sooner tried one by one than looked for."""


def touching(model: Any) -> list[tuple[int, int]]:
    """The geoms that MuJoCo would let touch each other, by their numbers."""
    kinds, affinities = model.geom_contype, model.geom_conaffinity
    body = model.body_weldid[model.geom_bodyid]
    parent = model.body_weldid[model.body_parentid[body]]
    found = []
    for one, other in itertools.combinations(range(model.ngeom), 2):
        welded = body[one] == body[other]
        nested = body[one] and body[other] and (body[one] == parent[other] or body[other] == parent[one])
        meant = kinds[one] & affinities[other] or kinds[other] & affinities[one]
        if meant and not welded and not nested:
            found.append((one, other))
    return found


def with_pairs(model: Any, path: str) -> Any:
    """``model``, which was read from ``path``, with what may touch written down if that is little and simple.

    MuJoCo otherwise looks for bodies that are near each other along an axis, at every step anew: an eighth of its time.
    """
    import mujoco

    pairs = touching(model)
    mixed = (model.geom_solref, model.geom_solimp, model.geom_solmix, model.geom_priority)
    alike = all((each == each[0]).all() for each in mixed) and not (model.geom_margin.any() or model.geom_gap.any())
    if not alike or model.npair or model.nexclude or not 0 < len(pairs) <= _FEW:
        return model
    spec = mujoco.MjSpec.from_file(path)
    spec.compile()  # it numbers them
    geoms = {geom.id: geom for geom in spec.geoms}
    for number, geom in geoms.items():
        geom.name = geom.name or f"geom {number}"
        geom.contype = geom.conaffinity = 0
    for one, other in pairs:
        slide, twist, roll = np.maximum(model.geom_friction[one], model.geom_friction[other])
        pair = spec.add_pair(geomname1=geoms[one].name, geomname2=geoms[other].name)
        pair.condim = int(max(model.geom_condim[one], model.geom_condim[other]))
        pair.friction = [slide, slide, twist, roll, roll]
        pair.solref, pair.solimp, pair.margin, pair.gap = model.geom_solref[one], model.geom_solimp[one], 0.0, 0.0
    return spec.compile()


class _Simulation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("set", "step", "get", "model", "data", "control")),
        *((name, ctypes.c_int64) for name in ("controls", "frames", "size", "parts")),
    )


class Simulation:
    """One simulation, in which the robots take their steps in turn.

    A simulation is some thirty kilobytes that are used at every step, a robot's state less than one. What MuJoCo does
    besides, and changes nothing for one robot on a plane, is switched off: to look for groups of bodies that touch and
    for geoms in a tree of boxes, and to read the clock at every turn (``mjcb_time``, for the whole process).
    """

    def __init__(self, model: Any, frames: int) -> None:
        import mujoco

        self.mujoco, self.model, self.data, self.frames = mujoco, model, mujoco.MjData(model), frames
        self.parts = mujoco.mjtState.mjSTATE_INTEGRATION
        self.size = mujoco.mj_stateSize(model, self.parts)
        off = mujoco.mjtDisableBit
        model.opt.disableflags |= int(off.mjDSBL_MIDPHASE) | int(getattr(off, "mjDSBL_ISLAND", 0))
        self.native = self._native()

    def _native(self) -> Callable[..., None] | None:
        """The steps in C, unless there is no compiled code, or this MuJoCo hides what is in it."""
        ours = native.library()
        try:
            theirs = ctypes.CDLL(str(next(Path(self.mujoco.__file__).parent.glob("libmujoco*"))))
            ctypes.c_void_p.in_dll(theirs, "mjcb_time").value = None
            calls = [
                ctypes.cast(each, ctypes.c_void_p) for each in (theirs.mj_setState, theirs.mj_step, theirs.mj_getState)
            ]
        except (OSError, ValueError, AttributeError, StopIteration):
            return None
        if ours is None:
            return None
        model, control = self.model, self.data.ctrl
        places = model._address, self.data._address, control.ctypes.data
        self._described = _Simulation(*calls, *places, len(control), self.frames, self.size, int(self.parts))
        step = ours.robots_step
        step.restype, step.argtypes = None, [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 3]
        return partial(step, ctypes.byref(self._described))

    def step(self, states: Array, control: Array, running: Array) -> None:
        """Step the robots that are ``running``."""
        if self.native is not None:
            self.native(len(states), running.ctypes.data, control.ctypes.data, states.ctypes.data)
            return
        for row in np.flatnonzero(running).tolist():
            self.mujoco.mj_setState(self.model, self.data, states[row], self.parts)
            self.data.ctrl[:] = control[row]
            self.mujoco.mj_step(self.model, self.data, self.frames)
            self.mujoco.mj_getState(self.model, self.data, states[row], self.parts)


class MujocoLoop(GymLoop):
    """Copies of one robot."""

    def __init__(self, name: str, make: Callable[[], Env], copies: int, watch: Watch) -> None:
        super().__init__(name, make, copies, watch)
        robot = robot_of(self.envs[0])
        assert robot is not None
        self._robot = robot
        model = robot.env.model
        self._simulation = Simulation(with_pairs(model, robot.env.fullpath), robot.env.frame_skip)
        self._states: Array = np.zeros((copies, self._simulation.size))
        self._elapsed: Array = np.zeros(copies, int)
        self._ours = False
        """Whether robots are in these two, instead of in Gymnasium's environments."""
        # a state begins with the time
        self._position, self._velocity, _ = np.split(self._states[:, 1:], [model.nq, model.nq + model.nv], 1)
        self._longest = self.envs[0]._max_episode_steps  # type: ignore[attr-defined]

    def _take(self, rows: Iterable[int]) -> None:
        """Take robots from Gymnasium's environments."""
        for row in rows:
            env: Any = self.envs[row]
            base = env.unwrapped
            self._simulation.mujoco.mj_getState(base.model, base.data, self._states[row], self._simulation.parts)
            self._elapsed[row] = env._elapsed_steps
        self._ours = True

    def _give_back(self) -> None:
        """Put all robots back, for Gymnasium to go on with."""
        if self._ours:
            for row, each in enumerate(self.envs):
                env: Any = each
                base = env.unwrapped
                self._simulation.mujoco.mj_setState(base.model, base.data, self._states[row], self._simulation.parts)
                env._elapsed_steps = int(self._elapsed[row])
        self._ours = False

    def _fresh(self, row: int) -> Any:
        self._give_back()
        return super()._fresh(row)

    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """See :class:`GymLoop`."""
        self._ours = False
        super().reset(seed, out)

    def state(self) -> State | None:
        """See :class:`GymLoop`."""
        self._give_back()
        return super().state()

    def load_state(self, state: State) -> None:
        """See :class:`GymLoop`."""
        self._ours = False
        super().load_state(state)

    def step_copies(self, actions: Arrays, ended: list[bool], views: StepViews) -> None:
        """See :class:`GymLoop`."""
        if not self._ours:
            self._take(range(self.copies))
        running: Array = ~self.ended
        over = np.flatnonzero(self.ended).tolist()
        for row in over:
            self.begin(row, self.envs[row].reset(), views.after)
        self._take(over)
        before = self._position[:, 0].copy()
        control = np.ascontiguousarray(self.fields.batch(actions), np.float32)
        self._simulation.step(self._states, control, running)
        self._elapsed += running
        self.fields.write_batch(self._robot.observation(self._position, self._velocity), views.after.obs)
        reward, fallen = self._robot.outcome(before, self._position, self._velocity, control)
        np.multiply(reward, running, out=views.reward, casting="same_kind")
        np.logical_and(fallen, running, out=views.terminated)
        np.greater_equal(self._elapsed, self._longest, out=views.truncated)
        np.logical_or(views.terminated, views.truncated, out=self.ended)
        np.logical_not(self.ended, out=views.after.acts)
