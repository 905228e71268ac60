"""Hosts of a cluster are killed and cut off while a run goes on. ``benchmarks/faults.py`` does it longer.

One run goes through most of it; in the end nothing was trained on twice, and no version has gone backwards.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import srl
from running import eventually
from srl.bench.faults import Run, prepared
from srl.recipes import recipe

pytestmark = pytest.mark.timeout(240)
WORKERS = ("actor-0", "actor-1", "policy-default-0", "trainer-default")


def experiment(cluster, **changes):
    return replace(
        recipe("cartpole"),
        actors=srl.Actors(count=2, envs=8, inference="remote", on="actor=yes"),
        policies=srl.Policies(on="policy=yes"),
        trainer=srl.Trainer(checkpoint_seconds=1.0, on="trainer=yes"),
        steps=10**9,
        restarts=0,
        launcher=f"ray://{cluster.address}",
        **changes,
    )


ROOM = """
import sys
from srl.launch import places
places._PATIENCE = places._ATTEMPT = 1.0
from srl.cli import main
main()
"""


def test_a_run_that_is_too_large_for_the_cluster_says_that_it_waits_and_ends_when_told(ray_cluster, tmp_path):
    where = ["--on", f"ray://{ray_cluster.address}", "--out", str(tmp_path / "run")]
    given = [sys.executable, "-c", ROOM, "train", "cartpole", *where, "--actors", "40", "--actors.on", "actor=yes"]
    with open(tmp_path / "out", "wb") as out:
        process = ray_cluster.start(given, stdout=out, stderr=out)
    text = "waits for room on the cluster: it takes 41 CPUs on hosts with actor=yes; free on all hosts: "
    eventually(lambda: text in " ".join((tmp_path / "out").read_text().split()), 60, "the message")
    process.terminate()
    assert process.wait(20) == 130, (tmp_path / "out").read_text()


def test_a_host_that_does_not_see_the_folder_is_named(ray_cluster, tmp_path):
    blind = len(ray_cluster.hosts) - 1  # which has not joined yet
    ray_cluster.labels[blind]["blind"] = "yes"
    ray_cluster.join(blind, hidden=tmp_path)
    try:
        where = ["--on", f"ray://{ray_cluster.address}", "--out", tmp_path / "run", "--actors.on", "blind=yes"]
        process = ray_cluster.srl("train", "cartpole", "--actors", "1", *where)
        out, _ = process.communicate(timeout=90)
        assert process.returncode == 2, out
        assert f"the run's folder {tmp_path / 'run'} is not there on host" in " ".join(out.split())
    finally:
        ray_cluster.leave(blind)
        del ray_cluster.labels[blind]["blind"]


@pytest.fixture(scope="module")
def run(ray_cluster, tmp_path_factory):
    """A run on four hosts that may not restart anything on its own account, and a fifth host that is free."""
    run_dir = tmp_path_factory.mktemp("faults") / "run"
    run = Run(prepared(experiment(ray_cluster), run_dir), run_dir, ray_cluster.start)
    run.working(WORKERS, 90)
    run.wait(lambda: any((run.run_dir / "checkpoints").glob("*/v*")), 30, "a checkpoint")
    ray_cluster.join(len(ray_cluster.hosts) - 1)
    yield run
    try:
        assert run.stop() == 0, run.tail()
        trained = run.trained()
        assert trained.batches and trained.twice == trained.backwards == 0
        nothing_is_left(ray_cluster)
    finally:
        ray_cluster.leave(len(ray_cluster.hosts) - 1)


def left(cluster):
    """Processes and temporary files of runs on all hosts."""
    found = [path for index in range(len(cluster.hosts)) for path in cluster.temporary(index).glob("pymp-*")]
    for pid in (pid for host in cluster.hosts for pid in host.pids()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        found += [command] if b"forkserver" in command or b"Site" in command else []
    return found


def nothing_is_left(cluster):
    deadline = time.monotonic() + 15
    while left(cluster) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left(cluster) == []


def host_of(cluster, run, kind):
    """The host of a worker, and all workers there."""
    first = run.workers(kind)[0]
    host = next(host for host in cluster.hosts if host.has(first.pid))
    return host, [life for life in run.workers() if host.has(life.pid)]


def lost(run, lives, since):
    """Whether the run has said that the host of these workers was lost."""
    said = [text for t, text in run.said if t > since and "was lost; started again where there is room" in text]
    return all(any(life.name in text for text in said) for life in lives)


@pytest.mark.parametrize("kind", ["trainer", "actor"])
def test_the_workers_of_a_killed_host_start_again_on_another_one(run, ray_cluster, kind):
    host, lives = host_of(ray_cluster, run, kind)
    at = time.monotonic()
    host.kill()
    for life in lives:
        assert run.back(life, at) < 30
    assert lost(run, lives, at)
    assert not host.pids()
    run.goes_on("trainer-default", time.monotonic())
    ray_cluster.join(ray_cluster.hosts.index(host))


def test_workers_for_which_there_is_no_room_start_again_when_their_host_is_back(run, ray_cluster):
    host, lives = host_of(ray_cluster, run, "policy")
    spare = len(ray_cluster.hosts) - 1  # full by now, or, if this test is the first, to be kept out of it
    empty = not any(ray_cluster.hosts[spare].has(life.pid) for life in run.workers())
    if empty:
        ray_cluster.leave(spare)
    at = time.monotonic()
    host.kill()
    run.wait(lambda: lost(run, lives, at), 30, "the loss")
    ray_cluster.join(ray_cluster.hosts.index(host))
    for life in lives:
        assert run.back(life, at) < 60
        assert host.has(run.life(life.name).pid)
    run.goes_on("trainer-default", time.monotonic())
    if empty:
        ray_cluster.join(spare)


def test_a_network_that_was_cut_heals_and_nobody_is_started_again(run, ray_cluster):
    before = {(life.name, life.number) for life in run.workers()}
    host, _ = host_of(ray_cluster, run, "trainer")
    host.cut()
    time.sleep(10)  # that is the fault; after six seconds connections are given up
    host.heal()
    healed = time.monotonic()
    for name in WORKERS:
        run.goes_on(name, healed)
    assert {(life.name, life.number) for life in run.workers()} == before


def test_a_slow_and_lossy_network_is_good_enough(run, ray_cluster):
    before = {(life.name, life.number) for life in run.workers()}
    try:
        for host in ray_cluster.hosts:
            host.slow(25, 0.5)  # a packet between two hosts passes two cards
        for name in WORKERS:
            run.goes_on(name, time.monotonic() + 2)
    finally:
        for host in ray_cluster.hosts:
            host.slow()
    assert {(life.name, life.number) for life in run.workers()} == before


def test_a_killed_controller_leaves_nothing_and_its_run_is_resumed(run, ray_cluster):
    run.process.kill()
    run.process.wait()
    nothing_is_left(ray_cluster)
    begin = time.monotonic()
    run.resume()
    run.wait(lambda: run.trained().batches[-1][0] > begin, 60, "training after the resume")
