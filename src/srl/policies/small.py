"""Small actor-critics in C, on the very memory of their torch weights.

For two layers of 64 units torch spends most of a gradient step on getting to its kernels (ADR 13). ``small.c`` does a
whole pass of PPO in one call, and acting in another. It serves networks of vector observations with one choice or one
normal distribution, without masks, on a CPU; all others stay with autograd, and so does everything where there was no C
compiler at installation. Both are compared in ``tests/test_small.py``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from srl.algorithms.passes import advantage_norms, divided
from srl.core import native
from srl.core.specs import Array, Arrays
from srl.policies.distributions import Categorical, Gaussian
from srl.policies.networks import Tanh, Twins

if TYPE_CHECKING:
    from srl.algorithms.adam import Adam
    from srl.algorithms.base import Interrupted, Peers
    from srl.algorithms.ppo import PPO
    from srl.policies.actor_critic import ActorCritic

_DEEPEST = 8
_LARGEST = 2**18
"""More products per row than this are worth torch's better kernels."""
_AT_ONCE = 32
"""Gradient steps between two looks at whether the run is ending: some milliseconds."""

Integers, Pointers = c_int64 * _DEEPEST, c_void_p * _DEEPEST
Meeting = ctypes.CFUNCTYPE(c_int)


class _Network(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("depth", "inputs", "actions", "gaussian", "start")),
        *((name, Integers) for name in ("width", "tanh")),
        *((name, Pointers) for name in ("weight", "bias")),
        *((name, c_void_p) for name in ("actor", "actor_bias", "critic", "critic_bias", "log_std", "mean", "std")),
        ("limit", c_float),
    )


class _Learning(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("flat", "grad", "moments", "squares", "steps")),
        ("normalize", c_int64),
        *((name, c_float) for name in ("lr", "eps", "clip", "value_clip", "value_coef", "bonus", "longest")),
    )


class _Samples(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("obs", "action", "log_prob", "obs_at", "action_at", "at")),
        *((name, c_void_p) for name in ("advantage", "returns", "old", "rows")),
        *((name, c_int64) for name in ("count", "minibatch", "minibatches")),
        ("norms", c_void_p),
        ("meet", Meeting),
    )


@functools.cache
def library() -> Any:
    """The compiled code; None if there is none."""
    found = native.library()
    if found is not None:
        results = [c_void_p] * 3
        found.small_act.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_float, c_float, *results]
        found.small_ppo.argtypes = [c_void_p] * 5
        found.small_ppo.restype = c_int
        found.small_team.argtypes, found.small_team.restype = [c_void_p, c_int64, c_int64, c_int64], c_void_p
        found.eye_pack.argtypes, found.eye_pack.restype = [*[c_void_p] * 3, c_int64, c_float, *[c_void_p] * 2], None
        found.eye_room.argtypes, found.eye_room.restype = [c_void_p, c_int64], c_int64
        found.eye_open.argtypes, found.eye_open.restype = [c_void_p, c_int64, c_void_p], None
        found.eye_forget.argtypes, found.eye_forget.restype = [c_void_p], None
        found.eye_see.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
        found.small_team_close.argtypes, found.small_team_close.restype = [c_void_p], None
    return found


def small(policy: ActorCritic) -> Small | None:
    """The arithmetic of ``policy``, if it is one that this can do."""
    trunk = policy.trunk
    if not trunk.twins or trunk.reduced or not Heads.fit(policy):
        return None
    layers = list(trunk.encoder.mlp.layers)
    if not all(isinstance(layer, (Twins, Tanh, torch.nn.ReLU)) for layer in layers) or len(layers) > 2 * _DEEPEST:
        return None
    products = sum(layer.weight.numel() for layer in layers if isinstance(layer, Twins))
    return Small(policy) if products <= _LARGEST else None


