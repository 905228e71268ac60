"""Load, in short: benchmarks/load.py has the same with two hundred actors and for longer."""

from __future__ import annotations

import multiprocessing.forkserver
import subprocess
import sys
import time
from pathlib import Path

import pytest

import srl
from srl.bench.load_crowd import Zoo
from srl.bench.load_watch import Watched, cost
from srl.bench.load_work import Checked, Huge, Sleeper, Slow
from srl.core.errors import TrainingError
from srl.core.memory import Doorbell
from srl.core.slab import Batch, BlockSpec, Slab
from srl.core.specs import ArraySpec, Spaces
from srl.streams.samples import SampleBoard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
ENDLESS = 10**12


@pytest.fixture
def light_forkserver():
    """Workers are forked from a process that has not imported torch, which an earlier test's may have."""
    multiprocessing.forkserver._forkserver._stop()


def light(env, algorithm, count=1, envs=1, **changes):
    actors = srl.Actors(count=count, envs=envs, inference="remote")
    return srl.Experiment(env, algorithm, actors=actors, steps=ENDLESS, **changes)


def trained(watched, updates=1):
    return watched.until(lambda: watched.count("trainer", "updates") >= updates)


def test_two_dozen_light_actors_are_as_fast_as_their_environments(tmp_path, light_forkserver):
    count, latency = 24, 0.2

    def script(watched):
        yield from watched.until(lambda: watched.having("actor", "steps") == count)
        yield from trained(watched)
        before, since, acted = watched.look(), time.monotonic(), watched.count("actor", "steps")
        yield from watched.wait(3)
        rate = (watched.count("actor", "steps") - acted) / (time.monotonic() - since)
        pids = [pid for name, pid in watched.pids().items() if name.startswith("actor")]
        torch = [pid for pid in pids if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]
        return rate, cost(before, watched.look(), "actor"), torch

    x = light(srl.envs.gym(Sleeper, seconds=latency), srl.PPO(horizon=8, minibatch=64), count)
    rate, found, torch = Watched(x, tmp_path, 60).run(script)
    print(f"{rate * latency / count:.0%} of the ideal rate; {found}")
    assert rate > 0.8 * count / latency
    assert found.processes == count and found.rss_most < 60 and found.pss < 30
    assert found.files < 40, "every actor opens what belongs to the others"
    assert not torch


@pytest.mark.parametrize("transport", ["tcp"])  # the benchmark has shared memory too
def test_observations_of_64_megabytes_arrive_as_they_were_shown(tmp_path, transport):
    def script(watched):
        yield from trained(watched, 2)
        return watched.gauge("trainer", "train/checked")

    x = light(srl.envs.gym(Huge, nbytes=2**26), Checked(horizon=1, minibatch=1, epochs=1), transport=transport)
    assert Watched(x, tmp_path, 60).run(script) >= 4


def test_the_check_of_large_observations_can_fail():
    env = Huge(2**12)
    seen = [env.reset(seed=1)[0].copy(), env.step(0)[0].copy()]
    spaces, algorithm = Spaces(env.observation_space, env.action_space), Checked(horizon=1)
    slab = Slab(algorithm.block(spaces, 1), 1, shared=False)
    slab.arrays["obs"][0, :, 0] = seen
    learner = algorithm.learner(spaces, 0, "cpu")
    learner.prepare(Batch(slab, [0]))
    slab.arrays["obs"][0, 1, 0, 1000] ^= 1
    with pytest.raises(TrainingError, match="not those"):
        learner.prepare(Batch(slab, [0]))


def test_ten_thousand_agents_learn_in_one_environment(tmp_path):
    def script(watched):
        yield from watched.until(lambda: watched.count("trainer", "steps") >= 300_000)
        found = watched.monitor.returns["default"]
        return sum(found) / len(found)

    ppo = srl.PPO(horizon=5, epochs=2, minibatch=2500, lr=1e-2)
    x = light(srl.envs.pettingzoo(Zoo, count=10_000, episode=5), ppo)
    assert Watched(x, tmp_path, 60).run(script) > 3.5, "by chance it is 1.25, at best 5"


