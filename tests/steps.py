"""A gradient step of PPO's by autograd, as its passes take it."""

from __future__ import annotations

import numpy as np


def gradient_step(learner, batch, goal):
    """One step on these tensors and goals; the sums of PPO's metrics."""
    count, advantage = goal.shape[1], goal[0]
    norm = count, 0.0, 1.0
    if learner.config.normalize_advantage and count > 1:
        norm = count, float(advantage.mean()), 1 / (float(advantage.std(ddof=1)) + 1e-8)
    learner.optimizer.zero_grad()
    sums = learner.gradient(learner.policy, batch, {}, None, goal, norm)
    length = learner.optimizer.clip(learner.config.max_grad_norm)
    learner.optimizer.step()
    return np.array([*sums, length * count])
