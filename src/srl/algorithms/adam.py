"""Adam on all weights at once.

The weights of a network become views of one tensor, and their gradients views of another. Zeroing and
measuring the gradient and the step itself are then one call each, whatever the number of layers. In C the gradient is
shortened on the way.
"""

from __future__ import annotations

import math
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from srl.core import native


class Adam:
    """Kingma & Ba (2015), for the weights of ``module`` that want gradients; all of one dtype, on one device."""

    def __init__(self, module: nn.Module, lr: float, eps: float = 1e-5) -> None:
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        self.flat = torch.empty(sum(map(Tensor.numel, weights)), dtype=weights[0].dtype, device=weights[0].device)
        self.grad = torch.zeros_like(self.flat)
        place = 0
        for weight in weights:
            end = place + weight.numel()
            like = weight.size(), weight.stride()
            weight.data = self.flat[place:end].as_strided(*like).copy_(weight.data)
            weight.grad = self.grad[place:end].as_strided(*like)
            place = end
        self.moments = [torch.zeros_like(self.flat) for _ in range(2)]
        self.steps = torch.zeros((), device=self.flat.device)
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, "eps": eps}]
        self._square, self._longest = 0.0, math.inf
        here = self.flat.device.type == "cpu" and self.flat.dtype is torch.float32
        self._library: Any = native.library() if here else None
        if self._library is not None:
            self._library.adam_square.restype = c_double

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self.grad.zero_()

    def clip(self, longest: float) -> float:
        """Have the next step shorten the gradient to ``longest``; how long it is."""
        if self._library is None:
            self._square = torch.linalg.vector_norm(self.grad).item() ** 2
        else:
            self._square = self._library.adam_square(_at(self.grad), c_int64(self.grad.numel()), native.threads())
        self._longest = longest
        return math.sqrt(self._square)

    def step(self) -> None:
        """One step along the gradient."""
        group, square, longest = self.param_groups[0], self._square, self._longest
        self._square, self._longest = 0.0, math.inf
        if self._library is not None:
            places = map(_at, (self.flat, self.grad, *self.moments, self.steps))
            numbers = map(c_double, (group["lr"], group["eps"], square, longest))
            self._library.adam_step(*places, c_int64(self.flat.numel()), *numbers, native.threads())
            return
        length = math.sqrt(square) + 1e-6
        if length > longest:
            self.grad.mul_(longest / length)
        self.steps += 1
        chosen = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
        lists: list[list[Tensor]] = [[self.flat], [self.grad], [self.moments[0]], [self.moments[1]], [], [self.steps]]
        torch.ops.aten._fused_adam_(*lists, **group, **chosen)

    def state_dict(self) -> dict[str, Any]:
        """The moments, in the form of torch's optimisers."""
        named = {"exp_avg": self.moments[0], "exp_avg_sq": self.moments[1], "step": self.steps}
        return {"state": {0: named}, "param_groups": self.param_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the moments; the learning rate stays as configured."""
        for name, mine in self.state_dict()["state"][0].items():
            mine.copy_(state["state"][0][name])


def _at(x: Tensor) -> c_void_p:
    return c_void_p(x.data_ptr())
