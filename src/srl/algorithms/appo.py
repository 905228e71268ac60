"""Asynchronous PPO: for samples that are older than PPO likes them (``max_staleness`` of 2 and more).

Actors go on while the trainer trains, so the policy that acted is some versions behind. Before an update the learner
looks at the batch with the policy as it is now: how likely the actions are by now says how far the values of what
followed can be believed (V-trace, Espeholt et al. 2018). With ``decoupled`` it also says what each sample counts for,
and the policy's change is clipped about where it stands now instead of where it stood when it acted (Hilton et al.
2022): a sample's age then no longer uses up the room that an update has.

Two things of Stellaris (Yu et al. 2024) can be had on top: a learning rate that falls with the age of the samples, and,
with several trainers, a bound on what a sample may count for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from srl.algorithms.base import Interrupted, seeded
from srl.algorithms.ppo import PPO, PPOLearner, Prepared
from srl.algorithms.returns import vtrace
from srl.core.slab import Batch
from srl.core.specs import Array, Spaces

if TYPE_CHECKING:
    from torch import Tensor

    from srl.policies.actor_critic import ActorCritic

_AT_ONCE = 1024
"""Samples looked at together."""


@dataclass(frozen=True)
class APPO(PPO):
    """Hyper-parameters of APPO."""

    name: ClassVar[str] = "appo"

    max_staleness: int = 4
    """How many versions old samples may be when trained on. 0: synchronous, 1: collect while training."""
    epochs: int = 2
    """Passes over each batch."""
    correction: str = "vtrace"
    """vtrace: believe values as far as the actions are still likely. decoupled: and weigh samples. none: be PPO."""
    rho: float = 1.0
    """How much likelier than it was an action may count for in what is believed of its step."""
    c: float = 1.0
    """The same for the steps that follow."""
    staleness_lr: bool = False
    """Multiply the learning rate with (versions that the samples are old)^(-1/3)."""
    truncate_ratio: bool = False
    """With several trainers: no sample counts for more than the least of their mean ratios, or 1."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        """See :class:`Algorithm`."""
        super().check(spaces, batch_steps)
        self.check_choice("correction", "decoupled", "vtrace", "none")
        self.check_above("rho", "c")

    def learner(self, spaces: Spaces, seed: int, device: str) -> APPOLearner:
        """See :class:`Algorithm`."""
        with seeded(seed):
            return APPOLearner(self, self.policy(spaces).to(device), seed, device)


class APPOLearner(PPOLearner):
    """Trains an actor-critic policy on what older versions of it did."""

    config: APPO

    def __init__(self, config: APPO, policy: ActorCritic, seed: int, device: str) -> None:
        self.scaled = config.normalize_advantage
        own = config if config.correction == "none" else replace(config, normalize_advantage=False)
        super().__init__(own, policy, seed, device)
        self.slowed = 1.0

    def prepare(self, batch: Batch) -> Prepared:
        """See :class:`Learner`."""
        if self.config.correction == "none":
            return super().prepare(batch)
        return Prepared(batch, np.empty(0, bool), np.empty((0, 0), np.float32))  # it takes the policy of its time

    def train(self, prepared: Prepared, steps: int, interrupted: Interrupted) -> dict[str, float] | None:
        """See :class:`Learner`."""
        batch = prepared.batch
        more: dict[str, float] = {}
        if self.config.staleness_lr:
            valid = batch.small("valid")[:-1]
            age = self.version - batch.small("version")[:-1][valid]
            self.slowed = max(1.0, float(age.mean())) ** (-1 / 3) if len(age) else 1.0
        if self.config.correction != "none":
            prepared, more = self._corrected(batch)
        found = super().train(prepared, steps, interrupted)
        return None if found is None else {**found, **more}

    def anneal(self, lr: float, over: int, steps: int) -> float:
        """See :class:`TorchLearner`; also slowed for old samples."""
        left = max(0.0, 1 - steps / over) if over else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = lr * left * self.slowed
        return left

    def _corrected(self, batch: Batch) -> tuple[Prepared, dict[str, float]]:
        """What the batch is worth to the policy as it is now; and how far that is from the one that acted."""
        config = self.config
        now, value = self.look(batch)
        acted, valid, first = (batch.small(name) for name in ("log_prob", "valid", "first"))
        reward, terminated, truncated = (batch.small(name)[:-1] for name in ("reward", "terminated", "truncated"))
        ratio = np.exp(np.where(valid[:-1], np.minimum(now - acted[:-1], 20.0), 0.0))
        bounds = {"rho": config.rho, "c": config.c}
        advantage, target, known = vtrace(
            reward, value, ratio, terminated, truncated, valid, config.gamma, config.lam, first, **bounds
        )
        goals = [advantage, target, value[:-1]]
        if config.correction == "decoupled":
            weight = np.minimum(ratio, min(config.rho, self._bound(ratio[known])))
            goals = [self._normalized(advantage, known) * weight, *goals[1:], now]
        else:
            goals[0] = self._normalized(advantage, known)
        more = {"ratio": float(ratio[known].mean())} if known.any() else {}
        return Prepared(batch, known.reshape(-1), np.stack(goals).reshape(len(goals), -1)), more

    def _bound(self, ratio: Array) -> float:
        """What no sample may count for more than: the least of the trainers' mean ratios, but 1 at least."""
        import torch

        if not self.config.truncate_ratio or self.peers is None:
            return float("inf")
        mine = float(ratio.mean()) if len(ratio) else 1.0
        return max(1.0, float(self.peers.gather(torch.tensor(mine)).min()))

    def _normalized(self, advantage: Array, known: Array) -> Array:
        """With mean 0 and variance 1 over the whole batch, before samples are weighed."""
        import torch

        if not self.scaled:
            return advantage
        kept = advantage[known].astype(np.float64)
        sums = torch.tensor([len(kept), kept.sum(), np.square(kept).sum()], dtype=torch.float64)
        if self.peers is not None:
            self.peers.sum(sums)
        count, total, squares = sums.tolist()
        mean = total / max(count, 1)
        spread = np.sqrt(max(squares / max(count, 1) - mean**2, 0.0))
        return np.asarray((advantage - mean) / (spread + 1e-8), np.float32)

    def look(self, batch: Batch) -> tuple[Array, Array]:
        """Log-probabilities of the actions ``[T, rows]`` and values ``[T + 1, rows]``, of the policy as it is now."""
        import torch

        from srl.algorithms.passes import memories

        spec, policy = batch.slab.spec, self.policy
        count, wide = spec.horizon * batch.wide, batch.wide
        chunks = batch.chunks() if spec.state else np.arange(count)[None]
        wanted = (*spec.inputs, *spec.actions)
        log_prob, value = np.empty(count, np.float32), np.empty(count + wide, np.float32)
        with torch.no_grad():
            for columns in _pieces(chunks.shape[1], max(1, _AT_ONCE // len(chunks))):
                rows = chunks[:, columns].reshape(-1)
                found = policy.evaluate(self.gather(batch, rows, wanted), memories(batch, columns))
                log_prob[rows], value[rows] = found[0].cpu().numpy(), self._in_rewards(found[2])
            # What follows the last step: with a memory what the policy that acted thought of it.
            value[count:] = batch.small("value")[-1]
            for part in _pieces(0 if spec.state else wide, _AT_ONCE):
                where = torch.from_numpy(batch.positions[count - wide :][part] + spec.rows)
                flat = {name: torch.from_numpy(batch.slab.flat[name]) for name in spec.inputs}
                seen = {name: field.index_select(0, where).to(self.device) for name, field in flat.items()}
                value[count:][part] = self._in_rewards(policy.heads(policy.trunk(seen)[0], seen)[1])
        return log_prob.reshape(-1, wide), value.reshape(-1, wide)

    def _in_rewards(self, value: Tensor) -> Array:
        found: Array = self.policy.in_rewards(value).cpu().numpy()
        return found


def _pieces(count: int, size: int) -> Sequence[Array]:
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
