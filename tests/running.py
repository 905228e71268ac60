"""Running ``srl`` commands as a user would, and looking at what they leave."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest


def eventually(condition, seconds=30.0, what="the condition"):
    """Poll until ``condition()`` is true; its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    pytest.fail(f"{what} did not come true within {seconds} s")


def group_of(pid):
    """Processes of the process group ``pid``, as {pid: command line}."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(stat[2]) == pid and stat[0] != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (OSError, IndexError):
            continue
    return found


class Command:
    """An ``srl`` command in a process group of its own, with a folder of its own for temporary files."""

    def __init__(self, *arguments):
        command = [sys.executable, "-c", "from srl.cli import main; main()", *map(str, arguments)]
        self.temporary = Path(tempfile.mkdtemp(prefix="t"))
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )
        self.pid = self.process.pid

    def litter(self):
        """Temporary files of the command (torch's own cache aside), and shared memory segments with a name."""
        files = [path for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        return [*files, *Path("/dev/shm").glob("*srl*"), *Path("/dev/shm").glob("psm_*")]

    def finish(self, seconds=120.0):
        """(exit code, stdout, stderr)"""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def kill_group(self):
        for pid in group_of(self.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=10)
        shutil.rmtree(self.temporary)
