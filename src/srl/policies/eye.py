"""Acting on images in C: all of a policy's answer in two calls.

A vector of eight games takes a policy a third of a millisecond of products, and as long again to get to torch's kernels
and back, with caches that the emulators have just filled. ``eye.c`` goes from bytes to features, ``small.c`` from there
to actions, on weights that are packed once a version. What was seen before with the same weights is not worked out
again; the result does not depend on it (ADR 21). Training is in :mod:`srl.policies.images`; both are compared in
``tests/test_eye.py``.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from srl.core.specs import Array, Arrays
from srl.policies.images import BLOCK, PANEL
from srl.policies.networks import Encoder
from srl.policies.small import Heads

if TYPE_CHECKING:
    from srl.policies.actor_critic import ActorCritic


_CHANNELS = 16


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("pieces", "size", "outputs")),
        *((name, c_void_p) for name in ("packed", "bias", "scales")),
    )


class _Layout(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("channels", "height", "width")),
        ("layers", _Layer * 4),
        ("memory", c_int64 * 64),  # of eye.c itself
    )


def eye(policy: ActorCritic) -> Eye | None:
    """The arithmetic of ``policy``, if it is one that this can do."""
    trunk, encoder = policy.trunk, policy.trunk.encoder
    if not isinstance(encoder, Encoder) or len(encoder.images) != 1 or encoder.vectors or encoder.twins:
        return None
    if trunk.memory is not None or trunk.reduced or not Heads.fit(policy):
        return None
    cnn: Any = encoder.cnn[next(iter(encoder.cnn))]
    fits = not cnn.last and not cnn.out_features % PANEL and cnn.first.in_channels <= _CHANNELS
    return Eye(policy, cnn, encoder.images[0]) if fits else None


class Eye(Heads):
    """See above."""

    def __init__(self, policy: ActorCritic, cnn: Any, name: str) -> None:
        super().__init__(policy, cnn.out_features)
        self.image, self.width = name, cnn.out_features
        layers: list[Any] = [*(each for each in cnn.modules() if isinstance(each, nn.Conv2d)), cnn.dense]
        self.weights = [*(layer.weight.detach() for layer in layers[:-1]), cnn.dense.weight.detach().t()]
        self.watched = [*self.weights, *(layer.bias.detach() for layer in layers)]
        self.bias = self.watched[-1]  # of the dense layer
        self.orders = [_order(number, weight) for number, weight in enumerate(self.weights)]
        self.packed = [torch.empty(weight.numel()) for weight in self.weights[:-1]]
        # The dense layer's are most of all weights. Sixteen bits of them come sooner from where emulators leave them.
        self.packed += [torch.empty(self.weights[-1].numel(), dtype=torch.int16)]
        self.scales, self.biases = torch.empty(2, self.width)
        self.layout = _Layout(channels=self.weights[0].shape[1], height=cnn.shape[0], width=cnn.shape[1])
        rows = zip(layers, self.orders, self.packed, strict=True)
        for number, (layer, order, packed) in enumerate(rows):
            own = (self.biases, self.scales) if number == len(layers) - 1 else (layer.bias,)
            places = (each.data_ptr() for each in (packed, *own))
            self.layout.layers[number] = _Layer(*order.shape, len(self.weights[number]), *places)
        self._here = ctypes.addressof(self.layout)
        self._version = -1
        self._rows, self._memory = 0, np.empty(0, np.int32)
        self._features: dict[int, tuple[Array, int]] = {}

    def act(self, inputs: Arrays, generator: torch.Generator | None) -> Arrays | None:
        """See :meth:`Heads.choose`; None where the images have too little in common."""
        images = np.ascontiguousarray(inputs[self.image])
        rows = len(images)
        if rows > self._rows:
            self._rows = rows
            self._memory = np.empty(self._library.eye_room(self._here, rows), np.int32)
            self._library.eye_open(self._here, rows, self._memory.ctypes.data)
        self._follow()
        if rows not in self._features:
            if len(self._features) > 16:
                self._features.clear()
            features = np.empty((rows, self.width), np.float32)
            self._features[rows] = features, features.ctypes.data
        features_at = self._features[rows][1]
        if not self._library.eye_see(self._here, images.ctypes.data, rows, features_at):
            return None
        return self.choose(features_at, rows, generator)

    def _follow(self) -> None:
        """Pack the weights anew if they have changed; torch counts how often a tensor was written."""
        version = sum(weight._version for weight in self.watched)
        if version == self._version:
            return
        self._version = version
        for number, (weight, order) in enumerate(zip(self.weights, self.orders, strict=True)):
            layer = ctypes.addressof(self.layout.layers[number])
            scale = 1 if number else 1 / 255  # bytes become numbers between 0 and 1
            given = weight.data_ptr(), order.ctypes.data, weight.stride(0), scale
            self._library.eye_pack(layer, *given, self.bias.data_ptr(), self.biases.data_ptr())
        self._library.eye_forget(self._here)


def _order(number: int, weight: Tensor) -> Array:
    """Where in memory the weights ``[pieces, size]`` of the first output of a layer are."""
    steps = zip(np.indices(weight.shape[1:]), weight.stride()[1:], strict=True)
    places = sum(index * stride for index, stride in steps)
    if places.ndim == 1:
        return np.ascontiguousarray(places.reshape(-1, PANEL))
    if number:
        return np.ascontiguousarray(places.transpose(1, 2, 0)).reshape(-1, len(places))
    split = places.reshape(len(places), 2, BLOCK, 2, BLOCK).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(split).reshape(4, -1)
