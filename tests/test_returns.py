"""Advantages and n-step transitions against references that look at one row at a time and take their time."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import srl
from srl.algorithms.returns import gae, transitions, vtrace
from srl.core.slab import Batch, Slab
from srl.core.specs import Spaces
from srl.workers.replay import replay_store, sample_block

GAMMA, LAM = 0.9, 0.8
fuzz = settings(deadline=None, max_examples=100, database=None)
numbers = st.floats(-5, 5, width=32)


@pytest.fixture(params=["compiled", "numpy"], autouse=True, scope="module")
def _way(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr("srl.core.native.library", lambda: None)
        yield


@st.composite
def rows(draw, turns=True):
    """One row of a block: T steps, some of them ends and resets, some not the row's turn."""
    steps = draw(st.integers(1, 12))
    reward, value = (draw(st.lists(numbers, min_size=n, max_size=n)) for n in (steps, steps + 1))
    terminated, truncated, valid = [], [], []
    resets = False
    for _ in range(steps):
        acts = not resets and (not turns or draw(st.booleans()))
        over = "" if resets else draw(st.sampled_from(["", "", "", "terminated", "truncated", "both"]))
        valid.append(acts)
        terminated.append(over in ("terminated", "both"))
        truncated.append(over in ("truncated", "both"))
        if resets:
            reward[len(valid) - 1] = 0.0
        resets = bool(over)
    valid.append(not resets and (not turns or draw(st.booleans())))
    return reward, value, terminated, truncated, valid


def arrays(reward, value, terminated, truncated, valid):
    """A row as columns of a block with one row."""
    kinds = (np.float32, np.float32, bool, bool, bool)
    parts = zip((reward, value, terminated, truncated, valid), kinds, strict=True)
    return [np.array(part, kind)[:, None] for part, kind in parts]


def outcome(row, step):
    """What became of a valid step, found by walking on: (reward until then, where that is, what follows it).

    What follows is the next valid "step", or that the episode was "terminated" or "truncated", or "unknown".
    """
    reward, _, terminated, truncated, valid = row
    total = 0.0
    for t in range(step, len(reward)):
        if t > step and valid[t]:
            return total, t, "step"
        total += reward[t]
        if terminated[t]:
            return total, t + 1, "terminated"
        if truncated[t]:
            return total, t + 1, "truncated"
    return total, len(reward), "step" if valid[len(reward)] else "unknown"


def slow_advantage(row, step):
    """The advantage of a valid step, or None if the block ended too early to tell."""
    reward, value, *_ = row
    total, after, what = outcome(row, step)
    if what == "unknown":
        return None
    worth = 0.0 if what == "terminated" else value[after]
    delta = total + GAMMA * worth - value[step]
    if what != "step" or after == len(reward):
        return delta
    return delta + GAMMA * LAM * (slow_advantage(row, after) or 0.0)


def slow_transition(row, step, n_step):
    """(discounted reward, where it leads, discount there) over up to ``n_step`` valid steps, or None."""
    reward = row[0]
    total, discount, at = 0.0, 1.0, step
    for number in range(n_step):
        gained, after, what = outcome(row, at)
        if what == "unknown":
            return (total, at, discount) if number else None
        total += discount * gained
        discount *= 0.0 if what == "terminated" else GAMMA
        at = after
        if what != "step" or at == len(reward):
            break
    return total, at, discount


@fuzz
@given(rows())
def test_gae_is_that_of_a_walk_over_every_row(row):
    found, known = gae(*arrays(*row), GAMMA, LAM)
    for step in range(len(row[0])):
        expected = slow_advantage(row, step) if row[4][step] else None
        assert known[step, 0] == (expected is not None)
        if expected is not None:
            assert found[step, 0] == pytest.approx(expected, rel=1e-4, abs=1e-3)


@fuzz
@given(rows(), st.integers(1, 5))
def test_transitions_are_those_of_a_walk_over_every_row(row, n_step):
    reward, _, terminated, truncated, valid = arrays(*row)
    found = transitions(reward, terminated, truncated, valid, GAMMA, n_step)
    for step in range(len(row[0])):
        expected = slow_transition(row, step, n_step) if row[4][step] else None
        assert found.known[step, 0] == (expected is not None)
        if expected is not None:
            total, after, discount = expected
            assert found.after[step, 0] == after
            assert found.reward[step, 0] == pytest.approx(total, rel=1e-4, abs=1e-3)
            assert found.discount[step, 0] == pytest.approx(discount, rel=1e-5)


