"""Packages of environments that SRL does not depend on: each is stepped, and trained on for a moment, if it is there.

The development tools do not bring them; ``docs/environments.md`` says which were seen to work.
"""

from __future__ import annotations

import numpy as np
import pytest

import srl
from srl import envs
from srl.core.errors import ConfigError, UnknownName
from srl.envs.base import StepViews


def started(config, copies, seed):
    env = config.make(copies)
    env.bind([env.agents])
    views = StepViews.zeros(env.spaces(env.agents[0]), copies * len(env.agents))
    env.reset(seed, [views.after])
    return env, views


class TestEnvPool:
    """CartPole, Pong and Ant from EnvPool."""

    @pytest.fixture(autouse=True)
    def _there(self):
        pytest.importorskip("envpool")

    def test_the_same_seed_gives_the_same_episodes_and_resets_take_a_step(self):
        runs = []
        for seed in (3, 3, 4):
            env, views = started(envs.envpool("CartPole-v1"), 4, seed)
            found = []
            for _ in range(60):
                env.step([{"action": np.zeros(4, np.int64)}], [views])
                found.append(np.c_[views.after.obs["obs"], views.reward, views.terminated, views.after.first])
                assert (views.after.acts == ~(views.terminated | views.truncated)).all()
            runs.append(np.stack(found))
            env.close()
        ends, firsts, rewards = runs[0][:-1, :, 5], runs[0][1:, :, 6], runs[0][1:, :, 4]
        assert ends.sum() > 10
        np.testing.assert_array_equal(ends, firsts)
        np.testing.assert_array_equal(rewards, 1 - ends)
        np.testing.assert_array_equal(runs[0], runs[1])
        assert (runs[0] != runs[2]).any()

    @pytest.mark.parametrize("name", ["Pong-v5", "Ant-v4", "MiniGrid-Empty-5x5-v0"])
    def test_families_are_stepped(self, name):
        env, views = started(envs.envpool(name), 2, 1)
        space = env.spaces(env.agents[0]).action
        for _ in range(5):
            env.step([{"action": np.stack([space.sample() for _ in range(2)])}], [views])
        assert all(np.isfinite(field).all() for field in views.after.obs.values())

    def test_a_run_learns_and_can_be_resumed(self, tmp_path):
        x = srl.Experiment(envs.named("envpool:CartPole-v1"), srl.PPO(lr=1e-3), actors=srl.Actors(count=1, envs=16))
        x.run(steps=60_000, launcher="inline", out=tmp_path / "run")
        assert srl.evaluate(tmp_path / "run", episodes=10).return_mean > 100
        srl.resume(tmp_path / "run", steps=62_000)

    def test_what_is_wrong_is_said(self):
        with pytest.raises(UnknownName, match="did you mean 'Pong-v5'"):
            envs.envpool("Pogn-v5").make(1)
        with pytest.raises(ConfigError, match="cannot be made with"):
            envs.envpool("Pong-v5", friction=3).make(1)


class TestJaxMarl:
    """SMAX and Overcooked."""

    @pytest.fixture(autouse=True)
    def _there(self):
        pytest.importorskip("jaxmarl")

    def test_a_skirmish_goes_on_from_game_to_game(self):
        env, views = started(envs.jaxmarl("HeuristicEnemySMAX", scenario="3m", state=True), 4, 1)
        rng = np.random.default_rng(0)
        seen = {"ends": 0, "dead": 0}
        for _ in range(120):
            acts, mask = views.after.acts.reshape(4, 3).copy(), views.after.obs["mask"]
            assert mask[views.after.acts].any(1).all()
            over = views.terminated | views.truncated
            views.valid[:] = views.after.acts
            env.step([{"action": (rng.random(mask.shape) * mask).argmax(1)}], [views])
            np.testing.assert_array_equal(views.after.first, over)
            assert (views.reward[over] == 0).all()
            seen["ends"] += over.reshape(4, 3)[:, 0].sum()
            seen["dead"] += (acts.any(1) & ~acts.all(1)).sum()
            whole = views.after.obs["obs/state"].reshape(4, 3, -1)
            assert (whole[:, :1] == whole).all()
        assert seen["ends"] >= 2 and seen["dead"] >= 2

    def test_the_same_seed_gives_the_same_games(self):
        runs = []
        for seed in (1, 1, 2):
            env, views = started(envs.jaxmarl("HeuristicEnemySMAX", scenario="3m"), 2, seed)
            for _ in range(30):
                env.step([{"action": np.full(6, 2)}], [views])
            runs.append(views.after.obs["obs"].copy())
        np.testing.assert_array_equal(runs[0], runs[1])
        assert (runs[0] != runs[2]).any()

    def test_cooks_are_trained(self, tmp_path):
        x = srl.Experiment(envs.jaxmarl("overcooked", layout="cramped_room"), srl.PPO(), actors=srl.Actors(1, envs=4))
        result = x.run(tmp_path / "run", steps=3_000, launcher="inline")
        assert result.steps >= 3_000

    @pytest.mark.parametrize("given", [{"scenario": "nothing of the kind"}, {"colour": 3}])
    def test_what_cannot_be_made_is_said(self, given):
        with pytest.raises(ConfigError, match="JaxMARL cannot make"):
            envs.jaxmarl("HeuristicEnemySMAX", **given).make(1)
