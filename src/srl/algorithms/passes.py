"""Passes over a batch in minibatches, by one trainer or by several that each have a part of every minibatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from srl.algorithms.team import Team
from srl.core.slab import Batch
from srl.core.specs import Array

if TYPE_CHECKING:
    from srl.algorithms.base import Interrupted, Peers
    from srl.algorithms.ppo import PPO, Norm, PPOLearner, Prepared
    from srl.policies.actor_critic import ActorCritic

Pass = Callable[[Array, Array, "Interrupted"], bool]
"""One pass over a batch in the given order; adds to the sums of METRICS. False: it was interrupted."""


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


def memories(batch: Batch, columns: Array) -> dict[str, torch.Tensor]:
    """What a policy with a memory remembered at the start of these chunks; nothing if it has none."""
    if not batch.slab.spec.state:
        return {}
    starts = torch.from_numpy(batch.chunk_starts[columns])
    return {name: torch.from_numpy(batch.slab.flat[name])[starts] for name in batch.slab.spec.state}


def autograd(learner: PPOLearner, prepared: Prepared, goals: Array, chunks: Array) -> Pass:
    """Passes with autograd; ``chunks`` has the entries that stay together in its columns."""
    config, whole, known = learner.config, prepared.batch, prepared.known
    spec, size = whole.slab.spec, max(1, config.minibatch // len(chunks))
    wanted = tuple(name for name in dict.fromkeys((*spec.inputs, *spec.outputs)) if name != "value")
    team = learner.team = learner.team or Team(learner.policy, learner.optimizer, divide=learner.policy.own_networks)

    def part(norm: Norm, policy: ActorCritic, columns: Array) -> Array:
        rows = chunks[:, columns].reshape(-1)
        keep = torch.from_numpy(np.flatnonzero(known[rows])) if config.memory else None
        given = learner.gather(whole, rows, wanted), memories(whole, columns), keep, goals[:, rows[known[rows]]]
        return learner.gradient(policy, *given, norm)

    def one_pass(order: Array, sums: Array, interrupted: Interrupted) -> bool:
        order = order[np.lexsort((chunks[0, order] % whole.wide, np.arange(len(order)) // size))]  # see Team.share
        minibatches = divided(order, size, learner.peers)
        entries = [chunks[:, columns] for columns in minibatches]
        norms = advantage_norms([goals[0, rows[known[rows]]] for rows in entries], config, learner.peers)
        for columns, rows, norm in zip(minibatches, entries, norms, strict=True):
            if interrupted():
                return False
            learner.optimizer.zero_grad()
            if len(columns):
                sums[:-1] += team.share(columns, rows.size, partial(part, norm.tolist()))
            if learner.peers is not None:
                learner.peers.sum(learner.optimizer.grad)
            sums[-1] += learner.optimizer.clip(config.max_grad_norm) * np.count_nonzero(known[rows])
            learner.optimizer.step()
        return True

    return one_pass
