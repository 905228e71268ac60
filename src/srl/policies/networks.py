"""Networks: encoders chosen by the observation, memory, and running normalisation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from srl.core import native
from srl.core.specs import channels_last, choices_of, is_image, leaves, spec_of
from srl.policies.images import features, interleaved

if TYPE_CHECKING:
    from srl.algorithms.base import Peers

M = TypeVar("M", nn.Linear, nn.Conv2d)


class Tanh(nn.Module):
    """The hyperbolic tangent as 1 - 2 sigmoid(-2x): to 2e-7 the same, and up to four times faster (ADR 10)."""

    def forward(self, x: Tensor) -> Tensor:
        """As ``x``."""
        return torch.rsub((-2 * x).sigmoid_(), 1, alpha=2)


Activations: dict[str, type[nn.Module]] = {"tanh": Tanh, "relu": nn.ReLU, "elu": nn.ELU}


class RunningNorm(nn.Module):
    """Mean and variance of all that was ever seen; lives in buffers, so it travels with the weights."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], limit: float = 10.0) -> None:
        super().__init__()
        self.limit = limit
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` with mean 0 and variance 1, clipped."""
        scaled = (x - self.mean.float()) / self.std()
        return scaled.clamp(-self.limit, self.limit)

    def inverse(self, y: Tensor) -> Tensor:
        """What :meth:`forward` would have turned into ``y``."""
        return y * self.std() + self.mean.float()

    def std(self) -> Tensor:
        """Standard deviation, never 0."""
        return (self.var + 1e-8).sqrt().float()

    @torch.no_grad()
    def update(self, x: Tensor, peers: Peers | None = None) -> None:
        """Take the rows of ``x`` (``[rows, …]``) into account, and those of ``peers``."""
        x = x.double()
        var, mean = torch.var_mean(x, dim=0, correction=0)
        found = torch.stack([torch.full_like(mean, x.shape[0]), mean, var]).nan_to_num()  # of no rows: not a number
        for count, mean, var in found[None] if peers is None else peers.gather(found):
            total = self.count + count
            if not total.any():  # there is nothing yet
                continue
            delta = mean - self.mean
            spread = self.var * self.count + var * count + delta.square() * self.count * count / total
            self.mean.add_(delta * (count / total))
            self.var.copy_(spread / total)
            self.count.copy_(total.reshape(-1)[0])


class Across(nn.Module):
    """A dense layer whose weights ``[inputs, outputs]`` lie as :mod:`srl.policies.images` reads them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        like = _orthogonal(nn.Linear(inputs, outputs))
        self.weight = nn.Parameter(like.weight.detach().t().contiguous())
        self.bias = nn.Parameter(like.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, outputs]``."""
        return torch.addmm(self.bias, x, self.weight)


class NatureCNN(nn.Module):
    """The convolutions of Mnih et al. (2015) for images of bytes, with channels first or last."""

    def __init__(self, shape: tuple[int, ...], width: int = 512) -> None:
        super().__init__()
        self.last = channels_last(shape)
        if self.last:
            shape = (shape[2], *shape[:2])
        self.shape = shape[1:]
        self.first = _orthogonal(nn.Conv2d(shape[0], 32, 8, 4))
        self.convolutions = nn.Sequential(
            nn.ReLU(),
            _orthogonal(nn.Conv2d(32, 64, 4, 2)),
            nn.ReLU(),
            _orthogonal(nn.Conv2d(64, 64, 3, 1)),
            nn.ReLU(),
        )
        with torch.no_grad():
            flat = self.convolutions(self.first(torch.zeros(1, *shape))).numel()
        for part in (self.first, self.convolutions):
            part.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.dense = Across(flat, width)
        self.out_features = width
        self.repeats = native.library() is not None
        """Whether what repeats in images was worked out once when it last looked at some."""

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[rows, features]``."""
        if self.last:
            x = x.movedim(-1, 1).contiguous()
        convolutions = [self.first, *(each for each in self.convolutions if isinstance(each, nn.Conv2d))]
        seen = features(x, convolutions, self.dense)
        if not torch.compiler.is_compiling():
            self.repeats = seen is not None
        if seen is not None:
            return seen
        # Channels last is the layout the convolution kernels work in; converting once here saves it in every layer.
        image = interleaved(x)
        # Bytes become numbers between 0 and 1 through the weights, which are fewer than the pixels.
        seen = functional.conv2d(image, self.first.weight * (1 / 255), self.first.bias, self.first.stride)
        return functional.relu(self.dense(self.convolutions(seen).permute(0, 2, 3, 1).flatten(1)))


class MLP(nn.Module):
    """Fully connected layers; with ``twins`` two networks of the same shape side by side, computed as one."""

    def __init__(self, inputs: int, hidden: Sequence[int], activation: str = "tanh", *, twins: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [Twins(inputs, width) if twins else _orthogonal(nn.Linear(inputs, width))]
            layers += [Activations[activation]()]
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.out_features = inputs

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[rows, features]``, or ``[2, rows, features]`` of twins."""
        out: Tensor = self.layers(x)
        return out


class Twins(nn.Module):
    """Two linear layers of the same shape: half as many calls, and the same arithmetic."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(2, 1, outputs))
        for weight in self.weight:
            nn.init.orthogonal_(weight, math.sqrt(2))

    def forward(self, x: Tensor) -> Tensor:
        """``[2, rows, outputs]`` from ``[rows, inputs]`` or ``[2, rows, inputs]``."""
        return torch.baddbmm(self.bias, x.expand(2, *x.shape[-2:]), self.weight)


class Encoder(nn.Module):
    """Observations to features: images through :class:`NatureCNN`, the rest side by side into an MLP.

    A discrete observation enters as one input per value, of which one is 1. With ``twins`` there are two MLPs, unless
    there are images: convolutions are too large to do twice.
    """

    def __init__(
        self, space: gymnasium.Space[Any], hidden: Sequence[int], activation: str, *, normalize: bool, twins: bool
    ) -> None:
        super().__init__()
        spec = spec_of("obs", space)
        found = leaves("obs", space)
        self.images = [name for name in spec if is_image(spec[name])]
        self.vectors = [name for name in spec if name not in self.images]
        self.discrete = {name: Choices(leaf) for name, leaf, _ in found if choices_of(leaf)}
        self.cnn = nn.ModuleDict({_key(name): NatureCNN(spec[name].shape) for name in self.images})
        widths = [self.discrete[n].width if n in self.discrete else math.prod(spec[n].shape) for n in self.vectors]
        self.width = sum(widths)
        self.norm = RunningNorm((self.width,)) if normalize and self.width else None
        inputs = self.width + sum(cnn.out_features for cnn in self.cnn.values())  # type: ignore[misc]
        # An image's features have gone through a dense layer already.
        self.twins = twins and not self.images and bool(hidden)
        self.mlp = MLP(int(inputs), hidden if self.vectors else (), activation, twins=self.twins)
        self.out_features = self.mlp.out_features

    def flatten(self, obs: dict[str, Tensor]) -> Tensor:
        """All vector fields side by side, ``[rows, width]``."""
        parts = []
        for name in self.vectors:
            flat = obs[name].reshape(len(obs[name]), -1)
            parts.append(self.discrete[name].one_hot(flat) if name in self.discrete else flat.float())
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        """Features ``[rows, features]``, or ``[2, rows, features]`` of twins."""
        parts = [self.cnn[_key(name)](obs[name]) for name in self.images]
        if self.vectors:
            flat = self.flatten(obs)
            parts.append(self.norm(flat) if self.norm is not None else flat)
        out: Tensor = self.mlp(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        return out


class Choices:
    """The values of a Discrete or MultiDiscrete space as positions in one row of ones and zeros."""

    def __init__(self, leaf: gymnasium.Space[Any]) -> None:
        counts = choices_of(leaf)
        first = np.asarray(getattr(leaf, "start", 0)).reshape(-1)
        self.width = sum(counts)
        self.offsets = torch.from_numpy(np.cumsum([0, *counts[:-1]]) - first)

    def one_hot(self, values: Tensor) -> Tensor:
        """``[rows, numbers]`` as ``[rows, width]``."""
        places = values.long() + self.offsets.to(values.device)
        return torch.zeros(len(values), self.width, device=values.device).scatter_(1, places, 1.0)


class Memory(nn.Module):
    """A recurrent layer whose state the caller keeps, as ``{"state/h": [rows, size], …}``."""

    def __init__(self, kind: str, inputs: int, size: int) -> None:
        super().__init__()
        self.lstm = kind == "lstm"
        self.cell: nn.LSTMCell | nn.GRUCell = (nn.LSTMCell if self.lstm else nn.GRUCell)(inputs, size)
        for name, weight in self.cell.named_parameters():
            nn.init.orthogonal_(weight) if weight.dim() > 1 else nn.init.zeros_(weight)
            if self.lstm and name == "bias_ih":
                nn.init.ones_(weight[size : 2 * size])  # to remember is the habit, to forget is learned
        self.out_features = size

    def forward(self, features: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state after one step; its ``state/h`` is the output."""
        if self.lstm:
            h, c = self.cell(features, (state["state/h"], state["state/c"]))
            return {"state/h": h, "state/c": c}
        return {"state/h": self.cell(features, state["state/h"])}

    def unroll(
        self, features: Tensor, state: dict[str, Tensor], first: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs ``[steps, rows, size]`` for features ``[steps, rows, …]``, and the state after all of them.

        The state begins anew where ``first``, and stays as it was after steps that are not ``valid``.
        """
        found = []
        for x, new, moves in zip(features, (~first).float().unsqueeze(-1), valid.unsqueeze(-1), strict=True):
            before = {name: kept * new for name, kept in state.items()}
            after = self(x, before)
            found.append(after["state/h"])
            state = {name: torch.where(moves, after[name], kept) for name, kept in before.items()}
        return torch.stack(found), state


def fast_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16 (without them it is slower than float32)."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as about:
        flags = next((line for line in about if line.startswith("flags")), "")
        return "avx512_bf16" in flags or "amx_bf16" in flags
    return False


def head(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A last layer."""
    return _orthogonal(nn.Linear(inputs, outputs), gain)


def _key(name: str) -> str:
    return name.replace("/", "_")


def _orthogonal(layer: M, gain: float = math.sqrt(2)) -> M:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
