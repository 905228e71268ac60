"""The worker protocol, and what a worker tells about itself.

A worker hosts a task and has one method that matters, :meth:`Worker.poll`: do what can be done now, wait at most
``timeout`` seconds if there is nothing, and say how much was done. It does not know which launcher calls it nor
which transport carries its streams.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from srl.core.specs import Arrays

WAITS = {
    "inference": "actor waits for actions",
    "requests": "policy waits for requests",
    "samples": "trainer waits for samples",
    "trainers": "trainer waits for the policy's other trainers",
    "buffer": "buffer waits for actors and trainer",
    "versions": "evaluator waits for a new version",
    "parameters": "actor waits for parameters (its next block is admitted by a new version)",
}


@dataclass
class State:
    """What a worker needs to go on exactly where it was: arrays, and plain JSON values."""

    arrays: Arrays = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def under(self, prefix: str) -> State:
        """The part whose names start with ``prefix/``, without it."""
        cut = len(prefix) + 1
        return State(
            {k[cut:]: v for k, v in self.arrays.items() if k.startswith(prefix + "/")},
            {k[cut:]: v for k, v in self.values.items() if k.startswith(prefix + "/")},
        )

    def put(self, prefix: str, part: State) -> None:
        """Add ``part`` with every name prefixed."""
        self.arrays.update({f"{prefix}/{k}": v for k, v in part.arrays.items()})
        self.values.update({f"{prefix}/{k}": v for k, v in part.values.items()})


@dataclass
class Metrics:
    """Counters since the worker started, latest values of gauges, and what has happened and is not yet reported."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    episodes: deque[tuple[str, float, int, int]] = field(default_factory=deque)
    """(policy, return, length, version of the policy at the end)"""
    measured: deque[tuple[str, float]] = field(default_factory=deque)
    """Numbers an environment gave, by name."""
    notes: deque[str] = field(default_factory=deque)
    """Sentences for the user."""
    orders: deque[dict[str, Any]] = field(default_factory=deque)
    """What the actors' environments are to be told."""
    started: float = field(default_factory=time.monotonic)

    def add(self, name: str, amount: float = 1) -> None:
        """Raise a counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Count the time spent inside as one of the :data:`WAITS`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(f"wait/{name}", time.perf_counter() - begin)

    def take(self, measured: list[tuple[str, float]], notes: list[str]) -> None:
        """Take over what an environment has to say; its lists are then empty."""
        if measured:
            self.measured.extend(measured)
            measured.clear()
        if notes:
            self.notes.extend(notes)
            notes.clear()

    def report(self) -> dict[str, Any]:
        """Everything, as plain values; the episodes are then forgotten. May be called from another thread."""
        alive = time.monotonic() - self.started
        queues: dict[str, deque[Any]] = {"episodes": self.episodes, "measured": self.measured}
        queues.update(notes=self.notes, orders=self.orders)
        taken = {name: [each.popleft() for _ in range(len(each))] for name, each in queues.items()}
        return {"counters": {**self.counters, "alive": alive}, "gauges": dict(self.gauges), **taken}


@dataclass(frozen=True)
class Progress:
    """What one poll did."""

    work: int = 0
    """Units of work done (steps, rows or samples); 0 means the worker had nothing to do."""
    done: bool = False
    """The worker has reached its goal and wants no more polls."""


class Worker(ABC):
    """One node of the graph."""

    kind: ClassVar[str]
    niceness: int = 0
    """How far it stands back for other workers that want the same processor, where it has a process of its own."""
    prompt: bool = False
    """Whether others, or threads of its own, wait for it, so that it should not wait for its turn on a processor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.metrics = Metrics()
        self.incarnation = 0
        """Differs with every start of this worker; set by the launcher before :meth:`start`."""
        self.restarted = False
        """Whether this worker replaces one that died; set by the launcher before :meth:`start`."""
        self.ending: Callable[[], float | None] = lambda: None
        """Since when (monotonic clock) the run is ending; set by the launcher."""

    def start(self) -> None:
        """Open streams and build what the worker hosts. Called once, in the worker's own process."""

    @abstractmethod
    def poll(self, timeout: float) -> Progress:
        """Do what can be done; wait at most ``timeout`` seconds if that is nothing."""

    def tell(self, values: dict[str, Any]) -> None:
        """Take in what a curriculum has decided on. Called between two polls."""

    def stop(self) -> None:
        """The run is ending: save what must be saved. Called before :meth:`close`, not after a crash."""

    def close(self) -> None:
        """Close streams and environments."""

    def state(self) -> State | None:
        """All that is needed to go on exactly here, or None where that cannot be had."""
        return State()

    def load_state(self, state: State) -> None:
        """Go on where ``state`` was taken. Called after :meth:`start`."""
