"""Small networks by hand, against the same networks by torch and autograd."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

import srl
from srl.core.specs import Spaces

ROWS = 48
BOX = gymnasium.spaces.Box(-1, 1, (5,))
SPACES = {
    "discrete": Spaces(BOX, gymnasium.spaces.Discrete(3)),
    "discrete from 2": Spaces(BOX, gymnasium.spaces.Discrete(3, start=2)),
    "box": Spaces(BOX, gymnasium.spaces.Box(-1, 1, (2, 2))),
    "dictionary": Spaces(
        gymnasium.spaces.Dict(a=BOX, b=gymnasium.spaces.Discrete(4)), gymnasium.spaces.Box(-1, 1, (1,))
    ),
}
CONFIGS = {
    "plain": srl.PPO(),
    "three layers, relu": srl.PPO(hidden=(32, 16, 8), activation="relu"),
    "normalised": srl.PPO(normalize_obs=True, normalize_return=True),
    "entropy": srl.PPO(entropy=0.1),
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
        learner.policy.observe(obs, torch.arange(ROWS).float())
    assert hand.policy.small() is not None and torchs.policy.small() is None
    return hand, torchs, obs


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("config", CONFIGS)
def test_actions_gradients_and_steps_are_those_of_autograd(space, config):
    spaces = SPACES[space]
    hand, torchs, obs = pair(CONFIGS[config], spaces)
    for seed in (None, 1):
        generators = [torch.Generator().manual_seed(seed) if seed else None for _ in range(2)]
        with torch.no_grad():
            mine, other = (p.act(obs, g) for p, g in zip((hand.policy, torchs.policy), generators, strict=True))
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert value.dtype == other[name].dtype, name
            torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-5)
    generator = torch.Generator().manual_seed(2)
    batch = {**obs, **mine, "log_prob": mine["log_prob"] + 0.2 * torch.randn(ROWS, generator=generator)}
    goal = torch.randn(ROWS, 3, generator=generator)
    for _ in range(3):
        found, expected = (learner._step(batch, {}, None, goal) for learner in (hand, torchs))
        torch.testing.assert_close(hand.optimizer.grad, torchs.optimizer.grad, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(hand.optimizer.flat, torchs.optimizer.flat, atol=1e-5, rtol=1e-4)


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


def test_weights_that_move_are_followed():
    policy = srl.PPO().policy(SPACES["discrete"])
    obs = {"obs": torch.ones(1, 5)}
    with torch.no_grad():
        before = policy.act(obs, None)["value"].item()
        for weight in policy.parameters():
            weight.data = weight.data.clone() * 2
        after = policy.act(obs, None)["value"].item()
        policy.by_hand = False
        assert before != pytest.approx(after)
        assert policy.act(obs, None)["value"].item() == pytest.approx(after, abs=1e-5)
