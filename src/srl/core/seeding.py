"""Seeds: every random choice in a run derives from the run's seed and the name of who makes it."""

from __future__ import annotations

import zlib

import numpy as np


def derive(seed: int, *path: str | int) -> int:
    """A seed for the part of the run named by ``path``, independent of the seeds of all other parts."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in path]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1)[0] >> 1)
