"""Where rows go: a JSON-lines file, TensorBoard events, and a picture of the learning curve at the end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from srl.monitor.monitor import Row

METRICS = "metrics.jsonl"
OPPONENTS = "opponents.json"
CURVE = "curve.png"


class JsonLines:
    """``metrics.jsonl``: one row a line, readable at any time; ``opponents.json``: results by opponent version."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._file = open(run_dir / METRICS, "a", buffering=1, encoding="utf-8")

    def write(self, row: Row) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        numbers = {name: round(value, 6) for name, value in row.values.items()}
        self._file.write(json.dumps({**numbers, "bottleneck": row.bottleneck}) + "\n")
        if row.opponents:
            played = {
                policy: {
                    f"v{version}": {"games": games, "return_mean": mean} for version, (games, mean) in found.items()
                }
                for policy, found in row.opponents.items()
            }
            (self._run_dir / OPPONENTS).write_text(json.dumps(played, indent=1))

    def say(self, text: str) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""

    def close(self) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        self._file.close()


class TensorBoard:
    """TensorBoard events, written without TensorFlow or torch."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = str(run_dir)
        self._writer: Any = None

    def write(self, row: Row) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        if self._writer is None and not row.values["steps"]:
            return  # importing takes a third of a second of a core that the workers need to start
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(self._folder)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        event = Event(wall_time=time.time(), step=int(row.values["steps"]), summary=Summary(value=values))
        self._writer.add_event(event)

    def say(self, text: str) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""

    def close(self) -> None:
        """See :class:`~srl.monitor.monitor.Sink`."""
        if self._writer is not None:
            self._writer.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All rows of a run; a line that was cut off by a crash is left out."""
    path = run_dir / METRICS
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def draw_curve(run_dir: Path, title: str) -> Path | None:
    """Draw return against steps, with the time on a second axis; None if no episode has ended."""
    rows = [row for row in read_metrics(run_dir) if any(name.startswith("return_mean") for name in row)]
    if not rows:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    for name in sorted({name for row in rows for name in row if name.startswith("return_mean")}):
        points = [(row["steps"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), label=name.removeprefix("return_mean").lstrip("/") or None)
    axes.set(title=title, xlabel="agent steps", ylabel="return (mean of last 100 episodes)")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
    minutes = rows[-1]["time"] / 60
    rate = rows[-1]["steps"] / max(rows[-1]["time"], 1e-9)
    axes.annotate(
        f"{minutes:.1f} min, {rate:,.0f} steps/s overall", (0.99, 0.02), xycoords="axes fraction", ha="right", alpha=0.7
    )
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    figure.tight_layout()
    figure.savefig(run_dir / CURVE)
    pyplot.close(figure)
    return run_dir / CURVE
