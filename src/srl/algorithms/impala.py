"""IMPALA (Espeholt et al. 2018): actors never wait, and the learner corrects for how old their samples are.

It is APPO with one pass and no clipping: the gradient of a batch is that of the policy as it is now, every sample
counts for as much as its action is likelier than it was (at most ``rho``), and values are learned by V-trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from srl.algorithms.appo import APPO


@dataclass(frozen=True)
class IMPALA(APPO):
    """Hyper-parameters of IMPALA."""

    name: ClassVar[str] = "impala"

    horizon: int = 20
    """Steps in a block: what an actor collects before handing over."""
    correction: str = "decoupled"
    """vtrace: believe values as far as the actions are still likely. decoupled: and weigh samples. none: be PPO."""
    epochs: int = 1
    """Passes over each batch."""
    lam: float = 1.0
    """Lambda of V-trace: how far what follows is believed at all."""
    clip: float = 1e6
    """The probability ratio is clipped to 1 ± this: as good as never."""
    entropy: float = 0.01
    """Weight of the entropy bonus."""
    normalize_advantage: bool = False
    """Scale advantages to mean 0 and variance 1 in every batch."""
