"""``srl bench rivals``: the same work done by SRL and by other libraries, in turn, on the same machine.

Each library is driven by a script in ``benchmarks/rivals`` and installed into an environment of its own there. A script
reports every finished update as a line of JSON; everything else is measured from outside, in the same way for all,
SRL included: the time from the start of the command to the first finished update, the steps trained on per second after
the warm-up, and the memory of all processes together.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

from srl.bench.machine import machine
from srl.bench.throughput import Work
from srl.core.errors import ConfigError, UnknownName

OURS = "srl"
_MARK = "SRL_RIVAL"
"""Variable in the environment of all processes of a measurement, by which they are found again."""
_LATE = 120.0
"""Seconds a script may take beyond its time, for starting, for its last update and for ending."""

_EVERY = 1.0
"""Seconds between two looks at the memory."""

Config = dict[str, Any]


@dataclass(frozen=True)
class RivalOptions:
    """Train the same with SRL and with other libraries, in turn, and compare."""

    work: tyro.conf.Positional[tuple[Work, ...]] = ("cartpole", "halfcheetah", "pong", "pong-4")
    """What to train. pong: one pass over each batch, pong-4: four."""
    rivals: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME …", help_behavior_hint="(default: all)")] = ()
    """Which libraries, beside SRL."""
    rounds: int = 3
    """Measurements of each, taken in turn (0: only install and search)."""
    seconds: float = 45.0
    """Length of one measurement."""
    warmup: float = 12.0
    """Seconds from the start of the command that do not count."""
    search: bool = False
    """Look again for the fastest configuration of each library, and keep it in best.json."""
    search_seconds: float = 20.0
    """Length of one measurement of that search."""
    target: bool = False
    """Measure how long it takes to learn instead of how fast it trains."""
    limit: float = 900.0
    """Seconds after which --target gives up."""
    json: Path | None = None
    """Also write the numbers to this file."""


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


def main(arguments: Sequence[str]) -> int:
    """Entry point of ``srl bench rivals``."""
    from srl.cli import parse

    options = parse(RivalOptions, arguments, "bench rivals")
    bench = Bench(_scripts(), options, Console(highlight=False, markup=False))
    bench.prepare()
    bench.save()
    for number in range(options.rounds):
        for work in options.work:
            bench.round(work, number)
            bench.save()
    for work in options.work if options.rounds else ():
        bench.console.print(bench.table(work))
    return 0


def _scripts() -> Path:
    """The folder of the rivals' scripts, which only a clone of the repository has."""
    for base in (Path(__file__).parents[3], Path.cwd()):
        if (base / "benchmarks" / "rivals" / "works.py").is_file():
            return base / "benchmarks" / "rivals"
    raise ConfigError("srl bench rivals needs benchmarks/rivals: clone the repository and run it there")


