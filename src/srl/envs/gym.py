"""Any Gymnasium environment as a vector: its own vector implementation if it has one, else copies stepped in turn."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from srl.core.errors import ConfigError, UnknownName
from srl.envs.base import EnvConfig
from srl.envs.guard import check_choice
from srl.envs.loop import Env, GymLoop
from srl.envs.native import GymVector
from srl.envs.single import SingleAgent, Watch

_EXTRAS = {"ale_py": "atari", "mujoco": "mujoco", "imageio": "mujoco", "pettingzoo": "multiagent", "mpe2": "multiagent"}

Make = Callable[..., gymnasium.Env[Any, Any]]


@dataclass(frozen=True)
class Gym(EnvConfig):
    """A registered Gymnasium id, or a callable that returns an environment."""

    id: str | Make
    kwargs: dict[str, Any] = field(default_factory=dict)
    mask: str = ""
    """Where to find which actions are allowed: a key of the observation's dictionary, or ``info:key``."""
    info: tuple[str, ...] = ()
    """Numbers in the environment's ``info`` to report; the last of each episode counts."""
    nonfinite: str = "stop"
    """What a NaN or an infinity does: ``stop`` the run, or ``skip`` the step and start its copy anew."""

    def __post_init__(self) -> None:
        check_choice(self.nonfinite)

    def make(self, copies: int, *, render: bool = False) -> SingleAgent:
        """See :class:`~srl.envs.base.EnvConfig`. Native vectors cannot draw themselves."""
        watch = Watch(self.mask, self.info, self.nonfinite)
        name = name_of(self.id)
        if not isinstance(self.id, str):
            kwargs = {**self.kwargs, **rendering(self.id, render)}
            return GymLoop(name, partial(self.id, **kwargs), copies, watch)
        with explained(name, self.kwargs):
            spec = _spec(self.id)
            atari = self.id.startswith("ALE/")
            if spec.vector_entry_point is not None and (atari or not render):
                env = _native(spec, copies, self.kwargs)
                if env is not None:
                    return GymVector(name, env, copies, watch)
            kwargs = {**self.kwargs, **rendering(_creator(spec), render)}
            make = partial(_single, spec, kwargs)
            loop = _robots(spec, make) if not self.mask and not self.info else GymLoop
            return loop(name, make, copies, watch)

    def describe(self) -> dict[str, Any]:
        """See :class:`~srl.envs.base.EnvConfig`."""
        watch = {"mask": self.mask, "info": list(self.info), "nonfinite": self.nonfinite}
        return {"gym": name_of(self.id), "kwargs": self.kwargs, **watch}


def gym(id: str | Make, /, *, mask: str = "", info: Sequence[str] = (), nonfinite: str = "stop", **kwargs: Any) -> Gym:
    """The environment with this Gymnasium id (or made by this callable), with these arguments.

    ``mask``, ``info`` and ``nonfinite`` are explained at :class:`Gym`.
    """
    return Gym(id, kwargs, mask, names_of(info), nonfinite)


def name_of(id: str | Callable[..., Any]) -> str:
    """An id, or how a saved configuration names a callable."""
    return id if isinstance(id, str) else f"{id.__module__}:{id.__qualname__}()"


def names_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Names as a tuple, also if only one was given."""
    return (names,) if isinstance(names, str) else tuple(names)


def rendering(make: Callable[..., Any], render: bool) -> dict[str, str]:
    """The argument that makes an environment draw itself, if it is wanted and ``make`` takes it."""
    if not render:
        return {}
    kinds = inspect.signature(make).parameters
    takes = "render_mode" in kinds or any(kind.kind is inspect.Parameter.VAR_KEYWORD for kind in kinds.values())
    return {"render_mode": "rgb_array"} if takes else {}


def callable_from(path: str) -> Callable[..., Any]:
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


def _spec(name: str) -> EnvSpec:
    """The registered environment of this name, after importing what registers it."""
    if name.startswith("ALE/"):
        _register_atari()
    module, _, bare = name.rpartition(":")
    if module:
        imported = importlib.import_module(module)
        if bare not in gymnasium.registry and hasattr(imported, "register_envs"):  # some register only when asked to
            imported.register_envs()
    spec = gymnasium.spec(bare)
    if "mujoco" in str(spec.entry_point):
        _quiet_mujoco()
    return spec


def _creator(spec: EnvSpec) -> Callable[..., Any]:
    entry = spec.entry_point
    return load_env_creator(entry) if isinstance(entry, str) else cast(Callable[..., Any], entry)


def _native(spec: EnvSpec, copies: int, kwargs: dict[str, Any]) -> VectorEnv[Any, Any, Any] | None:
    """The environment's own vector implementation, unless it resets its copies in another way than ours."""
    if spec.id.startswith("ALE/"):
        from srl.envs import atari

        env = atari.vector(spec.id, copies, kwargs)
    else:
        env = gymnasium.make_vec(spec.id, num_envs=copies, **kwargs)
    if env.metadata.get("autoreset_mode") is AutoresetMode.NEXT_STEP:
        return env
    env.close()
    return None


def _robots(spec: EnvSpec, make: Callable[[], Env]) -> type[GymLoop]:
    """How copies of this environment are stepped fastest."""
    if not str(spec.entry_point).startswith("gymnasium.envs.mujoco."):
        return GymLoop
    from srl.envs.mujoco import MujocoLoop, robot_of

    env = make()
    try:
        return MujocoLoop if robot_of(env) is not None else GymLoop
    finally:
        env.close()


def _single(spec: EnvSpec, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation notes of ids belong to the id's author
        return gymnasium.make(spec.id, disable_env_checker=True, **kwargs)


@contextmanager
def explained(name: str, kwargs: dict[str, Any]) -> Iterator[None]:
    """Turn what goes wrong when an environment is made into one clear line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (gymnasium.error.DependencyNotInstalled, gymnasium.error.UnregisteredEnv, ImportError) as error:
        raise _explain(name, error) from error
    except TypeError as error:
        raise ConfigError(f"environment {name!r} refused its arguments {kwargs}: {error}") from error


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
