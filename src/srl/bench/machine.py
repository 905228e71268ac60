"""What numbers were measured on, and where they are printed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "gymnasium")}
    return {"processor": model, "cores": os.cpu_count(), "python": platform.python_version(), **packages}


def report(*, markup: bool = False) -> Console:
    """Where a benchmark prints; in a file its tables are as wide as they must be."""
    from rich.console import Console

    console = Console(highlight=False, markup=markup)
    if not console.is_terminal:
        console.width = 120
    return console
