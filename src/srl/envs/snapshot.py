"""Saving environments without pickle, so that a run can resume exactly where it was.

An environment is saved if all that changes in it is plain: numbers, strings, arrays, random generators, containers
of these, and MuJoCo's simulation state. Anything else (an emulator in C++, a socket) makes it unsaveable: then
:func:`snapshot` returns None and a resumed run begins new episodes instead.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from srl.core.worker import State

# Attributes that say how an environment was made, not where it is.
_FIXED = {"spec", "metadata", "render_mode", "observation_space", "action_space", "single_observation_space"}
_FIXED |= {"single_action_space", "reward_range", "model", "mujoco_renderer", "env_fns", "_cached_spec"}
_FIXED |= {"screen", "screens", "surf", "clock", "viewer", "np_random", "autoreset_mode"}
_NESTED = (gymnasium.Env, gymnasium.vector.VectorEnv)


def snapshot(env: Any) -> State | None:
    """Everything that changes in ``env``, or None if some of it is not plain data."""
    state = State()
    return state if _save(env, "env", state) else None


def restore(env: Any, state: State) -> None:
    """Put ``env`` back to where ``state`` was taken."""
    _load(env, "env", state)


def _members(env: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(env).items() if name not in _FIXED and not callable(value)]


def _save(value: Any, path: str, state: State) -> bool:
    if isinstance(value, np.random.Generator):
        state.values[path] = value.bit_generator.state
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        state.arrays[path] = value.copy()
    elif isinstance(value, np.generic):
        state.arrays[path] = np.asarray(value)
    elif value is None or isinstance(value, (bool, int, float, str)):
        state.values[path] = value
    elif isinstance(value, _NESTED):
        return all(_save(member, f"{path}.{name}", state) for name, member in _members(value))
    elif isinstance(value, (list, tuple)):
        state.values[f"{path}.length"] = len(value)
        return all(_save(item, f"{path}.{i}", state) for i, item in enumerate(value))
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        state.values[f"{path}.keys"] = list(value)
        return all(_save(item, f"{path}.{key}", state) for key, item in value.items())
    elif type(value).__name__ == "MjData":
        state.arrays[path] = _mujoco_state(value)
    elif not isinstance(value, gymnasium.Space):
        return False
    return True


def _load(value: Any, path: str, state: State) -> Any:
    """``value`` as it was, changed in place where it can be."""
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state.values[path]
    elif isinstance(value, _NESTED):
        for name, member in _members(value):
            new = _load(member, f"{path}.{name}", state)
            if new is not member:
                setattr(value, name, new)
    elif isinstance(value, (list, tuple)):
        items = [*value, *[None] * state.values[f"{path}.length"]][: state.values[f"{path}.length"]]
        return type(value)(_load(item, f"{path}.{i}", state) for i, item in enumerate(items))
    elif isinstance(value, dict):
        return {key: _load(value.get(key), f"{path}.{key}", state) for key in state.values[f"{path}.keys"]}
    elif type(value).__name__ == "MjData":
        _mujoco_state(value, state.arrays[path])
    elif path in state.arrays:
        array = state.arrays[path]
        return array[()] if isinstance(value, np.generic) else array.copy()
    elif path in state.values:
        return state.values[path]
    return value


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
