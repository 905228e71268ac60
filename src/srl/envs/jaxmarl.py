"""JaxMARL: SMAX (StarCraft's skirmishes without StarCraft), Overcooked, Hanabi and others, compiled by JAX.

All copies are stepped by one compiled call. An agent that has died has a row that does not act until the game is over;
what the team is paid meanwhile belongs to its last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from srl.core.errors import ConfigError
from srl.core.specs import Array, Arrays, Spaces
from srl.envs.base import EnvConfig, Environment, Observed, StepViews

_ALL, _STATE = "__all__", "world_state"
"""What JaxMARL calls the end of a game, and what it has of the whole of it."""


@dataclass(frozen=True)
class JaxMarl(EnvConfig):
    """An environment of JaxMARL."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    """What ``jaxmarl.make`` is given; a scenario of SMAX and a layout of Overcooked by their names."""
    state: bool = False
    """Whether agents also get the state of the whole, for a critic to see (see MAPPO and QMIX)."""

    @property
    def name(self) -> str:
        """See :class:`~srl.envs.base.EnvConfig`."""
        return "-".join([self.id, *(str(value) for value in self.kwargs.values() if isinstance(value, str))])

    def make(self, copies: int, *, render: bool = False) -> JaxVector:
        """See :class:`~srl.envs.base.EnvConfig`."""
        return JaxVector(self, copies)


def jaxmarl(id: str, /, *, state: bool = False, **kwargs: Any) -> JaxMarl:
    """The environment that JaxMARL has under this id, with these arguments; see :class:`JaxMarl`."""
    return JaxMarl(id, kwargs, state)


class JaxVector(Environment):
    """``copies`` copies of an environment, compiled together."""

    def __init__(self, config: JaxMarl, copies: int) -> None:
        super().__init__()
        self.config, self.copies, self.game = config, copies, _made(config)
        self.agents = tuple(str(agent) for agent in self.game.agents)
        named = (kind.__name__ for kind in type(self.game).__mro__ if "get_avail_actions" in vars(kind))
        self.masked = next(named, "") not in ("", "MultiAgentEnv")  # the class of all has it, and only raises
        inner = getattr(self.game, "_env", self.game)
        self.longest = getattr(inner, "max_steps", None)
        self.over: Array = np.zeros(copies, bool)  # the next step is a reset
        self.time: Array = np.zeros(copies, np.int64)
        self._groups: list[tuple[str, ...]] = []
        self._key: Any = None

    def spaces(self, agent: str) -> Spaces:
        """See :class:`~srl.envs.base.Environment`."""
        seen = _space(self.game.observation_space(agent), self.config)
        if isinstance(seen, gymnasium.spaces.Box):  # some say another shape than they have
            shape = self._shapes()[agent].shape
            seen = gymnasium.spaces.Box(seen.low.min(), seen.high.max(), shape, seen.dtype.type)
        if self.config.state:
            whole = gymnasium.spaces.Box(-np.inf, np.inf, (self._state_width(),), np.float32)
            seen = gymnasium.spaces.Dict({"observation": seen, "state": whole})
        return Spaces(seen, _space(self.game.action_space(agent), self.config), masked=self.masked)

    def _shapes(self) -> Any:
        import jax

        return jax.eval_shape(self.game.reset, jax.random.key(0))[0]

    def _state_width(self) -> int:
        shapes = self._shapes()
        return int(sum(np.prod(each.shape) for name, each in shapes.items() if (name == _STATE) == (_STATE in shapes)))

    def bind(self, groups: Sequence[Sequence[str]]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        if sorted(agent for group in groups for agent in group) != sorted(self.agents):
            raise ConfigError(f"{self.config.name}: every agent of {self.agents} must be in one group, got {groups}")
        self._groups = [tuple(group) for group in groups]
        self._compile()

    def _compile(self) -> None:
        """Make the compiled functions: what is seen, a step, and a new game for some copies."""
        import jax
        import jax.numpy as jnp

        game, groups, state_wanted = self.game, self._groups, self.config.state

        def seen(obs: Any, state: Any) -> Any:
            fields = [{"obs": jnp.stack([obs[agent] for agent in group])} for group in groups]
            if state_wanted:
                flat = [obs[agent].reshape(-1) for agent in self.agents]
                whole = obs[_STATE] if _STATE in obs else jnp.concatenate(flat)
                fields = [{"obs/observation": each["obs"], "obs/state": whole.reshape(1, -1)} for each in fields]
            if self.masked:
                allowed = game.get_avail_actions(state)
                for each, group in zip(fields, groups, strict=True):
                    each["mask"] = jnp.stack([allowed[agent] for agent in group]).astype(bool)
            return fields

        def step(key: Any, state: Any, actions: Any) -> Any:
            pairs = zip(groups, actions, strict=True)
            given = {agent: group[i] for names, group in pairs for i, agent in enumerate(names)}
            obs, state, reward, done, _ = game.step_env(key, state, given)
            sums = [jnp.stack([reward[agent] for agent in group]) for group in groups]
            gone = [jnp.stack([done[agent] for agent in group]) for group in groups]
            return seen(obs, state), state, sums, gone, done[_ALL]

        def begin(key: Any, state: Any, old: Any, fresh: Any) -> Any:
            obs, new = game.reset(key)
            chosen = (new, seen(obs, new))
            return jax.tree.map(lambda a, b: jnp.where(fresh, b, a), (state, old), chosen)

        def first(key: Any) -> Any:
            obs, state = game.reset(key)
            return state, seen(obs, state)

        self._step, self._begin, self._first = (jax.jit(jax.vmap(each)) for each in (step, begin, first))
        self._split = jax.jit(lambda key: jax.random.split(key, self.copies + 1))

    def _keys(self) -> Any:
        keys = self._split(self._key)
        self._key = keys[0]
        return keys[1:]

    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        import jax

        self._key = jax.random.key(seed % 2**32)
        self._now, fields = self._first(self._keys())
        self.over[:], self.time[:] = False, 0
        gone = [np.zeros((self.copies, len(group)), bool) for group in self._groups]
        self._write(fields, np.ones(self.copies, bool), gone, out)

    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        fresh = self.over.copy()
        given = [
            fields["action"].reshape(self.copies, len(group), *fields["action"].shape[1:])
            for group, fields in zip(self._groups, actions, strict=True)
        ]
        fields, self._now, rewards, gone, over = self._step(self._keys(), self._now, given)
        gone = [np.array(each) for each in gone]
        self.time += 1
        self.over[:] = np.asarray(over) & ~fresh
        if fresh.any():
            self._now, fields = self._begin(self._keys(), self._now, fields, fresh)
            self.time[fresh] = 0
            for each in gone:
                each[fresh] = False
        late = self.over & (self.time == self.longest)
        self._write(fields, fresh, gone, [views.after for views in out])
        for group, views, reward in zip(self._groups, out, rewards, strict=True):
            views.reward[:] = np.where(fresh[:, None], 0.0, np.asarray(reward)).reshape(-1)
            views.truncated[:] = np.repeat(late, len(group))
            views.terminated[:] = np.repeat(self.over & ~late, len(group))

    def _write(self, fields: Any, first: Array, gone: list[Array], out: Sequence[Observed]) -> None:
        for group, found, dead, observed in zip(self._groups, fields, gone, out, strict=True):
            for name, value in found.items():
                target = observed.obs[name]
                target.reshape(self.copies, len(group), *target.shape[1:])[:] = np.asarray(value)
            observed.first[:] = np.repeat(first, len(group))
            observed.acts[:] = (~dead & ~self.over[:, None]).reshape(-1)

    def close(self) -> None:
        """See :class:`~srl.envs.base.Environment`."""


def _made(config: JaxMarl) -> Any:
    """The environment itself."""
    try:
        import jaxmarl
    except ImportError as error:
        raise ConfigError("needs the package jaxmarl: pip install 'reallyscalablerl[jaxmarl]'") from error
    given = dict(config.kwargs)
    try:
        if isinstance(given.get("scenario"), str):
            from jaxmarl.environments.smax import map_name_to_scenario

            given["scenario"] = map_name_to_scenario(given["scenario"])
        if config.id == "overcooked" and isinstance(given.get("layout"), str):
            from jaxmarl.environments.overcooked import overcooked_layouts

            given["layout"] = overcooked_layouts[given["layout"]]
        return jaxmarl.make(config.id, **given)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"JaxMARL cannot make {config.id!r} with {config.kwargs}: {reason}") from error


def _space(found: Any, config: JaxMarl) -> gymnasium.Space[Any]:
    """A space of JaxMARL as one of Gymnasium."""
    if hasattr(found, "n"):
        return gymnasium.spaces.Discrete(int(found.n))
    if hasattr(found, "low"):
        dtype = np.dtype(found.dtype)
        shape = tuple(np.atleast_1d(found.shape).tolist())
        return gymnasium.spaces.Box(float(np.min(found.low)), float(np.max(found.high)), shape, dtype.type)
    raise ConfigError(f"{config.name}: a {type(found).__name__} space is not supported")
