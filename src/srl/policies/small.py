"""The arithmetic of a small actor-critic in numpy, on the very memory of its torch weights.

For two layers of 64 units torch spends most of a gradient step on getting to its kernels (ADR 10). Here the same
products are written down once, forward and backward, into arrays that are kept. It serves networks of vector
observations with one choice or one normal distribution, without masks; all others stay with autograd. Both are compared
in ``tests/test_small.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from srl.core.specs import Array, Arrays
from srl.policies.distributions import Categorical, Gaussian
from srl.policies.networks import Tanh, Twins

if TYPE_CHECKING:
    from srl.policies.actor_critic import ActorCritic

_LARGEST = 2**18
"""More products per row than this are worth torch's threads and better kernels."""


def small(policy: ActorCritic) -> Small | None:
    """The arithmetic of ``policy``, if it is one that this can do."""
    trunk = policy.trunk
    if not trunk.twins or trunk.reduced or len(policy.action.heads) != 1:
        return None
    head = policy.action.heads[0]
    choice = isinstance(head, Categorical) and len(head.counts) == 1
    layers = list(trunk.encoder.mlp.layers)
    known = all(isinstance(layer, (Twins, Tanh, torch.nn.ReLU)) for layer in layers)
    if not (choice or isinstance(head, Gaussian)) or not known or policy.value.weight.device.type != "cpu":
        return None
    products = sum(layer.weight.numel() for layer in layers if isinstance(layer, Twins))
    return Small(policy) if products <= _LARGEST else None


