"""The actor's loop: when it works, when it waits, and what it counts."""

from __future__ import annotations

import time

import gymnasium
import numpy as np
import pytest

import srl
from srl import envs
from srl.core.memory import Doorbell
from srl.core.specs import Spaces
from srl.streams.inference import LocalInference
from srl.streams.samples import SampleBoard
from srl.workers.actor import ActorWorker, Route, groups_of

ROWS, HORIZON = 4, 32
SPACES = Spaces(gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2))
OUTPUTS = {
    "action": np.zeros(ROWS, np.int64),
    "log_prob": np.zeros(ROWS, np.float32),
    "value": np.zeros(ROWS, np.float32),
}


class OneStep(gymnasium.Env):
    """Every episode is over after one step, in all copies at once: every other step is a reset."""

    observation_space, action_space = SPACES.observation, SPACES.action

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 1.0, True, False, {}


class Answers:
    """An inference stream that answers at once."""

    def client(self, index, slab, incarnation):
        return LocalInference(slab, lambda obs, kind, version: (OUTPUTS, version))


@pytest.fixture
def actor():
    board = SampleBoard(srl.PPO(horizon=HORIZON).block(SPACES, ROWS), 2, [Doorbell()], shared=False)
    worker = ActorWorker("actor-0", 0, envs.gym(OneStep), ROWS, 1, [Route("default", ("agent",), Answers(), board)], 0)
    worker.start()
    yield worker, board.consumer()
    worker.close()


def test_a_step_that_is_all_resets_is_not_taken_for_a_wait(actor):
    worker, consumer = actor
    consumer.grant(1, 0)
    begin = time.monotonic()
    while consumer.take(1) is None:
        worker.poll(0.5)
    assert time.monotonic() - begin < 0.5
    assert worker.metrics.counters["steps"] == ROWS * HORIZON / 2  # resets are no steps
    assert len(worker.metrics.episodes) == ROWS * HORIZON / 2
    assert set(worker.metrics.episodes) == {("default", 1.0, 1, 0)}


def test_without_leave_to_start_a_block_the_actor_waits_for_parameters(actor):
    worker, _ = actor
    assert worker.poll(0.05).work == 0
    assert worker.metrics.counters["wait/parameters"] >= 0.04
    assert "steps" not in worker.metrics.counters


def test_agents_go_to_the_policy_of_the_first_pattern_they_match():
    agents = ("wolf_0", "wolf_1", "sheep_0", "shepherd")
    assert groups_of(agents, {"wolf_*": "hunter", "she*": "prey"}) == {
        "hunter": ("wolf_0", "wolf_1"),
        "prey": ("sheep_0", "shepherd"),
    }
    assert groups_of(agents, {"*_0": "first"}) == {"first": ("wolf_0", "sheep_0")}
    assert groups_of(agents, {"shepherd": "dog", "*": "rest"})["dog"] == ("shepherd",)
