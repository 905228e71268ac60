"""The live display: a progress bar, the numbers that matter, who waits for whom, and what the bottleneck is."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from srl.core.worker import WAITS
from srl.monitor.monitor import Row

_LINE_EVERY = 5.0


def on_console(title: str, steps: int) -> LiveDisplay | PlainDisplay:
    """A display on standard output."""
    return display(Console(), title, steps)


def display(console: Console, title: str, steps: int) -> LiveDisplay | PlainDisplay:
    """A live display on a terminal, plain lines elsewhere."""
    return LiveDisplay(console, title, steps) if console.is_terminal else PlainDisplay(console, title, steps)


class LiveDisplay:
    """Redraws itself in place."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self._console, self._title = console, title
        self._progress = Progress(
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TextColumn("steps, [bold]{task.fields[left]}[/] left"),
            console=console,
        )
        self._steps = steps
        self._task = self._progress.add_task("train", total=steps, left="–")
        self._live = Live(self.picture({}, "starting"), console=console, refresh_per_second=4)
        self._live.start()

    def write(self, row: Row) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        left = _left(row.values, self._steps)
        self._progress.update(self._task, completed=int(row.values["steps"]), left=left)
        self._live.update(self.picture(row.values, row.bottleneck))

    def say(self, text: str) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        self._live.stop()

    def picture(self, values: dict[str, float], bottleneck: str) -> Panel:
        """What the display shows for these numbers."""
        table = Table.grid(expand=True, padding=(0, 2))
        for _ in range(4):
            table.add_column(ratio=1)
        cells = [
            ("return", _returns(values)),
            ("episode length", _number(values, "length_mean", "{:,.0f}")),
            ("episodes", _number(values, "episodes", "{:,.0f}")),
            ("steps/s", _number(values, "steps_per_second", "{:,.0f}")),
            ("version", _number(values, "version", "{:,.0f}")),
            ("staleness", _number(values, "train/staleness", "{:.2f}")),
            ("blocks filling", _number(values, "queue/filling", "{:.0f}")),
            ("blocks waiting", _number(values, "queue/full", "{:.0f}")),
        ]
        for i in range(0, len(cells), 4):
            table.add_row(*(f"[dim]{name}[/] [bold]{value}[/]" for name, value in cells[i : i + 4]))
        shown = {
            text.split(" (")[0]: values[f"wait/{name}"] for name, text in WAITS.items() if f"wait/{name}" in values
        }
        waits = [f"{text} [bold]{share:.0%}[/]" for text, share in shown.items()]
        parts: list[Any] = [self._progress, table]
        if waits:
            parts.append("[dim]waits[/] " + " · ".join(waits))
        parts.append(f"[dim]bottleneck[/] [bold yellow]{bottleneck}[/]")
        return Panel(Group(*parts), title=self._title, border_style="cyan")


class PlainDisplay:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self._console, self._steps, self._last = console, steps, 0.0
        console.print(title, highlight=False, markup=False)

    def write(self, row: Row) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        values, now = row.values, time.monotonic()
        if now - self._last < _LINE_EVERY and values["steps"] < self._steps:
            return
        self._last = now
        rate = values["steps_per_second"]
        left = _left(values, self._steps)
        waits = " ".join(f"{name} {values[f'wait/{name}']:.0%}" for name in WAITS if f"wait/{name}" in values)
        text = (
            f"{values['time']:6.0f}s  {values['steps']:>10,.0f}/{self._steps:,} steps  {rate:>7,.0f}/s  "
            f"left {left:>7}  "
            f"return {_returns(values)}  length {_number(values, 'length_mean', '{:.0f}')}  "
            f"staleness {_number(values, 'train/staleness', '{:.2f}')}  "
            f"blocks {_number(values, 'queue/filling', '{:.0f}')}+{_number(values, 'queue/full', '{:.0f}')}  "
            f"waits: {waits}  bottleneck: {row.bottleneck}"
        )
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""


def _left(values: dict[str, float], steps: int) -> str:
    """The time left, as h:mm:ss."""
    rate = values["steps_per_second"]
    return str(timedelta(seconds=round(max(0.0, steps - values["steps"]) / rate))) if rate else "–"


def _returns(values: dict[str, float]) -> str:
    """The return, or that of every policy; the evaluator's in brackets."""
    found = []
    for name, value in values.items():
        if name.split("/")[0] == "return_mean":
            policy = name.removeprefix("return_mean").lstrip("/")
            judged = values.get("eval/return" + name.removeprefix("return_mean"), values.get("eval/return"))
            text = f"{policy} {value:,.1f}".strip()
            found.append(text if judged is None else f"{text} ({judged:,.1f})")
    return ", ".join(found) or "–"


def _number(values: dict[str, float], name: str, shape: str) -> str:
    return shape.format(values[name]) if name in values else "–"
