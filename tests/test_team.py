"""Minibatches divided over threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

import srl
from srl.algorithms.adam import Adam
from srl.algorithms.base import Learner
from srl.algorithms.team import Team
from srl.core.slab import Batch, Slab
from srl.core.specs import Spaces
from test_images import compiled, game

IMAGES = gymnasium.spaces.Dict(
    {"image": gymnasium.spaces.Box(0, 255, (1, 36, 36), np.uint8), "speed": gymnasium.spaces.Box(-1, 1, (2,))}
)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(algorithm: srl.PPO, size: int, updates: int = 2, alike: bool = False) -> tuple[Learner, list[dict]]:
    """A learner after some updates on made-up samples, with so many threads. ``alike``: images look like games."""
    torch.set_num_threads(size)
    spaces = Spaces(IMAGES, gymnasium.spaces.Discrete(3))
    slab = Slab(algorithm.block(spaces, 20), 1, shared=False)
    rng = np.random.default_rng(0)
    for name, array in slab.arrays.items():
        kind = array.dtype.kind
        made = rng.normal(size=array.shape) if kind == "f" else rng.integers(0, 2, array.shape)
        array[...] = True if name == "valid" else 60 * made if kind == "u" else made
    if alike:
        images = slab.arrays["obs/image"]
        images[...] = game(images[..., 0, 0, 0].size, IMAGES["image"].shape).numpy().reshape(images.shape)
    slab.arrays["valid"][0, 3:6, 2] = False
    learner = algorithm.learner(spaces, 0, "cpu")
    learner.policy.by_hand = False
    return learner, [learner.train(learner.prepare(Batch(slab, [0])), 0, lambda: False) for _ in range(updates)]


@pytest.mark.parametrize(
    "options",
    [{}, {"memory": "lstm", "chunk": 4}, {"normalize_obs": True, "normalize_return": True}, {"minibatch": 300}],
    ids=str,
)
def test_a_divided_minibatch_gives_the_gradient_of_the_whole(options):
    algorithm = replace(srl.PPO(horizon=16, minibatch=160, epochs=2, max_grad_norm=1e9, lr=1e-9), **options)
    (whole, expected), (divided, found) = (trained(algorithm, size) for size in (1, 2))
    assert divided.team.size == 2 and whole.team.size == 1
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    # Not number by number: where a ReLU is all but 0 the two may see different sides of it.
    difference, length = (each.norm() for each in (divided.optimizer.grad - whole.optimizer.grad, whole.optimizer.grad))
    assert length > 0 and difference < 1e-2 * length


def test_the_same_division_gives_the_same_result_to_the_bit():
    algorithm = srl.PPO(horizon=16, minibatch=160, epochs=2)
    one, two = (trained(algorithm, 2)[0] for _ in range(2))
    assert torch.equal(one.optimizer.flat, two.optimizer.flat)


@compiled
def test_images_that_repeat_are_not_divided(monkeypatch):
    algorithm = srl.PPO(horizon=16, minibatch=160, epochs=2)
    handed = []
    submit = ThreadPoolExecutor.submit
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *given: handed.append(given) or submit(*given))
    trained(algorithm, 2, alike=True)
    assert not handed
    learner, _ = trained(algorithm, 2, updates=1)
    assert len(handed) == 3 and not learner.team.eyes[0].repeats  # all four minibatches but the first


def test_what_a_copy_shows_goes_to_one_part(monkeypatch):
    seen = []
    monkeypatch.setattr(Team, "share", lambda team, entries, *_: seen.append(entries) or np.zeros(5))
    trained(srl.PPO(horizon=16, minibatch=160, epochs=1, normalize_advantage=False), 2, updates=1)
    copies = [np.setdiff1d(np.arange(320), [62, 82, 102])[entries] % 20 for entries in seen]  # but those not valid
    assert len(copies) == 2 and all((np.diff(each) >= 0).all() for each in copies)


def test_torch_has_its_threads_back_afterwards():
    trained(srl.PPO(horizon=16, minibatch=160), 2)
    assert torch.get_num_threads() == 2


class Own(torch.nn.Module):
    """A network of the user's own that counts its calls: nobody may call copies of it."""

    def __init__(self, spaces):
        super().__init__()
        self.layer, self.out_features = torch.nn.Linear(2, 8), 8
        self.calls = 0

    def forward(self, obs):
        self.calls += 1
        return self.layer(obs["obs/speed"])


def test_networks_of_the_users_own_are_not_divided():
    learner, _ = trained(srl.PPO(horizon=16, minibatch=160, epochs=1, network="test_team:Own"), 2, updates=1)
    assert learner.team.size == 1
    assert learner.policy.trunk.encoder.calls == 2  # minibatches


def test_copies_share_weights_and_buffers_and_have_gradients_of_their_own():
    torch.set_num_threads(3)
    policy = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    team = Team(policy, Adam(policy, 0.1), divide=True)
    seen = set()

    def work(copy, part):
        seen.add(threading.get_ident())
        copy[0](torch.ones(len(part), 4)).sum().backward()
        return np.array([len(part)])

    team.optimizer.zero_grad()
    assert team.share(np.arange(300), 300, work).tolist() == [300]
    assert threading.get_ident() in seen and len(seen) > 1
    assert policy[0].weight.grad.tolist() == [[300.0] * 4] * 3
    with torch.no_grad():
        policy[0].weight.fill_(7)
        policy[1].running_mean.fill_(5)
    for copy, gradient in team.others:
        assert (copy[0].weight == 7).all() and (copy[1].running_mean == 5).all()
        assert gradient.sum() == 100 * (12 + 3)


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_part_that_fails_is_said_when_all_have_ended(where):
    torch.set_num_threads(2)
    policy = torch.nn.Linear(2, 2)
    team = Team(policy, Adam(policy, 0.1), divide=True)
    ended = []

    def work(copy, part):
        if (copy is policy) == (where == "here"):
            raise ValueError("no")
        ended.append(len(part))
        return np.zeros(1)

    with pytest.raises(ValueError, match="no"):
        team.share(np.arange(200), 200, work)
    assert ended == [100]
    assert torch.get_num_threads() == 2


def test_few_samples_are_not_divided():
    torch.set_num_threads(2)
    policy = torch.nn.Linear(2, 2)
    team = Team(policy, Adam(policy, 0.1), divide=True)
    found = team.share(np.arange(100), 100, lambda copy, part: np.array([len(part), copy is policy]))
    assert found.tolist() == [100, 1]
