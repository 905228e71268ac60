"""Policies with memory: what training unrolls is what acting did, and nobody's memory is anybody else's.

The blocks of these tests come from real actors, through every way a policy can be asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
import torch

import srl
from srl import envs
from srl.core.memory import Doorbell
from srl.core.slab import Batch
from srl.core.specs import Spaces
from srl.envs.base import EnvConfig, Environment
from srl.policies.host import PolicyHost, arrays_of
from srl.services.names import FileNames
from srl.streams.inference import InferenceBoard
from srl.streams.parameters import ParameterBoard
from srl.streams.samples import SampleBoard
from srl.streams.tcp_inference import TcpInference
from srl.workers.actor import ActorWorker, Route
from srl.workers.policy import InlineInference, PolicyWorker

SPACES = Spaces(gymnasium.spaces.Box(-3, 3, (3,)), gymnasium.spaces.Discrete(3))
ROWS, RING, HORIZON, CHUNK, SIZE = 5, 2, 12, 4, 8
NOBODY = np.zeros(1, bool)


class Turns(Environment):
    """Random observations, turns, ends and resets, whatever is done."""

    agents = ("agent",)

    def __init__(self, copies):
        super().__init__()
        self.copies = copies

    def spaces(self, agent):
        return SPACES

    def bind(self, groups):
        pass

    def reset(self, seed, out):
        self.rng = np.random.default_rng(seed)
        self.ended = np.zeros(self.copies, bool)
        out[0].obs["obs"][:] = self.rng.normal(size=(self.copies, 3))
        out[0].first[:], out[0].acts[:] = True, self.rng.random(self.copies) < 0.7

    def step(self, actions, out):
        views, resets = out[0], self.ended
        views.reward[:] = 0
        over = (self.rng.random(self.copies) < 0.15) & ~resets
        views.terminated[:], views.truncated[:] = over, False
        views.after.obs["obs"][:] = self.rng.normal(size=(self.copies, 3))
        views.after.first[:] = resets
        views.after.acts[:] = ~over & (self.rng.random(self.copies) < 0.7)
        self.ended = over

    def close(self):
        pass


@dataclass(frozen=True)
class TurnsConfig(EnvConfig):
    def make(self, copies, *, render=False):
        return Turns(copies)

    def describe(self):
        return {"turns": ""}


def algorithm(kind):
    return srl.PPO(
        horizon=HORIZON, chunk=CHUNK, memory=kind, memory_size=SIZE, hidden=(16,), minibatch=CHUNK * 10, epochs=1
    )


def learner(kind):
    """A learner whose actions and values depend on its memory as if it had been trained."""
    found = algorithm(kind).learner(SPACES, 3, "cpu")
    with torch.no_grad():
        for weight in found.policy.action.parameters():
            weight.mul_(200)
    return found


class World:
    """An actor with two vectors, and a policy it asks inline, over a board, or over TCP."""

    def __init__(self, kind, transport, tmp_path):
        self.algorithm, self.learner, self.transport = algorithm(kind), learner(kind), transport
        spec = self.algorithm.block(SPACES, ROWS)
        bells = [Doorbell()] * RING
        self.samples = SampleBoard(spec, 12, bells, shared=False)
        self.parameters = ParameterBoard(shared=False)
        self.parameters.writer().publish(arrays_of(self.learner.policy), 0)
        self.hosted = {"algorithm": self.algorithm, "spaces": SPACES, "parameters": self.parameters}
        self.hosted.update(seed=1, threads=1, clients=RING, rows=ROWS)
        self.policy = None
        if transport == "inline":
            self.inference = InlineInference(**self.hosted)
        elif transport == "board":
            self.inference = InferenceBoard(self.samples.slab, bells, 1, shared=False)
        else:
            self.inference = TcpInference("inference", FileNames(tmp_path / "names"), spec, RING, 1)
        self.start_policy()
        self.actor = None
        self.start_actor(0)
        self.consumer = self.samples.consumer()

    def start_policy(self):
        if self.transport != "inline":
            if self.policy is not None:
                self.policy.close()
            self.policy = PolicyWorker("policy-default-0", 0, inference=self.inference, **self.hosted)
            self.policy.start()

    def start_actor(self, incarnation):
        if self.actor is not None:
            self.actor.close()
        route = Route("default", ("agent",), self.inference, self.samples)
        self.actor = ActorWorker("actor-0", 0, TurnsConfig(), ROWS, RING, [route], 7)
        self.actor.incarnation = incarnation
        self.actor.start()

    def poll(self):
        self.actor.poll(0)
        if self.policy is not None:
            self.policy.poll(0.01 if self.transport == "tcp" else 0)

    def collect(self, count):
        """The next ``count`` blocks, held."""
        granted, taken = 0, []
        while len(taken) < count:
            granted += self.consumer.grant(count - granted, 0)
            self.poll()
            taken += self.consumer.take(1) or []
        return taken

    def close(self):
        for worker in (self.actor, self.policy):
            if worker is not None:
                worker.close()


@pytest.fixture
def world(tmp_path):
    made = []

    def make(kind="lstm", transport="inline"):
        made.append(World(kind, transport, tmp_path / str(len(made))))
        return made[-1]

    yield make
    for each in made:
        each.close()


def unrolled(policy, slab, blocks, forget=()):
    """(log-probability, value) of every step in ``blocks`` as training computes them, and as acting wrote them."""
    batch, spec = Batch(slab, blocks), slab.spec
    where = batch.positions[batch.chunks().reshape(-1)]
    inputs = {name: torch.from_numpy(slab.flat[name][where]) for name in (*spec.inputs, *spec.actions)}
    if "first" in forget:
        inputs["first"] = torch.zeros_like(inputs["first"])
    if "valid" in forget:
        inputs["valid"] = torch.ones_like(inputs["valid"])
    state = {name: torch.from_numpy(slab.flat[name][batch.chunk_starts]) for name in spec.state}
    if "state" in forget:
        state = {name: torch.zeros_like(value) for name, value in state.items()}
    with torch.no_grad():
        log_prob, _, value = policy.evaluate(inputs, state)
    return np.stack([log_prob, value]), np.stack([slab.flat[name][where] for name in ("log_prob", "value")])


class Follower:
    """Does step by step, with one memory kept by hand, what a policy should have done with one client."""

    def __init__(self, policy, kind):
        self.policy = policy
        self.state = {f"state/{part}": torch.zeros(ROWS, SIZE) for part in ("h", "c")[: 1 + (kind == "lstm")]}

    def follow(self, block):
        """Check one block's memory and values against one's own, to the step after its last."""
        for step in range(HORIZON + 1):
            first = torch.from_numpy(block["first"][step]).unsqueeze(-1)
            before = {name: torch.where(first, 0.0, value) for name, value in self.state.items()}
            if step % CHUNK == 0 and step < HORIZON:
                for name, value in before.items():
                    np.testing.assert_allclose(block[name][step // CHUNK], value, atol=1e-5, err_msg=f"{name} {step}")
            with torch.no_grad():
                outputs = self.policy.act({"obs": torch.from_numpy(block["obs"][step]), **before}, None)
            np.testing.assert_allclose(block["value"][step], outputs["value"], atol=1e-5, err_msg=f"step {step}")
            moves = torch.from_numpy(block["valid"][step]).unsqueeze(-1)
            if step < HORIZON:
                self.state = {name: torch.where(moves, outputs[name], value) for name, value in before.items()}


KINDS = pytest.mark.parametrize("kind", ["lstm", "gru"])
TRANSPORTS = pytest.mark.parametrize("transport", ["inline", "board", "tcp"])


@KINDS
@TRANSPORTS
def test_training_unrolls_exactly_what_acting_did(world, kind, transport):
    here = world(kind, transport)
    blocks = [full.block for full in here.collect(6)]
    slab = here.samples.slab
    steps = {name: slab.arrays[name][blocks, :HORIZON] for name in ("first", "valid")}
    inside = np.ones(HORIZON, bool)
    inside[::CHUNK] = False
    assert steps["first"][:, inside].any(), "no episode began within a chunk"
    assert 0.3 < steps["valid"].mean() < 0.9
    found, acted = unrolled(here.learner.policy, slab, blocks)
    np.testing.assert_allclose(found, acted, atol=1e-5)
    # ... and each of memory, resets and turns has a part in that.
    for forgotten in ("state", "first", "valid"):
        wrong, _ = unrolled(here.learner.policy, slab, blocks, forget=[forgotten])
        assert np.abs(wrong - acted).max() > 0.01, forgotten


@KINDS
def test_the_learner_finds_ratios_of_one_in_its_first_pass(world, kind):
    here = world(kind)
    blocks = [full.block for full in here.collect(4)]
    for group in here.learner.optimizer.param_groups:
        group["lr"] = 0.0
    metrics = here.learner.train(here.learner.prepare(Batch(here.samples.slab, blocks)), 0, lambda: False)
    assert abs(metrics["kl"]) < 1e-9
    assert metrics["clip_fraction"] == 0
    assert metrics["grad_norm"] > 0
    here.samples.slab.arrays["state/h"][blocks] = 0
    metrics = here.learner.train(here.learner.prepare(Batch(here.samples.slab, blocks)), 0, lambda: False)
    assert metrics["kl"] > 1e-5


@KINDS
@TRANSPORTS
def test_every_clients_memory_goes_on_from_block_to_block(world, kind, transport):
    here = world(kind, transport)
    followers = [Follower(here.learner.policy, kind) for _ in range(RING)]
    seen = [0] * RING
    last = [None] * RING
    for full in here.collect(8):
        block = here.samples.slab.block(full.block)
        followers[full.producer].follow(block)
        if last[full.producer] is not None:  # the step after a block's last is the next one's first
            for name in ("obs", "first", "valid"):
                np.testing.assert_array_equal(last[full.producer][name][-1], block[name][0])
        seen[full.producer] += 1
        last[full.producer] = block
    assert min(seen) >= 3


@TRANSPORTS
def test_a_restarted_actor_begins_with_an_empty_memory(world, transport):
    here = world("lstm", transport)
    here.collect(2)
    if transport == "inline":
        here.inference = InlineInference(**here.hosted)  # its policy dies with it
    here.start_actor(1)
    for full in here.collect(2):
        assert full.incarnation == 1
        block = here.samples.slab.block(full.block)
        assert block["first"][0].all()
        assert not block["state/h"][0].any()
        Follower(here.learner.policy, "lstm").follow(block)


@pytest.mark.parametrize("transport", ["board", "tcp"])
@KINDS
def test_a_policy_worker_that_lost_its_memory_says_so_in_the_block(world, kind, transport):
    here = world(kind, transport)
    here.consumer.grant(2, 0)
    group = here.actor.slots[0].groups[0]
    while group.step < CHUNK + 1:
        here.poll()
    while not all(slot.groups[0].client.ready() for slot in here.actor.slots):
        here.policy.poll(0.01)
    steps = [slot.groups[0].step for slot in here.actor.slots]
    here.start_policy()
    taken = []
    while len(taken) < 2:
        here.poll()
        taken += here.consumer.take(1) or []
    slab = here.samples.slab
    for full in taken:
        block, lost = slab.block(full.block), steps[full.producer] + 1
        assert block["first"][lost].all()
        assert not block["first"][[lost - 1, lost + 1]].all(-1).any()
        Follower(here.learner.policy, kind).follow(block)
    found, acted = unrolled(here.learner.policy, slab, [full.block for full in taken])
    np.testing.assert_allclose(found, acted, atol=1e-5)


# The host of a policy, by itself


def inputs(rng, clients=1, first=False):
    rows = clients * ROWS
    return {
        "obs": rng.normal(size=(rows, 3)).astype(np.float32),
        "first": np.full(rows, first),
        "valid": np.ones(rows, bool),
    }


def host(kind, clients=2):
    made = PolicyHost(algorithm(kind), SPACES, 0, clients=clients, rows=ROWS, explore=False)
    made.load(arrays_of(learner(kind).policy), 0)
    return made


def memory(here):
    return {name: kept.copy() for name, kept in here.memory.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@KINDS
def test_a_peek_answers_like_the_step_it_stands_for_and_moves_nothing(kind):
    here, rng = host(kind), np.random.default_rng(0)
    who = np.array([1])
    for _ in range(3):
        here.act(inputs(rng), who, NOBODY)
    before, seen = memory(here), inputs(rng)
    peeked = here.act(seen, who, np.array([True]))
    assert_equal(memory(here), before)
    assert_equal(here.act(seen, who, NOBODY), peeked)
    assert np.abs(memory(here)["state/h"][1] - before["state/h"][1]).max() > 0.01


@KINDS
def test_only_the_memory_of_the_clients_that_asked_moves(kind):
    here, rng = host(kind, clients=3), np.random.default_rng(0)
    for _ in range(2):
        here.act(inputs(rng, 3), np.arange(3), np.zeros(3, bool))
    before, seen = memory(here), inputs(rng, 2)
    outputs = here.act(seen, np.array([0, 2]), np.array([False, True]))
    after = memory(here)
    for name in before:
        assert np.abs(after[name][0] - before[name][0]).max() > 0.01
        np.testing.assert_array_equal(after[name][1:], before[name][1:])
        np.testing.assert_array_equal(outputs[name], before[name][[0, 2]].reshape(-1, SIZE))  # what it had before


@KINDS
def test_nothing_of_an_episode_is_left_in_the_next(kind):
    rng = np.random.default_rng(0)
    histories = [[inputs(rng) for _ in range(5)] for _ in range(2)]
    episode = [inputs(rng, first=step == 0) for step in range(4)]
    found = []
    for history in (*histories, []):
        here = host(kind, clients=1)
        who = np.zeros(1, np.int64)
        for step in history:
            last = here.act(step, who, NOBODY)
        found.append([here.act(step, who, NOBODY) for step in episode])
    assert np.abs(last["value"] - found[0][-1]["value"]).max() > 0.01
    for other in found[1:]:
        for step, expected in zip(other, found[0], strict=True):
            assert_equal(step, expected)


@KINDS
def test_a_row_that_is_not_on_turn_keeps_its_memory(kind):
    here, rng = host(kind, clients=1), np.random.default_rng(0)
    who = np.zeros(1, np.int64)
    here.act(inputs(rng), who, NOBODY)
    before, seen = memory(here), inputs(rng)
    seen["valid"][[1, 3]] = False
    here.act(seen, who, NOBODY)
    moved = np.abs(memory(here)["state/h"] - before["state/h"]).max(-1)[0] > 1e-3
    assert moved.tolist() == seen["valid"].tolist()


# Learning


class Recall(gymnasium.Env):
    """The first observation shows a bit, all others are alike; the last action is to be that bit."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    length = 4

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bit, self.left = int(self.np_random.integers(2)), self.length
        return np.array([self.bit * 2 - 1], np.float32), {}

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        return np.zeros(1, np.float32), float(over and action == self.bit), over, False, {}


@pytest.mark.learning
@pytest.mark.parametrize("kind", ["", "lstm", "gru"])
def test_what_only_memory_can_tell_is_learned_with_memory_and_only_then(tmp_path, kind):
    x = srl.Experiment(
        envs.gym(Recall),
        srl.PPO(
            horizon=16,
            chunk=8,
            minibatch=256,
            epochs=4,
            lr=5e-3,
            anneal_steps=20_000,
            hidden=(16,),
            memory=kind,
            memory_size=16,
            entropy=0.01,
            max_staleness=0,
        ),
        actors=srl.Actors(envs=64),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=16_000,
    )
    x.run(tmp_path / "run", quiet=True)
    found = srl.evaluate(tmp_path / "run", episodes=100).return_mean
    assert found >= 0.95 if kind else 0.3 <= found <= 0.7
