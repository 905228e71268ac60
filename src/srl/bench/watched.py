"""One run of a script that trains something, watched from outside: its updates, its memory, and that nothing is left.

The script follows ``benchmarks/rivals/protocol.py``: every finished update becomes one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from srl.bench.throughput import slope

_MARK = "SRL_RIVAL"
"""Variable in the environment of all processes of a measurement, by which they are found again."""
_LATE = 120.0
"""Seconds a script may take beyond its time, for starting, for its last update and for ending."""

_EVERY = 1.0
"""Seconds between two looks at the memory."""


@dataclass(frozen=True)
class Outcome:
    """What one run of a script showed."""

    steps_per_second: float | None = None
    first: float | None = None
    """Seconds from the start of the command to the first finished update."""
    memory_mb: float = 0.0
    """The most that all processes had at a time, what they share counted once."""
    reached: tuple[float, int] | None = None
    """Seconds and steps until the target was reached."""
    last_return: float | None = None
    error: str = ""
    events: list[dict[str, float]] = field(default_factory=list)
    """Time since the start, steps and mean return after each update."""


def measure(command: Sequence[str], warmup: float, seconds: float, target: float | None = None) -> Outcome:
    """Run a script that follows ``benchmarks/rivals/protocol.py``, and whatever it starts, to its end."""
    with tempfile.TemporaryDirectory(prefix="rival-", ignore_cleanup_errors=True) as scratch:
        events, errors = Path(scratch) / "events.jsonl", Path(scratch) / "stderr"
        times = ["--warmup", str(warmup), "--seconds", str(seconds), "--events", str(events)]
        goal = [] if target is None else ["--target", str(target)]
        begin = time.time()
        with open(errors, "wb") as err, _started([*command, *times, *goal], scratch, err) as family:
            peak, code = family.watch(begin + warmup + seconds + _LATE)
        found = _read(events, begin)
        said = reason(errors.read_text(errors="replace"))
    error = ""
    if code:
        error = said or f"exit code {code}"
    elif not found:
        error = "no update within its time" + (f" ({said})" if said else "")
    hits = [event for event in found if target is not None and (event["return"] or -1e9) >= target]
    points = [(event["time"], event["steps"]) for event in found if event["time"] >= warmup]
    return Outcome(
        None if error else slope(points) or None,
        found[0]["time"] if found else None,
        peak,
        (hits[0]["time"], int(hits[0]["steps"])) if hits else None,
        found[-1]["return"] if found else None,
        error,
        found,
    )


def _read(path: Path, begin: float) -> list[dict[str, Any]]:
    """The events, with times since ``begin``; a line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            found.append({**event, "time": round(event["time"] - begin, 3)})
    return found


@contextlib.contextmanager
def _started(command: Sequence[str], scratch: str, errors: Any) -> Iterator[Family]:
    """A command in a session and a folder of its own; in the end, nothing that it started is left."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    env = {**os.environ, _MARK: mark, "TMPDIR": scratch}
    process = subprocess.Popen(
        command,
        cwd=scratch,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
    )
    family = Family(process, mark)
    try:
        yield family
    finally:
        family.kill()


class Family:
    """A process and all that descend from it, also those that left its session or lost their parent."""

    def __init__(self, process: subprocess.Popen[Any], mark: str) -> None:
        self.process, self.mark = process, f"{_MARK}={mark}".encode()
        self.known: set[tuple[int, int]] = set()
        """Process ids and start times: an id may be given to another process later."""
        self.pids: set[int] = set()
        """Of all that were ever seen."""

    def watch(self, deadline: float) -> tuple[float, int | None]:
        """Wait for the end, or for ``deadline``; the most memory in MB, and the exit code (None: still running)."""
        peak = 0.0
        while time.time() < deadline:
            peak = max(peak, sum(map(_pss_mb, self.members())))
            with contextlib.suppress(subprocess.TimeoutExpired):
                return peak, self.process.wait(timeout=_EVERY)
        return peak, None

    def members(self) -> list[int]:
        """Ids of those that live."""
        alive = _alive()
        found = _offspring(
            {pid for pid, stat in alive.items() if (pid, stat.start) in self.known or self._marked(pid, stat)}, alive
        )
        self.known = {(pid, alive[pid].start) for pid in found}
        self.pids |= found
        return sorted(found)

    def kill(self) -> None:
        """End them all, and wait until they are gone."""
        deadline = time.monotonic() + 30
        while (pids := self.members()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()  # so that it does not stay as a zombie
            time.sleep(0.02)
        self.process.wait()
        for pid in self.pids:  # PyTorch's shared tensors outlive those who made them and were killed
            for left in Path("/dev/shm").glob(f"torch_{pid}_*"):  # noqa: S108
                left.unlink(missing_ok=True)

    def _marked(self, pid: int, stat: _Stat) -> bool:
        if stat.session == self.process.pid:
            return True
        try:
            return self.mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


class _Stat(NamedTuple):
    parent: int
    session: int
    start: int


def descendants(pid: int) -> set[int]:
    """All processes that this one started, and those that they did."""
    return _offspring({pid}, _alive()) - {pid}


def _offspring(found: set[int], alive: dict[int, _Stat]) -> set[int]:
    """These processes and all that descend from them."""
    while more := {pid for pid, stat in alive.items() if stat.parent in found} - found:
        found = found | more
    return found


def _alive() -> dict[int, _Stat]:
    """All processes there are."""
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return {pid: stat for pid in pids if (stat := _stat(pid)) is not None}


def _stat(pid: int) -> _Stat | None:
    """What /proc says of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else _Stat(int(fields[1]), int(fields[3]), int(fields[19]))


def _pss_mb(pid: int) -> float:
    """Memory of a process, what it shares with others divided among them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def reason(text: str) -> str:
    """The last line of an error message that says something; of pip's, the one that names the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return (named or lines or [""])[-1][:200]
