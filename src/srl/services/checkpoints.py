"""Checkpoints: safetensors for arrays, JSON for the rest, a sha256 of everything, and nothing half-written.

A checkpoint is a folder ``v<version>`` that appears by one rename when it is complete::

    checkpoints/default/
        tags.json             {"latest": 812, "best": 640}
        v000000812/
            arrays.safetensors
            manifest.json     format, policy, values (counters, …), sha256 and size of each file, and of itself

Old versions without a tag are removed, all but the newest few. A trainer that starts claims the folder: one that was
given up but still runs somewhere, on a host that cannot be reached, can save nothing there any more.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from srl.core.errors import CheckpointError
from srl.core.worker import State

FORMAT = "srl-checkpoint-2"
_OLDER = "srl-checkpoint-1"
"""Has no digest of the manifest itself."""
_ARRAYS, _MANIFEST, _TAGS = "arrays.safetensors", "manifest.json", "tags.json"
_HOLDER = ".holder"


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one policy of one run."""

    folder: Path
    experiment: str
    """Identifies what was trained; a checkpoint of anything else is refused."""
    keep: int = 3
    holder: str = ""
    """Who may save, if it was claimed."""

    def claimed(self) -> CheckpointStore:
        """The same for a trainer that starts now: whoever claimed it before can save nothing any more."""
        holder = secrets.token_hex(8)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f"{_HOLDER}.{holder}"
            partial.write_text(holder)
            partial.replace(self.folder / _HOLDER)
        except OSError:  # such as a full disk, which does not end training
            return self
        return replace(self, holder=holder)

    def _check_holder(self) -> None:
        path = self.folder / _HOLDER
        if self.holder and path.exists() and path.read_text() != self.holder:
            raise CheckpointError(f"another trainer has taken over {self.folder}")

    def save(self, version: int, policy: str, state: State) -> None:
        """Write ``state`` as ``version`` and tag it ``latest``."""
        target = self._path(version)
        partial = self.folder / f".partial-{target.name}"
        try:
            self._check_holder()
            self._write(partial, version, policy, state)
            self._check_holder()
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            _sync(self.folder)
            self.tag("latest", version)
        except (OSError, SafetensorError, CheckpointError) as error:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
            raise CheckpointError(f"cannot write checkpoint {target}: {error}") from error
        self._collect_garbage()

    def _write(self, partial: Path, version: int, policy: str, state: State) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file(
            {name: np.require(array, requirements="C") for name, array in state.arrays.items()}, partial / _ARRAYS
        )
        _sync(partial / _ARRAYS)
        manifest = {
            "format": FORMAT,
            "experiment": self.experiment,
            "policy": policy,
            "version": version,
            "values": state.values,
            "files": {_ARRAYS: {"sha256": _digest(partial / _ARRAYS), "bytes": (partial / _ARRAYS).stat().st_size}},
        }
        (partial / _MANIFEST).write_text(json.dumps({**manifest, "sha256": _own_digest(manifest)}, indent=1))
        _sync(partial / _MANIFEST)

    def load(self, tag: str = "latest", warn: Callable[[str], None] | None = None) -> State:
        """The state tagged ``tag`` (or of version ``v123``), checked.

        If the latest is damaged and somebody is there to be warned, it is the newest good one instead.
        """
        version = self.resolve(tag)
        try:
            return self._read(version)
        except CheckpointError as error:
            good = next((v for v in sorted(self.versions(), reverse=True) if v != version and self._is_good(v)), None)
            if good is not None and tag == "latest" and warn is not None:
                warn(f"{error}; going on from the one before, v{good}")
                return self._read(good)
            hint = f"; the newest good one is v{good}, use --tag v{good}" if good is not None else ""
            raise CheckpointError(f"{error}{hint}") from error

    def resolve(self, tag: str) -> int:
        """The version a tag stands for."""
        tags, versions = self.tags(), self.versions()
        found = tags.get(tag)
        if found is None and tag.startswith("v") and tag[1:].isdigit():
            found = int(tag[1:])
        if found is None or found not in versions:
            known = ", ".join([*sorted(tags), *(f"v{v}" for v in versions)]) or "none"
            raise CheckpointError(f"no checkpoint {tag!r} in {self.folder}; there are: {known}")
        return found

    def tags(self) -> dict[str, int]:
        """All tags and the versions they stand for."""
        try:
            found = json.loads((self.folder / _TAGS).read_text())
            return {str(name): int(version) for name, version in found.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError):
            newest = max(self.versions(), default=None)
            return {} if newest is None else {"latest": newest}

    def tag(self, name: str, version: int) -> None:
        """Let ``name`` stand for ``version`` from now on. Trainer and evaluator may both do this at any time."""
        with open(self.folder / f".{_TAGS}.lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            partial = self.folder / f".{_TAGS}.partial"
            partial.write_text(json.dumps({**self.tags(), name: version}))
            _sync(partial)
            partial.replace(self.folder / _TAGS)

    def versions(self) -> list[int]:
        """The versions there are, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name[1:]) for p in self.folder.glob("v*") if p.name[1:].isdigit())

    def _path(self, version: int) -> Path:
        return self.folder / f"v{version:09d}"

    def _read(self, version: int) -> State:
        path = self._path(version)
        manifest = self._manifest(path)
        if manifest["experiment"] != self.experiment:
            raise CheckpointError(
                f"checkpoint {path} is of another experiment ({manifest['experiment']}, not {self.experiment})"
            )
        for name, about in manifest["files"].items():
            if name != _ARRAYS or not (path / name).is_file() or _digest(path / name) != about["sha256"]:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} does not have the recorded content")
        try:
            return State(load_file(path / _ARRAYS), manifest["values"])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error

    def _manifest(self, path: Path) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text())
            if manifest["format"] not in (FORMAT, _OLDER):
                raise CheckpointError(f"checkpoint {path} has the unknown format {manifest['format']!r}")
            if manifest["format"] == FORMAT and manifest.pop("sha256") != _own_digest(manifest):
                raise CheckpointError(f"checkpoint {path} is damaged: {_MANIFEST} does not have the recorded content")
            manifest["files"][_ARRAYS]["sha256"], manifest["values"], manifest["experiment"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint {path} is damaged: {_MANIFEST} cannot be read ({error})") from error
        return manifest

    def _is_good(self, version: int) -> bool:
        try:
            self._read(version)
        except CheckpointError:
            return False
        return True

    def _collect_garbage(self) -> None:
        tagged = set(self.tags().values())
        for version in self.versions()[: -self.keep]:
            if version not in tagged:
                shutil.rmtree(self._path(version), ignore_errors=True)


def _own_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    for chunk in _chunks(path):
        found.update(chunk)
    return found.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
