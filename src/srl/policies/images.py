"""Images of bytes on their way into a network, in C.

Games repeat themselves: of the windows that the first of :class:`~srl.policies.networks.NatureCNN`'s layers sees in a
minibatch of Pong 4 in 100 are different, of the second's 16, of the third's 36. Windows that are equal, byte by byte,
have equal features, and their gradients can be summed before they go back through the layer. So the different ones are
found, and every layer is one matrix product over them: what convolutions give, but for the order of sums (ADR 15).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from srl.core import native

if TYPE_CHECKING:
    from srl.policies.networks import Across

BLOCK = 4
"""Pixels of the blocks that images are compared by: the first layer's step, half of its window."""
PANEL = 64
"""Features of the last convolution, and what those of the dense layer must be a multiple of."""


def interleaved(x: Tensor) -> Tensor:
    """Images ``[rows, channels, height, width]`` as 32-bit numbers with channels last.

    torch does it with one thread at 3 GB/s: it was an eleventh of a forward pass.
    """
    library = _library(x)
    if library is None:
        return x.to(torch.float32, memory_format=torch.channels_last)
    rows, channels, height, width = x.shape
    found = torch.empty(rows, height, width, channels)
    library.images_interleave(_at(x), _at(found), *map(c_int64, (rows, channels, height * width)))
    return found.permute(0, 3, 1, 2)


def features(x: Tensor, layers: Sequence[nn.Conv2d], dense: Across) -> Tensor | None:
    """What convolutions of 8, 4 and 3 pixels in steps of 4, 2 and 1 and a dense layer, each with ReLU, make of images.

    Bytes count from 0 to 1. None: the images have too little in common, or are not where this works.
    """
    reduced = torch.is_autocast_enabled("cpu") or dense.weight.dtype is not torch.float32
    odd = dense.weight.shape[1] % PANEL or layers[-1].out_channels != PANEL
    library = None if reduced or odd else _library(x)
    found = _find(library, x) if library is not None else None
    if library is None or found is None:
        return None
    first, second, third = layers
    blocks, patches, windows, last, places = found
    channels = x.shape[1]
    pixels = blocks.view(torch.uint8).reshape(len(blocks), -1).float()
    # The first layer's weights in the order of blocks; bytes become numbers between 0 and 1 through them.
    split = first.weight.reshape(len(first.weight), channels, 2, BLOCK, 2, BLOCK)
    weight = split.permute(0, 2, 4, 1, 3, 5).reshape(len(first.weight), -1) * (1 / 255)
    seen: Tensor = Windows.apply(pixels, patches, weight, first.bias)  # type: ignore[no-untyped-call]
    for layer, numbers in ((second, windows), (third, last)):
        weight = layer.weight.permute(0, 2, 3, 1).flatten(1)
        seen = Windows.apply(seen, numbers, weight, layer.bias)  # type: ignore[no-untyped-call]
    out: Tensor = Dense.apply(seen, places, dense.weight, dense.bias)  # type: ignore[no-untyped-call]
    return out


def _find(library: ctypes.CDLL, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """The different blocks, the different patches of three layers, and the numbers of the last, by image."""
    rows, channels, height, width = x.shape
    high, wide = height // BLOCK, width // BLOCK
    most = [rows * high * wide // 2]  # with more of them convolutions are the faster way
    for size, step in ((2, 1), (4, 2), (3, 1)):
        high, wide = (high - size) // step + 1, (wide - size) // step + 1
        most += [rows * high * wide]
    words = (channels * BLOCK, 4, 16, 9)
    kept = [torch.empty(count, size, dtype=torch.int32) for count, size in zip(most, words, strict=True)]
    places = torch.empty(rows, high * wide, dtype=torch.int32)
    counts = (c_int64 * 4)()
    pointers = (c_void_p * 4)(*(each.data_ptr() for each in kept))
    if not library.repeats_find(_at(x), *map(c_int64, x.shape), pointers, (c_int64 * 4)(*most), counts, _at(places)):
        return None
    blocks, patches, windows, last = (each[:count] for each, count in zip(kept, counts, strict=True))
    return blocks, patches, windows, last, places


def _library(x: Tensor) -> ctypes.CDLL | None:
    """The compiled code, if it can work on these images."""
    here = x.dtype is torch.uint8 and x.device.type == "cpu" and x.is_contiguous()
    return native.library() if here and not torch.compiler.is_compiling() else None


def _at(x: Tensor) -> c_void_p:
    return c_void_p(x.data_ptr())


class Windows(torch.autograd.Function):
    """A layer and a ReLU over windows that consist of rows of ``seen``, by ``numbers`` ``[windows, pieces]``."""

    @staticmethod
    def forward(ctx: Any, seen: Tensor, numbers: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """See the class."""
        weight = weight.contiguous()
        out = torch.empty(len(numbers), len(weight))
        sizes = map(c_int64, (*numbers.shape, seen.shape[1], len(weight)))
        library: Any = native.library()
        given = *map(_at, (weight, bias, out)), native.threads()
        if not library.windows_forward(_at(seen), _at(numbers), *sizes, *given):
            raise MemoryError
        ctx.save_for_backward(seen, numbers, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor]:
        """See the class."""
        seen, numbers, weight, out = ctx.saved_tensors
        found, bias = torch.zeros(weight.shape[::-1]), torch.empty(len(weight))
        back = torch.empty_like(seen) if ctx.needs_input_grad[0] else None
        sizes = map(c_int64, (*numbers.shape, seen.shape[1], len(weight), len(seen)))
        gradient = gradient.contiguous()
        given = *map(_at, (weight, out, gradient, found, bias)), None if back is None else _at(back), native.threads()
        library: Any = native.library()
        if not library.windows_backward(_at(seen), _at(numbers), *sizes, *given):
            raise MemoryError
        return back, None, found.t(), bias


class Dense(torch.autograd.Function):
    """A dense layer and a ReLU over images whose ``places`` ``[images, places]`` name rows of features."""

    @staticmethod
    def forward(ctx: Any, seen: Tensor, places: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """See the class."""
        images, each = places.shape
        different = torch.empty(places.numel(), dtype=torch.int32)
        which, first = torch.empty(each, images, dtype=torch.int32), torch.zeros(len(seen), dtype=torch.int32)
        starts = torch.empty(each + 1, dtype=torch.int64)
        library: Any = native.library()
        sizes = c_int64(images), c_int64(each)
        library.dense_sort(_at(places), *sizes, _at(first), _at(which), _at(different), _at(starts))
        outputs = weight.shape[1]
        out = torch.empty(images, outputs)
        sorted_ = _at(which), _at(different), _at(starts)
        given = *sizes, c_int64(outputs), *map(_at, (weight, bias, out)), native.threads()
        if not library.dense_forward(_at(seen), *sorted_, *given):
            raise MemoryError
        ctx.save_for_backward(seen, weight, out, which, different, starts)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor]:
        """See the class. What weights have gathered already is added to in place: they are 6 MB."""
        seen, weight, out, which, different, starts = ctx.saved_tensors
        gradient, bias = gradient.contiguous(), torch.empty(weight.shape[1])
        has = weight.is_leaf and weight.grad is not None and weight.grad.is_contiguous()
        found, back = weight.grad if has else torch.zeros_like(weight), torch.zeros_like(seen)
        sizes = map(c_int64, (len(out), len(which), weight.shape[1]))
        given = *map(_at, (which, different, starts)), *sizes, *map(_at, (weight, out, gradient, found, bias, back))
        library: Any = native.library()
        if not library.dense_backward(_at(seen), *given, native.threads()):
            raise MemoryError
        return back, None, None if has else found, bias
