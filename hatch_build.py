"""Compiles the files of C there are; without a C compiler SRL is installed without it, and is slower."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES, TARGET = "src/srl/*/*.c", "src/srl/libnative.so"
# No -ffast-math: it is for everything in a process, and takes rounding away.
FLAGS = "-O3 -std=gnu11 -fPIC -shared -fno-math-errno -fno-trapping-math -Wno-psabi"


class Native(BuildHookInterface):
    """Runs when a wheel is built, also for an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say so if that is not possible."""
        sources, target = sorted(map(str, Path(self.root).glob(SOURCES))), Path(self.root, TARGET)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        partial = target.with_suffix(f".{os.getpid()}")
        command = [*compiler, *FLAGS.split(), *sources, "-o", str(partial), "-lm", "-lpthread"]
        try:
            if subprocess.run([*command, "-fopenmp"], capture_output=True).returncode:  # not every compiler has it
                subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or error
            print(f"srl: installed without compiled code, {command[0]} failed: {reason}", file=sys.stderr)
            target.unlink(missing_ok=True)
            return
        partial.replace(target)
        build_data["artifacts"].append(TARGET)
        build_data.update(pure_python=False, infer_tag=True)
