"""Runs on several hosts: the same experiment on a Ray cluster, with keys, and what happens when a host is lost.

Hosts are network namespaces; everything between them goes through their own addresses.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from running import eventually
from srl.bench.hosts import hosts, obstacle
from srl.monitor.sinks import read_metrics

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
    pytest.mark.timeout(240),
]

ROLES = ("trainer", "policy", "actor")
PORT = 6399


class Cluster:
    """A Ray cluster with one node on each host, labelled by what it is for."""

    def __init__(self, found, folder, logs):
        self.hosts, self.folder, self.logs = found, folder, logs
        self.env = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "4",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self.address = f"{found[0].address}:{PORT}"
        for index in range(len(found)):  # one after the other: two that join at the same moment may crash
            self.join(index)
            eventually(lambda count=index + 1: self.nodes() == count, 60, f"a cluster of {index + 1} nodes")

    def join(self, index, cpus=4):
        """Start the Ray node of a host."""
        host, role = self.hosts[index], ROLES[index % len(ROLES)]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        where = [f"--address={self.address}"] if index else head
        command = ["ray", "start", *where, f"--node-ip-address={host.address}", f"--num-cpus={cpus}", "--block"]
        command += [f"--temp-dir={self.folder}", f"--labels=role={role}", "--disable-usage-stats"]
        with open(self.logs / f"ray-{index}.log", "ab") as log:
            host.start(command, env=self.env, stdout=log, stderr=log)

    def srl(self, *arguments):
        """Start an srl command on the first host."""
        command = [sys.executable, "-c", "from srl.cli import main; main()", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return self.hosts[0].start(command, env=self.env, **pipes)

    def nodes(self):
        """How many nodes are alive."""
        code = "import ray; ray.init(logging_level='ERROR'); print(sum(node['Alive'] for node in ray.nodes()))"
        done = subprocess.run(
            ["ip", "netns", "exec", self.hosts[0].name, sys.executable, "-c", code],
            env={**self.env, "RAY_ADDRESS": self.address},
            capture_output=True,
            text=True,
        )
        return int(done.stdout.strip() or 0) if done.returncode == 0 else 0


@pytest.fixture
def cluster(tmp_path):
    folder = Path("/tmp") / f"srlray{os.getpid()}"  # sockets have short names only
    with hosts(3) as found:
        yield Cluster(found, folder, tmp_path)
    shutil.rmtree(folder, ignore_errors=True)


def test_the_same_experiment_learns_on_three_hosts(cluster, tmp_path):
    run_dir = tmp_path / "run"
    placed = [f"--{group}.on=role={role}" for group, role in zip(("trainer", "policies", "actors"), ROLES, strict=True)]
    layout = ["--actors", "2", "--actors.envs", "32", "--actors.inference", "remote"]
    process = cluster.srl(
        "train", "cartpole", "--on", f"ray://{cluster.address}", "--out", run_dir, *placed, *layout,
        "--until", "return>=475", "--steps", "3000000",
    )  # fmt: skip
    keys = run_dir / "keys.json"
    eventually(lambda: read_metrics(run_dir) and read_metrics(run_dir)[-1]["steps"] > 0, 90, "training")
    assert keys.stat().st_mode & 0o777 == 0o600
    for host, name in zip(cluster.hosts, ("trainer-default", "policy-default-0", "actor-0"), strict=True):
        running = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.pids()]
        assert any(b"forkserver" in each for each in running), f"{name} is not on its host"
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out
    evaluation = float(out.split("evaluation: return ")[1].split()[0])
    assert evaluation >= 475, out
    assert not keys.exists()
