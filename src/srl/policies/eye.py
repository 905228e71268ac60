"""Acting on images in C: all of a policy's answer in two calls.

A vector of eight games takes a policy half a millisecond of products, and as long again to get to torch's kernels and back,
with caches that the emulators have just filled. ``eye.c`` goes from bytes to features, ``small.c`` from there to actions,
on weights that are packed once a version. Training stays with :mod:`srl.policies.images`; both are compared in
``tests/test_eye.py``.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from srl.core.specs import Array, Arrays
from srl.policies.images import BLOCK
from srl.policies.networks import Encoder
from srl.policies.small import Heads

if TYPE_CHECKING:
    from srl.policies.actor_critic import ActorCritic

_PANEL = 64
"""Columns that weights are packed in."""
_WIDTH = 64
"""Features of the last convolution."""


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("pieces", "size", "outputs")),
        *((name, c_void_p) for name in ("packed", "bias")),
    )


class _Layout(ctypes.Structure):
    _fields_ = (*((name, c_int64) for name in ("channels", "height", "width")), ("layers", _Layer * 4))


def eye(policy: ActorCritic) -> Eye | None:
    """The arithmetic of ``policy``, if it is one that this can do."""
    trunk, encoder = policy.trunk, policy.trunk.encoder
    if not isinstance(encoder, Encoder) or len(encoder.images) != 1 or encoder.vectors or encoder.twins:
        return None
    if trunk.memory is not None or trunk.reduced or not Heads.fit(policy):
        return None
    (cnn,) = encoder.cnn.values()
    return Eye(policy, cnn, encoder.images[0]) if not cnn.last and not cnn.out_features % _PANEL else None


class Eye(Heads):
    """See above."""

    def __init__(self, policy: ActorCritic, cnn: Any, name: str) -> None:
        super().__init__(policy, cnn.out_features)
        self.image, self.features = name, cnn.out_features
        layers: list[Any] = [each for each in cnn.modules() if isinstance(each, (nn.Conv2d, nn.Linear))]
        self.weights = [layer.weight.detach() for layer in layers]
        self.orders = [_order(number, weight) for number, weight in enumerate(self.weights)]
        self.packed = [torch.empty(weight.numel()) for weight in self.weights]
        self.layout = _Layout(channels=self.weights[0].shape[1], height=cnn.shape[0], width=cnn.shape[1])
        rows = zip(layers, self.orders, self.packed, strict=True)
        for number, (layer, order, packed) in enumerate(rows):
            places = packed.data_ptr(), layer.bias.data_ptr()
            self.layout.layers[number] = _Layer(*order.shape, len(layer.weight), *places)
        self._version = -1
        self._sights: dict[int, tuple[Array, Array]] = {}

    def act(self, inputs: Arrays, generator: torch.Generator | None) -> Arrays | None:
        """See :meth:`Heads.choose`; None where the images have too little in common."""
        images = inputs[self.image]
        rows = len(images)
        if rows not in self._sights:
            if len(self._sights) > 16:
                self._sights.clear()
            room = self._library.eye_room(ctypes.byref(self.layout), c_int64(rows))
            self._sights[rows] = np.empty(room, np.int32), np.empty((rows, self.features), np.float32)
        self._follow()
        room, features = self._sights[rows]
        places = (c_void_p(array.ctypes.data) for array in (room, features))
        seen = np.ascontiguousarray(images).ctypes.data
        if not self._library.eye_see(ctypes.byref(self.layout), c_void_p(seen), c_int64(rows), *places):
            return None
        return self.choose(features.ctypes.data, rows, generator)

    def _follow(self) -> None:
        """Pack the weights anew if they have changed; torch counts how often a tensor was written."""
        version = sum(weight._version for weight in self.weights)
        if version == self._version:
            return
        self._version = version
        for number, (weight, order) in enumerate(zip(self.weights, self.orders, strict=True)):
            scale = c_float(1 if number else 1 / 255)  # bytes become numbers between 0 and 1
            places = c_void_p(weight.data_ptr()), c_void_p(order.ctypes.data)
            self._library.eye_pack(ctypes.byref(self.layout.layers[number]), *places, scale)


def _order(number: int, weight: Tensor) -> Array:
    """Where in memory the weights ``[pieces, size]`` of an output of a layer are."""
    like = np.arange(weight[0].numel())
    if number == 3:  # the dense layer: features of a place side by side
        return np.ascontiguousarray(like.reshape(_WIDTH, -1).T)
    strides = [stride * like.itemsize for stride in weight.stride()[1:]]
    places = np.lib.stride_tricks.as_strided(like, weight.shape[1:], strides)
    if number:
        return np.ascontiguousarray(places.transpose(1, 2, 0)).reshape(-1, len(places))
    split = places.reshape(len(places), 2, BLOCK, 2, BLOCK).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(split).reshape(4, -1)
