"""Auto-tuning: the rule, the calibration, what is kept of it, and what the user is told."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import srl
from srl import config, tune
from srl.bench import throughput
from srl.bench.parts import Cost, Costs
from srl.commands.train import _actors_in_short, _experiment
from srl.core.errors import ConfigError
from srl.experiment import Actors
from srl.launch.run import Result
from srl.plan import check, divided
from srl.recipes import RECIPES, recipe
from srl.tune import Machine, best, rate, threads_for, tuned

TWO = Machine(cores=2, threads=1)


def costs(env=1.0, forward=1.0, train=10.0, waits=0.0, make=0.001, vector=0.0, divides=False):
    return Costs(Cost(env, vector), Cost(forward, 0.0), train, waits, make, divides)


def count(found, here=TWO, envs=64, **actors):
    return best(found, Actors(envs=envs, **actors), 1, here)


def test_one_actor_feeds_a_trainer_that_is_the_bottleneck():
    assert count(costs(env=1, forward=2, train=13)) == 1
    assert count(costs(env=1, forward=2, train=13), Machine(cores=64, threads=1)) == 1


def test_a_trainer_has_as_many_threads_as_its_share_of_the_work_fills_cores():
    assert threads_for(costs(env=1, forward=1, train=6, divides=True), 64, 2) == 1  # a core is left to the actor
    assert threads_for(costs(env=1, forward=1, train=6, divides=True), 64, 16) == 12
    assert threads_for(costs(env=38, forward=2, train=8, divides=True), 64, 16) == 2
    assert threads_for(costs(env=38, forward=2, train=1, divides=True), 64, 16) == 1


def test_a_large_network_is_trained_by_as_many_threads_as_its_share_takes():
    assert threads_for(costs(env=360, forward=240, train=250), 8, 2) == 1
    assert threads_for(costs(env=360, forward=240, train=1000), 8, 2) == 2
    assert threads_for(costs(env=360, forward=240, train=250), 8, 16) == 6  # 4.7, and a run shows more than was seen
    assert threads_for(costs(env=360, forward=240, train=450), 8, 2) == 2  # 0.86, likewise


def test_slow_environments_get_as_many_actors_as_there_are_cores():
    assert count(costs(env=40, train=4)) == 2
    assert count(costs(env=40, train=1), Machine(cores=8, threads=1)) == 8


def test_no_more_actors_than_keep_the_trainer_busy():
    assert count(costs(env=40, train=12), Machine(cores=64, threads=1)) == 8  # 4 would do if nothing cost more


def test_environments_that_wait_get_more_actors_than_there_are_cores():
    assert count(costs(env=10, train=10, waits=1000)) == 16
    assert count(costs(env=10, train=10, waits=1000), Machine(cores=1, threads=1)) == 8


def test_copies_that_are_slow_to_make_are_made_on_every_core():
    trainer_bound = costs(env=300, forward=300, train=3000, make=0.2)
    assert count(trainer_bound, Machine(cores=2, threads=2), envs=32) == 2
    assert count(replace(trainer_bound, make=0.001), Machine(cores=2, threads=2), envs=32) == 1


def test_one_core_has_one_actor():
    for found in (costs(), costs(env=100, train=1), costs(make=1.0)):
        assert count(found, Machine(cores=1, threads=1)) == 1


def test_vectors_are_not_made_so_small_that_their_own_cost_eats_the_gain():
    many = Machine(cores=64, threads=64)
    assert count(costs(env=1, forward=0, train=1, vector=500), many) < count(costs(env=1, forward=0, train=1), many)


def test_with_remote_inference_the_forward_pass_is_no_work_of_the_actors():
    found, here = costs(env=10, forward=10, train=5), Machine(cores=8, threads=1)
    assert rate(found, Actors(envs=64), 1, here, 8) == pytest.approx(1e6 / 5)
    assert rate(found, Actors(envs=64, inference="remote"), 1, here, 8) == pytest.approx(1e6 / 10)
    assert count(found, here, inference="remote") == 2  # one policy worker is the bottleneck


def test_what_a_moment_shows_of_acting_is_not_relied_upon():
    assert count(costs(env=21, forward=2, train=21)) == 2


@pytest.mark.parametrize("envs", [1, 7, 12, 30, 37, 64, 97])
@pytest.mark.parametrize("ring", [1, 2])
def test_copies_are_divided_evenly_and_stay_as_many(envs, ring):
    x = replace(recipe("cartpole"), actors=Actors(envs=envs * ring, ring=ring))
    chosen = best(costs(env=500), x.actors, 1, Machine(cores=4, threads=1))
    actors = divided(x, chosen).actors
    assert actors.count * actors.ring * actors.envs == envs * ring
    assert chosen == {1: 1, 7: 7, 12: 4, 30: 5, 37: 1, 64: 4, 97: 1}[envs]


def test_the_line_says_if_the_copies_cannot_be_divided_well(cache, measured):
    for envs, said in ((37, "; 37 copies cannot be divided well, a multiple of 2 can"), (36, "")):
        x = replace(recipe("cartpole"), actors=Actors(envs=envs))
        assert tuned(x, check(x))[1].endswith(f"2 cores{said}")


def test_copies_that_cannot_be_divided_over_the_ring_are_refused():
    with pytest.raises(ConfigError, match=r"33 copies .* over 2 vectors; 32 can"):
        check(replace(recipe("cartpole"), actors=Actors(envs=33, ring=2)))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "srl" / "costs"


@pytest.fixture
def measured(monkeypatch):
    """How often a calibration was made; it finds what ``found`` says."""
    calls = []
    found = [costs(env=40, train=4)]

    def measure(x, plan):
        calls.append(x)
        return found[0]

    monkeypatch.setattr(tune, "_measure", measure)
    monkeypatch.setattr(tune, "cores", lambda: 2)
    return calls, found


def test_costs_are_measured_once_for_a_machine_and_an_experiment(cache, measured):
    calls, _ = measured
    x = recipe("cartpole")
    first, second = tuned(x, check(x)), tuned(replace(x, steps=5, seed=9), check(x))
    assert len(calls) == 1
    assert first[1] == second[1]
    other = replace(x, actors=Actors(envs=32))
    tuned(other, check(other))
    assert len(calls) == 2
    assert len(list(cache.iterdir())) == 2  # and no half-written file


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"env": 1}'])
def test_a_broken_cache_is_measured_anew(cache, measured, broken):
    x = recipe("cartpole")
    tuned(x, check(x))
    (path,) = cache.iterdir()
    path.write_bytes(broken)
    tuned(x, check(x))
    assert len(measured[0]) == 2
    assert json.loads(path.read_bytes())["train"] == 4


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, measured, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    x = recipe("cartpole")
    assert tuned(x, check(x))[0].actors == Actors(count=2, envs=32)


def test_what_the_user_chose_stays(measured):
    x = replace(recipe("cartpole"), actors=Actors(count=3, envs=5))
    assert tuned(x, check(x)) == (x, "")
    assert not measured[0]


def test_the_inline_launcher_has_one_actor_and_says_nothing(measured):
    x = replace(recipe("cartpole"), launcher="inline")
    assert tuned(x, check(x)) == (replace(x, actors=Actors(count=1, envs=64)), "")
    assert not measured[0]


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (recipe("cartpole-dqn"), "replay buffer"),
        (recipe("tictactoe"), "several policies"),
        (replace(recipe("cartpole"), trainer=srl.Trainer(batch=2)), "count blocks"),
    ],
)
def test_what_cannot_be_calibrated_has_one_actor_and_the_line_says_why(measured, x, reason):
    found, line = tuned(x, check(x))
    assert found.actors == replace(x.actors, count=1)
    assert line.startswith(f"1 actor × {x.actors.envs} copies")
    assert reason in line
    assert not measured[0]


def test_the_line_says_what_was_chosen_and_why(cache, measured):
    x = recipe("halfcheetah")
    measured[1][0] = costs(env=34, forward=4, train=12, make=0.2)
    assert tuned(x, check(x))[1] == (
        "2 actors × 32 copies, inference inline, trainer on 1 thread: acting is 76% of the work "
        "(env 34 µs, forward 4.0 µs, training 12 µs a step), a copy takes 0.20 s to make, 2 cores"
    )


def test_every_number_chosen_is_kept_in_the_run(cache, measured, tmp_path, capsys):
    x = replace(recipe("cartpole"), algorithm=srl.PPO(horizon=16, minibatch=64), actors=Actors(envs=8))
    result = x.run(tmp_path / "run", steps=500)
    kept = config.load(tmp_path / "run")
    assert kept.actors == Actors(count=2, envs=4)
    assert kept.trainer.threads == 1
    assert "2 actors × 4 copies" in capsys.readouterr().out
    assert {path.stem for path in (tmp_path / "run" / "logs").iterdir()} >= {"actor-0", "actor-1"}
    srl.resume(tmp_path / "run", steps=result.steps + 500)
    assert len(measured[0]) == 1


def test_a_real_calibration_takes_a_moment_and_none_the_second_time(cache):
    x = recipe("cartpole")
    plans = check(x)
    tuned(replace(x, actors=Actors(envs=2)), plans)  # the fork server imports torch, as it would for the run
    taken = []
    for _ in range(2):  # the better of two: other tests run at the same time
        shutil.rmtree(cache)
        begin = time.perf_counter()
        found, line = tuned(x, plans)
        taken.append(time.perf_counter() - begin)
    assert min(taken) < 5
    begin = time.perf_counter()
    assert tuned(x, plans) == (found, line)
    assert time.perf_counter() - begin < 0.5
    assert found.actors.count * found.actors.envs == 64
    assert "of the work (env" in line


class Sleepy(gymnasium.Env):
    """Waits most of the time."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        time.sleep(0.002)
        return np.zeros(3, np.float32), 0.0, False, False, {}


