"""Between an environment's own values and flat rows: observations, action masks and actions of one agent.

Spaces are walked once, when a vector is made. From then on each leaf of an observation is written straight into its
row of the block, after a check that it has the shape and the kind of number its space promises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from srl.core.errors import ConfigError, EnvError
from srl.core.specs import Array, Arrays, Spaces, choices_of, leaves

INFO = "info:"
_INNER = "observation"
_ABSENT = (KeyError, IndexError, TypeError)


@dataclass(frozen=True)
class Leaf:
    """One array of an observation: where its rows go, and how it is picked out of what the environment returns."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pick: Callable[[Any], Any]


@dataclass(frozen=True)
class MaskLeaf:
    """The flags of one discrete part of an action; ``starts`` is where each number's choices begin."""

    path: str
    size: int
    starts: tuple[int, ...]
    pick: Callable[[Any], Any]


class Fields:
    """The fields of one agent.

    ``mask`` is where the action mask is found: a key of the observation, ``info:key``, or nowhere. ``unwrap`` lets an
    observation of which only the entry ``observation`` is left stand for that entry.
    """

    def __init__(
        self,
        where: str,
        observation: gymnasium.Space[Any],
        action: gymnasium.Space[Any],
        mask: str,
        *,
        agent: str = "",
        unwrap: bool = False,
    ) -> None:
        self.where, self._agent = where, f", agent {agent!r}" if agent else ""
        self._info_key = mask.removeprefix(INFO) if mask.startswith(INFO) else ""
        self._obs_key = "" if self._info_key else mask
        seen, look = _without(observation, self._obs_key, where, unwrap=unwrap)
        self.spaces = Spaces(seen, action, bool(mask))
        shapes = self.spaces.observation_spec()
        self.leaves = [
            Leaf(path, shapes[path].shape, np.dtype(shapes[path].dtype), _after(look, pick))
            for path, _, pick in leaves("obs", seen)
        ]
        self.masks = _mask_leaves(action) if mask else []
        if mask and not self.masks:
            raise ConfigError(f"{where}: mask={mask!r}, but the action space {action} has no discrete part to mask")
        self.float_paths = [leaf.path for leaf in self.leaves if leaf.dtype.kind == "f"]
        self._batch = _batcher("action", action)
        self.float_actions = [path for path, spec in self.spaces.action_spec().items() if "f" in spec.dtype]

    def at(self, copy: int) -> str:
        """Which copy of which environment (and agent) an error is about."""
        return f"{self.where}, copy {copy}{self._agent}"

    def reward(self, value: Any, copy: int) -> float:
        """A reward, if it is a number."""
        return number(value, "the reward", lambda: self.at(copy))

    def write(self, found: Any, out: Arrays, row: int, copy: int) -> None:
        """Write one observation into its row."""
        for leaf in self.leaves:
            try:
                value = leaf.pick(found)
            except _ABSENT as error:
                raise EnvError(f"{self.at(copy)}: the observation has no {leaf.path!r}, which its space has") from error
            # the common case costs two comparisons; all others are looked at closely
            if type(value) is not np.ndarray or value.shape != leaf.shape or value.dtype != leaf.dtype:
                value = fit(value, leaf.shape, leaf.dtype, f"{self.at(copy)}: {leaf.path}")
            out[leaf.path][row] = value

    def write_mask(self, found: Any, info: Any, out: Arrays, row: int, copy: int) -> None:
        """Write which actions are allowed in one row."""
        value = self._mask_of(found, info, copy) if self.masks else None
        for leaf in self.masks:
            try:
                flags = _flags(leaf.pick(value))
            except _ABSENT as error:
                raise EnvError(f"{self.at(copy)}: the action mask has no part {leaf.path!r}") from error
            if flags.shape != (leaf.size,) or flags.dtype.kind not in "biuf":
                raise EnvError(
                    f"{self.at(copy)}: {leaf.path} must be {leaf.size} flags, one a choice, "
                    f"got {flags.dtype} of shape {flags.shape}"
                )
            out[leaf.path][row] = flags
            if not np.logical_or.reduceat(out[leaf.path][row], leaf.starts).all():
                raise EnvError(f"{self.at(copy)}: {leaf.path} allows no action at all, though the agent must act")

    def write_last_mask(self, found: Any, info: Any, out: Arrays, row: int, copy: int) -> None:
        """Write which actions were allowed at an episode's end: nobody acts there, but values are taken from it.

        An environment may leave that out, or allow nothing; then all is allowed.
        """
        if self.masks:
            try:
                self.write_mask(found, info, out, row, copy)
            except EnvError:
                self.allow_all(out, row)

    def allow_all(self, out: Arrays, rows: Any) -> None:
        """Allow everything in rows that do not act, so that no policy has to choose between nothing."""
        for leaf in self.masks:
            out[leaf.path][rows] = True

    def clear(self, out: Arrays, rows: Any) -> None:
        """Zero rows of which nothing is seen, so that what an older block left there is not taken for something."""
        for leaf in self.leaves:
            out[leaf.path][rows] = 0

    def write_batch(self, found: Any, out: Arrays) -> None:
        """Write the observations of all copies at once."""
        for leaf in self.leaves:
            target, value = out[leaf.path], leaf.pick(found)
            if type(value) is not np.ndarray or value.shape != target.shape or value.dtype != target.dtype:
                value = fit(value, target.shape, target.dtype, f"{self.where}: {leaf.path} of all copies")
            if value is not target:  # some write there by themselves
                target[...] = value

    def write_masks(self, found: Any, info: Any, out: Arrays, acts: Array) -> None:
        """Write the masks of all copies at once."""
        if self._info_key and self.masks:
            missing = acts & ~present(info, self._info_key, len(acts))
            if missing.any():
                raise self._no_mask(int(np.flatnonzero(missing)[0]))
        given = self.masks and (not self._info_key or self._info_key in info)
        value = self._mask_of(found, info, 0) if given else None
        for leaf in self.masks:
            target = out[leaf.path]
            target[...] = False
            if value is not None:
                fits = f"{self.where}: {leaf.path} of all copies"
                target[...] = fit(np.asarray(leaf.pick(value)) != 0, target.shape, target.dtype, fits)
            stuck = ~np.logical_or.reduceat(target, leaf.starts, axis=1).all(axis=1)
            target[stuck & ~acts] = True  # see write_last_mask
            if (stuck & acts).any():
                copy = int(np.flatnonzero(stuck & acts)[0])
                raise EnvError(f"{self.at(copy)}: {leaf.path} allows no action at all, though the agent must act")

    def batch(self, fields: Arrays) -> Any:
        """The actions of all rows, in the form a vector environment's ``step`` takes."""
        return self._batch(fields)

    def rows(self, fields: Arrays) -> Callable[[int], Any]:
        """A function from a row to its action, in the form an environment's ``step`` takes."""
        return _by_row(self.batch(fields), self.spaces.action)

    def _mask_of(self, found: Any, info: Any, copy: int) -> Any:
        try:
            return info[self._info_key] if self._info_key else found[self._obs_key]
        except _ABSENT as error:
            raise self._no_mask(copy) from error

    def _no_mask(self, copy: int) -> EnvError:
        source = f"info has no {self._info_key!r}" if self._info_key else f"the observation has no {self._obs_key!r}"
        return EnvError(f"{self.at(copy)}: {source}, where the action mask should be")


