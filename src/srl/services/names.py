"""Names: where the servers of a run can be reached.

A server says where it listens, a client asks by name and asks again when the server has been silent: a restarted
server listens elsewhere.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from srl.services.network import Network


class Names(Protocol):
    """The names of a run, as its workers know them."""

    @property
    def network(self) -> Network:
        """How this process takes part in the run's network."""

    def add(self, name: str, endpoint: str) -> None:
        """``name`` can be reached at ``endpoint`` from now on."""

    def resolve(self, name: str) -> str | None:
        """Where ``name`` can be reached, or None while that is not known."""

    def counter(self, name: str) -> Any:
        """A number at place 0, -1 at first, that outlives the process that writes it."""


@dataclass(frozen=True)
class FileNames:
    """Names as small files in a folder, for workers on one host."""

    folder: Path
    network: Network = field(default_factory=Network)

    def add(self, name: str, endpoint: str) -> None:
        """See :class:`Names`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{_file(name)}.{os.getpid()}"
        partial.write_text(endpoint)
        partial.replace(self.folder / _file(name))

    def counter(self, name: str) -> Any:
        """See :class:`Names`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{_file(name)}.counter"
        if not path.exists():
            path.write_bytes(np.int64(-1).tobytes())
        return np.memmap(path, "<i8", "r+", shape=(1,))

    def resolve(self, name: str) -> str | None:
        """See :class:`Names`."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / _file(name)).read_text()
        return None


def _file(name: str) -> str:
    return name.replace("/", "_")
