"""Small networks in C, against the same networks by torch and autograd."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

import srl
from srl.core.specs import Spaces
from srl.policies.host import arrays_of, load_arrays
from steps import gradient_step

ROWS, MINIBATCH = 197, 128
BOX = gymnasium.spaces.Box(-1, 1, (5,))
SPACES = {
    "discrete": Spaces(BOX, gymnasium.spaces.Discrete(3)),
    "discrete from 2": Spaces(BOX, gymnasium.spaces.Discrete(3, start=2)),
    "box": Spaces(BOX, gymnasium.spaces.Box(-1, 1, (2, 2))),
    "wider than the layers": Spaces(gymnasium.spaces.Box(-1, 1, (300,)), gymnasium.spaces.Discrete(40)),
    "dictionary": Spaces(
        gymnasium.spaces.Dict(a=BOX, b=gymnasium.spaces.Discrete(4)), gymnasium.spaces.Box(-1, 1, (1,))
    ),
}
CONFIGS = {
    "plain": srl.PPO(),
    "three layers, relu": srl.PPO(hidden=(32, 16, 8), activation="relu"),
    "normalised": srl.PPO(normalize_obs=True, normalize_return=True),
    "entropy": srl.PPO(entropy=0.1),
    "values clipped": srl.PPO(value_clip=0.3, normalize_advantage=False),
    "odd widths": srl.PPO(hidden=(13, 21)),
    "one layer": srl.PPO(hidden=(16,)),
}


def observations(spaces, generator):
    found = {}
    for name, spec in spaces.observation_spec().items():
        whole = spec.dtype.endswith("i8")
        found[name] = (
            torch.randint(0, 4, (ROWS, *spec.shape), generator=generator)
            if whole
            else torch.randn(ROWS, *spec.shape, generator=generator)
        )
    return found


def pair(config, spaces):
    """Two learners with the same weights, one by hand and one by autograd."""
    hand, torchs = (config.learner(spaces, 0, "cpu") for _ in range(2))
    torchs.policy.by_hand = False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for mine, other in zip(hand.policy.parameters(), torchs.policy.parameters(), strict=True):
            mine += 0.05 * torch.randn(mine.shape, generator=generator)
            other.copy_(mine)
    obs = observations(spaces, generator)
    for learner in (hand, torchs):
        learner.policy.observe(obs, torch.linspace(-2, 7, ROWS))
    assert hand.policy.small() is not None and torchs.policy.small() is None
    return hand, torchs, obs


@pytest.mark.parametrize("cores", [1, 4])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("config", CONFIGS)
def test_actions_gradients_and_steps_are_those_of_autograd(space, config, cores, monkeypatch):
    give(monkeypatch, cores)
    spaces = SPACES[space]
    hand, torchs, obs = pair(replace(CONFIGS[config], minibatch=MINIBATCH), spaces)
    for seed in (None, 1):
        generators = [torch.Generator().manual_seed(seed) if seed else None for _ in range(2)]
        mine = hand.policy.small().act({name: value.numpy() for name, value in obs.items()}, generators[0])
        with torch.no_grad():
            other = torchs.policy.act(obs, generators[1])
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name].dtype == value.numpy().dtype, name
            np.testing.assert_allclose(mine[name], value.numpy(), atol=1e-5, rtol=1e-5)
    generator = torch.Generator().manual_seed(2)
    acted = other["log_prob"] + 0.2 * torch.randn(ROWS, generator=generator)
    goal = torch.randn(3, ROWS, generator=generator).numpy()
    batch = {**obs, **other, "log_prob": acted}
    fields = {name: value.numpy() for name, value in batch.items()}
    for number in range(3):
        # Entries lie elsewhere than their number says, some are left out, and minibatches are not all as large.
        at = np.random.default_rng(number).permutation(ROWS)
        rows = np.random.default_rng(number + 9).permutation(ROWS)[: ROWS - 5]
        slab = {name: value[np.argsort(at)] for name, value in fields.items()}
        given = hand.optimizer, hand.config, hand.bonus, slab, at, goal, rows
        found, expected = np.zeros(6), np.zeros(6)
        assert hand.policy.small().learner(*given).one_pass(np.arange(len(rows)), found, lambda: False)
        for start in range(0, len(rows), MINIBATCH):
            part = rows[start : start + MINIBATCH]
            expected += gradient_step(torchs, {name: value[part] for name, value in batch.items()}, goal[:, part])
        torch.testing.assert_close(hand.optimizer.grad, torchs.optimizer.grad, atol=2e-6, rtol=1e-4)
        np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(hand.optimizer.flat, torchs.optimizer.flat, atol=2e-5, rtol=1e-4)
        assert hand.optimizer.steps == torchs.optimizer.steps == 2 * (number + 1)


def give(monkeypatch, cores):
    """Helpers for so many cores, though there may be fewer."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))


