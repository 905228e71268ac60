"""``srl check``: whether this machine has what SRL needs, and what to do where it has not."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from srl.core import native
from srl.core.memory import Doorbell, Segment, available_memory

EXTRAS = {
    "ale-py": "atari",
    "mujoco": "mujoco",
    "pettingzoo": "multiagent",
    "mpe2": "multiagent",
    "envpool": "envpool",
    "jaxmarl": "jaxmarl",
    "ray": "ray",
    "imageio": "video",
    "imageio-ffmpeg": "video",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "wandb": "wandb",
    "prometheus-client": "prometheus",
}
"""Optional packages, and the extra that brings each."""
_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[bold red]bad[/]"}


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    verdict: str
    """ok, note (works, but read this) or bad (will not work)."""
    found: str
    todo: str = ""


def findings() -> Iterator[Finding]:
    """Everything there is to look at."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok" if sys.version_info >= (3, 11) else "bad", version, "SRL needs Python 3.11 or newer")
    for package in ("torch", "numpy", "gymnasium", "pyzmq"):
        yield _package(package, "bad", "pip install reallyscalablerl")
    yield _native()
    yield _cores()
    yield _shared_memory()
    yield _docker_shm()
    yield _open_files()
    yield _loopback()
    for package, extra in EXTRAS.items():
        yield _package(package, "note", f"optional: pip install 'reallyscalablerl[{extra}]'")


def report() -> int:
    """Print all findings; 1 if something will not work."""
    table = Table("", "what", "found", "what to do", box=None, header_style="bold")
    bad = False
    for finding in findings():
        bad |= finding.verdict == "bad"
        todo = "" if finding.verdict == "ok" else finding.todo
        table.add_row(_MARKS[finding.verdict], finding.what, escape(finding.found), escape(todo))
    Console(highlight=False).print(table)
    return 1 if bad else 0


def _package(name: str, verdict: str, todo: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, verdict, "not installed", todo)


def _native() -> Finding:
    built = native.PATH.exists()
    todo = "small networks train several times slower: install a C compiler, then SRL again"
    return Finding("compiled code", "ok" if built else "note", "built" if built else "not built", todo)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    todo = "actors and trainer will share one core; give the container or job a second one"
    return Finding("processor cores", "ok" if cores > 1 else "note", str(cores), todo)


def _shared_memory() -> Finding:
    free = available_memory()
    try:
        segment, bell = Segment(1 << 20, shared=True), Doorbell()
        with open(segment.handle, "rb"):
            bell.ring()
    except OSError as error:
        return Finding(
            "shared memory", "bad", str(error), "SRL opens shared memory through /proc/<pid>/fd: mount /proc"
        )
    enough = free > 1 << 30
    todo = "large observations may not fit; lower actors.envs or the horizon"
    return Finding("shared memory", "ok" if enough else "note", f"{free / 2**30:.1f} GiB available", todo)


def _docker_shm() -> Finding:
    folder = Path("/dev") / "shm"
    if not folder.is_dir():
        return Finding(str(folder), "ok", "not there; not needed")
    about = os.statvfs(folder)
    size = about.f_frsize * about.f_blocks
    small = size < 1 << 30
    todo = "SRL does not need it, but other libraries do: docker run --shm-size=2g"
    return Finding(str(folder), "note" if small else "ok", f"{size / 2**30:.1f} GiB", todo)


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    todo = "enough for about 60 workers; for more: ulimit -n 65536"
    return Finding("open files (ulimit -n)", "ok" if soft >= 4096 else "note", str(soft), todo)


def _loopback() -> Finding:
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
    except OSError as error:
        return Finding("TCP ports on 127.0.0.1", "bad", str(error), "the tcp transport needs the loopback interface up")
    return Finding("TCP ports on 127.0.0.1", "ok", f"free ports can be had (got {port})")
