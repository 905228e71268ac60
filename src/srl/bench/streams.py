"""``srl bench streams``: what the streams cost, against what the machine can do and what else there is.

Three things are measured, over shared memory and over TCP on loopback: how many bytes a second the sample stream
carries, how long a round trip through the inference stream takes, and how long it takes until published weights are
there. Each is measured in turn with a yardstick (memcpy, a bare doorbell, raw ZeroMQ), with ``multiprocessing.Queue``
and, given an interpreter that has it, with Ray. What exactly is timed is told in ``stream_samples.py``,
``stream_inference.py`` and ``stream_parameters.py`` beside this file.

Numbers are medians over rounds in which all ways take turns, in several sets of processes; a ratio is the median of the
ratios within a round. In every set each way is run once before anything counts: the first write to a page of shared
memory (or of any other) costs a page fault, which is paid once a run and is not what a stream costs. Processor time is
that of both sides, threads included, but for Ray only that of its two workers, not of its daemons. With more clients
than cores, clients wait for each other as well.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.live import Live
from rich.table import Table

from srl.bench.machine import machine, report
from srl.bench.stream_inference import inference_lanes
from srl.bench.stream_parameters import parameter_lanes
from srl.bench.stream_peers import Case, Lane, Peer, alternate, peers
from srl.bench.stream_samples import block_of, sample_lanes, size_of
from srl.core.errors import ConfigError, SrlError

Section = Literal["sample", "inference", "parameters"]
_SECTIONS: tuple[Section, ...] = ("sample", "inference", "parameters")
_RAY = Path(__file__).parents[3] / "benchmarks" / "streams_ray.py"
_NO_RAY = "not measured: give --ray PYTHON"


@dataclass(frozen=True)
class StreamOptions:
    """Measure the streams against memcpy, a bare doorbell, ZeroMQ, multiprocessing.Queue and Ray."""

    json: Path | None = None
    """Also write the numbers to this file."""
    quick: bool = False
    """Fewer sizes, fewer and shorter rounds: a look, not a measurement."""
    only: Annotated[Section | None, tyro.conf.arg(help_behavior_hint="(default: all three)")] = None
    """Measure only this."""
    ray: Annotated[Path | None, tyro.conf.arg(metavar="PYTHON", help_behavior_hint="(default: without Ray)")] = None
    """An interpreter that has Ray installed."""


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    rounds: int = 5
    sets: int = 3
    """How often the processes are started anew: some are luckier with their memory than others while they live."""
    seconds: float = 0.2
    """Length of one run, about."""
    asking: float = 0.1
    """Seconds that clients ask for actions in one run: there are many cases of these."""
    blocks: tuple[int, ...] = (10_000, 100_000, 1_000_000, 8_000_000, 64_000_000)
    rows: tuple[int, ...] = (1, 8, 64, 512)
    clients: tuple[int, ...] = (1, 2, 4, 8, 16)
    weights: tuple[int, ...] = (100_000, 1_000_000, 10_000_000, 100_000_000)

    @property
    def cases(self) -> dict[Section, list[dict[str, int]]]:
        """Everything there is to measure."""
        return {
            "sample": [{"bytes": size_of(block_of(nbytes)), "asked": nbytes} for nbytes in self.blocks],
            "inference": [{"rows": rows, "clients": clients} for clients in self.clients for rows in self.rows],
            "parameters": [{"bytes": nbytes} for nbytes in self.weights],
        }


QUICK = Settings(2, 1, 0.04, 0.04, (10_000, 1_000_000, 8_000_000), (1, 64), (1, 4), (100_000, 10_000_000))


def main(arguments: Sequence[str]) -> int:
    """Entry point of ``srl bench streams``."""
    from srl.commands.options import parse

    options = parse(StreamOptions, arguments, "bench streams")
    return bench(options, QUICK if options.quick else Settings())


def bench(options: StreamOptions, settings: Settings) -> int:
    """Measure, show, and write the numbers."""
    if options.ray is not None and not options.ray.is_file():
        raise ConfigError(f"--ray {options.ray}: there is no such interpreter")
    console = report(markup=True)
    wanted = {name: settings.cases[name] for name in _SECTIONS if options.only in (None, name)}
    # Drawn only between measurements: a display that moves by itself takes time from what is measured.
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def tell(text: str) -> None:
            live.update(f"{text} …", refresh=True)

        found = measure(wanted, settings, tell)
        ray: Any = _NO_RAY
        if options.ray is not None:
            tell("Ray")
            ray = measure_ray(options.ray, wanted, settings, found)
    for name, cases in found.items():
        for table in _TABLES[name](cases):
            console.print(table, "")
    judged = list(judge(found))
    for target in judged:
        console.print(
            f"{'[green]met[/]   ' if target['met'] else '[red]missed[/]'} {target['target']}: {target['found']}"
        )
    if options.ray is None:
        console.print(f"Ray {_NO_RAY}")
    if options.json is not None:
        told = {"only": options.only, "quick": options.quick, **vars(settings)}
        whole: dict[str, Any] = {"machine": machine(), "options": told, "ray": ray, "targets": judged}
        whole.update({name: [vars(case) for case in cases] for name, cases in found.items()})
        options.json.write_text(json.dumps(whole, indent=1))
    return 0


def measure(
    wanted: dict[Section, list[dict[str, int]]], settings: Settings, tell: Callable[[str], None]
) -> dict[Section, list[Case]]:
    """All cases of the wanted sections."""
    number = max([4, *(1 + about["clients"] for about in wanted.get("inference", ()))])
    found = {name: [Case(dict(about)) for about in cases] for name, cases in wanted.items()}
    total, done = settings.sets * sum(len(cases) for cases in found.values()), 0
    for _ in range(settings.sets):
        with tempfile.TemporaryDirectory(prefix="srl-bench-") as folder, peers(number) as processes:
            for name, cases in found.items():
                for case in cases:
                    done += 1
                    told = ", ".join(f"{value:,} {what}" for what, value in case.about.items())
                    tell(f"{done} of {total}: {name}, {told}")
                    alternate(case, lanes_of(name, processes, case.about, settings, Path(folder)), settings.rounds)
    return found


def lanes_of(name: Section, found: list[Peer], about: dict[str, int], settings: Settings, folder: Path) -> list[Lane]:
    """All ways of one case."""
    if name == "sample":
        return sample_lanes(found, about["asked"], settings.seconds, folder)
    if name == "parameters":
        return parameter_lanes(found, about["bytes"], settings.seconds, folder)
    return inference_lanes(found, about["rows"], about["clients"], settings.asking, folder)


def measure_ray(
    python: Path, wanted: dict[Section, list[dict[str, int]]], settings: Settings, found: dict[Section, list[Case]]
) -> dict[str, str]:
    """Have Ray measured in a process of its own interpreter; its numbers are entered beside ours."""
    order = {"cases": wanted, "rounds": settings.rounds * settings.sets, "seconds": settings.seconds}
    done = subprocess.run([python, _RAY], input=json.dumps(order), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SrlError(f"{_RAY.name} failed: {done.stderr.strip().splitlines()[-1:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    for name, cases in found.items():
        for case, values in zip(cases, answer.get(name, ()), strict=False):
            case.lanes["Ray"] = values
    return {"version": answer["version"]}


def judge(found: dict[Section, list[Case]]) -> Iterator[dict[str, Any]]:
    """Which of the targets are met."""

    def target(text: str, ratios: list[float | None], most: float = float("inf"), least: float = 0.0) -> dict[str, Any]:
        values = [ratio for ratio in ratios if ratio is not None]
        told = ", ".join(f"{value:.2f}" for value in values)
        return {"target": text, "found": told, "met": bool(values) and all(least <= v <= most for v in values)}

    large = [case for case in found.get("sample", ()) if case.about["asked"] >= 1_000_000]
    for lane in ("shm", "shm + gather") if large else ():
        ratios = [case.ratio(lane, "memcpy", "GB/s") for case in large]
        yield target(f"{lane}: blocks of 1 MB and more at 0.8 of memcpy or above", ratios, least=0.8)
    raw = ("tcp", "ZeroMQ, anew"), ("tcp", "ZeroMQ"), ("tcp, keys", "ZeroMQ, keys")
    for lane, yardstick in raw if large else ():
        ratios = [case.ratio(lane, yardstick, "GB/s") for case in large]
        yield target(f"{lane}: blocks of 1 MB and more at 0.7 of raw {yardstick} or above", ratios, least=0.7)
    for case in found.get("inference", ()):
        if case.about == {"rows": 1, "clients": 1}:
            # Unbound, one of the two may have been on one core while the other was on two: no comparison.
            pinned = [place for place in (", one core", ", two cores") if f"shm{place}" in case.lanes]
            trips = [case.ratio(f"shm{place}", f"doorbell{place}", "p50_us") for place in pinned or [""]]
            yield target("inference over shm, 1 row: at most 3 bare doorbell round trips", trips, most=3.0)
    for case in found.get("parameters", ()):
        for lane in ("shm view", "shm copy") if case.about["bytes"] == 10_000_000 else ():
            ratios = [case.ratio(lane, "memcpy", "us")]
            yield target(f"parameters, {lane}: 10 MB there within 2 memcpys", ratios, most=2.0)


def sample_tables(cases: Sequence[Case]) -> Iterator[Table]:
    """Throughput and processor time of the sample stream."""
    lanes = {"memcpy, hot": "", "memcpy, own": "", "memcpy": "", "shm": "memcpy", "shm + gather": "memcpy"}
    lanes |= {
        "ZeroMQ": "",
        "ZeroMQ, kept": "",
        "ZeroMQ, anew": "",
        "tcp": "ZeroMQ, anew",
        "ZeroMQ, keys": "",
        "tcp, keys": "ZeroMQ, keys",
        "mp.Queue": "",
        "Ray": "",
    }
    yield _table("sample stream, GB/s (× yardstick)", cases, lanes, "GB/s", "{:.2f}")
    yield _table("sample stream, µs of processor time a block", cases, dict.fromkeys(lanes, ""), "cpu", "{:,.0f}")


def inference_tables(cases: Sequence[Case]) -> Iterator[Table]:
    """Round trips and processor time of the inference stream."""
    lanes = {"doorbell": "", "shm": "doorbell", "ZeroMQ": "", "tcp": "ZeroMQ", "mp.Queue": "", "Ray": ""}
    yield _table("inference stream, round trip µs p50 (× yardstick)", cases, lanes, "p50_us", "{:,.0f}")
    plain = dict.fromkeys(lanes, "")
    yield _table("inference stream, round trip µs p99", cases, plain, "p99_us", "{:,.0f}")
    yield _table("inference stream, µs of processor time a request", cases, plain, "cpu", "{:,.0f}")


def parameter_tables(cases: Sequence[Case]) -> Iterator[Table]:
    """Latency and processor time of the parameter stream."""
    lanes = {"memcpy, hot": "", "memcpy": "", "shm view": "memcpy", "shm copy": "memcpy", "ZeroMQ": "memcpy"}
    lanes |= {"tcp view": "memcpy", "tcp copy": "memcpy", "Ray": "memcpy"}
    yield _table("parameters, µs from publish to there (× yardstick)", cases, lanes, "us", "{:,.0f}")
    yield _table("parameters, µs of processor time a version", cases, dict.fromkeys(lanes, ""), "cpu", "{:,.0f}")


_TABLES: dict[Section, Callable[[Sequence[Case]], Iterator[Table]]] = {
    "sample": sample_tables,
    "inference": inference_tables,
    "parameters": parameter_tables,
}


def _table(title: str, cases: Sequence[Case], lanes: dict[str, str], quantity: str, form: str) -> Table:
    """A row a case and a column a lane; a lane with a yardstick shows its ratio to that in brackets."""
    heads = [name for name in cases[0].about if name != "asked"]
    table = Table(*heads, *lanes, box=None, header_style="bold", title=title, title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for case in cases:
        cells = []
        for lane, yardstick in lanes.items():
            value = _processor(case, lane) if quantity == "cpu" else case.median(lane, quantity)
            ratio = case.ratio(lane, yardstick, quantity) if yardstick else None
            cells.append("–" if value is None else form.format(value) + (f" ({ratio:.2f})" if ratio else ""))
        table.add_row(
            *(_size(case.about[name]) if name == "bytes" else f"{case.about[name]}" for name in heads), *cells
        )
    return table


def _size(nbytes: int) -> str:
    """Bytes in words."""
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.3g} kB"


def _processor(case: Case, lane: str) -> float | None:
    """Processor time of a message, of both sides."""
    found = [case.median(lane, quantity) for quantity in ("cpu_us", "sender_us", "receiver_us")]
    values = [value for value in found if value is not None]
    return sum(values) if values else None
