"""Algorithms: one file each."""

from __future__ import annotations

from srl.algorithms.appo import APPO
from srl.algorithms.base import Algorithm
from srl.algorithms.dqn import DQN
from srl.algorithms.impala import IMPALA
from srl.algorithms.mappo import MAPPO
from srl.algorithms.ppo import PPO
from srl.algorithms.qmix import QMIX, VDN
from srl.algorithms.r2d2 import R2D2
from srl.algorithms.sac import SAC

__all__ = ["ALGORITHMS", "APPO", "DQN", "IMPALA", "MAPPO", "PPO", "QMIX", "R2D2", "SAC", "VDN", "Algorithm"]

_KINDS = PPO, APPO, IMPALA, MAPPO, DQN, R2D2, VDN, QMIX, SAC
ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in _KINDS}
