"""A network for observations that no network could look at as a whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from srl.core.specs import Spaces

_LOOKS = 64


class Glance(nn.Module):
    """Looks at a few bytes of a long row."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        length = spaces.observation_spec()["obs"].shape[0]
        self.stride = max(1, length // _LOOKS)
        self.out_features = 16
        self.layer = nn.Linear(len(range(0, length, self.stride)), self.out_features)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Features ``[rows, out_features]``."""
        return torch.tanh(self.layer(inputs["obs"][:, :: self.stride].float() / 255))
