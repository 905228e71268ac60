"""Copies of a Gymnasium environment stepped one after the other.

What each copy returns is written straight into its row; there is no batch in between. A copy that raises is replaced
by a fresh one, whose first observation takes the place of the one the failed step owed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from srl.core.errors import SrlError
from srl.core.seeding import derive
from srl.core.specs import Array, Arrays
from srl.core.worker import State
from srl.envs.base import Observed, StepViews
from srl.envs.fields import parts
from srl.envs.single import SingleAgent, Watch, configure
from srl.envs.snapshot import restore, snapshot

Env = gymnasium.Env[Any, Any]

_STEP = "observation, reward, terminated, truncated, info"


class GymLoop(SingleAgent):
    """Single environments in turn: one agent per copy, so its rows are its copies."""

    def __init__(self, name: str, make: Callable[[], Env], copies: int, watch: Watch) -> None:
        self.envs = [make() for _ in range(copies)]
        super().__init__(name, self.envs[0].observation_space, self.envs[0].action_space, copies, watch)
        self._make = make
        self._seed = 0
        self._configured: dict[str, Any] = {}

    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self._seed = seed
        for row, env in enumerate(self.envs):
            self.begin(row, env.reset(seed=seed + row), out[0])
        self.wrong_start(out[0])

    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        views, ended = out[0], self.ended.tolist()
        self.guard.check_actions(self.fields.float_actions, actions[0], views.valid, self.fields.at)
        self.guard.steps += self.copies
        views.reward[:], views.terminated[:], views.truncated[:] = 0, False, False
        views.after.first[:], views.after.acts[:] = False, True
        self.step_copies(actions[0], ended, views)
        wrong = self.wrong_steps(views)
        for row, reason in wrong.items():
            self._replace(row, reason, views, running=not ended[row])
        if wrong:
            self.wrong_start(views.after)

    def step_copies(self, actions: Arrays, ended: list[bool], views: StepViews) -> None:
        """Step every copy, or reset it where its episode has ``ended``."""
        action = self.fields.rows(actions)
        for row, env in enumerate(self.envs):
            try:
                result = env.reset() if ended[row] else env.step(action(row))
            except SrlError:
                raise
            except Exception as error:
                self._replace(row, error, views, running=not ended[row])
                continue
            if ended[row]:
                self.begin(row, result, views.after)
            else:
                self._write(row, result, views)

    def begin(self, row: int, result: Any, out: Observed) -> None:
        """Write what a copy's ``reset`` returned."""
        found, info = parts(result, "observation, info", lambda: f"{self.fields.at(row)}: reset()")
        self.fields.write(found, out.obs, row, row)
        self.fields.write_mask(found, info, out.obs, row, row)
        out.first[row] = out.acts[row] = True
        self.ended[row] = False
        self.measures.forget(row)

    def _write(self, row: int, result: Any, views: StepViews) -> None:
        """Write what a copy's ``step`` returned."""
        found, reward, terminated, truncated, info = parts(result, _STEP, lambda: f"{self.fields.at(row)}: step()")
        self.fields.write(found, views.after.obs, row, row)
        views.reward[row] = self.fields.reward(reward, row)
        if self.measures.names:
            self.measures.see(row, info, partial(self.fields.at, row))
        if terminated or truncated:
            views.terminated[row], views.truncated[row] = terminated, truncated
            views.after.acts[row] = False
            self.ended[row] = True
            self.measures.end(row)
            self.fields.write_last_mask(found, info, views.after.obs, row, row)
        elif self.fields.masks:
            self.fields.write_mask(found, info, views.after.obs, row, row)

    def _replace(self, row: int, error: Exception, views: StepViews, *, running: bool) -> None:
        """Put a fresh copy in the place of one that failed; ``running`` if that cut an episode short."""
        self.guard.failed(row, error)
        with contextlib.suppress(Exception):
            self.envs[row].close()
        self.begin(row, self.guard.remake(error, lambda: self._fresh(row)), views.after)
        views.reward[row], views.terminated[row], views.truncated[row] = 0, False, running
        views.valid[row] = False

    def _fresh(self, row: int) -> Any:
        env = self.envs[row] = self._make()
        if self._configured:
            configure(env, self._configured, self.fields.where)
        # another seed than the copy began with, or it would go the same way
        return env.reset(seed=derive(self._seed, "copy", row, self.guard.failures))

    def configure(self, values: dict[str, Any]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        for env in self.envs:
            configure(env, values, self.fields.where)
        self._configured = {**self._configured, **values}

    def render(self) -> Array | None:
        """See :class:`~srl.envs.base.Environment`."""
        picture = self.envs[0].render() if self.envs[0].render_mode == "rgb_array" else None
        return picture if isinstance(picture, np.ndarray) else None

    def state(self) -> State | None:
        """See :class:`~srl.envs.base.Environment`."""
        state = self.with_books(snapshot(self.envs))
        if state is not None:
            state.values |= {"seed": self._seed, "configured": self._configured}
        return state

    def load_state(self, state: State) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self.load_books(state)
        self._seed, self._configured = state.values["seed"], state.values["configured"]
        restore(self.envs, state)

    def close(self) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        for env in self.envs:
            env.close()
