"""The trunk of a policy: an encoder, SRL's own or the user's, and a memory after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from srl.algorithms.base import NetworkOptions, Peers, load_object
from srl.core.errors import ConfigError
from srl.core.specs import Spaces
from srl.policies.networks import Encoder, Memory, fast_bfloat16


class Trunk(nn.Module):
    """Observations (and memory) to features ``[rows, out_features]``.

    Where ``twins`` are wanted and the encoder is neither large, nor someone's own, nor followed by a memory, there are
    two of it, and features ``[2, rows, out_features]``.
    """

    def __init__(
        self, spaces: Spaces, options: NetworkOptions, *, normalize: bool = False, twins: bool = False
    ) -> None:
        super().__init__()
        self.reduced = options.precision == "bfloat16" or (options.precision == "auto" and fast_bfloat16())
        self.encoder: Any = (
            custom(options.network, spaces)
            if options.network
            else Encoder(
                spaces.observation,
                options.hidden,
                options.activation,
                normalize=normalize,
                twins=twins and not options.memory,
            )
        )
        self.twins = isinstance(self.encoder, Encoder) and self.encoder.twins
        width: int = self.encoder.out_features  # type: ignore[assignment]
        self.memory = Memory(options.memory, width, options.memory_size) if options.memory else None
        self.out_features = width if self.memory is None else self.memory.out_features

    def encode(self, inputs: dict[str, Tensor]) -> Tensor:
        """Features of the observations alone."""
        if not self.reduced:
            features: Tensor = self.encoder(inputs)
            return features
        with torch.autocast(next(iter(inputs.values())).device.type, torch.bfloat16):
            reduced: Tensor = self.encoder(inputs)
        return reduced.float()

    def observe(self, obs: dict[str, Tensor], peers: Peers | None) -> None:
        """Update the encoder's running normalisation, if it has one; a network of one's own may have ``observe``."""
        if isinstance(self.encoder, Encoder):
            if self.encoder.norm is not None:
                self.encoder.norm.update(self.encoder.flatten(obs), peers)
        elif hasattr(self.encoder, "observe"):
            self.encoder.observe(obs, peers)

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Features after one step, and the memory moved on."""
        features = self.encode(inputs)
        if self.memory is None:
            return features, {}
        state = self.memory(features, {name: value for name, value in inputs.items() if name.startswith("state/")})
        return state["state/h"], state

    def unroll(self, inputs: dict[str, Tensor], state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Features ``[steps * rows, …]`` of whole chunks: inputs ``[steps * rows, …]``, state ``[rows, …]``.

        And the state after them.
        """
        features = self.encode(inputs)
        if self.memory is None:
            return features, {}
        rows = len(next(iter(state.values())))
        flags = (inputs[name].reshape(-1, rows) for name in ("first", "valid"))
        outputs, state = self.memory.unroll(features.reshape(-1, rows, features.shape[-1]), state, *flags)
        return outputs.flatten(0, 1), state


def custom(path: str, spaces: Spaces) -> nn.Module:
    """A network of the user's own, checked."""
    kind = load_object(path, "the network")
    network = kind(spaces)
    if not isinstance(network, nn.Module) or not isinstance(getattr(network, "out_features", None), int):
        raise ConfigError(f"the network {path!r} must be a torch.nn.Module with an integer out_features")
    return network
