"""What numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


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
