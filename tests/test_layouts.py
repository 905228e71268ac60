"""One experiment, every layout: the same CartPole run learns wherever its workers and streams are."""

from __future__ import annotations

import ctypes
import multiprocessing.forkserver
import os
import platform
import struct
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import srl
from srl.experiment import wire
from srl.launch.local import LocalLauncher
from srl.launch.places import berths, squeezed
from srl.plan import check
from srl.recipes import recipe

LAYOUTS = {
    "inline launcher": {"launcher": "inline", "trainer": srl.Trainer(threads=1)},
    "local, inline inference": {},
    "local, remote inference over shm": {"actors": srl.Actors(count=1, envs=32, ring=2, inference="remote")},
    "local, remote inference and samples over tcp": {
        "actors": srl.Actors(count=1, envs=32, ring=2, inference="remote"),
        "transport": "tcp",
    },
}


@pytest.mark.learning
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cartpole_is_solved_in_every_layout(tmp_path, layout):
    x = replace(recipe("cartpole"), **LAYOUTS[layout])
    result = x.run(tmp_path / "run", steps=220_000)
    assert result.steps >= 220_000
    assert srl.evaluate(tmp_path / "run", episodes=20).return_mean >= 475


MORE = {
    "several actors and policy workers": {
        "actors": srl.Actors(count=2, envs=8, ring=2, inference="remote"),
        "policies": srl.Policies(count=2),
    },
    "inline inference, tcp": {"actors": srl.Actors(count=2, envs=8), "transport": "tcp"},
    "synchronous": {"algorithm": srl.PPO(horizon=32, max_staleness=0)},
    "synchronous, remote, tcp": {
        "algorithm": srl.PPO(horizon=32, max_staleness=0),
        "actors": srl.Actors(count=1, envs=8, inference="remote"),
        "transport": "tcp",
    },
    "very stale": {"algorithm": srl.PPO(horizon=32, max_staleness=5)},
    "no prefetch, small batch": {
        "actors": srl.Actors(count=2, envs=16),
        "trainer": srl.Trainer(batch=1, prefetch=False),
    },
}


@pytest.mark.parametrize("layout", MORE)
def test_other_layouts_train_within_their_staleness_bound(tmp_path, layout):
    from srl.monitor.sinks import read_metrics

    x = replace(recipe("cartpole"), **MORE[layout])
    result = x.run(tmp_path / "run", steps=20_000)
    assert result.steps >= 20_000
    bound = next(iter(x.algorithms.values())).max_staleness
    seen = [row["train/staleness_max"] for row in read_metrics(tmp_path / "run") if "train/staleness_max" in row]
    assert seen
    assert max(seen) <= bound


