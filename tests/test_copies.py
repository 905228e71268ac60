"""On one host an observation is written once, by the environment, and gathered once, into the trainer's tensor."""

from __future__ import annotations

import pickle
import tracemalloc
from collections import Counter
from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
import torch

import srl
from srl.algorithms.ppo import METRICS, PPOLearner
from srl.core.memory import Doorbell
from srl.core.slab import Batch
from srl.core.specs import Spaces
from srl.envs.base import EnvConfig, Environment
from srl.streams.inference import BoardClient, BoardServer, InferenceBoard
from srl.streams.samples import SampleBoard
from srl.workers.actor import ActorWorker, Route

WIDTH = 50_000  # bytes of one observation: large, so that any copy of one is seen
ROWS, HORIZON, MINIBATCH = 4, 6, 8
SPACES = Spaces(gymnasium.spaces.Box(0, 255, (WIDTH,), np.uint8), gymnasium.spaces.Discrete(2))


class Counting(Environment):
    """Writes numbered observations straight into the block and counts how often."""

    agents = ("agent",)
    copies = ROWS

    def __init__(self):
        super().__init__()
        self.writes = 0

    def spaces(self, agent):
        return SPACES

    def bind(self, groups):
        pass

    def reset(self, seed, out):
        out[0].obs["obs"][:] = 0
        out[0].first[:] = out[0].acts[:] = True

    def step(self, actions, out):
        self.writes += ROWS
        out[0].after.obs["obs"][:] = self.writes % 251
        out[0].after.first[:], out[0].after.acts[:] = False, True
        out[0].reward[:] = 0
        out[0].terminated[:] = out[0].truncated[:] = False

    def close(self):
        pass


@dataclass(frozen=True)
class CountingConfig(EnvConfig):
    env: Counting

    def make(self, copies, *, render=False):
        return self.env

    def describe(self):
        return {}


class Stub(torch.nn.Module):
    """In place of a network: what a network does to its input is not a copy of ours."""

    return_norm, own_networks = None, False

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def small(self):
        return None


@pytest.fixture
def board():
    bell = Doorbell()
    return SampleBoard(srl.PPO(horizon=HORIZON).block(SPACES, ROWS), 2, [bell], shared=True)


def big(event):
    return [shape for shape in event.input_shapes if shape and shape[-1] == WIDTH]


def test_one_write_and_one_gather_between_environment_and_trainer_tensor(board, monkeypatch):
    # The other processes' mappings: the same memory at other addresses, as a policy worker and a trainer have it.
    inference = InferenceBoard(board.slab, board.bells, 1, shared=True)
    for_policy = BoardServer(pickle.loads(pickle.dumps(inference)), 0)
    for_trainer = pickle.loads(pickle.dumps(board)).consumer()
    assert not np.shares_memory(for_trainer.slab.arrays["obs"], board.slab.arrays["obs"])

    env = Counting()
    actor = ActorWorker("actor-0", 0, CountingConfig(env), ROWS, 1, [Route("default", ("agent",), inference, board)], 0)
    actor.start()
    for_trainer.grant(1, 0)
    outputs = {
        "action": np.zeros(ROWS, np.int64),
        "log_prob": np.zeros(ROWS, np.float32),
        "value": np.zeros(ROWS, np.float32),
    }

    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    taken = None
    while taken is None:
        actor.poll(0)
        requests = for_policy.take()
        if requests is not None:
            assert np.shares_memory(requests.obs["obs"], for_policy.board.slab.arrays["obs"])  # read in place
            for_policy.reply(requests, outputs, 0)
        taken = for_trainer.take(1)
    grown = tracemalloc.take_snapshot().compare_to(before, "filename")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert env.writes == HORIZON * ROWS  # every observation once
    assert peak < ROWS * WIDTH, grown[:3]  # and nowhere a second array of even one step's observations

    batch = Batch(for_trainer.slab, [full.block for full in taken])
    expected = for_trainer.slab.arrays["obs"][batch.blocks[0], :-1, :, 0].reshape(-1)
    learner = PPOLearner(srl.PPO(horizon=HORIZON, minibatch=MINIBATCH, epochs=1), Stub(), 0, "cpu")
    got = []

    def gradient(policy, taken, *_):
        got.append(taken["obs"])
        return np.zeros(len(METRICS) - 1)

    monkeypatch.setattr(learner, "gradient", gradient)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        learner.train(learner.prepare(batch), 0, lambda: False)
    touched = Counter(event.name for event in profile.events() if big(event))
    minibatches = HORIZON * ROWS // MINIBATCH
    assert touched.pop("aten::index_select") == minibatches  # the gather
    assert not set(touched) & {
        "aten::copy_",
        "aten::clone",
        "aten::cat",
        "aten::stack",
        "aten::contiguous",
        "aten::index",
    }
    assert sorted(torch.cat(got)[:, 0].tolist()) == sorted(expected.tolist())


def test_two_clients_cost_the_policy_one_gather(board):
    slab = board.slab
    inference = InferenceBoard(slab, [Doorbell(), Doorbell()], 1, shared=True)
    for client in range(2):
        slab.arrays["obs"][client, 3] = client + 1
        BoardClient(inference, client).submit(client * (HORIZON + 1) + 3, 0)
    requests = BoardServer(inference, 0).take()
    assert requests.obs["obs"].shape == (2 * ROWS, WIDTH)
    assert requests.obs["obs"][:, 0].tolist() == [1] * ROWS + [2] * ROWS
