"""Saving environments without pickle, so that a run can resume exactly where it was.

An environment is saved if all that changes in it is plain: numbers, strings, arrays, random generators, containers
of these, MuJoCo's simulation state, and plain Python objects of the environment's own packages (a world, its agents),
which may refer to each other. Anything else (an emulator in C++, a socket) makes it unsaveable: then :func:`snapshot`
returns None and a resumed run begins new episodes instead.

Every value has a path. Beside it, a note such as ``path#list`` says what the value was; ``path#same`` names the path
of another value that was the very same object. Objects are restored into those of the environment given where these
exist; new ones are made without calling their constructor, and only of classes from the environment's own packages.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any

import gymnasium
import numpy as np

from srl.core.errors import CheckpointError
from srl.core.worker import State

# Attributes that say how an environment was made, not where it is.
_FIXED = {"spec", "metadata", "render_mode", "observation_space", "action_space", "single_observation_space"}
_FIXED |= {"single_action_space", "reward_range", "model", "mujoco_renderer", "env_fns", "_cached_spec"}
_FIXED |= {"screen", "screens", "surf", "clock", "viewer", "autoreset_mode"}

_DRAWING = {"Surface", "Font", "Clock"}  # of pygame, whatever the attribute is called
_PLAIN = (bool, int, float, str, type(None))
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque}


class _Plain:
    """As large as any object that has nothing but a dictionary of attributes."""


class _Unsaveable(Exception):
    """Something in an environment is not plain data."""


def snapshot(env: Any) -> State | None:
    """Everything that changes in ``env``, or None if some of it is not plain data."""
    saving = _Saving(env)
    try:
        saving.save(env, "env")
    except _Unsaveable:
        return None
    return saving.state


def restore(env: Any, state: State) -> None:
    """Put ``env`` back to where ``state`` was taken."""
    found = _Loading(env, state).load(env, "env")
    pairs = zip(found, env, strict=True) if isinstance(env, list) else [(found, env)]
    if any(new is not old for new, old in pairs):
        raise CheckpointError(f"the saved environment is another one than {_class_name(env)}")


class _Saving:
    """Walks an environment and writes down all that changes."""

    def __init__(self, env: Any) -> None:
        self.state = State()
        self.packages = _packages(env)
        self.paths: dict[int, str] = {}

    def save(self, value: Any, path: str) -> None:
        """Write down ``value``."""
        if type(value) in _PLAIN:
            self.state.values[path] = value
        elif isinstance(value, np.generic) and value.dtype.kind in "biuf":
            self.state.arrays[f"{path}#number"] = np.asarray(value)
        elif _still(value):
            self.state.values[f"{path}#still"] = True
        elif id(value) in self.paths:
            self.state.values[f"{path}#same"] = self.paths[id(value)]
        else:
            self.paths[id(value)] = path
            self._save_mutable(value, path)

    def _save_mutable(self, value: Any, path: str) -> None:
        values, arrays = self.state.values, self.state.arrays
        if isinstance(value, np.random.Generator):
            values[f"{path}#generator"] = value.bit_generator.state
        elif type(value) is np.ndarray and value.dtype.kind in "biuf":
            arrays[path] = value.copy()
        elif type(value).__name__ == "MjData":
            arrays[f"{path}#mujoco"] = _mujoco_state(value)
        elif type(value) in _SEQUENCES.values():
            values[f"{path}#{type(value).__name__}"] = [len(value), getattr(value, "maxlen", None)]
            self._save_all(((str(i), item) for i, item in enumerate(value)), path)
        elif type(value) is dict and all(type(key) in (str, int) for key in value):
            values[f"{path}#dict"] = list(value)
            self._save_all(((str(i), item) for i, item in enumerate(value.values())), path)
        elif type(value) is set and all(type(key) in (str, int) for key in value):
            values[f"{path}#set"] = list(value)
        elif isinstance(value, Enum):
            values[f"{path}#enum"] = [_class_name(value), value.name]
        elif _is_own(value, self.packages) and not _is_constant(value):
            values[f"{path}#object"] = [_class_name(value), [name for name, _ in _members(value, self.packages)]]
            self._save_all(_members(value, self.packages), path)
        else:
            raise _Unsaveable(path)

    def _save_all(self, items: Iterable[tuple[str, Any]], path: str) -> None:
        for name, item in items:
            self.save(item, f"{path}.{name}")


class _Loading:
    """Walks what was written down, and an environment beside it."""

    def __init__(self, env: Any, state: State) -> None:
        self.state = state
        self.packages = _packages(env)
        self.loaded: dict[str, Any] = {}
        self.taken: set[int] = set()

    def load(self, live: Any, path: str) -> Any:
        """The value at ``path`` as it was; ``live`` is what the environment has there now."""
        values, arrays = self.state.values, self.state.arrays
        if f"{path}#same" in values:
            return self.loaded[values[f"{path}#same"]]
        if path in values:
            return values[path]
        if f"{path}#number" in arrays:
            return arrays[f"{path}#number"][()]
        if f"{path}#still" in values:
            return live
        if f"{path}#object" in values:
            return self._object(live, path)
        self.loaded[path] = found = self._mutable(live, path)
        return found

    def _mutable(self, live: Any, path: str) -> Any:
        values, arrays = self.state.values, self.state.arrays
        if path in arrays:
            return arrays[path].copy()
        if f"{path}#generator" in values:
            return self._generator(live, values[f"{path}#generator"])
        if f"{path}#mujoco" in arrays:
            return _mujoco_state(live, arrays[f"{path}#mujoco"])
        if f"{path}#dict" in values:
            return self._dict(live, path)
        if f"{path}#enum" in values:
            return self._class(values[f"{path}#enum"][0], path)[values[f"{path}#enum"][1]]
        if f"{path}#set" in values:
            return set(values[f"{path}#set"])
        for name, kind in _SEQUENCES.items():
            if f"{path}#{name}" in values:
                return self._sequence(live, path, name, kind)
        raise CheckpointError(f"the saved environment has nothing at {path!r}; it was saved by another version")

    def _dict(self, live: Any, path: str) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        self.loaded[path] = found  # before its items, which may refer to it
        known = live if isinstance(live, dict) else {}
        for i, key in enumerate(self.state.values[f"{path}#dict"]):
            found[key] = self.load(known.get(key), f"{path}.{i}")
        return found

    def _sequence(self, live: Any, path: str, name: str, kind: Any) -> Any:
        length, limit = self.state.values[f"{path}#{name}"]
        known = [*live] if isinstance(live, kind) else []
        known += [None] * (length - len(known))
        if kind is tuple:
            return tuple(self.load(known[i], f"{path}.{i}") for i in range(length))
        found: Any = deque(maxlen=limit) if kind is deque else []
        self.loaded[path] = found
        for i in range(length):
            found.append(self.load(known[i], f"{path}.{i}"))
        return found

    def _object(self, live: Any, path: str) -> Any:
        name, names = self.state.values[f"{path}#object"]
        found = live if _class_name(live) == name and self._free(live) else object.__new__(self._class(name, path))
        self.taken.add(id(found))
        self.loaded[path] = found
        attributes = vars(found)
        for extra in {member for member, _ in _members(found, self.packages)} - set(names):
            del attributes[extra]
        for member in names:
            attributes[member] = self.load(attributes.get(member), f"{path}.{member}")
        return found

    def _generator(self, live: Any, state: dict[str, Any]) -> np.random.Generator:
        kind = getattr(np.random, state["bit_generator"], None)
        if not isinstance(kind, type) or not issubclass(kind, np.random.BitGenerator):
            raise CheckpointError(f"the saved environment has an unknown random generator {state['bit_generator']!r}")
        same = isinstance(live, np.random.Generator) and type(live.bit_generator) is kind and self._free(live)
        found = live if same else np.random.Generator(kind())
        self.taken.add(id(found))
        found.bit_generator.state = state
        return found

    def _free(self, live: Any) -> bool:
        """Whether an object may be overwritten: two paths of the saved environment must not end in one object."""
        return id(live) not in self.taken and not _is_constant(live)

    def _class(self, name: str, path: str) -> Any:
        """A class by its name, if it is one of the environment's own."""
        module, _, qualname = name.partition(":")
        found: Any = sys.modules.get(module)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type) or module.partition(".")[0] not in self.packages:
            raise CheckpointError(f"the saved environment has a {name} at {path!r}, which this one does not know")
        return found


