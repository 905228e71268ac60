"""Named, tuned experiments. ``srl recipes`` lists them, ``srl train NAME`` runs one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from srl import envs
from srl.algorithms.ppo import PPO
from srl.core.errors import UnknownName
from srl.experiment import Actors, Experiment


@dataclass(frozen=True)
class Recipe:
    """An experiment with a name."""

    about: str
    extra: str
    """Which optional packages it needs, as an extra of this distribution."""
    make: Callable[[], Experiment]


def _cartpole() -> Experiment:
    return Experiment(
        env=envs.gym("CartPole-v1"),
        algorithm=PPO(lr=1e-3, horizon=64, epochs=4, minibatch=256),
        actors=Actors(envs=64),
        steps=300_000,
    )


def _halfcheetah() -> Experiment:
    return Experiment(
        env=envs.gym("HalfCheetah-v5"),
        algorithm=PPO(
            lr=3e-4,
            horizon=128,
            epochs=5,
            minibatch=512,
            gamma=0.98,
            lam=0.92,
            log_std=-1.0,
            normalize_obs=True,
            normalize_return=True,
        ),
        actors=Actors(envs=32),
        steps=3_000_000,
    )


def _pong() -> Experiment:
    return Experiment(
        env=envs.gym("ALE/Pong-v5", repeat_action_probability=0.0),
        algorithm=PPO(
            lr=5e-4,
            horizon=64,
            epochs=3,
            minibatch=256,
            clip=0.1,
            entropy=0.01,
            anneal_steps=4_000_000,
            precision="auto",
        ),
        actors=Actors(envs=32),
        steps=2_000_000,
    )


RECIPES = {
    "cartpole": Recipe("balance a pole; half a minute", "", _cartpole),
    "halfcheetah": Recipe("MuJoCo: run fast; ten minutes", "mujoco", _halfcheetah),
    "pong": Recipe("Atari from pixels; an hour", "atari", _pong),
}


def recipe(name: str) -> Experiment:
    """The experiment with this name."""
    if name not in RECIPES:
        raise UnknownName("recipe", name, RECIPES, "`srl recipes` lists them")
    return RECIPES[name].make()