def _load(path: Path) -> ModuleType:
    """The module in the file ``path``."""
    spec = importlib.util.spec_from_file_location(f"rivals_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Bench:
    """One invocation: who takes part, in which configuration, and what was found."""

    def __init__(self, folder: Path, options: RivalOptions, console: Console) -> None:
        self.folder, self.options, self.console = folder, options, console
        self.works: Mapping[str, Any] = _load(folder / "works.py").WORKS
        tables = _load(folder / "search.py")
        known: Mapping[str, Any] = tables.RIVALS
        for name in options.rivals:
            if name not in known:
                raise UnknownName("rival", name, known, f"there are {', '.join(known)}")
        self.rivals = {name: known[name] for name in known if name in options.rivals or not options.rivals}
        self.pythons: dict[str, Path] = {OURS: Path(sys.executable)}
        self.missing: dict[str, str] = {} if options.rivals else dict(tables.LEFT_OUT)
        best = folder / "best.json"
        self.best: dict[str, dict[str, Config]] = json.loads(best.read_text()) if best.is_file() else {}
        self.searched: dict[str, Any] = {}
        self.found: dict[str, dict[str, list[Outcome]]] = {work: {OURS: []} for work in options.work}

    def prepare(self) -> None:
        """Install every rival, and look for the configurations that are not known yet."""
        for name in self.rivals:
            try:
                self.pythons[name] = install(self.folder, name, self.console.print)
            except InstallError as error:
                self.missing[name] = str(error)
                self.console.print(f"{name}: not installed: {error}", style="yellow", soft_wrap=True)
        for name in self.pythons:
            for work in self.options.work if name != OURS else ():
                if self.options.search or work not in self.best.get(name, {}):
                    self.look(name, work)

    def look(self, name: str, work: Work) -> None:
        """Try all configurations of a rival for a short time; keep the fastest."""
        tried = []
        for config in self.rivals[name].search[work]:
            outcome = self.run(name, work, config, 1, self.options.search_seconds, f"{work}: {name} {config} …")
            rate = outcome.steps_per_second or 0.0
            tried.append({"config": config, "steps/s": round(rate, 1), "error": outcome.error})
            self.console.print(f"{work:12} {name:15} {rate:>9,.0f} steps/s  {config} {outcome.error}", soft_wrap=True)
        best = max(tried, key=lambda found: found["steps/s"])
        self.searched.setdefault(name, {})[work] = tried
        self.best.setdefault(name, {})[work] = best["config"]
        if not best["steps/s"]:
            return  # nothing to keep: next time it is tried again
        ordered = {rival: dict(sorted(self.best[rival].items())) for rival in sorted(self.best)}
        (self.folder / "best.json").write_text(json.dumps(ordered, indent=1) + "\n")

    def round(self, work: Work, number: int) -> None:
        """Everybody once."""
        for name in self.pythons:
            config = self.best[name][work] if name != OURS else {}
            target = self.works[work].target if self.options.target else None
            seconds = self.options.seconds if target is None else self.options.limit
            text = f"{work}, round {number + 1} of {self.options.rounds}: {name} …"
            outcome = self.run(name, work, config, number + 1, seconds, text, target)
            self.found[work].setdefault(name, []).append(outcome)
            self.console.print(f"{work:12} round {number + 1}: {name:15} {_summary(outcome)}", soft_wrap=True)

    def run(
        self, name: str, work: Work, config: Config, seed: int, seconds: float, text: str, target: float | None = None
    ) -> Outcome:
        """Run the script of ``name`` once, and show ``text`` meanwhile."""
        script = self.folder / (self.rivals[name].script if name != OURS else "srl_ppo.py")
        command = [str(self.pythons[name]), str(script), work, "--config", json.dumps(config), "--seed", str(seed)]
        with self.console.status(text):
            return measure(command, self.options.warmup, seconds, target)

    def table(self, work: Work) -> Table:
        """What was found for one work."""
        head = ("seconds to target", "steps to target") if self.options.target else ("steps/s", "ratio to SRL")
        table = Table(work, *head, "first update", "memory", "configuration", box=None, header_style="bold")
        ours = self.found[work][OURS]
        for name, outcomes in self.found[work].items():
            config = " ".join(f"{key}={value}" for key, value in self.best[name][work].items()) if name != OURS else ""
            good = [outcome for outcome in outcomes if not outcome.error]
            if not good:
                table.add_row(name, f"failed: {outcomes[-1].error}", "", "", "", config)
                continue
            cells = _target_cells(outcomes) if self.options.target else _rate_cells(outcomes, ours)
            first = median(outcome.first or 0.0 for outcome in good)
            memory = max(outcome.memory_mb for outcome in good)
            table.add_row(name, *cells, f"{first:.1f} s", f"{memory:,.0f} MB", config)
        for name, reason in self.missing.items():
            table.add_row(name, f"not installed: {reason}")
        return table

    def save(self) -> None:
        """Write all that is known so far, raw, if a file was named for it."""
        if self.options.json is None:
            return
        requirements = {name: _requirements(self.folder, name).read_text().split() for name in self.rivals}
        works: dict[str, Any] = {work: {} for work in self.found}
        for work, everybody in self.found.items():
            for name, outcomes in everybody.items():
                rounds = [asdict(outcome) for outcome in outcomes]
                works[work][name] = {"config": self.best.get(name, {}).get(work), "rounds": rounds}
        options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(self.options).items()}
        found = {"machine": machine(), "options": options, "requirements": requirements, "not installed": self.missing}
        found |= {"search": self.searched, "works": works}
        self.options.json.write_text(json.dumps(found, indent=1) + "\n")


