"""Draw how the cost of a message grows: with its bytes, its rows, the clients that ask, and the size of the weights.

srl bench streams --json benchmarks/results/streams.json
python benchmarks/growth.py benchmarks/results/streams.json docs/img/growth.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Cases = list[dict[str, Any]]


def lines(place: Any, cases: Cases, key: str, lanes: tuple[str, ...], value: Callable[[dict[str, Any]], float]) -> None:
    for lane in lanes:
        points = [
            (case["about"][key], value({**case["lanes"][lane], **case["about"]}))
            for case in cases
            if lane in case["lanes"]
        ]
        place.plot(*zip(*points, strict=True), marker="o", markersize=3, label=lane)
    place.set(xscale="log", yscale="log")
    place.grid(alpha=0.3, which="both")
    place.legend(fontsize=7)


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    figure, ((a, b), (c, d)) = pyplot.subplots(2, 2, figsize=(10, 7))
    sample = ("memcpy", "shm", "tcp", "ZeroMQ", "mp.Queue", "Ray")
    lines(a, found["sample"], "bytes", sample, lambda x: x["bytes"] / median(x["GB/s"]) / 1e3)
    a.set(title="sample stream", xlabel="bytes of a block", ylabel="µs a block")
    asked = ("doorbell", "shm", "tcp", "ZeroMQ", "mp.Queue", "Ray")
    one = [case for case in found["inference"] if case["about"]["clients"] == 1]
    lines(b, one, "rows", asked, lambda x: median(x["p50_us"]))
    b.set(title="inference, one client", xlabel="rows of a request", ylabel="round trip, µs (p50)")
    narrow = [case for case in found["inference"] if case["about"]["rows"] == 8]
    lines(c, narrow, "clients", asked, lambda x: median(x["p50_us"]))
    c.set(title="inference, 8 rows a request", xlabel="clients at a time", ylabel="round trip, µs (p50)")
    weights = ("memcpy", "shm view", "shm copy", "tcp copy", "ZeroMQ", "Ray")
    lines(d, found["parameters"], "bytes", weights, lambda x: median(x["us"]))
    d.set(title="parameters", xlabel="bytes of the weights", ylabel="µs from publish to there")
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=100)


if __name__ == "__main__":
    main()
