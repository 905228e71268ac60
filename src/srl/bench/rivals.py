"""``srl bench rivals``: the same work done by SRL and by other libraries, in turn, on the same machine.

Each library is driven by a script in ``benchmarks/rivals`` and installed into an environment of its own there. A script
reports every finished update as a line of JSON; everything else is measured from outside, in the same way for all,
SRL included: the time from the start of the command to the first finished update, the steps trained on per second after
the warm-up, and the memory of all processes together.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from srl.bench.machine import machine, report
from srl.bench.throughput import Work
from srl.bench.watched import Outcome, measure, reason
from srl.core.errors import ConfigError, UnknownName

OURS = "srl"
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
    own: bool = False
    """Give every library the hyper-parameters its authors recommend for the work, where they do, not SRL's."""
    target: bool = False
    """Measure how long it takes to learn instead of how fast it trains."""
    limit: float = 900.0
    """Seconds after which --target gives up."""
    json: Path | None = None
    """Also write the numbers to this file."""


def main(arguments: Sequence[str]) -> int:
    """Entry point of ``srl bench rivals``."""
    from srl.commands.options import parse

    options = parse(RivalOptions, arguments, "bench rivals")
    bench = Bench(_scripts(), options, report())
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
        described = _load(folder / "works.py")
        self.works: Mapping[str, Any] = described.WORKS
        self.own: Mapping[str, Any] = described.OWN if options.own else {}
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
            config = self.config(name, work)
            target = self.works[work].target if self.options.target else None
            seconds = self.options.seconds if target is None else self.options.limit
            text = f"{work}, round {number + 1} of {self.options.rounds}: {name} …"
            outcome = self.run(name, work, config, number + 1, seconds, text, target)
            self.found[work].setdefault(name, []).append(outcome)
            self.console.print(f"{work:12} round {number + 1}: {name:15} {_summary(outcome)}", soft_wrap=True)

    def config(self, name: str, work: str) -> Config:
        """In which configuration a library does a work."""
        if name == OURS:
            return {}
        own, more = self.own.get(name, {}).get(work, ({}, {}))
        return {**self.best[name][work], **more, **({"own": own} if own else {})}

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
            config = " ".join(f"{key}={value}" for key, value in self.config(name, work).items())
            good = [outcome for outcome in outcomes if not outcome.error]
            if not good:
                table.add_row(name, f"failed: {outcomes[-1].error}", "", "", "", config)
                continue
            cells = _target_cells(outcomes) if self.options.target else _rate_cells(outcomes, ours)
            first = median(outcome.first or 0.0 for outcome in good)
            memory = max(outcome.memory_mb for outcome in good)
            table.add_row(name, *cells, f"{first:.1f} s", f"{memory:,.0f} MB", config)
        for name, why in self.missing.items():
            table.add_row(name, f"not installed: {why}")
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
                works[work][name] = {"config": self.config(name, work) if rounds else None, "rounds": rounds}
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
            raise InstallError(reason(done.stderr) or f"exit code {done.returncode}")
    shutil.copy(wanted, stamp)
    return python