class Broken(Sleepy):
    """Cannot be stepped."""

    def step(self, action):
        raise ValueError("the robot fell apart")


class Fatal(Sleepy):
    """Takes its process along."""

    def step(self, action):
        import os

        os._exit(3)


def small(env, **options):
    ppo = srl.PPO(horizon=16, minibatch=64, **options)
    return srl.Experiment(srl.envs.gym(env), ppo, actors=Actors(envs=16))


def test_an_environment_that_sleeps_gets_more_actors_than_there_are_cores(cache, monkeypatch):
    monkeypatch.setattr(tune, "cores", lambda: 2)
    x = small(Sleepy)
    found, line = tuned(x, check(x))
    assert found.actors.count > 2
    assert "the environment waits" in line


@pytest.mark.parametrize(("env", "reason"), [(Broken, "the robot fell apart"), (Fatal, "its process ended")])
def test_a_calibration_that_fails_costs_nothing_but_the_choice(cache, env, reason):
    x = small(env)
    found, line = tuned(x, check(x))
    assert found.actors == Actors(count=1, envs=16)
    assert "not calibrated" in line
    assert reason in line
    assert not cache.exists()


def test_recurrent_policies_can_be_calibrated(cache):
    x = replace(recipe("recall"), actors=Actors(envs=16))
    assert "of the work" in tuned(x, check(x))[1]


@pytest.mark.parametrize("said", [["--actors", "auto"], ["--actors=auto"], ["--actors.count", "auto"], []])
def test_auto_can_be_said_on_the_command_line(said):
    assert _experiment(_actors_in_short(["cartpole", *said]))[0].actors == Actors(envs=64)


@pytest.mark.parametrize("said", [["--actors", "3"], ["--actors=3"], ["--actors.count=3"]])
def test_so_can_a_number(said):
    assert _experiment(_actors_in_short(["cartpole", *said, "--seed", "4"]))[0].actors == Actors(count=3, envs=64)


def test_every_recipe_leaves_the_number_of_actors_open():
    assert all(each.make().actors.count == 0 for each in RECIPES.values())


def test_an_interrupted_measurement_ends_the_benchmark(monkeypatch):
    stopped = Result(Path(), steps=0, trained=0, seconds=1.0, interrupted=True, return_mean=None)
    monkeypatch.setattr(throughput, "run", lambda *_, **__: stopped)
    with pytest.raises(KeyboardInterrupt):
        throughput.measure(recipe("cartpole"), 1.0, 1.0)
