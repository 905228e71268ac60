"""Algorithms: one file each."""

from __future__ import annotations

from srl.algorithms.base import Algorithm
from srl.algorithms.dqn import DQN
from srl.algorithms.ppo import PPO

__all__ = ["ALGORITHMS", "DQN", "PPO", "Algorithm"]

ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in (PPO, DQN)}
