"""Atari's games as ALE's own vector shows them, to the bit, but sooner.

ALE steps all copies in C++, and a fifth of its time goes into making screens smaller. So it is asked for whole screens,
and these are made smaller, and stacked, in C: rows of pixels that look as they did a step ago are not worked out anew.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int64, c_void_p
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from srl.core import native
from srl.core.specs import Array

Vector = VectorEnv[Any, Any, Any]
_CRUMB = 1e-3
_WIDTH, _HEIGHT = 160, 210
_HEIGHTS = {"carnival": 214, "journey_escape": 230, "pooyan": 220}
_TALL = ("adventure", "air_raid", "keystone_kapers", "king_kong", "klax", "laser_gates", "mr_do", "pacman")
_HEIGHTS |= dict.fromkeys((*_TALL, "sir_lancelot", "space_war"), 250)
"""Lines of the screens of games that have more of them than the others."""


def vector(id: str, game: str, copies: int, kwargs: dict[str, Any]) -> Vector:
    """So many copies of the game, in the fastest way there is here."""
    size = [kwargs.get(name, 84) for name in ("img_height", "img_width")]
    screen = _HEIGHTS.get(game, _HEIGHT), _WIDTH
    pairs = list(zip(size, screen, strict=True))
    smaller = all(isinstance(own, int) and 0 < own < full for own, full in pairs)
    # Where both sides shrink by whole numbers OpenCV rounds in another way.
    if not smaller or not any(full % own for own, full in pairs) or not kwargs.get("grayscale", True):
        return gymnasium.make_vec(id, num_envs=copies, **kwargs)
    if native.library() is None:
        return gymnasium.make_vec(id, num_envs=copies, **kwargs)
    whole = {**kwargs, "img_height": screen[0], "img_width": screen[1], "stack_num": 1}
    return Screens(gymnasium.make_vec(id, num_envs=copies, **whole), size, kwargs.get("stack_num", 4))


class Screens(VectorWrapper):
    """Makes the screens ``[copies, 1, height, width]`` of a vector smaller and stacks them.

    Two arrays of stacks take turns: what a step returned is good until the step after the next.
    """

    def __init__(self, env: Vector, size: list[int], deep: int) -> None:
        super().__init__(env)
        shape: tuple[int, ...] = env.single_observation_space.shape or ()
        self.sides = [Side(full, own) for full, own in zip(shape[-2:], size, strict=True)]
        self.single_observation_space = Box(0, 255, (deep, *size), np.uint8)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)
        self.ended = np.ones(env.num_envs, bool)
        self.screens: Array = np.zeros((env.num_envs, *shape), np.uint8)
        self.stacks, self.spare = (np.zeros((env.num_envs, deep, *size), np.uint8) for _ in range(2))

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See :class:`gymnasium.vector.VectorEnv`."""
        found, info = self.env.reset(seed=seed, options=options)
        self.ended[:] = True
        stacked = self._stacked(found)
        self.ended[:] = False
        return stacked, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """See :class:`gymnasium.vector.VectorEnv`."""
        found, reward, terminated, truncated, info = self.env.step(actions)
        stacked = self._stacked(found)
        np.logical_or(terminated, truncated, out=self.ended)
        return stacked, reward, terminated, truncated, info

    def _stacked(self, found: Array) -> Array:
        library, screens = native.library(), np.ascontiguousarray(found)
        assert library is not None
        sizes = c_int64(self.num_envs), c_int64(self.stacks.shape[1])
        arrays = (screens, self.screens, self.ended, self.stacks, self.spare)
        places = (c_void_p(array.ctypes.data) for array in arrays)
        library.screens_stack(*(ctypes.byref(side) for side in self.sides), *sizes, *places)
        self.screens, self.stacks, self.spare = screens, self.spare, self.stacks
        return self.stacks


class Side(ctypes.Structure):
    """How a side of ``full`` pixels becomes one of ``own``: each is the sum of a few, weighed as OpenCV does it."""

    _fields_ = (("full", c_int64), ("own", c_int64), ("taps", c_int64), ("first", c_void_p), ("weight", c_void_p))

    def __init__(self, full: int, own: int) -> None:
        scale = 1 / (own / full)
        shares = [_shares(at * scale, at * scale + scale, full) for at in range(own)]
        taps = max(max(each) - min(each) + 1 for each in shares)
        self.firsts = np.array([min(*each, full - taps) for each in shares], np.int32)
        self.weights = np.zeros((taps, own), np.float32)
        for at, each in enumerate(shares):
            for pixel, weight in each.items():
                self.weights[pixel - self.firsts[at], at] = weight
        super().__init__(full, own, taps, self.firsts.ctypes.data, self.weights.ctypes.data)


def _shares(begin: float, end: float, full: int) -> dict[int, float]:
    """What each pixel counts from ``begin`` to ``end``; crumbs do not."""
    width = min(end - begin, full - begin)
    last = min(math.floor(end), full - 1)
    first = min(math.ceil(begin), last)
    found = dict.fromkeys(range(first, last), 1 / width)
    if first - begin > _CRUMB:
        found[first - 1] = (first - begin) / width
    if end - last > _CRUMB:
        found[last] = min(end - last, 1.0, width) / width
    return found
