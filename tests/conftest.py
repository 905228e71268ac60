"""Fixtures that several test files use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from running import Command, eventually
from srl.launch import share_the_machine

share_the_machine()  # two tests run at once; nothing above imports numpy


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What tests calibrate is not kept for the user; matplotlib's list of fonts, slow to make, is shared."""
    os.environ.setdefault("MPLCONFIGDIR", str(Path("~/.cache/matplotlib").expanduser()))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def srl_command():
    """Start ``srl`` commands; whatever they leave running is ended."""
    commands = []

    def start(*arguments):
        commands.append(Command(*arguments))
        return commands[-1]

    yield start
    for command in commands:
        command.kill_group()


@pytest.fixture
def trained_some():
    """Wait until a run has trained on something."""
    from srl.monitor.sinks import read_metrics

    def wait(run_dir, steps=1, seconds=60.0):
        def condition():
            rows = read_metrics(Path(run_dir))
            return rows and rows[-1]["steps"] >= steps

        eventually(condition, seconds, f"{run_dir} training on {steps} steps")

    return wait


@pytest.fixture(scope="session")
def ray_cluster():
    """Four hosts with a Ray node each, labelled by what they are for, and one that has not joined yet."""
    from srl.bench.cluster import LABELS, cluster
    from srl.bench.hosts import obstacle

    pytest.importorskip("ray", reason="Ray is not installed")
    if obstacle():
        pytest.skip(obstacle())
    with cluster(LABELS, cpus=3, spares=1) as found:
        yield found
