"""Every error SRL raises on purpose.

    SrlError
    ├── ConfigError          what the user declared cannot run; raised before any process starts
    │   └── UnknownName      a recipe, environment, algorithm or key nobody knows; suggests the nearest
    ├── StreamError          a stream cannot carry what it was given
    │   ├── DecodeError      bytes from a peer that are not a valid frame of this stream
    │   ├── StreamClosed     the other side closed the stream for good
    │   └── Unreachable      a peer did not answer for long; starting again may help
    ├── EnvError             an environment gave something it must not give, or was given it: NaN, a wrong shape
    ├── TrainingError        an update gave NaN or Inf
    ├── CheckpointError      a checkpoint is missing, damaged or of another experiment
    └── WorkerError          a worker failed more often than its restart budget allows

Each message says what was wrong, where, and what to do, in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SrlError(Exception):
    """Base of all errors raised by SRL."""


class ConfigError(SrlError):
    """The declared experiment cannot run."""


class UnknownName(ConfigError):
    """A name that is not in the list of known names."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
        text = f"unknown {kind} {name!r}"
        if near:
            text += f"; did you mean {near[0]!r}?"
        if hint:
            text += f" ({hint})"
        super().__init__(text)


class StreamError(SrlError):
    """A stream cannot carry what it was given."""


class DecodeError(StreamError):
    """Bytes from a peer that are not a valid frame of this stream."""


class StreamClosed(StreamError):
    """The other side closed the stream for good."""


class Unreachable(StreamError):
    """A peer did not answer for long."""


class EnvError(SrlError):
    """What passes between the run and an environment is not what the environment's spaces promise."""


class TrainingError(SrlError):
    """An update gave NaN or Inf."""


class CheckpointError(SrlError):
    """A checkpoint is missing, damaged or of another experiment."""


class WorkerError(SrlError):
    """A worker failed more often than its restart budget allows."""