@fuzz
@given(st.lists(rows(), min_size=2, max_size=4))
def test_rows_do_not_mix(many):
    steps = min(len(row[0]) for row in many)
    cut = [[part[: steps + (len(part) > len(row[0]))] for part in row] for row in many]
    alone = [arrays(*row) for row in cut]
    together = [np.concatenate(parts, 1) for parts in zip(*alone, strict=True)]
    found, known = gae(*together, GAMMA, LAM)
    reward, _, *flags = together
    led = transitions(reward, *flags, GAMMA, 3)
    for i, row in enumerate(alone):
        expected, expected_known = gae(*row, GAMMA, LAM)
        np.testing.assert_array_equal(found[:, [i]], expected)
        np.testing.assert_array_equal(known[:, [i]], expected_known)
        for mine, theirs in zip(led, transitions(row[0], *row[2:], GAMMA, 3), strict=True):
            np.testing.assert_array_equal(mine[:, [i]], theirs)


@fuzz
@given(rows(turns=False))
def test_gae_with_every_row_on_turn_is_the_textbook_formula(row):
    reward, value, terminated, truncated, valid = row
    over = [a or b for a, b in zip(terminated, truncated, strict=True)]
    found, known = gae(*arrays(*row), GAMMA, LAM)
    assert known[:, 0].tolist() == valid[:-1]  # all but resets
    for t in (t for t in range(len(reward)) if valid[t]):
        # A_t = sum over l of (gamma lambda)^l delta_{t+l}, up to the end of the episode or of the block
        last = next((k for k in range(t, len(reward)) if over[k]), len(reward) - 1)
        deltas = [reward[k] + GAMMA * (not terminated[k]) * value[k + 1] - value[k] for k in range(t, last + 1)]
        expected = sum((GAMMA * LAM) ** power * delta for power, delta in enumerate(deltas))
        assert found[t, 0] == pytest.approx(expected, rel=1e-4, abs=1e-3)


@fuzz
@given(rows(), st.integers(1, 5))
def test_no_transition_crosses_an_episode_end(row, n_step):
    reward, _, terminated, truncated, valid = arrays(*row)
    found = transitions(reward, terminated, truncated, valid, GAMMA, n_step)
    over = (terminated | truncated)[:, 0]
    for step in np.flatnonzero(found.known[:, 0]).tolist():
        after = int(found.after[step, 0])
        assert step < after <= len(reward)
        assert not over[step : after - 1].any()  # at most its last step is an end


def test_n_step_takes_fewer_steps_where_the_block_ends():
    reward, none = np.ones((4, 1), np.float32), np.zeros((4, 1), bool)
    found = transitions(reward, none, none, np.ones((5, 1), bool), 0.5, 3)
    assert found.known.all()
    assert found.after[:, 0].tolist() == [3, 4, 4, 4]
    assert found.reward[:, 0].tolist() == [1.75, 1.75, 1.5, 1.0]
    assert found.discount[:, 0].tolist() == [0.125, 0.125, 0.25, 0.5]


def test_reward_given_while_another_is_on_turn_belongs_to_the_last_own_step():
    reward = np.array([[0], [5], [0], [-1]], np.float32)
    valid = np.array([[1], [0], [1], [0], [0]], bool)
    terminated = np.array([[0], [0], [0], [1]], bool)
    none = np.zeros((4, 1), bool)
    found = transitions(reward, terminated, none, valid, 0.5, 1)
    assert found.known[:, 0].tolist() == [True, False, True, False]
    assert (found.reward[0, 0], found.after[0, 0], found.discount[0, 0]) == (5, 2, 0.5)
    assert (found.reward[2, 0], found.discount[2, 0]) == (-1, 0)
    advantage, known = gae(reward, np.zeros((5, 1), np.float32), terminated, none, valid, 0.5, 1.0)
    assert known[:, 0].tolist() == [True, False, True, False]
    assert advantage[[0, 2], 0].tolist() == [5 + 0.5 * -1, -1]


def test_a_step_whose_row_is_never_on_turn_again_in_the_block_is_not_trained_on():
    reward, none = np.ones((3, 1), np.float32), np.zeros((3, 1), bool)
    valid = np.array([[1], [1], [0], [0]], bool)
    value = np.array([[1], [2], [50], [50]], np.float32)
    advantage, known = gae(reward, value, none, none, valid, 0.5, 1.0)
    assert known[:, 0].tolist() == [True, False, False]
    assert advantage[0, 0] == 1 + 0.5 * 2 - 1  # bootstrapped from the step whose own outcome is unknown
    found = transitions(reward, none, none, valid, 0.5, 2)
    assert found.known[:, 0].tolist() == [True, False, False]
    assert (found.reward[0, 0], found.after[0, 0], found.discount[0, 0]) == (1, 1, 0.5)