@pytest.mark.parametrize("minibatch", [1000, 256, 100])
def test_what_helpers_do_changes_nothing_to_the_bit(minibatch, monkeypatch):
    rows, rng = 4000, np.random.default_rng(0)
    spaces = SPACES["discrete"]
    fields = {"obs": rng.normal(size=(rows, 5)).astype(np.float32), "action": rng.integers(0, 2, rows)}
    fields["log_prob"] = rng.normal(-1, 0.1, rows).astype(np.float32)
    goals, index = rng.normal(size=(3, rows)).astype(np.float32), np.arange(rows)
    orders, results = [rng.permutation(rows) for _ in range(20)], []
    for cores in (1, 2, 6):
        give(monkeypatch, cores)
        learner, sums = srl.PPO(minibatch=minibatch).learner(spaces, 0, "cpu"), np.zeros(6)
        small = learner.policy.small()
        for order in orders:
            given = learner.optimizer, learner.config, 0.01, fields, index, goals, index
            assert small.learner(*given).one_pass(order, sums, lambda: False)
        results.append((learner.optimizer.flat.clone(), sums))
    for weights, sums in results[1:]:
        assert torch.equal(weights, results[0][0])
        np.testing.assert_array_equal(sums, results[0][1])


@pytest.mark.parametrize(
    ("config", "spaces"),
    [
        (srl.PPO(), Spaces(BOX, gymnasium.spaces.MultiDiscrete([2, 3]))),
        (srl.PPO(), Spaces(BOX, gymnasium.spaces.Discrete(3), True)),
        (srl.PPO(activation="elu"), SPACES["discrete"]),
        (srl.PPO(memory="gru"), SPACES["discrete"]),
        (srl.PPO(hidden=(512, 512)), SPACES["discrete"]),
        (srl.PPO(), Spaces(gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8), gymnasium.spaces.Discrete(3))),
    ],
)
def test_everything_else_stays_with_torch(config, spaces):
    assert config.policy(spaces).small() is None


def test_weights_that_move_and_normalisers_that_change_are_followed():
    policy = srl.PPO(normalize_obs=True).policy(SPACES["discrete"])
    obs = {"obs": torch.ones(1, 5)}

    def value():
        found = policy.small().act({"obs": obs["obs"].numpy()}, None)["value"].item()
        with torch.no_grad():
            assert policy.act(obs, None)["value"].item() == pytest.approx(found, abs=1e-5)
        return found

    before = value()
    for weight in policy.parameters():
        weight.data = weight.data.clone() * 2
    after = value()
    assert before != pytest.approx(after)
    policy.observe({"obs": torch.randn(100, 5) * 3}, torch.zeros(100))
    assert value() != pytest.approx(after)
    load_arrays(policy, {**arrays_of(policy), "trunk.encoder.norm.var": np.full(5, 7.0)})
    assert value() != pytest.approx(after)


def test_without_a_compiler_at_installation_torch_does_it_all(monkeypatch):
    monkeypatch.setattr("srl.policies.small.library", lambda: None)
    assert srl.PPO().policy(SPACES["discrete"]).small() is None


def test_a_pass_that_is_interrupted_says_so():
    learner = srl.PPO(minibatch=2).learner(SPACES["discrete"], 0, "cpu")
    fields = {"obs": np.zeros((300, 5), np.float32), "action": np.zeros(300, np.int64)}
    fields["log_prob"] = np.zeros(300, np.float32)
    index, goals = np.arange(300), np.ones((3, 300), np.float32)
    given = learner.optimizer, learner.config, 0.0, fields, index, goals, index
    looks = iter([False, False, True])
    done = learner.policy.small().learner(*given).one_pass(index, np.zeros(6), lambda: next(looks))
    assert not done
    assert learner.optimizer.steps == 64  # what was done between looks
