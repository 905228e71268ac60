"""Dense layers in float32, by whichever of torch's two libraries has the wider instructions on this processor.

torch multiplies matrices of float32 with MKL, which leaves half of an AMD processor with AVX-512 idle: 90 GFLOP/s of a
core where oneDNN, which torch brings along for convolutions, has 200 (ADR 21). oneDNN compiles a kernel for every shape
it has not seen, so the number of rows should not be a different one each time: :func:`rounded`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What a dense layer and a ReLU after it make of ``x`` ``[rows, inputs]``."""
    if not _wide() or x.dtype is not torch.float32 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return functional.linear(x, weight, bias).relu_()
    if not torch.is_grad_enabled():
        return _product(x, weight, bias, "relu")
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def rounded(rows: int) -> int:
    """As many rows or up to a sixteenth more (or 7), such that few different numbers come out."""
    step = 1 << max(3, rows.bit_length() - 5)
    return -(-rows // step) * step


@functools.cache
def _wide() -> bool:
    """Whether this is a processor that oneDNN is the faster one on."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as about:
        return any("AuthenticAMD" in line for line in about)
    return False


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none") -> Tensor:
    """``x @ weight.T + bias``, and what comes after it."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, after, [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = _product(x, weight, bias, "relu")
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, out = ctx.saved_tensors
        gradient = torch.ops.aten.threshold_backward(gradient, out, 0)
        back = _product(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        return back, _product(gradient.t(), x.t()), gradient.sum(0)
