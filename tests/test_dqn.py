"""DQN as a user runs it: through a buffer worker in a process of its own, over every transport, at the stated ratio."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

import gymnasium
import pytest

import srl
from srl import envs
from srl.algorithms.dqn import DQNLearner
from srl.core.errors import ConfigError
from srl.launch.run import run
from srl.monitor.sinks import read_metrics
from srl.plan import check
from srl.recipes import recipe


@pytest.mark.learning
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_dqn_solves_cartpole_through_a_buffer_worker(tmp_path, transport):
    judged = srl.Evaluator(count=1, seconds=3, episodes=40)  # that many, so that it is not luck that ends the run
    x = replace(recipe("cartpole-dqn"), transport=transport, until="return>=495", evaluator=judged)
    x.run(tmp_path / "run")
    assert srl.evaluate(tmp_path / "run", tag="best", episodes=40, seed=7).return_mean >= 475


class Slow(gymnasium.Wrapper):
    """CartPole at a thousandth of its speed."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action):
        time.sleep(0.0003)
        return super().step(action)


class SlowLearner(DQNLearner):
    def train(self, prepared, steps, interrupted):
        time.sleep(0.03)
        return super().train(prepared, steps, interrupted)


@dataclass(frozen=True)
class SlowDQN(srl.DQN):
    """DQN whose updates take long."""

    name: ClassVar[str] = "slow-dqn"

    def learner(self, spaces, seed, device):
        return SlowLearner(self, self.policy(spaces), seed, device)


SMALL = {"minibatch": 32, "minibatches": 4, "warmup": 500, "horizon": 16, "samples_per_insert": 3.0}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("slow", ["actors", "trainer"])
def test_samples_per_insert_holds_within_5_percent_whoever_is_slow(tmp_path, slow, transport):
    env = envs.gym(Slow if slow == "actors" else "CartPole-v1")
    algorithm = srl.DQN(**SMALL) if slow == "actors" else SlowDQN(**SMALL)
    x = srl.Experiment(env, algorithm, actors=srl.Actors(envs=4), transport=transport, steps=8000)
    run(x, tmp_path / "run", seconds=60)
    last = read_metrics(tmp_path / "run")[-1]
    inserted = last["replay/steps"] - SMALL["warmup"]
    drawn = SMALL["samples_per_insert"] * inserted - last["replay/owed"]
    print(f"{slow} slow over {transport}: {drawn / inserted:.3f} samples per insert, {inserted:,.0f} steps")
    assert inserted > 3000
    assert drawn / inserted == pytest.approx(SMALL["samples_per_insert"], rel=0.05)


def test_what_dqn_cannot_do_is_said_before_anything_starts():
    with pytest.raises(ConfigError, match="only a Discrete action space"):
        srl.DQN().learner(check(srl.Experiment(envs.gym("Pendulum-v1")))[0].spaces, 0, "cpu")
    cartpole = srl.Experiment(envs.gym("CartPole-v1"), srl.DQN())
    for wrong in ({"memory": "lstm"}, {"warmup": 10**6}, {"samples_per_insert": -1.0}, {"epsilon": 2.0}, {"n_step": 0}):
        with pytest.raises(ConfigError, match="dqn"):
            check(replace(cartpole, algorithm=srl.DQN(**wrong)))