def _packages(env: Any) -> set[str]:
    """The packages whose objects are the environment's own."""
    envs = env if isinstance(env, list) else [env]
    classes = [type(each) for env in envs for each in (env, getattr(env, "unwrapped", env))]
    return {"gymnasium", "pettingzoo", *(cls.__module__.partition(".")[0] for cls in classes)}


def _members(value: Any, packages: set[str]) -> list[tuple[str, Any]]:
    """The attributes of an object that can change: not its functions, nor what its name says is fixed."""
    found = [(name, member) for name, member in vars(value).items() if name not in _FIXED and not _still(member)]
    return [(name, member) for name, member in found if not callable(member) or _is_own(member, packages)]


def _still(value: Any) -> bool:
    """Whether a value belongs to how an environment was made, wherever it is kept: spaces, and what it draws with."""
    drawn = type(value).__module__.partition(".")[0] == "pygame" and type(value).__name__ in _DRAWING
    return drawn or isinstance(value, gymnasium.Space)


def _is_own(value: Any, packages: set[str]) -> bool:
    """Whether a value is an object of the environment's own code with nothing in it but its attributes."""
    own = any(base.__module__.partition(".")[0] in packages for base in type(value).__mro__)
    return own and type(value).__basicsize__ == _Plain.__basicsize__ and type(value).__itemsize__ == 0


def _is_constant(value: Any) -> bool:
    """Whether an object is a global of the module of its class: then others have it too, and it must stay as it is."""
    module = sys.modules.get(type(value).__module__)
    return module is not None and any(member is value for member in vars(module).values())


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _mujoco_state(data: Any, new: Any = None) -> Any:
    """Read, or with ``new`` write, the whole integration state of a MuJoCo simulation."""
    import mujoco

    everything = mujoco.mjtState.mjSTATE_INTEGRATION
    if new is None:
        found = np.empty(mujoco.mj_stateSize(data.model, everything))
        mujoco.mj_getState(data.model, data, found, everything)
        return found
    mujoco.mj_setState(data.model, data, new, everything)
    mujoco.mj_forward(data.model, data)  # what is derived from the state; it also moves the solver's warm start,
    mujoco.mj_setState(data.model, data, new, everything)  # so that is put back
    return data
