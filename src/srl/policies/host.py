"""A policy at work: holds a copy of the newest weights and turns observation arrays into output arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from srl.algorithms.base import Algorithm
from srl.core.specs import Array, Arrays, Spaces
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
    """Runs the policy of ``algorithm`` for ``clients`` clients of ``rows`` rows; keeps a recurrent policy's memory.

    With ``explore`` off it takes the likeliest actions.
    """

    def __init__(
        self, algorithm: Algorithm, spaces: Spaces, seed: int, *, clients: int, rows: int, explore: bool = True
    ) -> None:
        self.policy: Any = algorithm.policy(spaces)
        self.policy.eval()
        self.version = -1
        self._acting = getattr(self.policy, "acting", lambda: None)
        self.generator = torch.Generator().manual_seed(seed)
        self._explore = explore
        self._like = arrays_of(self.policy)
        self._rank = np.linspace(0, 1, clients * rows, dtype=np.float32).reshape(clients, rows)
        memory = algorithm.memory_spec().items()
        self.memory = {name: np.zeros((clients, rows, *spec.shape), spec.dtype) for name, spec in memory}
        self._known = np.zeros((clients, rows), bool)

    def load(self, arrays: Arrays, version: int) -> None:
        """Use these weights from now on."""
        load_arrays(self.policy, arrays)
        self.version = version

    def refresh(self, reader: ParameterReader) -> None:
        """Use the newest weights from now on."""
        if reader.newest() > self.version:
            self.version = reader.read(self._like, lambda arrays: load_arrays(self.policy, arrays))

    def act(self, inputs: Arrays, clients: Array, peek: Array) -> Arrays:
        """Outputs for the inputs (``[len(clients) * rows, …]``); a client that peeks keeps its memory as it was."""
        if not self.memory:
            return self._run(inputs, clients)
        fresh = inputs["first"] | ~self._known[clients].reshape(-1)
        before = {name: kept[clients].reshape(-1, *kept.shape[2:]) for name, kept in self.memory.items()}
        for kept in before.values():
            kept[fresh] = 0
        outputs = self._run({**inputs, **before}, clients)
        moves = inputs["valid"] & ~np.repeat(peek, self._known.shape[1])
        for name, kept in before.items():
            after = np.where(moves.reshape(-1, *[1] * (kept.ndim - 1)), outputs[name], kept)
            self.memory[name][clients] = after.reshape(len(clients), *self.memory[name].shape[1:])
        self._known[clients] = True
        return {**outputs, **before, "first": fresh}

    def _run(self, inputs: Arrays, clients: Array) -> Arrays:
        generator, acting = self.generator if self._explore else None, self._acting()
        found: Arrays | None = acting.act(inputs, generator) if acting is not None else None
        if found is not None:
            return found
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
            tensors["rank"] = torch.from_numpy(self._rank[clients].reshape(-1))
            outputs = self.policy.act(tensors, generator)
            return {name: tensor.numpy() for name, tensor in outputs.items()}

    def state(self) -> State:
        """The random generator and the memory (weights come from the trainer)."""
        kept = {f"memory/{name}": array.copy() for name, array in {**self.memory, "known": self._known}.items()}
        return State({"generator": self.generator.get_state().numpy().copy(), **kept})

    def load_state(self, state: State) -> None:
        """Go on where ``state`` was taken."""
        self.generator.set_state(torch.from_numpy(np.ascontiguousarray(state.arrays["generator"])))
        for name, array in {**self.memory, "known": self._known}.items():
            array[...] = state.arrays[f"memory/{name}"]
