"""Experiments as JSON: what a run directory keeps, and what ``srl resume`` starts from."""

from __future__ import annotations

import importlib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgspec

from srl import envs
from srl.algorithms import ALGORITHMS
from srl.algorithms.base import Algorithm
from srl.core.errors import ConfigError, UnknownName
from srl.experiment import Actors, Evaluator, Experiment, Policies, Trainer
from srl.workers.opponents import Opponent

CONFIG = "config.json"
_GROUPS: dict[str, Any] = {"actors": Actors, "policies": Policies, "trainer": Trainer, "evaluator": Evaluator}


def to_json(x: Experiment) -> dict[str, Any]:
    """``x`` as plain JSON."""
    groups = {name: asdict(getattr(x, name)) for name in _GROUPS}
    maps = ("env", "algorithm", "agents", "samples", "opponents")
    simple = {f.name: getattr(x, f.name) for f in fields(x) if f.name not in (*groups, *maps)}
    return {
        "env": x.env.describe(),
        "algorithm": {policy: _algorithm_json(each) for policy, each in x.algorithms.items()},
        "agents": dict(x.agents),
        "samples": {policy: list(trainers) for policy, trainers in x.samples.items()},
        "opponents": {policy: asdict(each) for policy, each in x.opponents.items()},
        **groups,
        **simple,
    }


def from_json(found: dict[str, Any]) -> Experiment:
    """The experiment that :func:`to_json` described."""
    known = {f.name for f in fields(Experiment)}
    for key in found:
        if key not in known:
            raise UnknownName("key in the configuration", key, known)
    given = dict(found)
    given["env"] = envs.from_json(given["env"])
    given["algorithm"] = {policy: _algorithm(each) for policy, each in given["algorithm"].items()}
    for name, kind in _GROUPS.items():
        if name in given:
            given[name] = _typed(given[name], kind, name)
    opponents = given.get("opponents", {}).items()
    given["opponents"] = {policy: _typed(each, Opponent, "opponents") for policy, each in opponents}
    return Experiment(**given)


def load(run_dir: Path) -> Experiment:
    """The experiment of a run directory."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG}")
    try:
        return from_json(msgspec.json.decode(path.read_bytes()))
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def save(x: Experiment, run_dir: Path) -> None:
    """Write the experiment into its run directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    partial = run_dir / f".{CONFIG}"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(to_json(x))))
    partial.replace(run_dir / CONFIG)


def _algorithm_json(algorithm: Algorithm) -> dict[str, Any]:
    kind = type(algorithm)
    name = algorithm.name if ALGORITHMS.get(algorithm.name) is kind else f"{kind.__module__}:{kind.__qualname__}"
    return {"name": name, **asdict(algorithm)}


def _algorithm(found: dict[str, Any]) -> Algorithm:
    given = dict(found)
    name = given.pop("name")
    if name in ALGORITHMS:
        return _typed(given, ALGORITHMS[name], name)  # type: ignore[no-any-return]
    module, _, kind = name.partition(":")
    if not kind:
        raise UnknownName("algorithm", name, ALGORITHMS)
    try:
        return _typed(given, getattr(importlib.import_module(module), kind), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the algorithm {name!r} of this run cannot be imported: {error}") from error


def _typed(given: dict[str, Any], kind: Any, where: str) -> Any:
    known = {f.name for f in fields(kind)}
    for key in given:
        if key not in known:
            raise UnknownName(f"key in {where}", key, known)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
