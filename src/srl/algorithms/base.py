"""What an algorithm is to the rest of the system.

An :class:`Algorithm` is a frozen dataclass of hyper-parameters that can build a policy and a learner. The module it
lives in must not import torch at the top: the controller and light actors read hyper-parameters and block fields
from it and never load torch. See ``ppo.py`` for a whole one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from srl.core.errors import ConfigError
from srl.core.slab import STEP_FIELDS, Batch, BlockSpec
from srl.core.specs import Arrays, ArraySpec, Spaces
from srl.core.worker import State

if TYPE_CHECKING:
    import torch

Interrupted = Callable[[], bool]
"""Says whether an update should be abandoned half-way because the run is ending."""


class Learner(ABC):
    """Changes a policy by training on batches. Lives in the trainer."""

    policy: torch.nn.Module

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """What can be computed before it is the batch's turn; may run in another thread, changes nothing."""

    @abstractmethod
    def train(self, prepared: Any, steps: int, interrupted: Interrupted) -> dict[str, float] | None:
        """One update; ``steps`` were trained on before. Returns metrics, or None if it was abandoned."""

    @abstractmethod
    def state(self) -> State:
        """Copies of all that changes: weights under ``policy/``, optimiser, random generators, normalisers."""

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Go on where ``state`` was taken."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """Hyper-parameters, and how to build what they describe."""

    name: ClassVar[str]

    horizon: int = 128
    """Steps in a block: what an actor collects before handing over."""
    max_staleness: int = 1
    """How many versions old samples may be when trained on. 0: synchronous, 1: collect while training."""
    reuse: int = 1
    """How many updates each batch is used for."""

    def check(self, spaces: Spaces, batch_steps: int) -> None:
        """Raise ConfigError if these hyper-parameters make no sense for such spaces and batches."""
        for field, least in (("horizon", 1), ("max_staleness", 0), ("reuse", 1)):
            if getattr(self, field) < least:
                raise ConfigError(f"{self.name}.{field} must be at least {least}, got {getattr(self, field)}")

    @abstractmethod
    def outputs(self) -> dict[str, ArraySpec]:
        """Fields the policy writes beside the action."""

    @abstractmethod
    def policy(self, spaces: Spaces) -> torch.nn.Module:
        """A policy: a module with ``act(obs, generator) -> {field: tensor}`` for the action and :meth:`outputs`."""

    @abstractmethod
    def learner(self, spaces: Spaces, seed: int, device: str) -> Learner:
        """A learner with a freshly initialised policy."""

    def block(self, spaces: Spaces, rows: int) -> BlockSpec:
        """The shape of this algorithm's blocks."""
        fields = {**spaces.observation_spec(), **spaces.action_spec(), **self.outputs(), **STEP_FIELDS}
        return BlockSpec(fields, self.horizon, rows)


def optimizer_state(optimizer: torch.optim.Optimizer) -> Arrays:
    """The optimiser's moments as arrays (copies)."""
    import torch

    found = {}
    for index, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            found[f"{index}/{name}"] = torch.as_tensor(value).detach().cpu().numpy().copy()
    return found


def load_optimizer_state(optimizer: torch.optim.Optimizer, arrays: Arrays) -> None:
    """Put back what :func:`optimizer_state` saved; learning rates stay as configured."""
    import torch

    moments: dict[int, dict[str, torch.Tensor]] = {}
    for path, value in arrays.items():
        index, name = path.split("/")
        moments.setdefault(int(index), {})[name] = torch.from_numpy(value.copy())
    state = optimizer.state_dict()
    state["state"] = moments
    optimizer.load_state_dict(state)