# A step that fails is not valid and cuts the episode; the copy starts anew at once, without a reset of its own.
FAILED = {
    "reward": np.array([[1], [0], [100], [100]], np.float32),
    "terminated": np.zeros((4, 1), bool),
    "truncated": np.array([[0], [1], [0], [0]], bool),
    "valid": np.array([[1], [0], [1], [1], [1]], bool),
}


def test_nothing_of_the_next_episode_is_counted_before_a_step_that_failed():
    found = transitions(**FAILED, gamma=0.5, n_step=3)
    assert found.known[:, 0].tolist() == [True, False, True, True]
    assert found.reward[0, 0] == 1
    advantage, known = gae(**FAILED, value=np.zeros((5, 1), np.float32), gamma=0.5, lam=1.0)
    assert known[:, 0].tolist() == [True, False, True, True]
    assert advantage[0, 0] == 1


@pytest.mark.parametrize(
    "algorithm", [srl.PPO(horizon=4, gamma=0.5), srl.DQN(horizon=4, gamma=0.5, minibatch=8)], ids=["ppo", "dqn"]
)
def test_before_a_step_that_failed_the_value_is_that_of_the_observation_it_began_with(algorithm):
    spaces = Spaces(gymnasium.spaces.Box(0, 1000, (1,)), gymnasium.spaces.Discrete(2))
    slab = Slab(algorithm.block(spaces, 1), 1, shared=False)
    fields = slab.block(0)
    for name, array in FAILED.items():
        fields[name][: len(array)] = array
    fields["first"][[0, 2]] = True
    fields["obs"][:, 0, 0] = [1, 2, 700, 800, 900]
    if isinstance(algorithm, srl.PPO):
        fields["value"][:, 0] = fields["obs"][:, 0, 0]
        prepared = algorithm.learner(spaces, 0, "cpu").prepare(Batch(slab, [0]))
        assert prepared.targets[1, 0] == pytest.approx(1 + 0.5 * 2, abs=0.1)
    else:
        store = replay_store(slab, algorithm.replay(), 1, 0)
        store.insert(0)
        out = Slab(sample_block(slab.spec, algorithm.replay()), 1, shared=False).block(0)
        store.draw(out)
        followed = set(out["obs"][1, out["obs"][0, :, 0] == 1, 0].tolist())
        assert followed == {2.0}


ratios = st.lists(st.floats(0.0, 3.0, width=32), min_size=12, max_size=12)


def vtrace_of(row, ratio, step, rho, c):
    """Advantage and target of a valid step, from what becomes of it and of the steps after it."""
    value = row[1]
    reward, where, follows = outcome(row, step)
    if follows == "step" and where < len(row[0]):
        after, (_, target) = value[where], vtrace_of(row, ratio, where, rho, c)
        later = 0.0 if target is None else target - after
    else:
        after, later = (0.0 if follows == "terminated" else value[where]), 0.0
    if follows == "unknown":
        return None, None
    difference = reward + GAMMA * after - value[step]
    error = min(rho, ratio[step]) * difference + GAMMA * LAM * min(c, ratio[step]) * later
    return difference + GAMMA * LAM * later, value[step] + error


@fuzz
@given(rows(), ratios, st.sampled_from([(1.0, 1.0), (2.0, 1.0), (0.5, 0.25)]))
def test_vtrace_is_what_its_definition_says(row, ratio, bounds):
    reward, value, *flags = arrays(*row)
    steps, (rho, c) = len(reward), bounds
    weights = np.array(ratio[:steps], np.float32)[:, None]
    advantage, target, known = vtrace(reward, value, weights, *flags, GAMMA, LAM, rho=rho, c=c)
    for step in range(steps):
        if not row[4][step]:
            assert not known[step, 0]
            continue
        expected = vtrace_of(row, ratio, step, rho, c)
        assert known[step, 0] == (expected[0] is not None)
        if known[step, 0]:
            assert advantage[step, 0] == pytest.approx(expected[0], abs=1e-3)
            assert target[step, 0] == pytest.approx(expected[1], abs=1e-3)


@fuzz
@given(rows())
def test_vtrace_of_the_policy_that_acted_is_gae(row):
    reward, value, *flags = arrays(*row)
    advantage, target, known = vtrace(reward, value, np.ones_like(reward), *flags, GAMMA, LAM)
    expected, complete = gae(reward, value, *flags, GAMMA, LAM)
    np.testing.assert_array_equal(known, complete)
    np.testing.assert_allclose(advantage[known], expected[known], atol=1e-4)
    np.testing.assert_allclose(target[known], (expected + value[:-1])[known], atol=1e-4)
