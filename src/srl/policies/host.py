"""A policy at work: holds a copy of the newest weights and turns observation arrays into output arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from srl.algorithms.base import Algorithm
from srl.core.specs import Arrays, Spaces
from srl.core.worker import State

if TYPE_CHECKING:
    from srl.streams.protocols import ParameterReader


def arrays_of(module: torch.nn.Module) -> Arrays:
    """All weights and buffers of ``module`` as arrays (views, on a CPU)."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}


def load_arrays(module: torch.nn.Module, arrays: Arrays) -> None:
    """Copy ``arrays`` into the weights and buffers of ``module``."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(torch.from_numpy(arrays[name]))


class PolicyHost:
    """Runs the policy of ``algorithm``; with ``explore`` off it takes the likeliest actions."""

    def __init__(self, algorithm: Algorithm, spaces: Spaces, seed: int, *, explore: bool = True) -> None:
        self.policy: Any = algorithm.policy(spaces)
        self.policy.eval()
        self.version = -1
        self.generator = torch.Generator().manual_seed(seed)
        self._explore = explore
        self._like = arrays_of(self.policy)

    def load(self, arrays: Arrays, version: int) -> None:
        """Use these weights from now on."""
        load_arrays(self.policy, arrays)
        self.version = version

    def refresh(self, reader: ParameterReader) -> None:
        """Use the newest weights from now on."""
        if reader.newest() > self.version:
            self.version = reader.read(self._like, lambda arrays: load_arrays(self.policy, arrays))

    def act(self, obs: Arrays) -> Arrays:
        """Outputs for ``obs``, each ``[rows, …]``."""
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(array) for name, array in obs.items()}
            outputs = self.policy.act(tensors, self.generator if self._explore else None)
            return {name: tensor.numpy() for name, tensor in outputs.items()}

    def state(self) -> State:
        """The random generator's state (weights come from the trainer)."""
        return State({"generator": self.generator.get_state().numpy().copy()})

    def load_state(self, state: State) -> None:
        """Go on where ``state`` was taken."""
        self.generator.set_state(torch.from_numpy(np.ascontiguousarray(state.arrays["generator"])))
