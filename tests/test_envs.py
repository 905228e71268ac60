"""Environments as vectors: ends and resets, seeds, nested spaces, native vectors, exact snapshots."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from srl import envs
from srl.core.slab import STEP_FIELDS, BlockSpec, Slab
from srl.core.specs import spec_of
from srl.envs.base import StepViews
from srl.envs.snapshot import restore, snapshot


class Counter(gymnasium.Env):
    """Observes how many steps the episode has; ends after 3, by termination or by truncation in turn."""

    observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.episodes += 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t == 3
        terminated = over and self.episodes % 2 == 1
        return np.array([self.t], np.float32), float(self.t), terminated, over and not terminated, {}


class Nested(gymnasium.Env):
    """A dictionary in, a tuple out."""

    observation_space = gymnasium.spaces.Dict(
        {
            "camera": gymnasium.spaces.Box(0, 255, (2, 2), np.uint8),
            "body": gymnasium.spaces.Tuple([gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(4)]),
        }
    )
    action_space = gymnasium.spaces.Dict(
        {"arm": gymnasium.spaces.Box(-1, 1, (2,)), "hand": gymnasium.spaces.Discrete(3)}
    )

    def look(self):
        return {"camera": np.full((2, 2), self.t, np.uint8), "body": (np.full(3, self.t / 10, np.float32), self.t % 4)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def step(self, action):
        assert self.action_space.contains({"arm": action["arm"].astype(np.float32), "hand": int(action["hand"])}), (
            action
        )
        self.t += 1
        return self.look(), float(action["hand"]), False, False, {}


def player(config, copies):
    """An environment and a one-step block to play it in."""
    env = config.make(copies)
    env.bind([env.agents])
    spaces = env.spaces(env.agents[0])
    fields = {**spaces.observation_spec(), **spaces.action_spec(), **STEP_FIELDS}
    slab = Slab(BlockSpec(fields, 0, copies), 1, shared=False)
    block = {name: array[0, 0] for name, array in slab.arrays.items()}
    obs = {name: block[name] for name in slab.spec.observations}
    views = StepViews(obs, block["reward"], block["terminated"], block["truncated"], block["valid"])
    return env, block, views


def test_the_last_observation_of_an_episode_is_seen_and_the_reset_is_not_a_step():
    env, block, views = player(envs.gym(Counter), 1)
    env.reset(0, [views.obs])
    seen = []
    for _ in range(8):
        env.step([{"action": block["action"]}], [views])
        seen.append(
            (views.obs["obs"][0, 0], views.reward[0], *(v[0] for v in (views.terminated, views.truncated, views.valid)))
        )
    assert seen == [
        (1, 1, False, False, True),
        (2, 2, False, False, True),
        (3, 3, True, False, True),  # terminated; the observation is the episode's own last one
        (0, 0, False, False, False),  # the reset: not valid, no reward, a new episode's first observation
        (1, 1, False, False, True),
        (2, 2, False, False, True),
        (3, 3, False, True, True),  # truncated
        (0, 0, False, False, False),
    ]
    env.close()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "ALE/Pong-v5"])
def test_seeds_make_environments_repeat_themselves(name):
    if name.startswith("ALE"):
        pytest.importorskip("ale_py")

    def play(seed):
        env, block, views = player(envs.gym(name), 3)
        env.reset(seed, [views.obs])
        rng = np.random.default_rng(0)
        seen = []
        for _ in range(30):
            if block["action"].dtype.kind == "f":
                block["action"][...] = rng.normal(size=block["action"].shape)
            else:
                block["action"][...] = rng.integers(0, 2, block["action"].shape)
            env.step([{"action": block["action"]}], [views])
            seen.append(views.obs["obs"].copy())
        env.close()
        return np.stack(seen)

    assert np.array_equal(play(5), play(5))
    assert not np.array_equal(play(5), play(6))


def test_native_vectors_are_used_where_they_exist():
    pytest.importorskip("ale_py")
    assert type(envs.gym("CartPole-v1").make(2).env).__name__ == "CartPoleVectorEnv"
    pong = envs.gym("ALE/Pong-v5").make(2)
    assert type(pong.env).__name__ == "AtariVectorEnv"
    assert pong.spaces("agent").observation_spec()["obs"].shape == (4, 84, 84)
    pong.close()


def test_native_and_in_turn_cartpole_behave_alike():
    native, block, views = player(envs.gym("CartPole-v1"), 16)
    turn, _, _ = player(envs.gym(gymnasium.make, id="CartPole-v1"), 16)
    lengths = []
    for env in (native, turn):
        rng = np.random.default_rng(1)
        env.reset(3, [views.obs])
        ends = steps = 0
        for _ in range(2000):
            block["action"][:] = rng.integers(0, 2, 16)
            env.step([{"action": block["action"]}], [views])
            steps += int(views.valid.sum())
            ends += int(views.terminated.sum())
        lengths.append(steps / ends)
        env.close()
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1)


def test_nested_spaces_are_flattened_by_path_and_put_together_again():
    env, block, views = player(envs.gym(Nested), 2)
    assert set(views.obs) == {"obs/camera", "obs/body/0", "obs/body/1"}
    assert {name for name in block if name.startswith("action")} == {"action/arm", "action/hand"}
    env.reset(0, [views.obs])
    block["action/arm"][:] = [[5.0, -5.0], [0.1, 0.2]]  # the first is clipped to the space
    block["action/hand"][:] = [2, 1]
    env.step([{"action/arm": block["action/arm"], "action/hand": block["action/hand"]}], [views])
    assert views.obs["obs/camera"].tolist() == [[[1, 1], [1, 1]]] * 2
    assert np.allclose(views.obs["obs/body/0"], 0.1)
    assert views.obs["obs/body/1"].tolist() == [1, 1]
    assert views.reward.tolist() == [2.0, 1.0]
    env.close()


def test_spaces_without_a_fixed_shape_are_refused():
    from srl.core.errors import ConfigError

    with pytest.raises(ConfigError, match="obs/words"):
        spec_of("obs", gymnasium.spaces.Dict({"words": gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(3))}))


class Remembering(Counter):
    """Keeps lists and dictionaries that grow."""

    def __init__(self):
        self.history, self.notes = [], {}

    def step(self, action):
        self.history.append(np.array([len(self.history)]))
        self.notes[str(len(self.history))] = float(self.np_random.random())
        return super().step(action)


def test_snapshot_brings_back_containers_that_have_grown():
    env = Remembering()
    env.reset(seed=1)
    for _ in range(2):
        env.step(0)
    state = snapshot(env)
    env.step(0)
    expected = dict(env.notes)
    again = Remembering()
    again.reset(seed=2)
    restore(again, state)
    assert [array.tolist() for array in again.history] == [[0], [1]]
    again.step(0)
    assert again.notes == expected


def test_environment_with_something_unknown_inside_cannot_be_saved():
    env = Counter()
    env.reset(seed=1)
    env.connection = object()
    assert snapshot(env) is None
