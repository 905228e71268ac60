"""The compiled code of this package: ``hatch_build.py`` makes one library of its files of C at installation.

Whoever uses it also works without, slower: there may have been no compiler.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

PATH = Path(__file__).parent.with_name("libnative.so")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled code; None if there is none."""
    return ctypes.CDLL(str(PATH)) if PATH.exists() else None


def threads() -> ctypes.c_int64:
    """Over how many threads compiled code that trains may divide its work: as many as torch does."""
    import torch

    return ctypes.c_int64(torch.get_num_threads())
