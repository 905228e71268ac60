"""Gymnasium's running robots, many copies at a time.

The copies are Gymnasium's own environments: they are made, reset and saved by Gymnasium. Only their step is ours: the
physics of one copy after the other, then observations, rewards and ends of all copies at once, to the bit what
Gymnasium computes copy by copy. What MuJoCo does besides and these robots have no use for is switched off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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


def _lean(model: Any) -> ctypes.CDLL | None:
    """Leave out of ``model``'s step what changes nothing for one robot on a plane: a fifth of its time.

    MuJoCo looks for groups of bodies that touch, and for pairs of geoms in a tree of boxes; a robot is one group of
    a few geoms. And it reads the clock some twenty times, for a profile that is for the whole process (``mjcb_time``).
    Returned is MuJoCo itself, unless this installation of it hides what is in there.
    """
    import mujoco

    off = mujoco.mjtDisableBit
    model.opt.disableflags |= int(off.mjDSBL_MIDPHASE) | int(getattr(off, "mjDSBL_ISLAND", 0))
    try:
        library = ctypes.CDLL(str(next(Path(mujoco.__file__).parent.glob("libmujoco*"))))
        ctypes.c_void_p.in_dll(library, "mjcb_time").value = None
    except (OSError, ValueError, StopIteration):
        return None
    return library


def _native_step(mujoco: ctypes.CDLL | None) -> Callable[..., None] | None:
    """``robots_step`` with MuJoCo's step in it, if there is compiled code."""
    library = native.library()
    if library is None or mujoco is None:
        return None
    kinds = "pplplpppppp"
    step = library.robots_step
    step.restype, step.argtypes = None, [ctypes.c_int64 if kind == "l" else ctypes.c_void_p for kind in kinds]
    return partial(step, ctypes.cast(mujoco.mj_step, ctypes.c_void_p))


class Copies(NamedTuple):
    """The simulations of all copies, looked up anew when a copy has changed."""

    data: list[Any]
    control: list[Array]
    position: list[Array]
    velocity: list[Array]
    addresses: Array
    """Of each copy's simulation, control, position and velocity, for ``robots.c``."""


class MujocoLoop(GymLoop):
    """Copies of one robot."""

    def __init__(self, name: str, make: Callable[[], Env], copies: int, watch: Watch) -> None:
        super().__init__(name, make, copies, watch)
        robot = robot_of(self.envs[0])
        assert robot is not None
        model = robot.env.model  # the copies' models are alike; one for all stays in the cache
        self._robot, self._model, self._step = robot, model, _native_step(_lean(model))
        self._sizes: Array = np.array([model.nu, model.nq, model.nv])
        self._before: Array = np.zeros(copies)
        self._position: Array = np.zeros((copies, model.nq))
        self._velocity: Array = np.zeros((copies, model.nv))
        self._found = [each.ctypes.data for each in (self._sizes, self._before, self._position, self._velocity)]
        self._copies: Copies | None = None
        self._elapsed: Array = np.zeros(copies, int)
        """Steps of each copy's episode; Gymnasium keeps them in each copy, and has them back in :meth:`_let_go`."""
        self._longest = self.envs[0]._max_episode_steps  # type: ignore[attr-defined]

    def _look_up(self) -> Copies:
        data = [env.unwrapped.data for env in self.envs]  # type: ignore[attr-defined]
        control, position, velocity = ([getattr(each, name) for each in data] for name in ("ctrl", "qpos", "qvel"))
        arrays = ([each.ctypes.data for each in part] for part in (control, position, velocity))
        addresses = np.array([[each._address for each in data], *arrays]).T.copy()
        self._elapsed[:] = [env._elapsed_steps for env in self.envs]  # type: ignore[attr-defined]
        self._copies = Copies(data, control, position, velocity, addresses)
        return self._copies

    def _let_go(self) -> None:
        if self._copies is not None:
            for env, elapsed in zip(self.envs, self._elapsed.tolist(), strict=True):
                env._elapsed_steps = elapsed  # type: ignore[attr-defined]
        self._copies = None

    def _fresh(self, row: int) -> Any:
        self._let_go()
        return super()._fresh(row)

    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """See :class:`GymLoop`."""
        self._let_go()
        super().reset(seed, out)

    def state(self) -> State | None:
        """See :class:`GymLoop`."""
        self._let_go()
        return super().state()

    def load_state(self, state: State) -> None:
        """See :class:`GymLoop`."""
        self._let_go()
        super().load_state(state)

    def step_copies(self, actions: Arrays, ended: list[bool], views: StepViews) -> None:
        """See :class:`GymLoop`."""
        copies = self._copies or self._look_up()
        running: Array = ~self.ended
        for row in np.flatnonzero(self.ended).tolist():
            self.begin(row, self.envs[row].reset(), views.after)
            self._elapsed[row] = 0
        control = np.ascontiguousarray(self.fields.batch(actions), np.float32)
        self._simulate(copies, control, running)
        self.fields.write_batch(self._robot.observation(self._position, self._velocity), views.after.obs)
        reward, over = self._robot.outcome(self._before, self._position, self._velocity, control)
        self._elapsed += running
        np.multiply(reward, running, out=views.reward, casting="same_kind")
        np.logical_and(over, running, out=views.terminated)
        np.greater_equal(self._elapsed, self._longest, out=views.truncated)
        np.logical_or(views.terminated, views.truncated, out=self.ended)
        np.logical_not(self.ended, out=views.after.acts)

    def _simulate(self, copies: Copies, control: Array, running: Array) -> None:
        """The physics of one step, and what came of it."""
        model, frames = self._model, self._robot.env.frame_skip
        if self._step is not None:
            robots = copies.addresses.ctypes.data, self.copies, running.ctypes.data, control.ctypes.data
            self._step(model._address, frames, *robots, *self._found)
            return
        import mujoco

        self._before[:] = [position[0] for position in copies.position]
        for row in np.flatnonzero(running).tolist():
            copies.control[row][:] = control[row]
            mujoco.mj_step(model, copies.data[row], frames)
        np.concatenate(copies.position, out=self._position.reshape(-1))
        np.concatenate(copies.velocity, out=self._velocity.reshape(-1))
