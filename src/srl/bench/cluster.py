"""A Ray cluster whose hosts are network namespaces (:mod:`srl.bench.hosts`), for tests and benchmarks.

Hosts can be lost and come back: a node that joins again is a new one to Ray.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from srl.bench.hosts import Host, hosts

KINDS = ("actor", "policy", "trainer")
LABELS = [{"head": "yes"}, *({kind: "yes"} for kind in KINDS), dict.fromkeys(KINDS, "yes")]
"""Of five hosts: the controller's, one for each kind of worker, and one that can take over from any of these."""
PORT = 6399
_STARTED = b"Ray runtime started"
_STORE = 100 * 2**20
"""Bytes of each node's object store, in which SRL puts nothing."""
_SECONDS = 90.0
"""A node may take to join."""


class Cluster:
    """One Ray node on each host. The first one is the head, and where commands are started."""

    def __init__(self, found: Sequence[Host], folder: Path, labels: Sequence[Mapping[str, str]], cpus: int = 4) -> None:
        """``folder`` is Ray's own; ``labels`` are those of each host. ``RAY_…`` variables say how it is to be."""
        self.hosts, self.folder, self.labels, self.cpus = found, folder, labels, cpus
        self.address = f"{found[0].address}:{PORT}"
        self.env = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": self.address,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def join(self, index: int, hidden: Path | None = None) -> None:
        """Start the Ray node of a host, on which the folder ``hidden`` is empty, and wait until it has joined.

        One after the other: two that join at the same moment may crash.
        """
        host = self.hosts[index]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        labels = ",".join(f"{name}={value}" for name, value in self.labels[index].items())
        command = ["ray", "start", *([f"--address={self.address}"] if index else head), "--block"]
        command += [f"--node-ip-address={host.address}", f"--num-cpus={self.cpus}", f"--temp-dir={self.folder}"]
        command += [f"--labels={labels}", "--disable-usage-stats", f"--object-store-memory={_STORE}"]
        if hidden is not None:  # `ip netns exec` has given it mounts of its own
            command = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden), *command]
        temporary = self.temporary(index)
        shutil.rmtree(temporary, ignore_errors=True)  # it has been switched on
        temporary.mkdir(parents=True)
        log = self.folder.with_name(f"{self.folder.name}-{index}.log")
        with open(log, "wb") as output:
            env = {**self.env, "TMPDIR": str(temporary)}
            process = host.start(command, env=env, stdout=output, stderr=output)
        deadline = time.monotonic() + _SECONDS
        while _STARTED not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the Ray node of host {index} did not start: {log.read_text()}")
            time.sleep(0.05)

    def temporary(self, index: int) -> Path:
        """Where the processes of a host keep temporary files."""
        return self.folder / f"h{index}"

    def leave(self, index: int) -> None:
        """End the Ray node of a host in good order: Ray knows at once."""
        host, deadline = self.hosts[index], time.monotonic() + 10
        host.kill(signal.SIGTERM)
        while host.pids() and time.monotonic() < deadline:
            time.sleep(0.05)
        host.kill()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the first host."""
        return self.hosts[0].start(command, env={**self.env, **options.pop("env", {})}, **options)

    def srl(self, *arguments: object, **options: Any) -> subprocess.Popen[Any]:
        """Start an srl command on the first host; what it says is in one pipe."""
        command = [sys.executable, "-c", "from srl.cli import main; main()", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return self.start(command, **{**pipes, **options})


@contextlib.contextmanager
def cluster(labels: Sequence[Mapping[str, str]], cpus: int = 4, spares: int = 0) -> Iterator[Cluster]:
    """A cluster with so many hosts as there are ``labels``; the last ``spares`` of them have not joined yet."""
    folder = Path(tempfile.mkdtemp(prefix="srlray", dir="/tmp"))  # sockets have short names only
    try:
        with hosts(len(labels)) as found:
            made = Cluster(found, folder, labels, cpus)
            for index in range(len(labels) - spares):
                made.join(index)
            yield made
    finally:
        for log in folder.parent.glob(f"{folder.name}-*.log"):
            log.unlink()
        shutil.rmtree(folder, ignore_errors=True)
