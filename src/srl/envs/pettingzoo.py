"""Any PettingZoo environment as a vector: parallel where it can be, else turn by turn."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from srl.core.errors import ConfigError
from srl.envs.base import EnvConfig
from srl.envs.games import Game, ParallelGame, TurnGame, WithState
from srl.envs.guard import check_choice
from srl.envs.gym import explained, name_of, names_of, rendering
from srl.envs.multi import MultiAgent
from srl.envs.single import Watch


@dataclass(frozen=True)
class PettingZoo(EnvConfig):
    """A module such as ``mpe2.simple_tag_v3``, or a callable that returns a ``ParallelEnv`` or an ``AECEnv``."""

    id: str | Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    mask: str = "auto"
    """Where to find which actions are allowed: a key of the observation's dictionary, ``info:key``, or nowhere.

    With ``auto`` that is ``action_mask``, if the observation has it. If only ``observation`` is left beside the mask,
    that is what policies see.
    """
    info: tuple[str, ...] = ()
    """Numbers in the agents' ``info`` to report; the last of each episode counts."""
    nonfinite: str = "stop"
    """What a NaN or an infinity does: ``stop`` the run, or ``skip`` the step and start its copy anew."""
    roles: tuple[str, ...] = ()
    """Names that each episode deals to the agents at random, so that whoever has one of them plays every seat."""
    state: bool = False
    """Whether agents also get the state of the whole environment, for a critic to see (see MAPPO and QMIX)."""

    def __post_init__(self) -> None:
        check_choice(self.nonfinite)

    def make(self, copies: int, *, render: bool = False) -> MultiAgent:
        """See :class:`~srl.envs.base.EnvConfig`."""
        name, watch = name_of(self.id), Watch(self.mask, self.info, self.nonfinite)
        with explained(name, self.kwargs):
            make = self._maker()
            kwargs = {**self.kwargs, **rendering(make, render)}
            return MultiAgent(name, partial(_game, partial(make, **kwargs), self.state), copies, watch, self.roles)

    def _maker(self) -> Callable[..., Any]:
        """What makes one copy: of a module's two ways the parallel one, if that works."""
        if not isinstance(self.id, str):
            return self.id
        module = _module(self.id)
        found = [getattr(module, name) for name in ("parallel_env", "env") if callable(getattr(module, name, None))]
        if not found:
            raise ConfigError(
                f"{self.id!r} is no PettingZoo environment: the module has no parallel_env() and no env()"
            )
        if len(found) == 2:
            try:
                found[0](**self.kwargs).close()
            except AssertionError:  # PettingZoo's way to say that a turn-based game cannot be played in parallel
                return found[1]  # type: ignore[no-any-return]
        return found[0]  # type: ignore[no-any-return]

    def describe(self) -> dict[str, Any]:
        """See :class:`~srl.envs.base.EnvConfig`."""
        watch = {"mask": self.mask, "info": list(self.info), "nonfinite": self.nonfinite, "roles": list(self.roles)}
        return {"pettingzoo": name_of(self.id), "kwargs": self.kwargs, **watch, "state": self.state}


def pettingzoo(
    id: str | Callable[..., Any],
    /,
    *,
    mask: str = "auto",
    info: Sequence[str] = (),
    nonfinite: str = "stop",
    roles: Sequence[str] = (),
    state: bool = False,
    **kwargs: Any,
) -> PettingZoo:
    """The environment of this PettingZoo module (or made by this callable), with these arguments.

    ``mask``, ``info``, ``nonfinite``, ``roles`` and ``state`` are explained at :class:`PettingZoo`.
    """
    return PettingZoo(id, kwargs, mask, names_of(info), nonfinite, tuple(roles), state)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"there is no module {name!r}; check its name, or install its package: "
                "pip install 'reallyscalablerl[multiagent]'"
            ) from error
        raise


def _game(make: Callable[[], Any], state: bool, at: str) -> Game:
    zoo = importlib.import_module("pettingzoo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation notes belong to the environment's author
        env = make()
    seen = WithState(env, at) if state else env
    if isinstance(env, zoo.ParallelEnv):
        return ParallelGame(seen, at)
    if isinstance(env, zoo.AECEnv):
        return TurnGame(seen, at)
    raise ConfigError(f"{at}: a {type(env).__name__} is neither a PettingZoo ParallelEnv nor an AECEnv")
