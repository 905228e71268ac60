"""Replay: what is drawn how often, what it carries, who is held back, and the values that DQN learns from it."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import example, given, settings
from hypothesis import strategies as st

import srl
from srl import envs
from srl.algorithms.base import Replay
from srl.core.memory import Doorbell
from srl.core.slab import Slab
from srl.core.specs import Spaces
from srl.core.sumtree import SumTree
from srl.services.checkpoints import CheckpointStore
from srl.streams.samples import SampleBoard
from srl.workers.buffer import ReplayBuffer
from srl.workers.replay import blocks_kept, feedback_block, replay_store, sample_block

fuzz = settings(deadline=None, max_examples=100, database=None)

# The tree


@st.composite
def settings_of_weights(draw):
    size = draw(st.integers(1, 40))
    change = st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 9)), min_size=1, max_size=8)
    return size, draw(st.lists(change, min_size=1, max_size=8))


@fuzz
@given(settings_of_weights())
def test_the_tree_sums_and_finds_like_weights_laid_end_to_end(case):
    size, changes = case
    tree, weights = SumTree(size), np.zeros(size)
    for change in changes:
        leaves = np.array(sorted(dict(change)))
        values = np.array([dict(change)[leaf] for leaf in leaves.tolist()], float)
        tree[leaves] = values
        weights[leaves] = values
        np.testing.assert_array_equal(tree[np.arange(size)], weights)
        assert tree.total == weights.sum()
        if tree.total:
            marks = np.arange(0, tree.total, 0.25)
            # Whole numbers add up exactly, so a border belongs to the leaf that begins there.
            np.testing.assert_array_equal(tree.find(marks), np.searchsorted(np.cumsum(weights), marks, side="right"))


@fuzz
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=50).filter(any),
    st.lists(st.floats(0, 1), min_size=1, max_size=20),
)
@example([0.009, 0.622, 3.032], [1.0])  # 0.631 + 3.032 is rounded up
@example([15.7, 0.0, 37.2, 0.0], [1.0])
def test_an_empty_leaf_is_never_found_however_sums_are_rounded(weights, shares):
    tree = SumTree(len(weights))
    tree[np.arange(len(weights))] = np.array(weights)
    found = tree.find(np.array(shares) * tree.total)
    assert (tree[found] > 0).all()


# The store


ROWS, HORIZON = 2, 5
SPACES = Spaces(Box(0, 1e6, (1,)), Discrete(2))
SPEC = srl.DQN(horizon=HORIZON).block(SPACES, ROWS)
UNIFORM = Replay("uniform", batch=64, gamma=0.5)
PRIORITIZED = replace(UNIFORM, kind="prioritized", alpha=1.0, beta=1.0)


def number(block, step, row):
    """The observation that stands for one step."""
    return block * 100 + step * 10 + row


def write(slab, block, count):
    """Write the ``count``-th block: every observation is a number of its own, nothing ends."""
    fields = slab.block(block)
    steps, rows = np.indices((HORIZON + 1, ROWS))
    fields["obs"][..., 0] = number(count, steps, rows)
    fields["action"][:] = (steps + rows) % 2
    fields["reward"][:] = steps
    fields["version"][:] = count
    fields["valid"][:] = True
    fields["terminated"][:] = fields["truncated"][:] = fields["first"][:] = False


class Kept:
    """A store of ``places`` blocks with as many more in its slab, and a block to draw into."""

    def __init__(self, replay, places=3, seed=0):
        self.slab = Slab(SPEC, places + 1, shared=False)
        self.store = replay_store(self.slab, replay, places, seed)
        drawn = sample_block(SPEC, replay)
        self.out = Slab(drawn, 1, shared=False).block(0)
        self.free = list(range(places + 1))
        self.came = 0

    def insert(self):
        block = self.free.pop(0)
        write(self.slab, block, self.came)
        steps, gone = self.store.insert(block)
        if gone >= 0:
            self.free.append(gone)
        self.came += 1
        return steps

    def draw(self):
        """One batch, as copies."""
        self.store.draw(self.out)
        return {name: value.copy() for name, value in self.out.items()}

    def prioritize(self, priority):
        """Give every sample the priority ``priority(observation)``."""
        for place in np.flatnonzero(self.store.blocks >= 0):
            count = HORIZON * ROWS
            index = place * count + np.arange(count)
            seen = self.slab.arrays["obs"][self.store.blocks[place], :HORIZON, :, 0].reshape(-1)
            stamp = np.full(count, self.store.stamps[place])
            self.store.reprioritize(index, stamp, priority(seen).astype(np.float32))


def everything(kept):
    """The observations of all steps that can be drawn."""
    return kept.slab.arrays["obs"][kept.store.blocks, :HORIZON, :, 0].reshape(-1)


def frequencies(kept, batches):
    """How often each observation was drawn, in the order of :func:`everything`."""
    seen = np.concatenate([kept.draw()["obs"][0, :, 0] for _ in range(batches)])
    names, counts = np.unique(seen, return_counts=True)
    found = dict(zip(names.tolist(), counts.tolist(), strict=True))
    return np.array([found.pop(name, 0) for name in everything(kept).tolist()]), found


def assert_proportional(counts, weights):
    expected = counts.sum() * weights / weights.sum()
    statistic = np.sum((counts - expected) ** 2 / expected)
    freedom = len(counts) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), (counts, expected)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_new_steps_are_drawn_equally_often(kind):
    kept = Kept(replace(UNIFORM, kind=kind))
    for _ in range(3):
        kept.insert()
    counts, others = frequencies(kept, 200)
    assert not others
    assert_proportional(counts, np.ones(len(counts)))
    assert (kept.draw()["weight"][0] == 1).all()


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_steps_are_drawn_in_proportion_to_their_priorities(alpha):
    kept = Kept(replace(PRIORITIZED, alpha=alpha))
    for _ in range(3):
        kept.insert()
    kept.prioritize(lambda seen: 1 + seen % 7)
    counts, others = frequencies(kept, 400)
    assert not others
    assert_proportional(counts, (1 + everything(kept) % 7) ** alpha)


def test_with_full_correction_the_weighted_mean_is_the_uniform_mean():
    kept = Kept(replace(PRIORITIZED, batch=512), seed=3)
    for _ in range(3):
        kept.insert()
    kept.prioritize(lambda seen: 1 + seen % 100 // 5)  # late steps far more often
    batches = [kept.draw() for _ in range(100)]
    quantity = [batch["obs"][0, :, 0] % 100 for batch in batches]
    weighted = np.mean([np.average(x, weights=b["weight"][0]) for x, b in zip(quantity, batches, strict=True)])
    uniform = (everything(kept) % 100).mean()
    assert weighted == pytest.approx(uniform, rel=0.02)
    assert np.mean(quantity) > 1.3 * uniform  # what was corrected
    assert all(batch["weight"].max() == 1 for batch in batches)


def test_half_a_correction_is_the_root_of_the_whole_one():
    found = []
    for beta in (1.0, 0.5, 0.0):
        kept = Kept(replace(PRIORITIZED, beta=beta))
        kept.insert()
        kept.prioritize(lambda seen: 1 + seen % 7)
        found.append(kept.draw())
    np.testing.assert_array_equal(found[0]["index"], found[1]["index"])
    np.testing.assert_allclose(np.sqrt(found[0]["weight"][0]), found[1]["weight"][0], rtol=1e-5)
    assert (found[2]["weight"][0] == 1).all()
    assert len(set(found[0]["weight"][0].tolist())) > 3


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_what_was_evicted_is_never_drawn_and_all_that_is_there_is(kind):
    kept = Kept(replace(PRIORITIZED, kind=kind))
    for count in range(9):
        assert kept.insert() == HORIZON * ROWS
        drawn = np.concatenate([kept.draw()["obs"][0, :, 0] for _ in range(12)])
        assert set((drawn // 100).astype(int).tolist()) == set(range(max(0, count - 2), count + 1))
        assert len(kept.store) == min(count + 1, 3) * HORIZON * ROWS


def test_a_priority_that_comes_too_late_changes_nothing():
    kept = Kept(PRIORITIZED)
    for _ in range(3):
        kept.insert()
    old = kept.draw()
    kept.insert()  # evicts block 0
    gone = old["stamp"][0] == 0
    assert gone.any() and not gone.all()
    before, top = kept.store.tree.nodes.copy(), kept.store.top
    kept.store.reprioritize(old["index"][0][gone], old["stamp"][0][gone], np.full(gone.sum(), 50, np.float32))
    np.testing.assert_array_equal(kept.store.tree.nodes, before)
    assert kept.store.top == top
    kept.store.reprioritize(old["index"][0], old["stamp"][0], np.full(len(gone), 50, np.float32))
    here = old["index"][0][~gone]
    assert (kept.store.tree[here] == 50).all()
    changed = kept.store.tree[np.arange(kept.store.tree.capacity)] == 50
    assert set(np.flatnonzero(changed).tolist()) == set(here.tolist())


def test_a_new_step_is_drawn_as_often_as_the_most_urgent_one():
    kept = Kept(PRIORITIZED)
    kept.insert()
    kept.prioritize(lambda seen: 1 + seen % 7)
    kept.insert()
    weights = kept.store.tree[np.arange(2 * HORIZON * ROWS)]
    assert (weights[HORIZON * ROWS :] == weights.max()).all()


def test_samples_carry_rewards_discount_and_what_followed_across_episode_ends():
    kept = Kept(replace(UNIFORM, n_step=3, gamma=0.5))
    write(kept.slab, 0, 0)
    fields = kept.slab.block(0)
    fields["reward"][:, 0] = [1, 2, 4, 0, 8, 0]
    fields["terminated"][2, 0] = True
    fields["valid"][3, 0] = False  # the reset
    fields["reward"][:, 1] = [1, 2, 0, 4, 8, 0]
    fields["truncated"][1, 1] = True
    fields["valid"][2, 1] = False
    fields["valid"][5, 1] = False  # not on turn when the block ends
    steps, _ = kept.store.insert(0)
    assert steps == 8
    expected = {  # step and row: reward, discount, what followed
        (0, 0): (1 + 1 + 1, 0.0, None),
        (1, 0): (2 + 2, 0.0, None),
        (2, 0): (4, 0.0, None),
        (4, 0): (8, 0.5, (5, 0)),  # the block ends
        (0, 1): (1 + 1, 0.25, (2, 1)),  # bootstrapped from the last observation of the episode
        (1, 1): (2, 0.5, (2, 1)),
        (3, 1): (4, 0.5, (4, 1)),  # of the step after it nothing is known
    }
    seen = {}
    for _ in range(5):
        batch = kept.draw()
        for i in range(64):
            place = divmod(int(batch["obs"][0, i, 0]), 10)
            later = divmod(int(batch["obs"][1, i, 0]), 10)
            discount = float(batch["discount"][0, i])
            assert batch["action"][0, i] == sum(place) % 2
            seen[place] = (float(batch["reward"][0, i]), discount, later if discount else None)
    assert seen == expected


# Windows


WINDOWS = replace(UNIFORM, window=3, stride=1, burn_in=1)


def windows_of(batch):
    """The observations of every window drawn, as rows of numbers."""
    return batch["obs"][..., 0].T


def test_windows_are_steps_as_they_were_and_all_of_them_are_drawn():
    kept = Kept(replace(WINDOWS, batch=512))
    for _ in range(3):
        kept.insert()
    batch = kept.draw()
    found = windows_of(batch)
    np.testing.assert_array_equal(np.diff(found, axis=1), 10)
    starts = {number(block, step, row) for block in range(3) for step in range(HORIZON - 2) for row in range(ROWS)}
    assert set(found[:, 0].tolist()) == starts
    steps = found // 10 % 10
    np.testing.assert_array_equal(batch["reward"].T[:, :3], steps[:, :3])
    np.testing.assert_array_equal(batch["action"].T[:, :3], ((steps + found % 10) % 2)[:, :3])
    assert len(kept.store) == len(starts)


def test_a_window_in_which_nothing_can_be_learned_is_not_drawn():
    kept = Kept(replace(WINDOWS, batch=256), places=1)
    write(kept.slab, 0, 0)
    kept.slab.arrays["valid"][0, 2:, 0] = False  # the first row is there for two steps, of which one is burnt
    kept.store.insert(0)
    found = windows_of(kept.draw())
    assert {each for each in found[:, 0].tolist() if each % 10 == 0} == {number(0, 0, 0)}


def test_the_agents_of_a_copy_are_drawn_together():
    spec = replace(SPEC, agents=2)
    replay = replace(WINDOWS, teams=True, batch=32)
    slab = Slab(spec, 1, shared=False)
    write(slab, 0, 0)
    store = replay_store(slab, replay, 1, 0)
    store.insert(0)
    out = Slab(sample_block(spec, replay), 1, shared=False).block(0)
    store.draw(out)
    found = windows_of(out)
    assert len(found) == 64
    np.testing.assert_array_equal(found[::2] + 1, found[1::2])
    assert (out["index"][0, ::2] == out["index"][0, 1::2]).all()


def test_windows_begin_with_the_memory_of_their_chunk():
    spec = srl.R2D2(horizon=8, chunk=4, burn_in=2, memory="gru", memory_size=1).block(SPACES, 2)
    replay = srl.R2D2(horizon=8, chunk=2, burn_in=2, minibatch=64, minibatches=1, prioritized=False).replay()
    replay = replace(replay, stride=4)
    slab = Slab(spec, 1, shared=False)
    slab.arrays["valid"][:] = True
    steps, rows = np.indices((9, 2))
    slab.arrays["obs"][0, ..., 0] = 10 * steps + rows
    slab.arrays["state/h"][0, ..., 0] = [[0, 1], [40, 41]]
    store = replay_store(slab, replay, 1, 0)
    store.insert(0)
    out = Slab(sample_block(spec, replay), 1, shared=False).block(0)
    store.draw(out)
    assert set(out["state/h"][0, :, 0].tolist()) == {0, 1, 40, 41}
    np.testing.assert_array_equal(out["state/h"][0, :, 0], out["obs"][0, :, 0])


def test_new_samples_get_the_priority_that_their_actor_gave_them():
    algorithm = srl.DQN(horizon=HORIZON, actor_priorities=True, n_step=1, gamma=0.5, alpha=1.0)
    spec, replay = algorithm.block(SPACES, ROWS), algorithm.replay()
    slab = Slab(spec, 1, shared=False)
    write(slab, 0, 0)
    fields = slab.block(0)
    fields["q_taken"][:] = 3
    fields["q_best"][:] = np.arange(HORIZON + 1)[:, None]
    store = replay_store(slab, replay, 1, 0)
    store.insert(0)
    expected = [abs(step + 0.5 * (step + 1) - 3) for step in range(HORIZON) for _ in range(ROWS)]
    np.testing.assert_allclose(store.tree[np.arange(HORIZON * ROWS)], np.maximum(expected, 1e-6), rtol=1e-5)


# The worker: nobody runs away


class Line:
    """A buffer worker between two producers and a trainer that this test plays itself."""

    def __init__(self, ratio, batch, warmup, kind="uniform", checkpoints=None, resume=False):
        self.replay = Replay(kind, capacity=200, warmup=warmup, batch=batch, samples_per_insert=ratio, keep=True)
        self.samples = SampleBoard(SPEC, blocks_kept(SPEC, self.replay) + 4, [Doorbell()] * 2, shared=False)
        self.batches = SampleBoard(sample_block(SPEC, self.replay), 3, [Doorbell()], shared=False)
        self.priorities = None
        if kind == "prioritized":
            self.priorities = SampleBoard(feedback_block(self.replay), 3, [Doorbell()], shared=False)
        streams = (self.samples, self.batches, self.priorities)
        self.buffer = ReplayBuffer("buffer", self.replay, *streams, 0, 2, checkpoints, resume)
        self.buffer.start()
        self.producers = [self.samples.producer(i, 0) for i in range(2)]
        self.feedback = self.priorities.producer(0, 0) if self.priorities else None
        self.trainer = self.batches.consumer()
        self.rng = np.random.default_rng(0)
        self.made = self.trained = self.told = 0
        """Steps handed over, samples trained on, steps the trainer was told of."""

    def check(self):
        """The inequality of the module, with steps and samples counted by ourselves."""
        drawn = self.drawn()
        owed = self.replay.samples_per_insert * (self.made - self.replay.warmup) - drawn
        slack = self.replay.samples_per_insert * HORIZON * ROWS * 2 + self.replay.batch
        assert owed <= slack
        if drawn:
            assert owed >= -slack
            assert self.made >= self.replay.warmup

    def drawn(self):
        """Samples on their way to the trainer, or there."""
        return self.trained + self.trainer.levels()[1] * self.replay.batch

    def produce(self):
        """Both producers fill what they may; the number of blocks."""
        made = 0
        for producer in self.producers:
            if (grant := producer.acquire()) is not None:
                write(self.samples.slab, grant.block, made)
                valid = self.samples.slab.arrays["valid"][grant.block]
                valid[:] = self.rng.random(valid.shape) < 0.8
                producer.commit(grant.block)
                self.made += int(valid[:-1].sum())
                made += 1
        return made

    def train(self):
        """Train on one batch, if there is one."""
        self.trainer.grant(3, 0)
        taken = self.trainer.take(1)
        if taken is None:
            return False
        block = self.batches.slab.block(taken[0].block)
        self.trained += self.replay.batch
        self.told += int(block["inserted"][:-1].sum())
        if self.feedback is not None and (grant := self.feedback.acquire()) is not None:
            back = self.priorities.slab.block(grant.block)
            for name in ("index", "stamp"):
                back[name][0] = block[name][0]
            back["priority"][0] = self.rng.random(self.replay.batch)
            self.feedback.commit(grant.block)
        self.trainer.release(taken)
        return True

    def pass_on(self):
        self.buffer.poll(0)
        self.check()


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
@pytest.mark.parametrize(("ratio", "batch"), [(0.5, 16), (4.0, 32), (8.0, 7)])
@pytest.mark.parametrize("slow", ["producer", "trainer", "neither"])
def test_samples_per_insert_is_kept_whoever_is_slow(kind, ratio, batch, slow):
    line = Line(ratio, batch, warmup=60, kind=kind)
    enough = 60 + 25 * (2 * HORIZON * ROWS + batch / ratio)  # a slack is then 4 % of all samples
    for turn in range(10_000):
        line.pass_on()
        if slow != "producer" or turn % 7 == 0:
            line.produce()
            line.check()
        line.pass_on()
        if slow != "trainer" or turn % 7 == 0:
            line.train()
            line.check()
        if line.made > enough:
            break
    assert line.made > enough, "they stand still"
    assert line.drawn() / (line.made - 60) == pytest.approx(ratio, rel=0.05)
    assert line.made - 3 * HORIZON * ROWS - 60 <= line.told <= line.made
    assert line.buffer.metrics.counters["drawn"] == line.buffer.drawn


def test_without_a_trainer_the_actors_stop_and_without_actors_the_trainer_stops():
    line = Line(2.0, 16, warmup=60)

    def exhaust(do):
        """Do it until the buffer allows no more of it; how often that was."""
        times = idle = 0
        while idle < 5:
            line.pass_on()
            idle = 0 if do() else idle + 1
            times += not idle
            assert times < 100, "nothing holds it back"
        return times

    assert exhaust(line.produce) > 3
    for _ in range(3):  # and each goes on as soon as the other does
        assert exhaust(line.train) > 1
        assert exhaust(line.produce) > 1


def test_a_block_that_comes_while_the_buffer_counts_is_counted(monkeypatch):
    line = Line(2.0, 16, warmup=60)
    count = line.buffer.consumer.levels

    def levels():
        line.produce()  # as an actor in another process does at any moment
        return count()

    monkeypatch.setattr(line.buffer.consumer, "levels", levels)
    for _ in range(100):
        line.pass_on()
    assert line.made > 60


def test_nothing_is_drawn_before_there_is_enough():
    line = Line(100.0, 16, warmup=60)
    while line.made < 60:
        line.pass_on()
        assert not line.train()
        line.produce()
    line.pass_on()
    assert line.train()


def test_without_a_ratio_neither_side_waits():
    line = Line(0.0, 16, warmup=60)
    for _ in range(100):
        line.buffer.poll(0)
        line.produce()
    assert line.made > 1000
    for _ in range(100):
        line.buffer.poll(0)
        assert line.train() or line.trained == 0
    assert line.trained > 90 * 16


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_a_saved_replay_draws_what_the_lost_one_would_have_drawn(tmp_path, kind):
    store = CheckpointStore(tmp_path / "replay", "replay", keep=1)
    first = Line(4.0, 32, warmup=60, kind=kind, checkpoints=store)
    for _ in range(60):
        first.pass_on()
        first.produce()
        first.train()
    first.buffer.poll(0)
    assert first.made > 300  # more than it keeps
    while first.train():  # only the buffer's own content is saved
        pass
    first.buffer.poll(0)
    while first.trainer.take(1):
        pass
    first.buffer.stop()
    second = Line(4.0, 32, warmup=60, kind=kind, checkpoints=store, resume=True)
    assert (second.buffer.inserted, second.buffer.drawn) == (first.buffer.inserted, first.buffer.drawn)
    drawn = []
    for line in (first, second):
        out = Slab(sample_block(SPEC, line.replay), 1, shared=False).block(0)
        found = []
        for _ in range(3):
            line.buffer.store.draw(out)
            found.append({name: value.copy() for name, value in out.items()})
        drawn.append(found)
    for one, two in zip(*drawn, strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, two[name], err_msg=name)
    second.made, second.trained = first.made, first.trained
    for _ in range(30):  # and it goes on like any other
        second.buffer.poll(0)
        second.produce()
        second.train()
    assert second.made > first.made


# Learning


def experiment(env, algorithm, steps, seed=1):
    return srl.Experiment(
        env,
        algorithm,
        actors=srl.Actors(envs=16),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=steps,
        seed=seed,
    )


def q_values(x, run_dir, obs):
    from srl.plan import check, checkpoint_store
    from srl.policies.host import load_arrays

    plan = check(x)[0]
    policy = plan.algorithm.policy(plan.spaces)
    load_arrays(policy, checkpoint_store(run_dir, plan).load().under("learner").under("policy").arrays)
    with torch.no_grad():
        return policy({"obs": torch.as_tensor(obs)}).numpy()


class Chain(gymnasium.Env):
    """Five states in a row; at the right end there is a reward of 1 and it is over. Cut off after 12 steps."""

    observation_space, action_space = Discrete(5), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(4)), 0
        return self.place, {}

    def step(self, action):
        self.steps += 1
        self.place = self.place + 1 if action == 1 else max(0, self.place - 1)
        over = self.place == 4
        return self.place, float(over), over, self.steps == 12 and not over, {}


CHAIN = np.array([[0.9 ** (4 - max(s - 1, 0)), 0.9 ** (3 - s)] for s in range(4)])
TABLE = {"gamma": 0.9, "lr": 2e-2, "horizon": 8, "hidden": (), "minibatch": 64, "minibatches": 4, "warmup": 512}
TABLE |= {"n_step": 1, "epsilon": 1.0, "target_every": 20, "replay_steps": 4096, "samples_per_insert": 8.0}


@pytest.mark.learning
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("prioritized", [False, True])
def test_dqn_finds_the_known_values_of_a_chain(tmp_path, prioritized, double):
    algorithm = srl.DQN(prioritized=prioritized, beta=1.0, double=double, dueling=double, **TABLE)
    x = experiment(envs.gym(Chain), algorithm, 6_000)
    x.run(tmp_path / "run", quiet=True)
    np.testing.assert_allclose(q_values(x, tmp_path / "run", np.arange(4)), CHAIN, atol=0.03)


class Lottery(gymnasium.Env):
    """One step: a reward of 1 with probability 0.2. Drawn by the size of their error, wins are drawn too often."""

    observation_space, action_space = Discrete(1), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, float(self.np_random.random() < 0.2), True, False, {}


@pytest.mark.learning
def test_corrected_priorities_learn_the_value_that_uniform_draws_learn(tmp_path):
    found = {}
    for name, how in {
        "uniform": {"prioritized": False},
        "corrected": {"beta": 1.0},
        "uncorrected": {"beta": 0.0},
    }.items():
        x = experiment(envs.gym(Lottery), srl.DQN(**{**TABLE, "minibatch": 256, **how}), 6_000)
        x.run(tmp_path / name, quiet=True)
        found[name] = float(q_values(x, tmp_path / name, np.zeros(1, np.int64)).mean())
    assert found["uniform"] == pytest.approx(0.2, abs=0.03)
    assert found["corrected"] == pytest.approx(0.2, abs=0.03)
    assert found["uncorrected"] > 0.25  # about 0.3, in the end: what there was to correct


class Endless(gymnasium.Env):
    """Reward 1 for ever; cut off after 5 steps. With truncation bootstrapped the value is 1 / (1 - gamma)."""

    observation_space, action_space = Discrete(6), Discrete(2)
    ends = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self.left, {}

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        return self.left, 1.0, over and self.ends, over and not self.ends, {}


class Looping(Endless):
    """The same, and every observation looks alike."""

    observation_space = Discrete(1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        _, *rest = super().step(action)
        return 0, *rest


class Ending(Endless):
    """Really over after 5 steps, and the observation tells how many are left."""

    ends = True


@pytest.mark.learning
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(("env", "seen", "value"), [(Looping, [0], [5.0]), (Ending, range(1, 6), None)])
def test_dqn_bootstraps_truncated_episodes_and_no_others(tmp_path, env, seen, value, n_step):
    value = value or [(1 - 0.8**left) / (1 - 0.8) for left in range(1, 6)]
    settings = {**TABLE, "gamma": 0.8, "n_step": n_step, "lr": 5e-2, "target_every": 10}
    x = experiment(envs.gym(env), srl.DQN(**settings), 5_000)
    x.run(tmp_path / "run", quiet=True)
    found = q_values(x, tmp_path / "run", np.array(seen))
    np.testing.assert_allclose(found, np.repeat(np.array(value)[:, None], 2, 1), rtol=0.05)


# Relabelling


class Which(gymnasium.Env):
    """One step: the reward is 1 if the action is what is seen."""

    observation_space, action_space = Discrete(3), Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = int(self.np_random.integers(3))
        return self.goal, {}

    def step(self, action):
        return self.goal, float(action == self.goal), True, False, {}


def turn_round(block):
    """Make good what was bad; twice would change nothing."""
    assert block["reward"].shape == block["valid"].shape
    block["reward"] *= -1


@pytest.mark.learning
@pytest.mark.parametrize(
    "algorithm",
    [
        srl.PPO(horizon=8, minibatch=64, lr=1e-2, hidden=()),
        srl.DQN(horizon=8, minibatch=64, minibatches=2, warmup=256, hidden=(), lr=2e-2, epsilon_steps=1_000),
    ],
    ids=["ppo", "dqn"],
)
@pytest.mark.parametrize("relabel", ["", "test_replay:turn_round"])
def test_the_relabel_hook_decides_what_is_trained_on(tmp_path, algorithm, relabel):
    experiment(envs.gym(Which), replace(algorithm, relabel=relabel), 3_000).run(tmp_path / "run", quiet=True)
    assert srl.evaluate(tmp_path / "run", episodes=60).return_mean == (0.0 if relabel else 1.0)