@pytest.mark.parametrize("transport", ["tcp"])  # the benchmark has shared memory too
def test_actors_stand_still_while_the_trainer_is_slow(tmp_path, transport):
    horizon, count, envs = 16, 3, 8
    bound = 2 * count  # the batch being trained on and the next one, for a staleness of 1

    def script(watched):
        yield from trained(watched)
        begin, since, blocks, ahead = watched.look(), time.monotonic(), 0.0, 0.0
        while time.monotonic() < since + 3:
            blocks = max(blocks, sum(watched.gauge("trainer", f"queue/{name}") for name in ("filling", "full")))
            ahead = max(ahead, watched.count("actor", "steps") - watched.count("trainer", "steps"))
            yield
        return begin, watched.look(), blocks, ahead

    slow = Slow(horizon=horizon, minibatch=64, pause=1.0)
    x = light(srl.envs.gym("CartPole-v1"), slow, count, envs, transport=transport)
    begin, end, blocks, ahead = Watched(x, tmp_path, 60).run(script)
    assert 0 < blocks <= bound
    # A trainer tells of an update up to a quarter of a second later: one more batch may have gone in.
    assert 0 < ahead <= (bound + count) * horizon * envs
    for name in end:
        assert end[name].private < begin[name].private + 8, f"{name} grows"
    assert cost(begin, end, "actor").cpu < 0.1, "they spin"
    assert cost(begin, end, "policy").cpu < 0.1


@pytest.mark.parametrize("transport", ["tcp"])  # the benchmark has shared memory too
def test_nobody_spins_while_an_environment_takes_its_time(tmp_path, transport):
    def script(watched):
        yield from watched.until(lambda: watched.count("actor", "steps") > 0)
        yield from trained(watched)
        before = watched.look()
        yield from watched.wait(4)
        return before, watched.look()

    x = light(srl.envs.gym(Sleeper, seconds=1.0), srl.PPO(horizon=1, minibatch=1), transport=transport)
    before, after = Watched(x, tmp_path, 60).run(script)
    for kind in ("actor", "policy", "trainer", "controller"):
        found = cost(before, after, kind)
        print(f"{kind:10} {found.cpu:.2%} of a core, {found.wakes:.0f} wake-ups a second")
        assert found.cpu < 0.05, f"the {kind} spins"
        assert found.wakes < 200, f"the {kind} is woken for nothing"


FIELDS = {"obs": ArraySpec((2,), "<f4"), "version": ArraySpec((), "<i8")}


def test_who_comes_first_leaves_blocks_for_those_who_are_still_to_come():
    bells = [Doorbell() for _ in range(20)]
    board = SampleBoard(BlockSpec(FIELDS, 1, 1), 40, bells, shared=False)
    consumer = board.consumer()
    early = [board.producer(index, 1) for index in (3, 7)]
    assert consumer.grant(40, 0) == 4
    late = [board.producer(index, 1) for index in range(20) if index not in (3, 7)]
    assert consumer.grant(40, 0) == 36
    for producer in (*early, *late):
        assert [producer.acquire() is not None for _ in range(3)] == [True, True, False]


def test_blocks_of_those_who_left_go_to_those_who_stay():
    board = SampleBoard(BlockSpec(FIELDS, 1, 1), 8, [Doorbell() for _ in range(4)], shared=False)
    consumer = board.consumer()
    producers = [board.producer(index, 1) for index in range(4)]
    for producer in producers[1:]:
        producer.close()
    assert consumer.grant(8, 0) == 8
    assert all(producers[0].acquire() is not None for _ in range(8))


def test_a_producer_gets_the_blocks_again_that_it_had():
    board = SampleBoard(BlockSpec(FIELDS, 1, 1), 8, [Doorbell() for _ in range(4)], shared=False)
    consumer = board.consumer()
    producers = [board.producer(index, 1) for index in range(4)]
    had = [set() for _ in producers]
    for turn in range(20):
        order = producers[turn % 4 :] + producers[: turn % 4]  # in whichever order they are done
        consumer.grant(8, 0)
        for producer in order:
            while (grant := producer.acquire()) is not None:
                had[producer.index].add(grant.block)
                producer.commit(grant.block)
        consumer.release(consumer.take(8))
    assert [len(blocks) for blocks in had] == [2] * 4


def test_a_controller_may_have_more_files_open_than_is_usual():
    script = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from srl.launch import share_the_machine
share_the_machine()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    soft, hard = map(int, done.stdout.split())
    assert soft == (65_536 if hard < 0 else min(65_536, hard))
