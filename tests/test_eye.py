"""Acting on images in C against torch."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest
import torch

from srl.algorithms import PPO
from srl.core.specs import Spaces
from srl.policies.actor_critic import ActorCritic
from srl.policies.eye import Eye, eye
from test_images import compiled, game, lanes  # noqa: F401

SHAPE = (4, 84, 84)
DISCRETE = gymnasium.spaces.Discrete(6, start=2)
pytestmark = compiled


def policy(shape=SHAPE, action=DISCRETE, seed=0, **options) -> ActorCritic:
    torch.manual_seed(seed)
    made = PPO(**options).policy(Spaces(gymnasium.spaces.Box(0, 255, shape, np.uint8), action, masked=False))
    with torch.no_grad():
        for weight in made.parameters():  # so that probabilities and values differ by much
            weight.mul_(1.5).add_(0.01 * torch.randn_like(weight))
    return made


def acting(made: ActorCritic) -> Eye:
    found = made.acting()
    assert isinstance(found, Eye)
    return found


def by_torch(made: ActorCritic, x: torch.Tensor, generator: torch.Generator | None) -> dict[str, np.ndarray]:
    with torch.inference_mode():
        return {name: each.numpy() for name, each in made.act({"obs": x}, generator).items()}


@pytest.mark.parametrize("shape", [SHAPE, (1, 36, 40), (3, 39, 53), (12, 36, 64)])
@pytest.mark.parametrize("action", [DISCRETE, gymnasium.spaces.Box(-1, 1, (3,), np.float32)])
@pytest.mark.parametrize("drawn", [True, False])
def test_acting_is_what_torch_does(shape, action, drawn, lanes):  # noqa: F811
    made = policy(shape, action)
    found = acting(made)
    for rows, seed in ((1, 1), (7, 2), (8, 3), (20, 4), (3, 5)):
        x = game(rows, shape, seed)
        luck = [torch.Generator().manual_seed(seed) if drawn else None for _ in range(2)]
        mine, theirs = found.act({"obs": x.numpy()}, luck[0]), by_torch(made, x, luck[1])
        assert mine is not None
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-4, atol=1e-4, err_msg=name)
            assert mine[name].dtype == theirs[name].dtype


def test_new_weights_are_seen_at_once():
    made, x = policy(), game(4, SHAPE)
    found = acting(made)
    before = found.act({"obs": x.numpy()}, None)["value"].copy()
    for name, weight in made.trunk.named_parameters():
        with torch.no_grad():
            weight.mul_(1.1)
        after = found.act({"obs": x.numpy()}, None)["value"].copy()
        assert not np.array_equal(before, after), name
        np.testing.assert_allclose(after, by_torch(made, x, None)["value"], rtol=1e-4, atol=1e-4)
        before = after


def test_sixteen_bits_are_enough_whatever_the_weights():
    made, x = policy(), game(6, SHAPE)
    dense = made.trunk.encoder.cnn["obs"].dense
    with torch.no_grad():
        dense.weight[:, 0] = 0
        dense.weight[:, 1] *= 1e-30
        dense.weight[:, 2] *= 1e4
        dense.weight[17, 3] = 50  # all others of this output are hundreds of times smaller
        dense.bias[:4] = torch.tensor([2.0, 3.0, -1.0, 0.5])
        made.value.weight[:, :4] = 1
    found = acting(made)
    mine, theirs = found.act({"obs": x.numpy()}, None), by_torch(made, x, None)
    np.testing.assert_allclose(mine["value"], theirs["value"], rtol=1e-4)
    features = found._features[6][0]
    with torch.inference_mode():
        wanted = made.trunk.encoder.cnn["obs"](x).numpy()
    np.testing.assert_array_equal(features[:, 0], 2)
    np.testing.assert_array_equal(features[:, 1], 3)
    np.testing.assert_allclose(features[:, 2], wanted[:, 2], rtol=1e-4)
    np.testing.assert_allclose(features, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted[:, 4:]).max())


def test_what_is_seen_depends_neither_on_other_rows_nor_on_what_was_seen_before():
    made, x = policy(), game(40, SHAPE, 7)
    together = acting(made).act({"obs": x.numpy()}, None)["value"].copy()
    one, many = eye(made), eye(made)
    for row in range(40):
        assert one.act({"obs": x[row : row + 1].numpy()}, None)["value"] == together[row]
    luck = np.random.default_rng(0)
    for _ in range(60):
        rows = luck.integers(0, 40, luck.integers(1, 12))
        np.testing.assert_array_equal(many.act({"obs": x[rows].numpy()}, None)["value"], together[rows])


def test_a_full_memory_is_begun_anew():
    made = policy()
    found = acting(made)
    for seed in range(80):  # far more than eight times what one image can show
        x = game(2, SHAPE, seed)
        mine = found.act({"obs": x.numpy()}, None)
        np.testing.assert_allclose(mine["value"], by_torch(made, x, None)["value"], rtol=1e-4, atol=1e-4)


def test_noise_is_left_to_torch():
    made = policy()
    x = torch.randint(0, 256, (2, *SHAPE), dtype=torch.uint8)
    assert acting(made).act({"obs": x.numpy()}, None) is None
    seen = game(2, SHAPE)
    mine = acting(made).act({"obs": seen.numpy()}, None)
    np.testing.assert_allclose(mine["value"], by_torch(made, seen, None)["value"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "made",
    [
        lambda: policy((84, 84, 3)),
        lambda: policy(memory="lstm"),
        lambda: policy(precision="bfloat16"),
        lambda: policy((20, 84, 84)),
        lambda: policy(action=gymnasium.spaces.MultiDiscrete([2, 3])),
    ],
)
def test_others_act_in_torch(made):
    assert made().acting() is None


def test_a_policy_that_acts_can_be_copied():
    made = policy()
    acting(made)
    assert acting(copy.deepcopy(made)).act({"obs": game(2, SHAPE).numpy()}, None) is not None