def watch(x, run_dir, look):
    """Run ``x`` until ``look(children, updates)`` returns something; that. Children are the launcher's."""
    found, updates = [], [0.0]

    def feed(name, kind, report):
        if kind == "trainer":
            updates[0] = report["counters"].get("updates", 0.0)

    launcher = LocalLauncher(wire(x, check(x), run_dir, None), feed, run_dir / "logs", 0, 0, print)

    def ending():
        result = look(launcher.children, updates[0])
        if result is not None:
            found.append(result)
            return time.monotonic()
        return None

    launcher.run(ending)
    return found[0]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_actor_with_remote_inference_is_light(tmp_path, transport):
    x = replace(recipe("cartpole"), actors=srl.Actors(count=1, envs=64, inference="remote"), transport=transport)
    deadline = time.monotonic() + 60
    multiprocessing.forkserver._forkserver._stop()  # an earlier test's may have imported torch

    def look(children, updates):
        actor = children.get("actor-0")
        if updates < 5:
            assert time.monotonic() < deadline
            return None
        log = (tmp_path / "logs" / "actor-0.log").read_text()
        assert log == ""
        with open(f"/proc/{actor.process.pid}/status", encoding="ascii") as about:
            resident = next(int(line.split()[1]) for line in about if line.startswith("VmRSS"))
        with open(f"/proc/{actor.process.pid}/maps", encoding="utf-8") as maps:
            libraries = {line.split("/")[-1].strip() for line in maps if ".so" in line}
        return resident / 1024, libraries

    resident, libraries = watch(x, tmp_path, look)
    print(f"resident set of a light actor ({transport}): {resident:.1f} MB")
    assert not [name for name in libraries if "torch" in name]
    assert resident < 80


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="asks Linux on x86-64")
def test_who_others_wait_for_gets_short_turns(tmp_path):
    """Nanoseconds of a turn that the kernel has noted for each worker."""
    x = replace(recipe("cartpole"), actors=srl.Actors(count=1, envs=64, inference="remote"))
    deadline = time.monotonic() + 60

    def turn(child):
        found = ctypes.create_string_buffer(56)
        assert ctypes.CDLL(None).syscall(315, child.process.pid, found, 56, 0) == 0
        return struct.unpack("IIQiIQQQII", found.raw)[5]

    def look(children, updates):
        assert time.monotonic() < deadline
        return {name: turn(child) for name, child in children.items()} if updates >= 2 else None

    turns = watch(x, tmp_path, look)
    short = turns.pop("policy-default-0")
    if not all(turns.values()):
        pytest.skip("this kernel has no turns of different lengths")
    assert short < min(turns.values())


def test_a_light_actor_process_never_imports_torch():
    code = (
        "import sys, srl, srl.experiment, srl.launch.child, srl.launch.local, srl.envs, srl.recipes, srl.cli\n"
        "import srl.streams.tcp_samples, srl.streams.tcp_inference, srl.streams.tcp_parameters\n"
        "from srl.plan import check\n"
        "check(srl.recipe('cartpole'))\n"
        "assert 'torch' not in sys.modules"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_torch_is_imported_before_the_command_line_is_understood_and_in_vain_only_for_a_moment():
    code = (
        "import os, sys, time; from srl import launch; from srl.cli import main\n"
        "sys.argv[1:] = ['train', 'no-such-recipe']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "pid = launch._forkserver_pid()\n"
        "assert pid is not None\n"
        "assert os.waitpid(pid, 0)[1] == 9, 'it was not ended'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "unknown recipe" in done.stderr


def test_a_step_of_the_slow_path_does_not_import_sympy():
    code = (
        "import sys, gymnasium, numpy as np, torch, srl\n"
        "from srl.core.specs import Spaces\n"
        "spaces = Spaces(gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2))\n"
        "learner = srl.PPO().learner(spaces, 0, 'cpu')\n"
        "seen, none = torch.ones(4, 3), torch.zeros(4)\n"
        "batch = {'obs': seen, 'action': none.long(), 'log_prob': none}\n"
        "before = learner.optimizer.flat.clone()\n"
        "goal = np.arange(12, dtype=np.float32).reshape(3, 4)\n"
        "learner.gradient(learner.policy, batch, {}, None, goal, (4, 0.0, 1.0))\n"
        "learner.optimizer.step()\n"
        "assert (learner.optimizer.flat != before).any()\n"
        "assert 'sympy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_run_that_is_alone_on_its_machine_takes_no_more_cores_than_there_are(tmp_path):
    """It would wait for ever: `--on ray` starts a cluster of this machine alone, to which nobody adds a host."""
    x = replace(recipe("cartpole"), actors=srl.Actors(count=5, envs=10), evaluator=srl.Evaluator(count=1))
    nodes = wire(x, check(x), tmp_path, None)
    found = berths(x, nodes, [{"CPU": 2.0}])
    assert sum(each.resources["CPU"] for each in found) == 7
    fitting = squeezed(found, 2)
    assert 1.9 < sum(each.resources["CPU"] for each in fitting) <= 2
    assert all(each.resources["CPU"] > 0 for each in fitting)
    assert [each.nodes for each in fitting] == [each.nodes for each in found]
    assert squeezed(found, 8) == found
