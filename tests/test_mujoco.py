"""Our step of Gymnasium's robots against Gymnasium's own, to the bit."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest

from srl import envs
from srl.core import native
from srl.envs.base import Observed, StepViews
from srl.envs.loop import GymLoop
from srl.envs.mujoco import MujocoLoop
from srl.envs.single import AGENT, Watch

pytest.importorskip("mujoco")

COPIES = 5
FALLING = ["Hopper-v5", "Walker2d-v5"]


def views(env):
    spec = env.spaces(AGENT).observation_spec()
    obs = {name: np.zeros((COPIES, *each.shape), each.dtype) for name, each in spec.items()}
    flags = [np.zeros(COPIES, bool) for _ in range(4)]
    return StepViews(Observed(obs, *flags[:2]), np.zeros(COPIES, np.float32), *flags[2:], np.ones(COPIES, bool))


def arrays(out):
    return [out.after.obs["obs"], out.after.first, out.after.acts, out.reward, out.terminated, out.truncated]


def pair(id, **kwargs):
    ours = envs.gym(id, **kwargs).make(COPIES)
    theirs = GymLoop(id, partial(gymnasium.make, id, disable_env_checker=True, **kwargs), COPIES, Watch("", (), "stop"))
    outs = views(ours), views(theirs)
    for env, out in zip((ours, theirs), outs, strict=True):
        env.bind([[AGENT]])
        env.reset(7, [out.after])
    return ours, theirs, *outs


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("id", "kwargs"),
    [
        ("HalfCheetah-v5", {"max_episode_steps": 40}),
        ("HalfCheetah-v5", {"max_episode_steps": 50, "exclude_current_positions_from_observation": False}),
        *((name, {"max_episode_steps": 60}) for name in FALLING),
        *(
            (name, {"max_episode_steps": 30, "terminate_when_unhealthy": False, "ctrl_cost_weight": 0.5})
            for name in FALLING
        ),
    ],
)
def test_steps_rewards_and_ends_are_gymnasiums_to_the_bit(id, kwargs, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr("srl.core.native.library", lambda: None)
    ours, theirs, mine, other = pair(id, **kwargs)
    assert type(ours) is MujocoLoop
    assert (ours._simulation.native is not None) == (compiled and native.library() is not None)
    rng, ends = np.random.default_rng(0), 0
    for step in range(200):
        action = {"action": rng.normal(size=(COPIES, *ours.spaces(AGENT).action.shape)).astype(np.float32)}
        ours.step([action], [mine])
        theirs.step([action], [other])
        for found, expected in zip(arrays(mine), arrays(other), strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=f"step {step}")
        ends += int(mine.terminated.sum() + mine.truncated.sum())
    assert ends >= COPIES


def test_a_saved_state_goes_on_to_the_bit():
    ours, _, mine, _ = pair("Walker2d-v5", max_episode_steps=25)
    rng = np.random.default_rng(1)
    actions = [{"action": rng.normal(size=(COPIES, 6)).astype(np.float32)} for _ in range(80)]
    for action in actions[:30]:
        ours.step([action], [mine])
    again = envs.gym("Walker2d-v5", max_episode_steps=25).make(COPIES)
    again.bind([[AGENT]])
    out = views(again)
    again.reset(99, [out.after])
    again.load_state(ours.state())
    for action in actions[30:]:
        ours.step([action], [mine])
        again.step([action], [out])
        for found, expected in zip(arrays(out), arrays(mine), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("id", "kwargs"),
    [("Ant-v5", {}), ("HalfCheetah-v4", {}), ("HalfCheetah-v5", {"info": "x_velocity"})],
)
def test_other_robots_and_those_with_measures_are_left_to_gymnasium(id, kwargs):
    if id == "HalfCheetah-v4":
        pytest.importorskip("gymnasium.envs.mujoco.half_cheetah_v4")
    assert type(envs.gym(id, **kwargs).make(1)) is GymLoop