class Heads:
    """The heads of an actor-critic: actions and values from features."""

    def __init__(self, policy: ActorCritic, inputs: int, **hidden: Any) -> None:
        """``hidden`` are the fields of layers before the heads."""
        self.name = policy.action.names[0]
        self.return_norm = policy.return_norm
        head: Any = policy.action.heads[0]
        self.choice = isinstance(head, Categorical)
        self.shape: tuple[int, ...] = head.shape
        linear = head.logits if self.choice else head.mean
        self.actions: int = linear.out_features
        start = getattr(head, "start", None)
        self.network = _Network(
            inputs=inputs,
            actions=self.actions,
            gaussian=not self.choice,
            start=0 if start is None else int(start),
            actor=linear.weight.data_ptr(),
            actor_bias=linear.bias.data_ptr(),
            critic=policy.value.weight.data_ptr(),
            critic_bias=policy.value.bias.data_ptr(),
            log_std=None if self.choice else head.log_std.data_ptr(),
            **hidden,
        )
        self._at = ctypes.addressof(self.network)
        self._return_version = -1
        self._scale, self._shift = 1.0, 0.0
        self._library = library()
        self._act = self._library.small_act
        self._rooms: dict[int, tuple[torch.Tensor, Arrays, tuple[int, ...]]] = {}

    @staticmethod
    def fit(policy: ActorCritic) -> bool:
        """Whether these are heads of a kind that this can do, here."""
        heads = list(policy.action.heads)
        choice = isinstance(heads[0], Categorical) and len(heads[0].counts) == 1
        here = library() is not None and policy.value.weight.device.type == "cpu"
        return here and len(heads) == 1 and (choice or isinstance(heads[0], Gaussian))

    def choose(self, features: int, rows: int, generator: torch.Generator | None) -> Arrays:
        """Actions (the likeliest ones without a generator), their log-probabilities, and values in reward units.

        ``features`` is where in memory they are. The arrays are overwritten by the next call with as many rows.
        """
        norm = self.return_norm
        if norm is not None and norm.var._version != self._return_version:
            self._return_version = norm.var._version
            self._scale, self._shift = float(norm.std()), float(norm.mean)
        if rows not in self._rooms:
            if len(self._rooms) > 16:
                self._rooms.clear()
            self._rooms[rows] = self._room(rows)
        noise, found, places = self._rooms[rows]
        luck = None
        if generator is not None:
            luck = (noise.exponential_ if self.choice else noise.normal_)(generator=generator).data_ptr()
        if self._act(self._at, features, rows, luck, self._scale, self._shift, *places):
            raise MemoryError
        return found

    def _room(self, rows: int) -> tuple[torch.Tensor, Arrays, tuple[int, ...]]:
        """Noise and what is found for so many rows, and where in memory the latter is; kept from call to call."""
        actions = np.empty((rows, *self.shape), np.int64 if self.choice else np.float32)
        log_prob, value = np.empty(rows, np.float32), np.empty(rows, np.float32)
        places = actions.ctypes.data, log_prob.ctypes.data, value.ctypes.data
        return torch.empty(rows, self.actions), {self.name: actions, "log_prob": log_prob, "value": value}, places


class Small(Heads):
    """See above."""

    def __init__(self, policy: ActorCritic) -> None:
        self.encoder = policy.trunk.encoder
        self.plain = self.encoder.vectors[0] if len(self.encoder.vectors) == 1 and not self.encoder.discrete else ""
        layers = list(self.encoder.mlp.layers)
        hidden = [layer for layer in layers if isinstance(layer, Twins)]
        super().__init__(
            policy,
            self.encoder.width,
            depth=len(hidden),
            width=Integers(*(layer.weight.shape[2] for layer in hidden)),
            tanh=Integers(*(isinstance(layer, Tanh) for layer in layers if not isinstance(layer, Twins))),
            weight=Pointers(*(layer.weight.data_ptr() for layer in hidden)),
            bias=Pointers(*(layer.bias.data_ptr() for layer in hidden)),
        )
        self._norm_version = -1
        self._team_for, self._team = (0, 0), 0
        self._dismiss: Callable[[], Any] = lambda: None

    def act(self, obs: Arrays, generator: torch.Generator | None) -> Arrays:
        """See :meth:`Heads.choose`."""
        self._follow()
        x = self._flat(obs)
        return self.choose(x.ctypes.data, len(x), generator)

    def learner(
        self,
        optimizer: Adam,
        config: PPO,
        bonus: float,
        fields: Arrays,
        at: Array,
        goals: Array,
        index: Array,
        peers: Peers | None = None,
    ) -> Learner:
        """Passes over a batch: ``fields`` of the slab, ``at`` the place of each entry there, ``goals`` of each.

        ``bonus`` is the weight of the entropy; ``index`` are the entries that can be trained on; ``peers`` train on
        other parts of the same minibatches.
        """
        self._follow()
        return Learner(self, optimizer, config, bonus, fields, at, goals, index, peers)

    def team(self, size: int, minibatch: int) -> int:
        """Where in memory those are who train ``size`` weights on minibatches of ``minibatch`` rows."""
        if self._team_for != (size, minibatch):
            self._dismiss()
            helpers = len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else 0
            team = self._library.small_team(self._at, size, minibatch, helpers)
            if not team:
                raise MemoryError
            self._team_for, self._dismiss = (
                (size, minibatch),
                weakref.finalize(self, self._library.small_team_close, team),
            )
            self._team = team
        return self._team

    def _follow(self) -> None:
        """Take over what normalisers have learned; torch counts how often a tensor was written."""
        norm = self.encoder.norm
        if norm is not None and norm.var._version != self._norm_version:
            self._norm_version = norm.var._version
            self._mean, self._std = norm.mean.float().numpy().copy(), norm.std().numpy().copy()
            self.network.mean, self.network.std = self._mean.ctypes.data, self._std.ctypes.data
            self.network.limit = norm.limit

    def _flat(self, obs: Arrays) -> Array:
        """All observed fields side by side, as 32-bit numbers one after the other."""
        if self.plain:
            x = obs[self.plain]
            return np.ascontiguousarray(x.reshape(len(x), -1), np.float32)
        found: Array = self.encoder.flatten(
            {name: torch.from_numpy(obs[name]) for name in self.encoder.vectors}
        ).numpy()
        return np.ascontiguousarray(found)


