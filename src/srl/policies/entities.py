"""A network for things of which there are more or fewer: each is embedded, they attend to each other, and are pooled.

For observations with fields ``[things, numbers]`` and, for each such field ``x``, masks ``x_seen`` and ``x_exist``, as
hide-and-seek has them. What acts looks at what is seen (:class:`Seen`), what judges in training at what is there
(:class:`Everything`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional

from srl.core.errors import ConfigError
from srl.core.specs import Spaces
from srl.policies.networks import RunningNorm

if TYPE_CHECKING:
    from srl.algorithms.base import Peers

HEADS = 4
_RAYS, _CHANNELS = "lidar", 9


class Entities(nn.Module):
    """Features of oneself and of the things around; one block of attention (Baker et al. 2019)."""

    mask = ""
    width = 64
    """Numbers for each thing, a multiple of HEADS. The original has 128: more than two cores can train in hours."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        space = spaces.observation
        names = list(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else []
        self.kinds = [name for name in names if f"{name}_{self.mask}" in names]
        if not self.kinds:
            raise ConfigError(f"{type(self).__name__} needs things to look at and masks of them, not {space}")
        masks = {f"{name}_{mask}" for name in self.kinds for mask in ("seen", "exist")}
        self.own = [name for name in names if name not in masks and name not in self.kinds]
        shapes = {name: space[name].shape for name in (*self.own, *self.kinds)}  # type: ignore[index]
        self.norms = nn.ModuleDict({name: RunningNorm(shape[-1:]) for name, shape in shapes.items()})
        rays = math.prod(shapes[_RAYS]) * _CHANNELS if _RAYS in self.own else 0
        self.rays = nn.Conv1d(1, _CHANNELS, 3, padding=1, padding_mode="circular") if rays else None
        inputs, width = sum(math.prod(shapes[name]) for name in self.own if name != _RAYS) + rays, self.width
        self.self_embed = nn.Linear(inputs, width)
        self.embed = nn.ModuleDict({name: nn.Linear(shapes[name][-1], width) for name in self.kinds})
        self.beside = nn.ModuleDict({name: nn.Linear(inputs, width, bias=False) for name in self.kinds})
        self.before, self.attention, self.after = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.out_features = 2 * width

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Features ``[rows, out_features]``: of all that may be looked at, and of oneself."""
        own = torch.cat([self._own(name, inputs[f"obs/{name}"]) for name in self.own], -1)
        myself = functional.relu(self.self_embed(own))
        things, there = [myself.unsqueeze(1)], [torch.ones(len(own), 1, dtype=torch.bool, device=own.device)]
        for name in self.kinds:
            each = self.embed[name](self.norms[name](inputs[f"obs/{name}"]))
            things.append(functional.relu(each + self.beside[name](own).unsqueeze(1)))
            there.append(inputs[f"obs/{name}_{self.mask}"].bool())
        found, mask = torch.cat(things, 1), torch.cat(there, 1)
        found = found + self._attended(self.before(found), mask)
        weight = mask.unsqueeze(-1).to(found.dtype)
        return torch.cat([(found * weight).sum(1) / weight.sum(1), myself], -1)

    def _own(self, name: str, value: Tensor) -> Tensor:
        scaled: Tensor = self.norms[name](value)
        if name != _RAYS or self.rays is None:
            return scaled.flatten(1)
        rays: Tensor = functional.relu(self.rays(scaled.unsqueeze(1))).flatten(1)
        return rays

    def _attended(self, things: Tensor, mask: Tensor) -> Tensor:
        heads = self.attention(things).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        found = functional.scaled_dot_product_attention(q, k, v, mask[:, None, None])
        out: Tensor = self.after(found.transpose(1, 2).flatten(2))
        return out

    @torch.no_grad()
    def observe(self, obs: dict[str, Tensor], peers: Peers | None) -> None:
        """Update the running normalisation, of what there is."""
        for name, norm in self.norms.items():
            seen = obs[f"obs/{name}"]
            exists = obs.get(f"obs/{name}_exist")
            norm.update(seen if exists is None else seen[exists.bool()], peers)  # type: ignore[operator]


class Seen(Entities):
    """Of what an agent sees."""

    mask = "seen"


class Everything(Entities):
    """Of all that is there."""

    mask = "exist"