def _summary(outcome: Outcome) -> str:
    if outcome.error:
        return f"failed: {outcome.error}"
    if outcome.reached is not None:
        return f"target after {outcome.reached[0]:,.0f} s and {outcome.reached[1]:,} steps"
    learned = "" if outcome.last_return is None else f", return {outcome.last_return:,.1f}"
    about = f"first update after {outcome.first:.1f} s, {outcome.memory_mb:,.0f} MB{learned}"
    return f"{outcome.steps_per_second or 0:>9,.0f} steps/s, {about}"


def _spread(values: Sequence[float], digits: int = 0) -> str:
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})" if values else "–"


def _rate_cells(outcomes: list[Outcome], ours: list[Outcome]) -> tuple[str, str]:
    rates = [outcome.steps_per_second for outcome in outcomes if outcome.steps_per_second]
    pairs = zip(outcomes, ours, strict=False)
    ratios = [a.steps_per_second / b.steps_per_second for a, b in pairs if a.steps_per_second and b.steps_per_second]
    failed = f", {len(outcomes) - len(rates)} failed" if len(rates) < len(outcomes) else ""
    return _spread(rates) + failed, f"{median(ratios):.2f}" if ratios else "–"


def _target_cells(outcomes: list[Outcome]) -> tuple[str, str]:
    reached = [outcome.reached for outcome in outcomes if outcome.reached is not None]
    missed = f", {len(outcomes) - len(reached)} not reached" if len(reached) < len(outcomes) else ""
    return _spread([seconds for seconds, _ in reached]) + missed, _spread([steps for _, steps in reached])


# Installing


class InstallError(Exception):
    """A rival cannot be installed here."""


def _requirements(folder: Path, name: str) -> Path:
    return folder / f"requirements-{name}.txt"


def install(folder: Path, name: str, say: Callable[[str], object]) -> Path:
    """The interpreter of the rival's environment, which is made if its requirements are new."""
    wanted = _requirements(folder, name)
    home = folder / ".venvs" / name
    python, stamp = home / "bin" / "python", home / "installed.txt"
    if stamp.is_file() and stamp.read_text() == wanted.read_text():
        return python
    say(f"installing {name} into {home} …")
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(home)],
        [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(wanted)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallError(_reason(done.stderr) or f"exit code {done.returncode}")
    shutil.copy(wanted, stamp)
    return python


def _reason(text: str) -> str:
    """The last line of an error message that says something; of pip's, the one that names the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return (named or lines or [""])[-1][:200]


# Measuring


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
        said = _reason(errors.read_text(errors="replace"))
    error = ""
    if code:
        error = said or f"exit code {code}"
    elif not found:
        error = "no update within its time" + (f" ({said})" if said else "")
    hits = [event for event in found if target is not None and (event["return"] or -1e9) >= target]
    points = [(event["time"], event["steps"]) for event in found]
    return Outcome(
        None if error else slope(points, warmup),
        found[0]["time"] if found else None,
        peak,
        (hits[0]["time"], int(hits[0]["steps"])) if hits else None,
        found[-1]["return"] if found else None,
        error,
        found,
    )


def slope(points: Sequence[tuple[float, float]], warmup: float) -> float | None:
    """Steps per second between the first update after the warm-up and the last; None if there are no two."""
    counted = [point for point in points if point[0] >= warmup]
    if len(counted) < 2:
        return None
    (begin, first), (end, last) = counted[0], counted[-1]
    return (last - first) / (end - begin)


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
        pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
        alive = {pid: stat for pid in pids if (stat := _stat(pid)) is not None}
        found = {pid for pid, stat in alive.items() if (pid, stat.start) in self.known or self._marked(pid, stat)}
        while more := {pid for pid, stat in alive.items() if stat.parent in found} - found:
            found |= more
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
