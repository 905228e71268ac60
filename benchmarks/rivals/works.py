"""What every library is asked to do, and what each of them may vary while doing it.

Only the standard library is imported here, since every rival reads this file in an environment of its own, and so does
``srl bench rivals``. The numbers are those of SRL's recipes as ``srl bench throughput`` runs them; tests/test_rivals.py
compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """An environment and how PPO trains on it."""

    env: str
    """Gymnasium id."""
    batch: int
    """Agent steps of one update."""
    epochs: int
    lr: float
    target: float
    """Mean return of the last 100 training episodes that counts as learned."""
    minibatch: int = 256
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    entropy: float = 0.0
    value_coef: float = 0.5
    grad_norm: float = 0.5
    log_std: float = 0.0
    """First log standard deviation of continuous actions, where the library lets one say it."""
    normalize: bool = False
    """Observations and returns (or rewards, where the library scales those) by their running mean and variance."""
    pixels: bool = False
    """Atari: frame skip 4, maximum of the last two frames, 84×84 grey, 4 stacked, up to 30 no-ops, no sticky actions.
    One Nature CNN for actor and critic; otherwise two MLPs of 2×64 tanh."""


HIDDEN = (64, 64)

_PONG: dict[str, Any] = {
    "env": "ALE/Pong-v5",
    "batch": 2048,
    "lr": 5e-4,
    "clip": 0.1,
    "entropy": 0.01,
    "target": 15.0,
    "pixels": True,
}

WORKS = {
    "cartpole": Work("CartPole-v1", batch=4096, epochs=4, lr=1e-3, target=475.0),
    "halfcheetah": Work(
        "HalfCheetah-v5",
        batch=4096,
        epochs=4,
        lr=3e-4,
        target=3000.0,
        gamma=0.98,
        lam=0.92,
        log_std=-1.0,
        normalize=True,
    ),
    "pong": Work(epochs=1, **_PONG),
    "pong-4": Work(epochs=4, **_PONG),
}


OWN: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "sb3": {  # RL Baselines3 Zoo's, without the schedules of learning rate and clip range
        "cartpole": ({"batch": 256, "epochs": 20, "gamma": 0.98, "lam": 0.8}, {"envs": 8}),
        "halfcheetah": (
            {"batch": 512, "minibatch": 64, "epochs": 20, "lr": 2e-5, "entropy": 4e-4, "clip": 0.1, "grad_norm": 0.8}
            | {"value_coef": 0.58, "log_std": -2.0},
            {"envs": 1},
        ),
    },
    "envpool": {  # CleanRL's ppo.py and ppo_continuous_action.py, without annealing
        "cartpole": ({"batch": 512, "minibatch": 128, "lr": 2.5e-4, "entropy": 0.01}, {"envs": 4, "groups": 1}),
        "halfcheetah": (
            {"batch": 2048, "minibatch": 64, "epochs": 10, "gamma": 0.99, "lam": 0.95, "log_std": 0.0},
            {"envs": 1, "groups": 1},
        ),
    },
    "rllib": {  # its tuned example
        "cartpole": ({"batch": 4000, "minibatch": 128, "epochs": 6, "lr": 3e-4, "value_coef": 0.01}, {}),
    },
}
"""What the authors of a library recommend for a work: fields of :class:`Work`, and of the library's configuration."""


def horizon(work: Work, envs: int) -> int:
    """Steps of each environment in one update."""
    steps, rest = divmod(work.batch, envs)
    if rest:
        raise ValueError(f"{envs} environments do not divide a batch of {work.batch} steps")
    return steps
