"""Runs on several hosts: the same experiment on a Ray cluster, with keys. What happens when one is lost: tests/faults.

Hosts are network namespaces; everything between them goes through their own addresses.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from running import eventually
from srl.monitor.sinks import read_metrics

pytestmark = pytest.mark.timeout(240)
PLACED = ["--actors.on=actor=yes", "--policies.on=policy=yes", "--trainer.on=trainer=yes"]


def test_the_same_experiment_learns_on_four_hosts(ray_cluster, tmp_path):
    run_dir = tmp_path / "run"
    layout = ["--actors", "2", "--actors.envs", "32", "--actors.inference", "remote"]
    process = ray_cluster.srl(
        "train", "cartpole", "--on", f"ray://{ray_cluster.address}", "--out", run_dir, *PLACED, *layout,
        "--until", "return>=475", "--steps", "3000000",
    )  # fmt: skip
    keys = run_dir / "keys.json"
    eventually(lambda: read_metrics(run_dir) and read_metrics(run_dir)[-1]["steps"] > 0, 90, "training")
    assert keys.stat().st_mode & 0o777 == 0o600
    for host, kind in zip(ray_cluster.hosts[1:], ("actors", "policies", "trainer"), strict=False):
        running = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.pids()]
        assert any(b"forkserver" in each for each in running), f"the {kind} are not on their host"
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out
    evaluation = float(out.split("evaluation: return ")[1].split()[0])
    assert evaluation >= 475, out
    assert not keys.exists()
