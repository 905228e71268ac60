"""Simple spread as a native vector: the same as mpe2's, to the bit, and saved and restored exactly."""

from __future__ import annotations

import numpy as np
import pytest

from srl import envs
from srl.core.errors import ConfigError
from srl.envs.base import StepViews

AGENTS = tuple(f"agent_{i}" for i in range(3))


def started(config, copies, seed, groups=(AGENTS,)):
    env = config.make(copies)
    env.bind(groups)
    views = [StepViews.zeros(env.spaces(group[0]), copies * len(group)) for group in groups]
    env.reset(seed, [each.after for each in views])
    return env, views


def copied(views):
    whole = [{**each.after.obs, **vars(each), "first": each.after.first, "acts": each.after.acts} for each in views]
    return [{name: np.copy(value) for name, value in each.items() if name != "after"} for each in whole]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("groups", [(AGENTS,), (AGENTS[2:], AGENTS[:2])], ids=["one policy", "two policies"])
def test_every_step_is_that_of_mpe2(state, groups):
    pytest.importorskip("mpe2")
    rng = np.random.default_rng(5)
    ours, theirs = (
        started(config, 4, 11, groups)
        for config in (envs.spread(state=state), envs.pettingzoo("mpe2.simple_spread_v3", state=state))
    )
    for step in range(80):
        for mine, other in zip(copied(ours[1]), copied(theirs[1]), strict=True):
            for name in mine:
                np.testing.assert_array_equal(mine[name], other[name], f"{name}, step {step}")
        # Often the same for all agents, so that they meet.
        actions = rng.integers(0, 5, (4, 1 if rng.random() < 0.5 else 3)) * np.ones((1, 3), np.int64)
        place = {agent: number for number, agent in enumerate(AGENTS)}
        given = [{"action": actions[:, [place[agent] for agent in group]].reshape(-1)} for group in groups]
        for env, views in (ours, theirs):
            for each in views:
                each.valid[:] = each.after.acts
            env.step(given, views)


def test_a_saved_state_goes_on_exactly():
    env, views = started(envs.spread(), 3, 1)
    again, others = started(envs.spread(), 3, 2)
    rng = np.random.default_rng(0)
    for step in range(60):
        if step == 20:
            again.load_state(env.state())
        given = [{"action": rng.integers(0, 5, 9)}]
        env.step(given, views)
        again.step(given, others)
        if step >= 20:
            for mine, other in zip(copied(views), copied(others), strict=True):
                for name in mine:
                    np.testing.assert_array_equal(mine[name], other[name])


@pytest.mark.parametrize("wrong", [{"count": 0}, {"max_cycles": 0}, {"local_ratio": 1.5}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError, match="simple spread"):
        envs.spread(**wrong)


def test_agents_left_out_are_refused():
    with pytest.raises(ConfigError, match="every agent"):
        envs.spread().make(2).bind([AGENTS[:2]])