class Small:
    """See above. What :meth:`evaluate` found stays in its arrays until the next call, for one :meth:`backward`."""

    def __init__(self, policy: ActorCritic) -> None:
        self.encoder = policy.trunk.encoder
        self.plain = self.encoder.vectors[0] if len(self.encoder.vectors) == 1 and not self.encoder.discrete else ""
        self.name = policy.action.names[0]
        head: Any = policy.action.heads[0]
        layers = list(self.encoder.mlp.layers)
        self.choice: Categorical | None = head if isinstance(head, Categorical) else None
        self.shape: tuple[int, ...] = head.shape
        linear = head.logits if self.choice else head.mean
        hidden = [layer for layer in layers if isinstance(layer, Twins)]
        self.tanh = [isinstance(layer, Tanh) for layer in layers if not isinstance(layer, Twins)]
        layered: list[Any] = [*hidden, linear, policy.value]
        self.parameters: list[Any] = [each for layer in layered for each in (layer.weight, layer.bias)]
        self.parameters += [] if self.choice else [head.log_std]
        views = [parameter.detach().numpy() for parameter in self.parameters]
        depth = len(hidden)
        self.hidden = list(zip(views[0 : 2 * depth : 2], views[1 : 2 * depth : 2], strict=True))
        self.actor, self.actor_bias, self.critic, self.critic_bias = views[2 * depth : 2 * depth + 4]
        self.log_std: Any = None if self.choice else views[-1]
        self.return_norm = policy.return_norm
        self._rooms: dict[tuple[int, bool], list[Array]] = {}
        self._norm_version = self._return_version = -1

    def forward(self, obs: Arrays) -> tuple[Array, Array]:
        """Logits or means ``[rows, …]``, and values ``[rows]``."""
        x = self._normal(self._flat(obs))
        self.x, self.activations = x, self._room(len(x))
        for (weight, bias), out, tanh in zip(self.hidden, self.activations, self.tanh, strict=True):
            np.matmul(x, weight, out=out)
            out += bias
            np.tanh(out, out=out) if tanh else np.maximum(out, 0, out=out)
            x = out
        params = np.matmul(x[0], self.actor.T)
        params += self.actor_bias
        return params, np.matmul(x[1], self.critic[0]) + self.critic_bias[0]

    def _flat(self, obs: Arrays) -> Array:
        """All observed fields side by side."""
        if self.plain:
            x = obs[self.plain]
            return x.reshape(len(x), -1).astype(np.float32, copy=False)
        found: Array = self.encoder.flatten(
            {name: torch.from_numpy(obs[name]) for name in self.encoder.vectors}
        ).numpy()
        return found

    def _normal(self, x: Array) -> Array:
        """``x`` normalised, where that is asked for."""
        norm = self.encoder.norm
        if norm is None:
            return x
        if norm.var._version != self._norm_version:  # torch counts how often a tensor was written
            self._norm_version = norm.var._version
            self._mean, self._std = norm.mean.float().numpy(), norm.std().numpy()
        x = x - self._mean
        x /= self._std
        np.maximum(x, np.float32(-norm.limit), out=x)
        return np.minimum(x, np.float32(norm.limit), out=x)

    def _room(self, rows: int, *, slopes: bool = False) -> list[Array]:
        """Arrays for the activations of all layers, or for their gradients; kept from call to call."""
        if (rows, slopes) not in self._rooms:
            if len(self._rooms) > 16:
                self._rooms.clear()
            shapes = [(2, rows, weight.shape[2]) for weight, _ in self.hidden]
            self._rooms[rows, slopes] = [np.empty(shape, np.float32) for shape in shapes]
        return self._rooms[rows, slopes]

    def act(self, obs: Arrays, generator: torch.Generator | None) -> Arrays:
        """Actions (the likeliest ones without a generator), their log-probabilities, and values in reward units."""
        params, value = self.forward(obs)
        if self.return_norm is not None:
            if self.return_norm.var._version != self._return_version:
                self._return_version = self.return_norm.var._version
                self._spread, self._middle = self.return_norm.std().numpy(), self.return_norm.mean.float().numpy()
            value *= self._spread
            value += self._middle
        if self.choice is not None:
            log_p = _log_softmax(params)
            scores = log_p
            if generator is not None:
                scores = np.exp(log_p) / torch.empty(params.shape).exponential_(generator=generator).numpy()
            chosen = scores.argmax(-1)
            log_prob = log_p[np.arange(len(log_p)), chosen]
            actions = chosen if self.choice.start is None else chosen + self.choice.start.numpy()
        else:
            noise = np.zeros_like(params)
            if generator is not None:
                noise = torch.empty(params.shape).normal_(generator=generator).numpy()
            actions = np.exp(self.log_std) * noise
            actions += params
            log_prob = _log_density(noise, self.log_std)
        return {self.name: actions.reshape(-1, *self.shape), "log_prob": log_prob, "value": value}

    def evaluate(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the actions, entropies and values."""
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        params, value = self.forward(arrays)
        action = arrays[self.name]
        if self.choice is not None:
            chosen = action if self.choice.start is None else action - self.choice.start.numpy()
            self.log_p = _log_softmax(params)
            self.p = np.exp(self.log_p)
            self.chosen = np.arange(len(chosen)), chosen
            log_prob = self.log_p[self.chosen]
            self.entropy: Array = -np.vecdot(self.p, self.log_p)
        else:
            self.scaled = (action.reshape(params.shape) - params) * np.exp(-self.log_std)
            log_prob = _log_density(self.scaled, self.log_std)
            spread = float(self.log_std.sum()) + 0.5 * len(self.log_std) * (1 + math.log(2 * math.pi))
            self.entropy = np.full(len(log_prob), spread, np.float32)
        return torch.from_numpy(log_prob), torch.from_numpy(self.entropy), torch.from_numpy(value)

    def backward(self, log_prob: Array, value: Array, entropy: Array | None) -> None:
        """Write the weights' gradients, given those of what :meth:`evaluate` returned."""
        grads: list[Any] = [parameter.grad.numpy() for parameter in self.parameters if parameter.grad is not None]
        depth, top = len(self.hidden), self.activations[-1]
        slope = self._head(log_prob, entropy, None if self.choice else grads[-1])
        for place, part in enumerate((slope, value[:, None])):
            np.matmul(part.T, top[place], out=grads[2 * (depth + place)])
            part.sum(0, out=grads[2 * (depth + place) + 1])
        below = self._room(len(value), slopes=True)[-1]
        np.matmul(slope, self.actor, out=below[0])
        np.multiply(value[:, None], self.critic, out=below[1])
        for layer in reversed(range(depth)):
            self._derivative(layer)
            below *= self.activations[layer]
            before = self.activations[layer - 1] if layer else self.x
            np.matmul(before.swapaxes(-1, -2), below, out=grads[2 * layer])
            below.sum(1, keepdims=True, out=grads[2 * layer + 1])
            if layer:
                below, above = self._room(len(value), slopes=True)[layer - 1], below
                np.matmul(above, self.hidden[layer][0].swapaxes(-1, -2), out=below)

    def _derivative(self, layer: int) -> None:
        """Put the derivative of a layer's activation in the place of the activation, which is not needed any more."""
        out = self.activations[layer]
        if self.tanh[layer]:
            np.multiply(out, out, out=out)
            np.subtract(1, out, out=out)
        else:
            np.greater(out, 0, out=out, casting="unsafe")

    def _head(self, log_prob: Array, entropy: Array | None, log_std: Array | None) -> Array:
        """The gradient of logits or means; that of ``log_std`` is written."""
        if self.choice is not None:
            slope = self.p * -log_prob[:, None]
            slope[self.chosen] += log_prob
            if entropy is not None:
                slope -= self.p * (self.log_p + self.entropy[:, None]) * entropy[:, None]
            return slope
        assert log_std is not None
        np.einsum("i,ij->j", log_prob, self.scaled * self.scaled - 1, out=log_std)
        if entropy is not None:
            log_std += entropy.sum()
        found: Array = self.scaled * (log_prob[:, None] * np.exp(-self.log_std))
        return found


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def _log_density(scaled: Array, log_std: Array) -> Array:
    constant = np.float32(log_std.sum() + 0.5 * len(log_std) * math.log(2 * math.pi))
    found: Array = -0.5 * np.vecdot(scaled, scaled) - constant
    return found
