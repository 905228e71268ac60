"""Environments that are vectors by themselves, such as Atari's: all copies are stepped by one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from srl.core.errors import EnvError
from srl.core.specs import Arrays
from srl.core.worker import State
from srl.envs.base import Observed, StepViews
from srl.envs.single import SingleAgent, Watch, configure
from srl.envs.snapshot import restore, snapshot


class GymVector(SingleAgent):
    """A Gymnasium vector environment with ``NEXT_STEP`` autoreset: its rows are its copies."""

    def __init__(self, name: str, env: VectorEnv[Any, Any, Any], copies: int, watch: Watch) -> None:
        super().__init__(name, env.single_observation_space, env.single_action_space, copies, watch)
        self.env: Any = env
        self.direct = self.fields.leaves[0].path if hasattr(env, "out") else ""
        """The field that ``env`` writes by itself."""
        # Policies take no other actions than those of the space; to look again is an eighth of Gymnasium's CartPole.
        space = getattr(env.unwrapped, "action_space", None)
        if space is not None:
            space.contains = lambda x: True

    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        found, info = self.env.reset(seed=seed)
        self.ended[:] = False
        out[0].first[:], out[0].acts[:] = True, True
        self._write(found, info, out[0])
        self.wrong_start(out[0])

    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        views = out[0]
        self.guard.check_actions(self.fields.float_actions, actions[0], views.valid, self.fields.at)
        self.guard.steps += self.copies
        if self.direct:
            self.env.out = views.after.obs[self.direct]
        found, reward, terminated, truncated, info = self.env.step(self.fields.batch(actions[0]))
        views.after.first[:] = self.ended
        np.logical_or(terminated, truncated, out=self.ended)
        np.logical_not(self.ended, out=views.after.acts)
        views.reward[:], views.terminated[:], views.truncated[:] = reward, terminated, truncated
        self._write(found, info, views.after)
        if self.measures.names:
            self._measure(info)
        for row, error in self.wrong_steps(views).items():
            self._skip(row, error, views)

    def _write(self, found: Any, info: Any, out: Observed) -> None:
        self.fields.write_batch(found, out.obs)
        self.fields.write_masks(found, info, out.obs, out.acts)

    def _measure(self, info: Any) -> None:
        self.measures.see_batch(info)
        for row in np.flatnonzero(self.ended).tolist():
            self.measures.end(row)

    def _skip(self, row: int, error: EnvError, views: StepViews) -> None:
        """Cut the episode at a step that cannot be used; one copy of a vector cannot be started anew by itself."""
        self.guard.failed(row, error, "had its step skipped")
        views.reward[row], views.terminated[row] = 0, False
        views.truncated[row] = not views.after.first[row]
        views.valid[row] = False
        views.after.first[row] = views.after.acts[row]
        self.fields.clear(views.after.obs, row)

    def configure(self, values: dict[str, Any]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        configure(self.env, values, self.fields.where)

    def state(self) -> State | None:
        """See :class:`~srl.envs.base.Environment`."""
        return self.with_books(snapshot(self.env))

    def load_state(self, state: State) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self.load_books(state)
        restore(self.env, state)

    def close(self) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self.env.close()
