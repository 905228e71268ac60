"""Array specs: what one row of an observation, an action or a policy output looks like.

Nested Gymnasium spaces are flattened once, at start-up, into a flat mapping from a path such as ``obs`` or
``obs/camera/left`` to an :class:`ArraySpec`. Everything after that handles flat dictionaries of arrays, so no
hot path walks a tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from srl.core.errors import ConfigError

if TYPE_CHECKING:
    import gymnasium

Array = NDArray[Any]
Arrays = dict[str, Array]


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one row of one field."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        kind = np.dtype(self.dtype).kind
        if kind not in "biuf":
            raise ConfigError(f"dtype {self.dtype!r} cannot be shared between workers; use bool, int, uint or float")

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


Spec = Mapping[str, ArraySpec]

_LEAST_SIDE = 36
"""Pixels on each side that the convolutions need."""


def is_image(leaf: ArraySpec) -> bool:
    """Whether a field holds images: bytes in three dimensions, at least 36 by 36 pixels. Smaller ones are vectors."""
    return leaf.dtype == "|u1" and len(leaf.shape) == 3 and sorted(leaf.shape)[1] >= _LEAST_SIDE


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image's channels are its last dimension instead of its first: there are fewer of them than pixels."""
    return shape[-1] < shape[0]


@dataclass(frozen=True)
class Spaces:
    """What one agent sees and does, as Gymnasium spaces."""

    observation: gymnasium.Space[Any]
    action: gymnasium.Space[Any]
    masked: bool = False
    """Whether the environment says which of the discrete actions are allowed."""
    agents: int = field(default=1, compare=False)
    """How many agents of one copy of the environment act by the same policy."""

    def observation_spec(self) -> dict[str, ArraySpec]:
        """Fields of the observation."""
        return spec_of("obs", self.observation)

    def mask_spec(self) -> dict[str, ArraySpec]:
        """Fields of the action mask: for the field ``action/x`` of the action it is ``mask/x``, one flag a choice."""
        found = {}
        for path, leaf, _ in leaves("mask", self.action) if self.masked else []:
            choices = choices_of(leaf)
            if choices:
                found[path] = ArraySpec((sum(choices),), "|b1")
        return found

    def action_spec(self) -> dict[str, ArraySpec]:
        """Fields of the action."""
        return spec_of("action", self.action)


def spec_of(name: str, space: gymnasium.Space[Any]) -> dict[str, ArraySpec]:
    """Flatten ``space`` into ``{path: spec}`` with paths starting at ``name``."""
    found: dict[str, ArraySpec] = {}
    for path, leaf, _ in leaves(name, space):
        shape, dtype = leaf.shape, leaf.dtype
        if shape is None or dtype is None:
            raise ConfigError(
                f"{path}: a {type(leaf).__name__} space has no fixed shape and cannot be put in a block; wrap the "
                "environment in one without it (such as gymnasium.wrappers.FilterObservation)"
            )
        found[path] = ArraySpec(tuple(shape), np.dtype(dtype).str)
    return found


def leaves(name: str, space: gymnasium.Space[Any]) -> list[tuple[str, gymnasium.Space[Any], Callable[[Any], Any]]]:
    """Every leaf of ``space`` as (path, leaf space, function that picks the leaf's value out of a sample)."""
    from gymnasium import spaces

    children: list[tuple[Any, gymnasium.Space[Any]]]
    if isinstance(space, spaces.Dict):
        children = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        children = list(enumerate(space.spaces))
    else:
        return [(name, space, lambda value: value)]
    found: list[tuple[str, gymnasium.Space[Any], Callable[[Any], Any]]] = []
    for key, child in children:
        for path, leaf, pick in leaves(f"{name}/{key}", child):
            found.append((path, leaf, _picker(key, pick)))
    return found


def choices_of(leaf: gymnasium.Space[Any]) -> tuple[int, ...]:
    """Between how many values each number of a discrete space chooses; nothing for other spaces."""
    from gymnasium import spaces

    if isinstance(leaf, spaces.Discrete):
        return (int(leaf.n),)
    if isinstance(leaf, spaces.MultiDiscrete):
        return tuple(int(n) for n in leaf.nvec.reshape(-1))
    return ()


def _picker(key: Any, pick: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: pick(value[key])
