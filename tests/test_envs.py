"""Environments as vectors: ends and resets, seeds, nested spaces, native vectors, exact snapshots."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from enum import Enum

import gymnasium
import numpy as np
import pytest

from srl import envs
from srl.core import native
from srl.core.errors import CheckpointError, ConfigError
from srl.core.specs import spec_of
from srl.envs.base import Observed, StepViews
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


class Play:
    """Plays a vector, each step in memory full of rubbish, and keeps what a block would hold."""

    def __init__(self, config, copies, groups=None, seed=0):
        self.env = config.make(copies)
        self.groups = groups or [self.env.agents]
        self.env.bind(self.groups)
        self.specs = []
        for agents in self.groups:
            spaces = self.env.spaces(agents[0])
            fields = {**spaces.observation_spec(), **spaces.mask_spec()}
            self.specs.append((fields, spaces.action_spec(), copies * len(agents)))
        self.actions = [rubbish(actions, rows, 0) for _, actions, rows in self.specs]
        self.reset(seed)

    def reset(self, seed):
        self.now = [Observed(rubbish(fields, n), np.zeros(n, bool), np.zeros(n, bool)) for fields, _, n in self.specs]
        self.env.reset(seed, self.now)

    def step(self, *actions):
        for given, values in zip(self.actions, actions, strict=False):
            for name, value in (values if isinstance(values, dict) else {"action": values}).items():
                given[name][...] = value
        views = []
        for before, (fields, _, rows) in zip(self.now, self.specs, strict=True):
            odd = np.arange(rows) % 2 == 1
            after = Observed(rubbish(fields, rows), odd.copy(), ~odd)
            views.append(StepViews(after, np.full(rows, 77, np.float32), odd.copy(), ~odd, before.acts))
        self.env.step(self.actions, views)
        self.now = [view.after for view in views]
        return views[0] if len(views) == 1 else views


def rubbish(fields, rows, value=77):
    return {name: np.full((rows, *spec.shape), value, spec.dtype) for name, spec in fields.items()}


def row(views, i):
    """One row of a step: observation, reward, terminated, truncated, valid, and whether it is a first and acts."""
    after = views.after
    flags = (views.terminated, views.truncated, views.valid, after.first, after.acts)
    return (after.obs["obs"][i].item(), views.reward[i].item(), "".join("TUVFA"[k] for k in range(5) if flags[k][i]))


def test_the_last_observation_of_an_episode_is_seen_and_the_reset_is_not_a_step():
    play = Play(envs.gym(Counter), 1)
    assert play.now[0].first.tolist() == play.now[0].acts.tolist() == [True]
    assert [row(play.step(0), 0) for _ in range(8)] == [
        (1, 1, "VA"),
        (2, 2, "VA"),
        (3, 3, "TV"),  # terminated; the observation is the episode's own last one, on which nobody acts
        (0, 0, "FA"),  # the reset: not valid, no reward, a new episode's first observation
        (1, 1, "VA"),
        (2, 2, "VA"),
        (3, 3, "UV"),  # truncated
        (0, 0, "FA"),
    ]


def test_native_vectors_mark_ends_and_resets_like_the_loop():
    play = Play(envs.gym("CartPole-v1"), 4)
    for _ in range(100):
        acted = play.now[0].acts.copy()
        views = play.step(1)
        assert np.array_equal(views.valid, acted)
        assert np.array_equal(views.after.first, ~acted)
        assert np.array_equal(views.after.acts, ~(views.terminated | views.truncated))
        assert not views.reward[~acted].any()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "ALE/Pong-v5"])
def test_seeds_make_environments_repeat_themselves(name):
    if name.startswith("ALE"):
        pytest.importorskip("ale_py")

    def play(seed):
        game = Play(envs.gym(name), 3, seed=seed)
        rng = np.random.default_rng(0)
        seen = []
        for _ in range(30):
            action = game.actions[0]["action"]
            drawn = rng.normal(size=action.shape) if action.dtype.kind == "f" else rng.integers(0, 2, action.shape)
            seen.append(game.step(drawn).after.obs["obs"])
        game.env.close()
        return np.stack(seen)

    assert np.array_equal(play(5), play(5))
    assert not np.array_equal(play(5), play(6))


def test_native_vectors_are_used_where_they_exist():
    pytest.importorskip("ale_py")
    assert type(envs.gym("CartPole-v1").make(2).env).__name__ == "CartPoleVectorEnv"
    pong = envs.gym("ALE/Pong-v5").make(2)
    assert type(pong.env.unwrapped).__name__ == ("Games" if native.library() is not None else "AtariVectorEnv")
    assert pong.spaces("agent").observation_spec()["obs"].shape == (4, 84, 84)
    pong.close()


def test_loop_is_seeded_and_steps_like_gymnasiums_own_vector():
    name, copies = "Pendulum-v1", 3
    play = Play(envs.gym(name, max_episode_steps=5), copies, seed=7)
    theirs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(name, max_episode_steps=5)] * copies)
    assert np.array_equal(play.now[0].obs["obs"], theirs.reset(seed=7)[0])
    rng = np.random.default_rng(0)
    for _ in range(20):
        action = rng.uniform(-2, 2, (copies, 1)).astype(np.float32)
        views = play.step(action)
        obs, reward, _, truncated, _ = theirs.step(action)
        assert np.array_equal(views.after.obs["obs"], obs)
        assert np.array_equal(views.reward, reward.astype(np.float32))
        assert np.array_equal(views.truncated, truncated)


def test_native_and_in_turn_cartpole_behave_alike():
    lengths = []
    for config in (envs.gym("CartPole-v1"), envs.gym(gymnasium.make, id="CartPole-v1")):
        rng = np.random.default_rng(1)
        play = Play(config, 16, seed=3)
        ends = steps = 0
        for _ in range(2000):
            views = play.step(rng.integers(0, 2, 16))
            steps += int(views.valid.sum())
            ends += int(views.terminated.sum())
        lengths.append(steps / ends)
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1)


def test_nested_spaces_are_flattened_by_path_and_put_together_again():
    play = Play(envs.gym(Nested), 2)
    assert set(play.now[0].obs) == {"obs/camera", "obs/body/0", "obs/body/1"}
    assert set(play.actions[0]) == {"action/arm", "action/hand"}
    # the first arm is clipped to the space
    views = play.step({"action/arm": [[5.0, -5.0], [0.1, 0.2]], "action/hand": [2, 1]})
    assert views.after.obs["obs/camera"].tolist() == [[[1, 1], [1, 1]]] * 2
    assert np.allclose(views.after.obs["obs/body/0"], 0.1)
    assert views.after.obs["obs/body/1"].tolist() == [1, 1]
    assert views.reward.tolist() == [2.0, 1.0]


class Grabbing(Counter):
    """Changes the action it is given, as careless environments do."""

    action_space = gymnasium.spaces.MultiDiscrete([3, 3])

    def step(self, action):
        action[:] = 0
        return super().step(action)


def test_environment_that_changes_its_action_does_not_change_the_block():
    play = Play(envs.gym(Grabbing), 2)
    play.step([[1, 2], [2, 1]])
    assert play.actions[0]["action"].tolist() == [[1, 2], [2, 1]]


def test_a_copy_draws_itself_only_if_asked_to():
    pytest.importorskip("pygame")
    for config in (envs.gym("CartPole-v1"), envs.gym(gymnasium.make, id="CartPole-v1")):
        env = config.make(1, render=True)
        env.bind([env.agents])
        env.reset(0, [Observed({"obs": np.zeros((1, 4), np.float32)}, np.zeros(1, bool), np.zeros(1, bool))])
        assert env.render().shape == (400, 600, 3)
        env.close()
    assert Play(envs.gym(Counter), 1).env.render() is None
    assert Play(envs.gym("CartPole-v1"), 1).env.render() is None


@pytest.mark.parametrize(
    "config",
    [
        envs.gym("CartPole-v1"),
        envs.gym("ALE/Pong-v5", mask="info:legal", info=("lives", "score"), nonfinite="skip", frameskip=2),
        envs.gym(gymnasium.make, id="CartPole-v1"),
    ],
)
def test_config_survives_a_saved_configuration(config):
    assert envs.from_json(json.loads(json.dumps(config.describe()))) == config


def test_importing_the_adapters_imports_no_simulator_and_no_torch():
    code = "import sys, srl.envs; print([m for m in ('torch', 'pettingzoo', 'pygame', 'mujoco') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_spaces_without_a_fixed_shape_are_refused():
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


class Color(Enum):
    RED = 1
    BLUE = 2


class Thing:
    """Knows the world it is in, which knows it."""

    def __init__(self, world):
        self.world, self.color, self.energy = world, Color.RED, np.zeros(2)


class Crowded(Counter):
    """A world of objects that refer to each other and come into being as it runs."""

    def __init__(self):
        self.things, self.trail, self.by_number = [Thing(self)], deque([0], maxlen=3), {}
        self.leader, self.drawn = self.things[0], set()

    def step(self, action):
        self.things.append(Thing(self))
        self.leader = self.things[-1]
        self.leader.color, self.leader.energy = Color.BLUE, self.things[0].energy
        self.leader.energy += self.np_random.random()
        self.trail.append(len(self.things))
        self.by_number[len(self.things)] = self.leader
        self.drawn.add(int(self.np_random.integers(5)))
        return super().step(action)


def test_snapshot_keeps_which_objects_are_the_same():
    env = Crowded()
    env.reset(seed=1)
    for _ in range(4):
        env.step(0)
    state = snapshot(env)
    json.dumps(state.values)
    again = Crowded()
    again.reset(seed=2)
    again.step(0)
    restore(again, state)
    assert len(again.things) == 5
    assert again.leader is again.things[-1] is again.by_number[5]
    assert all(thing.world is again for thing in again.things)
    assert all(thing.energy is again.things[0].energy for thing in again.things)
    assert (again.trail, again.drawn) == (env.trail, env.drawn)
    assert [thing.color for thing in again.things] == [Color.RED] + [Color.BLUE] * 4
    for each in (env, again):
        each.step(0)
    assert np.array_equal(env.leader.energy, again.leader.energy)


SHARED = Thing(None)


def test_snapshot_does_not_touch_objects_that_belong_to_a_module():
    env = Counter()
    env.reset(seed=1)
    env.thing = SHARED
    assert snapshot(env) is None
    other = Counter()
    other.reset(seed=1)
    other.thing = Thing(None)
    other.thing.energy = 3
    restore(env, snapshot(other))
    assert env.thing.energy == 3
    assert env.thing is not SHARED
    assert SHARED.energy.tolist() == [0, 0]


def test_snapshot_of_another_environment_is_refused():
    env, other = Counter(), Remembering()
    for each in (env, other):
        each.reset(seed=1)
    with pytest.raises(CheckpointError, match="another one"):
        restore(env, snapshot(other))


def test_environment_with_something_unknown_inside_cannot_be_saved():
    env = Counter()
    env.reset(seed=1)
    env.connection = object()
    assert snapshot(env) is None


def test_a_package_that_registers_only_when_asked_is_asked(tmp_path, monkeypatch):
    (tmp_path / "shy_games.py").write_text(
        "import gymnasium\n"
        "def register_envs():\n"
        "    gymnasium.register('Shy/Pole-v0', 'gymnasium.envs.classic_control.cartpole:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = envs.gym("shy_games:Shy/Pole-v0").make(2)
    assert env.spaces(env.agents[0]).action == gymnasium.spaces.Discrete(2)
    del gymnasium.registry["Shy/Pole-v0"]