class Learner:
    """Gradient steps on the samples of one batch, which stay where they are unless they must be converted."""

    def __init__(
        self,
        small: Small,
        optimizer: Adam,
        config: PPO,
        bonus: float,
        fields: Arrays,
        at: Array,
        goals: Array,
        index: Array,
        peers: Peers | None,
    ) -> None:
        """See :meth:`Small.learner`."""
        self.small, self.index, self._library = small, index, small._library
        self.config, self.gradient, self.peers = config, optimizer.grad, peers
        self._team = small.team(optimizer.flat.numel(), config.minibatch)
        group = optimizer.param_groups[0]
        self.learning = _Learning(
            *(each.data_ptr() for each in (optimizer.flat, optimizer.grad, *optimizer.moments, optimizer.steps)),
            normalize=config.normalize_advantage,
            lr=group["lr"],
            eps=group["eps"],
            clip=config.clip,
            value_clip=config.value_clip,
            value_coef=config.value_coef,
            bonus=bonus,
            longest=config.max_grad_norm,
        )
        names = small.encoder.vectors
        in_place = small.plain and fields[small.plain].dtype == np.float32
        obs = fields[small.plain] if in_place else small._flat({name: fields[name][at] for name in names})
        action = fields[small.name]
        kind = np.int64 if small.choice else np.float32
        taken = action if action.dtype == kind else action[at].astype(kind)
        goals, at = np.ascontiguousarray(goals, np.float32), np.ascontiguousarray(at, np.int64)
        self.advantage = goals[0]
        self._kept = (obs, taken, goals, at, fields)  # what the pointers point to
        self.samples = _Samples(
            obs=obs.ctypes.data,
            action=taken.ctypes.data,
            log_prob=fields["log_prob"].ctypes.data,
            obs_at=at.ctypes.data if in_place else None,
            action_at=at.ctypes.data if taken is action else None,
            at=at.ctypes.data,
            advantage=goals[0].ctypes.data,
            returns=goals[1].ctypes.data,
            old=goals[2].ctypes.data,
            minibatch=config.minibatch,
            meet=Meeting() if peers is None else Meeting(self._meet),
        )
        self._error: BaseException | None = None

    def one_pass(self, order: Array, sums: Array, interrupted: Interrupted) -> bool:
        """Gradient steps on all entries in this order; adds up METRICS over the entries. False: it was interrupted."""
        rows, size = self.index[order], self.samples.minibatch
        count, norms = -(-len(rows) // size), None
        if self.peers is not None:
            parts = divided(rows, size, self.peers)
            count, norms = (
                len(parts),
                advantage_norms([self.advantage[part] for part in parts], self.config, self.peers),
            )
        structures = (self.small.network, self.learning, self.samples)
        for start in range(0, count, _AT_ONCE):
            if interrupted():
                return False
            part = rows[start * size : (start + _AT_ONCE) * size]
            self.samples.rows, self.samples.count = part.ctypes.data, len(part)
            self.samples.minibatches = min(_AT_ONCE, count - start)
            self.samples.norms = None if norms is None else norms[start:].ctypes.data
            if self._library.small_ppo(self._team, *map(ctypes.addressof, structures), sums.ctypes.data):
                assert self._error is not None
                raise self._error
        return True

    def _meet(self) -> int:
        """Add up gradients over all trainers; called from C, where nothing can be raised."""
        assert self.peers is not None
        try:
            self.peers.sum(self.gradient)
        except BaseException as error:
            self._error = error
            return 1
        return 0