def fit(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> Array:
    """``value`` as an array, if it has this shape and its numbers are of a kind that may become ``dtype``."""
    got = np.asarray(value)
    if got.shape != shape or not np.can_cast(got.dtype, dtype, "same_kind"):
        raise EnvError(
            f"{what} must be {dtype} of shape {shape}, as its space says, got {got.dtype} of shape {got.shape}"
        )
    return got


def number(value: Any, what: str, at: Callable[[], str]) -> float:
    """``value`` as a float, if it is a single number."""
    if isinstance(value, (int, float, np.number, np.bool_)) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return float(value)
    raise EnvError(f"{at()}: {what} must be a number, got {type(value).__name__} ({value!r:.60})")


def parts(value: Any, names: str, what: Callable[[], str]) -> tuple[Any, ...]:
    """What ``reset`` or ``step`` returned, if it has as many parts as it should."""
    count = names.count(",") + 1
    if isinstance(value, tuple) and len(value) == count:
        return value
    got = f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__
    raise EnvError(f"{what()} must return ({names}), got {got}")


def present(info: Any, key: str, copies: int) -> Array:
    """For which copies a vector environment's ``info`` has ``key`` (Gymnasium marks them in ``_key``)."""
    if key not in info:
        return np.zeros(copies, bool)
    return np.asarray(info.get(f"_{key}", np.ones(copies, bool)))


def _without(
    space: gymnasium.Space[Any], key: str, where: str, *, unwrap: bool
) -> tuple[gymnasium.Space[Any], Callable[[Any], Any] | None]:
    """The space that policies see when the mask at ``key`` is taken out of it, and how to get there from a sample."""
    if not key:
        return space, None
    if not isinstance(space, gymnasium.spaces.Dict) or key not in space.spaces:
        has = sorted(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else f"a {type(space).__name__} space"
        raise ConfigError(f"{where}: mask={key!r} names no entry of the observation, which has {has}")
    rest = {name: child for name, child in space.spaces.items() if name != key}
    if unwrap and list(rest) == [_INNER]:
        return rest[_INNER], lambda found: found[_INNER]
    if not rest:
        raise ConfigError(f"{where}: the observation has nothing but the mask {key!r}")
    return gymnasium.spaces.Dict(rest), None


def _after(look: Callable[[Any], Any] | None, pick: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return pick if look is None else lambda found: pick(look(found))


def _mask_leaves(action: gymnasium.Space[Any]) -> list[MaskLeaf]:
    found = []
    for path, leaf, pick in leaves("mask", action):
        choices = choices_of(leaf)
        if choices:
            starts = tuple(int(n) for n in np.cumsum((0, *choices[:-1])))
            found.append(MaskLeaf(path, sum(choices), starts, pick))
    return found


def _flags(value: Any) -> Array:
    """One flat array of flags; Gymnasium writes the mask of a MultiDiscrete space as a tuple of arrays."""
    if isinstance(value, (tuple, list)):
        return np.concatenate([np.ravel(part) for part in value])
    return np.asarray(value)


def _batcher(name: str, space: gymnasium.Space[Any]) -> Callable[[Arrays], Any]:
    """A function from the fields of an action to what a vector environment takes."""
    if isinstance(space, gymnasium.spaces.Dict):
        named = {key: _batcher(f"{name}/{key}", child) for key, child in space.spaces.items()}
        return lambda fields: {key: make(fields) for key, make in named.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        placed = [_batcher(f"{name}/{i}", child) for i, child in enumerate(space.spaces)]
        return lambda fields: tuple(make(fields) for make in placed)
    if isinstance(space, gymnasium.spaces.Box):
        low, high = space.low, space.high
        return lambda fields: np.minimum(np.maximum(fields[name], low), high)
    return lambda fields: fields[name].copy()  # who keeps or changes its action must not change the block


def _by_row(values: Any, space: gymnasium.Space[Any]) -> Callable[[int], Any]:
    if isinstance(space, gymnasium.spaces.Dict):
        named = {key: _by_row(values[key], child) for key, child in space.spaces.items()}
        return lambda row: {key: take(row) for key, take in named.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        placed = [_by_row(values[i], child) for i, child in enumerate(space.spaces)]
        return lambda row: tuple(take(row) for take in placed)
    return values.__getitem__  # type: ignore[no-any-return]
