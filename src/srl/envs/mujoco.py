"""Gymnasium's running robots, many copies at a time.

The copies are Gymnasium's own environments: they are made, reset and saved by Gymnasium. Only their step is ours: the
physics of one copy after the other, then observations, rewards and ends of all copies at once, to the bit what
Gymnasium computes copy by copy. What MuJoCo does besides and these robots have no use for is switched off.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from srl.core.specs import Array, Arrays
from srl.core.worker import State
from srl.envs.base import StepViews
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


def _lean(model: Any) -> None:
    """Leave out of ``model``'s step what changes nothing for one robot on a plane: a quarter of its time.

    MuJoCo looks for groups of bodies that touch, and for pairs of geoms in a tree of boxes; a robot is one group of
    nine geoms. And it reads the clock some twenty times, for a profile that is for the whole process (``mjcb_time``).
    """
    import mujoco

    off = mujoco.mjtDisableBit
    model.opt.disableflags |= int(off.mjDSBL_MIDPHASE) | int(getattr(off, "mjDSBL_ISLAND", 0))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        library = ctypes.CDLL(str(next(Path(mujoco.__file__).parent.glob("libmujoco*"))))
        ctypes.c_void_p.in_dll(library, "mjcb_time").value = None


class MujocoLoop(GymLoop):
    """Copies of one robot."""

    def __init__(self, name: str, make: Callable[[], Env], copies: int, watch: Watch) -> None:
        super().__init__(name, make, copies, watch)
        import mujoco

        robot = robot_of(self.envs[0])
        assert robot is not None
        self._robot, self._mj_step = robot, mujoco.mj_step
        self._model: Any = robot.env.model  # the copies' models are alike; one for all stays in the cache
        _lean(self._model)
        self._position: Array = np.zeros((copies, self._model.nq))
        self._velocity: Array = np.zeros((copies, self._model.nv))
        self._copies: list[tuple[Any, Any, Array]] = []
        """Time limit, simulation and its control of every copy; looked up anew when copies have changed."""

    def _fresh(self, row: int) -> Any:
        self._copies = []
        return super()._fresh(row)

    def load_state(self, state: State) -> None:
        """See :class:`GymLoop`."""
        self._copies = []
        super().load_state(state)

    def _look_up(self) -> None:
        data = [env.unwrapped.data for env in self.envs]  # type: ignore[attr-defined]
        self._copies = [(env, each, each.ctrl) for env, each in zip(self.envs, data, strict=True)]
        self._positions, self._velocities = [each.qpos for each in data], [each.qvel for each in data]

    def step_copies(self, actions: Arrays, ended: list[bool], views: StepViews) -> None:
        """See :class:`GymLoop`."""
        if not self._copies:
            self._look_up()
        control = np.asarray(self.fields.batch(actions))
        before: Array = np.array([position[0] for position in self._positions])
        step, model, frames = self._mj_step, self._model, self._robot.env.frame_skip
        truncated = [False] * self.copies
        for row, (limit, data, ctrl) in enumerate(self._copies):
            if ended[row]:
                self.begin(row, limit.reset(), views.after)
            else:
                ctrl[:] = control[row]
                step(model, data, frames)
                limit._elapsed_steps += 1
                truncated[row] = limit._elapsed_steps >= limit._max_episode_steps
        np.concatenate(self._positions, out=self._position.reshape(-1))
        np.concatenate(self._velocities, out=self._velocity.reshape(-1))
        self.fields.write_batch(self._robot.observation(self._position, self._velocity), views.after.obs)
        reward, over = self._robot.outcome(before, self._position, self._velocity, control)
        running = ~np.array(ended)
        views.truncated[:] = truncated
        np.multiply(reward, running, out=views.reward, casting="same_kind")
        np.logical_and(over, running, out=views.terminated)
        np.logical_or(views.terminated, views.truncated, out=self.ended)
        np.logical_not(self.ended, out=views.after.acts)
