"""Any Gymnasium environment as a vector: native vector implementations first, else copies stepped in turn."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from srl.core.errors import ConfigError, UnknownName
from srl.core.specs import Array, Arrays, Spaces, leaves
from srl.core.worker import State
from srl.envs.base import EnvConfig, Environment, StepViews
from srl.envs.snapshot import restore, snapshot

AGENT = "agent"

_EXTRAS = {"ale_py": "atari", "mujoco": "mujoco", "imageio": "mujoco"}


@dataclass(frozen=True)
class Gym(EnvConfig):
    """A registered Gymnasium id, or a callable that returns an environment."""

    id: str | Callable[..., gymnasium.Env[Any, Any]]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def make(self, copies: int) -> GymEnvironment:
        """See :class:`~srl.envs.base.EnvConfig`."""
        return GymEnvironment(self._vector(copies), copies)

    def describe(self) -> dict[str, Any]:
        """See :class:`~srl.envs.base.EnvConfig`."""
        name = self.id if isinstance(self.id, str) else f"{self.id.__module__}:{self.id.__qualname__}()"
        return {"gym": name, "kwargs": self.kwargs}

    def _vector(self, copies: int) -> VectorEnv[Any, Any, Any]:
        if not isinstance(self.id, str):
            make = self.id
            return _in_turn(lambda: make(**self.kwargs), copies)
        name, kwargs = self.id, dict(self.kwargs)
        if name.startswith("ALE/"):
            _register_atari()
            kwargs.setdefault("num_threads", 1)  # an actor is one core's work; more cores are more actors
        module, _, bare = name.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecation notes of ids belong to the id's author
                spec = gymnasium.spec(bare)
                if "mujoco" in str(spec.entry_point):
                    _quiet_mujoco()
                if spec.vector_entry_point is not None:
                    env: VectorEnv[Any, Any, Any] = gymnasium.make_vec(bare, num_envs=copies, **kwargs)
                    if env.metadata.get("autoreset_mode") is AutoresetMode.NEXT_STEP:
                        return env
                    env.close()
                return _in_turn(lambda: gymnasium.make(bare, disable_env_checker=True, **kwargs), copies)
        except (gymnasium.error.DependencyNotInstalled, gymnasium.error.UnregisteredEnv, ImportError) as error:
            raise _explain(name, error) from error
        except TypeError as error:
            raise ConfigError(f"environment {name!r} refused its arguments {kwargs}: {error}") from error


def gym(id: str | Callable[..., gymnasium.Env[Any, Any]], /, **kwargs: Any) -> Gym:
    """The environment with this Gymnasium id (or made by this callable), with these arguments."""
    return Gym(id, kwargs)


def callable_from(path: str) -> Callable[..., gymnasium.Env[Any, Any]]:
    """The environment factory that ``module:name()`` stands for in a saved configuration."""
    module, _, name = path.removesuffix("()").partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the environment {path!r} of this run cannot be imported: {error}") from error
    return found  # type: ignore[no-any-return]


def _register_atari() -> None:
    try:
        import ale_py
    except ImportError as error:
        raise ConfigError("Atari games need the package ale-py: pip install 'reallyscalablerl[atari]'") from error
    gymnasium.register_envs(ale_py)


def _quiet_mujoco() -> None:
    """Keep MuJoCo from printing, and logging to the current folder, what is deprecated in a model's file."""
    import mujoco

    mujoco.set_mju_user_warning(lambda text: None if "deprecated" in text else print(text, file=sys.stderr))


def _in_turn(make: Callable[[], gymnasium.Env[Any, Any]], copies: int) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([make] * copies, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)


def _explain(name: str, error: Exception) -> ConfigError:
    """What to do about an environment that cannot be made."""
    if isinstance(error, gymnasium.error.UnregisteredEnv):
        return UnknownName("environment", name, gymnasium.registry, "any Gymnasium id, or module:id to import first")
    for package, extra in _EXTRAS.items():
        if package in str(error).lower():
            return ConfigError(
                f"environment {name!r} needs the package {package}: pip install 'reallyscalablerl[{extra}]'"
            )
    return ConfigError(f"environment {name!r} needs something that is not installed: {error}")


class GymEnvironment(Environment):
    """A Gymnasium vector environment: one agent per copy, so its rows are its copies."""

    agents = (AGENT,)

    def __init__(self, env: VectorEnv[Any, Any, Any], copies: int) -> None:
        self.env, self.copies = env, copies
        self._spaces = Spaces(env.single_observation_space, env.single_action_space)
        self._picks = [(path, pick) for path, _, pick in leaves("obs", self._spaces.observation)]
        self._action = _action_builder(self._spaces.action)
        self._ended: Array = np.zeros(copies, bool)

    def spaces(self, agent: str) -> Spaces:
        """See :class:`~srl.envs.base.Environment`."""
        return self._spaces

    def bind(self, groups: Sequence[Sequence[str]]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        if [list(group) for group in groups] != [[AGENT]]:
            raise ConfigError(f"a Gymnasium environment has the one agent {AGENT!r}, got groups {groups}")

    def reset(self, seed: int, obs: Sequence[Arrays]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        found, _ = self.env.reset(seed=seed)
        self._ended[:] = False
        self._write(found, obs[0])

    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        views = out[0]
        found, reward, terminated, truncated, _ = self.env.step(self._action(actions[0]))
        self._write(found, views.obs)
        views.reward[:] = reward
        views.terminated[:] = terminated
        views.truncated[:] = truncated
        np.logical_not(self._ended, out=views.valid)
        np.logical_or(terminated, truncated, out=self._ended)

    def _write(self, found: Any, obs: Arrays) -> None:
        for path, pick in self._picks:
            np.copyto(obs[path], pick(found), casting="same_kind")

    def state(self) -> State | None:
        """See :class:`~srl.envs.base.Environment`."""
        state = snapshot(self.env)
        if state is not None:
            state.arrays["ended"] = self._ended.copy()
        return state

    def load_state(self, state: State) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self._ended[:] = state.arrays["ended"]
        restore(self.env, state)

    def close(self) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self.env.close()


def _action_builder(space: gymnasium.Space[Any]) -> Callable[[Arrays], Any]:
    """A function that turns flat action fields into what a vector environment's ``step`` takes."""

    def build(name: str, space: gymnasium.Space[Any], fields: Arrays) -> Any:
        if isinstance(space, gymnasium.spaces.Dict):
            return {key: build(f"{name}/{key}", child, fields) for key, child in space.spaces.items()}
        if isinstance(space, gymnasium.spaces.Tuple):
            return tuple(build(f"{name}/{i}", child, fields) for i, child in enumerate(space.spaces))
        if isinstance(space, gymnasium.spaces.Box):
            return np.clip(fields[name], space.low, space.high)
        return fields[name]

    return lambda fields: build("action", space, fields)
