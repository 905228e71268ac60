"""Several hosts on one machine, for tests and benchmarks of what crosses a network: namespaces joined by a bridge.

Each has an address of its own, and its network can be cut, delayed and made lossy. Needs Linux, root and iproute2. All
hosts see the same files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from srl.bench import wire

_USED = itertools.count()


def obstacle() -> str:
    """Why there can be no such hosts here, if so."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") else "the command ip is missing (Debian: iproute2)"


class Host:
    """One namespace. ``outside`` is its network card's other end, at the bridge."""

    def __init__(self, name: str, address: str, outside: str, bridge: str) -> None:
        self.name, self.address, self.outside, self.bridge = name, address, outside, bridge
        self.within = ("ip", "netns", "exec", name)
        self.started: list[subprocess.Popen[Any]] = []
        self._wire: subprocess.Popen[Any] | None = None

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host."""
        self.started.append(subprocess.Popen((*self.within, *command), start_new_session=True, **options))
        return self.started[-1]

    def pids(self) -> list[int]:
        """The processes on this host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]

    def has(self, pid: int) -> bool:
        """Whether a process is on this host."""
        try:
            return Path(f"/proc/{pid}/ns/net").stat().st_ino == Path(f"/run/netns/{self.name}").stat().st_ino
        except OSError:
            return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """A power cut: every process on this host gets a signal at once."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cut(self) -> None:
        """Pull the plug out of its network card."""
        _run("ip", "link", "set", self.outside, "down")

    def heal(self) -> None:
        """Put it back."""
        _run("ip", "link", "set", self.outside, "up")

    def slow(self, delay_ms: float = 0.0, loss_percent: float = 0.0) -> None:
        """Delay all packets and lose some, in both directions; without arguments as before."""
        near, far = f"{self.outside}n", f"{self.outside}f"
        if self._wire is not None:
            self._wire.kill()
            self._wire.communicate()
            self._wire = None
            _run("ip", "link", "del", near)
            _run("ip", "link", "set", self.outside, "master", self.bridge)
        if not (delay_ms or loss_percent):
            return
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        _run("ip", "link", "set", self.outside, "nomaster")
        _run("ip", "link", "set", near, "up")
        _run("ip", "link", "set", far, "master", self.bridge, "up")
        command = [*wire.COMMAND, self.outside, near, str(delay_ms), str(loss_percent)]
        self._wire = subprocess.Popen(command, stdout=subprocess.PIPE)
        if self._wire.stdout is None or self._wire.stdout.readline() != wire.READY:
            raise RuntimeError("the bad wire did not start")

    def limit(self, mbit: float) -> None:
        """Let no more than so many million bits a second through, each way."""
        for where in ((), self.within):
            card = "eth0" if where else self.outside
            bucket = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
            _run(*where, "tc", "qdisc", "replace", "dev", card, "root", *bucket)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, which are gone with everything on them afterwards."""
    number = (os.getpid() * 4 + next(_USED)) % 2**14
    subnet, tag = f"10.{128 + number // 256}.{number % 256}", f"srl{number}"
    bridge = f"{tag}b"
    made: list[Host] = []
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for index in range(count):
            host = Host(f"{tag}-{index}", f"{subnet}.{index + 1}", f"{tag}v{index}", bridge)
            _run("ip", "netns", "add", host.name)
            made.append(host)
            inside = f"{tag}e{index}"
            _run("ip", "link", "add", host.outside, "type", "veth", "peer", "name", inside)
            _run("ip", "link", "set", inside, "netns", host.name)
            _run("ip", "link", "set", host.outside, "master", bridge, "up")
            within = ("ip", "-n", host.name)
            _run(*within, "link", "set", inside, "name", "eth0")
            _run(*within, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run(*within, "link", "set", "lo", "up")
            _run(*within, "link", "set", "eth0", "up")
            _run(*within, "route", "add", "default", "dev", "eth0")
        yield made
    finally:
        for host in made:
            host.slow()
            _empty(host)
            _try("ip", "netns", "del", host.name)
            _try("ip", "link", "del", host.outside)
        _try("ip", "link", "del", bridge)


def _empty(host: Host) -> None:
    deadline = time.monotonic() + 10
    while host.pids() and time.monotonic() < deadline:
        host.kill()
        time.sleep(0.05)
    for process in host.started:
        process.wait(timeout=5)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _try(*command: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        _run(*command)
