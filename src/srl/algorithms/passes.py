"""Passes over a batch in minibatches, by one trainer or by several that each have a part of every minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from srl.core.specs import Array

if TYPE_CHECKING:
    from srl.algorithms.base import Peers
    from srl.algorithms.ppo import PPO


def divided(order: Array, size: int, peers: Peers | None) -> list[Array]:
    """``order`` in pieces of ``size``: as many as the trainer with most samples has, so the last ones may be empty."""
    count = -(-len(order) // size)
    if peers is not None:
        count = int(peers.gather(torch.tensor(count)).max())
    return [order[start : start + size] for start in range(0, count * size, size)]


def advantage_norms(parts: Sequence[Array], config: PPO, peers: Peers | None) -> Array:
    """For every minibatch, of whose advantages ``parts`` are ours: how many there are in all, and their normalisation.

    ``[minibatches, 3]``: count, what is taken off, what is multiplied with.
    """
    if peers is None:
        return np.array([_alone(part, config.normalize_advantage) for part in parts])
    wide = [part.astype(np.float64) for part in parts]
    sums = torch.tensor([(len(part), part.sum(), np.square(part).sum()) for part in wide], dtype=torch.float64)
    peers.sum(sums)
    count, total, squares = sums.numpy().T
    if not config.normalize_advantage:
        return np.stack([count, np.zeros_like(count), np.ones_like(count)], 1)
    mean = total / np.maximum(count, 1)
    variance = np.maximum(squares - count * mean**2, 0) / np.maximum(count - 1, 1)
    scale = np.where(count > 1, 1 / (np.sqrt(variance) + 1e-8), 1.0)
    return np.ascontiguousarray(np.stack([count, np.where(count > 1, mean, 0.0), scale], 1))


def _alone(advantage: Array, normalize: bool) -> tuple[int, float, float]:
    if not normalize or len(advantage) < 2:
        return len(advantage), 0.0, 1.0
    return len(advantage), float(advantage.mean()), 1 / (float(advantage.std(ddof=1)) + 1e-8)
