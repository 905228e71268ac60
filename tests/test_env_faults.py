"""Environments that misbehave: a failing copy is isolated, wrong values are named, masks and measures are found."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from srl import envs
from srl.core.errors import ConfigError, EnvError
from test_envs import Counter, Play, row


class Script(gymnasium.Env):
    """Observes its step; does at step 2 what a subclass says; ends at step 4."""

    observation_space = spaces.Box(0, 10, (1,), np.float32)
    action_space = spaces.Discrete(2)
    made = 0

    def __init__(self, only=0):
        cls = type(self)
        self.number, self.only = cls.made, only
        cls.made += 1

    def __init_subclass__(cls):
        cls.made = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def look(self):
        return np.array([self.t], np.float32)

    def step(self, action):
        self.t += 1
        result = self.look(), float(self.t), self.t == 4, False, {}
        return self.wrong(*result) if self.t == 2 and self.number == self.only else result

    def wrong(self, *result):
        return result


@pytest.fixture(autouse=True)
def _count_anew():
    for cls in Script.__subclasses__():
        cls.made = 0


def rows(views, count):
    return [row(views, i) for i in range(count)]


class Raises(Script):
    def wrong(self, *result):
        raise RuntimeError("the simulator\nexploded")


def test_copy_that_raises_in_step_is_made_anew_and_the_others_go_on(capsys):
    play = Play(envs.gym(Raises), 2)
    failing = play.env.envs[0]
    first, second = zip(*(rows(play.step(0), 2) for _ in range(3)), strict=True)
    assert list(first) == [
        (1, 1, "VA"),
        (0, 0, "UFA"),  # cut, not valid, and already the first observation of the new episode
        (1, 1, "VA"),
    ]
    assert list(second) == [(1, 1, "VA"), (2, 2, "VA"), (3, 3, "VA")]
    assert play.env.envs[0] is not failing
    assert play.env.notes == [
        "environment 'test_env_faults:Raises()', copy 0 failed and was made anew: RuntimeError: the simulator exploded"
    ]
    assert "Traceback" in capsys.readouterr().err


class RaisesInReset(Counter):
    """The second reset of the first copy fails."""

    made = 0

    def __init__(self):
        self.number = RaisesInReset.made
        RaisesInReset.made += 1

    def reset(self, *, seed=None, options=None):
        if self.number == 0 and self.episodes == 1:
            raise OSError("no more levels")
        return super().reset(seed=seed)


def test_reset_that_raises_is_made_up_for_and_cuts_no_episode():
    RaisesInReset.made = 0
    play = Play(envs.gym(RaisesInReset), 1)
    assert [row(play.step(0), 0) for _ in range(5)] == [
        (1, 1, "VA"),
        (2, 2, "VA"),
        (3, 3, "TV"),
        (0, 0, "FA"),
        (1, 1, "VA"),
    ]
    assert len(play.env.notes) == 1


def test_fresh_copies_are_not_seeded_like_the_ones_they_replace():
    class Random(Raises):
        def look(self):
            return self.np_random.random(1).astype(np.float32) if self.t == 0 else super().look()

    seen = []
    for _ in range(2):
        Random.made = 0
        play = Play(envs.gym(Random), 1, seed=3)
        begun = play.now[0].obs["obs"].item()
        play.step(0)
        seen.append((begun, play.step(0).after.obs["obs"].item()))
    assert seen[0] == seen[1]  # the same in each run
    assert seen[0][0] != seen[0][1]


class AlwaysRaises(Script):
    def step(self, action):
        raise ZeroDivisionError("broken for good")


def test_crash_loop_ends_with_the_original_exception():
    play = Play(envs.gym(AlwaysRaises), 2)
    with pytest.raises(ZeroDivisionError, match="broken for good"):
        for _ in range(10):
            play.step(0)
    assert play.env.guard.failures == 10
    assert len(play.env.notes) == 9


def test_failures_within_one_in_a_hundred_steps_do_not_end_a_run():
    play = Play(envs.gym(AlwaysRaises), 1)
    play.env.guard.steps = 100_000
    for _ in range(50):
        play.step(0)
    assert len(play.env.notes) == 50


class BrokenFresh(Script):
    """Raises in its second step, and cannot be made a second time."""

    def __init__(self):
        if type(self).made == 1:
            raise OSError("no licence left")
        super().__init__()

    def wrong(self, *result):
        raise RuntimeError("first cause")


class BrokenFreshReset(BrokenFresh):
    def __init__(self):
        Script.__init__(self)

    def reset(self, *, seed=None, options=None):
        if self.number == 1:
            raise OSError("no level left")
        return super().reset(seed=seed)


@pytest.mark.parametrize("broken", [BrokenFresh, BrokenFreshReset])
def test_fresh_copy_that_fails_too_ends_with_the_original_exception(broken):
    broken.made = 0
    play = Play(envs.gym(broken), 1)
    play.step(0)
    with pytest.raises(RuntimeError, match="first cause") as caught:
        play.step(0)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_being_told_to_stop_is_not_taken_for_a_failure(signal):
    class Stops(Script):
        def wrong(self, *result):
            raise signal

    play = Play(envs.gym(Stops), 1)
    play.step(0)
    with pytest.raises(signal):
        play.step(0)


def test_errors_in_the_first_reset_are_not_hidden():
    class NeverStarts(Script):
        def reset(self, *, seed=None, options=None):
            raise OSError("no display")

    with pytest.raises(OSError, match="no display"):
        Play(envs.gym(NeverStarts), 1)


class NanObs(Script):
    def wrong(self, obs, *rest):
        return obs * np.nan, *rest


class InfReward(Script):
    def wrong(self, obs, reward, *rest):
        return obs, -np.inf, *rest


@pytest.mark.parametrize(("broken", "what"), [(NanObs, "obs is NaN"), (InfReward, "reward is Inf")])
def test_nonfinite_value_stops_the_run_and_names_copy_and_field(broken, what):
    play = Play(envs.gym(broken, only=1), 3)
    play.step(0)
    with pytest.raises(EnvError) as caught:
        play.step(0)
    text = str(caught.value)
    assert text.startswith(f"environment 'test_env_faults:{broken.__name__}()', copy 1: {what}; ")
    assert "nonfinite='skip'" in text


@pytest.mark.parametrize("broken", [NanObs, InfReward])
def test_nonfinite_value_can_be_skipped(broken):
    play = Play(envs.gym(broken, nonfinite="skip", only=1), 3)
    first, second, _ = zip(*(rows(play.step(0), 3) for _ in range(3)), strict=True)
    assert list(first) == [(1, 1, "VA"), (2, 2, "VA"), (3, 3, "VA")]
    assert list(second) == [(1, 1, "VA"), (0, 0, "UFA"), (1, 1, "VA")]
    assert "copy 1 failed and was made anew" in play.env.notes[0]


def test_environment_that_starts_with_nan_is_refused_even_if_skipping():
    class StartsNan(Script):
        def look(self):
            return np.full(1, np.nan, np.float32)

    with pytest.raises(EnvError, match="copy 0: obs is NaN"):
        Play(envs.gym(StartsNan, nonfinite="skip"), 2)


def test_nonfinite_action_is_the_policys_fault():
    play = Play(envs.gym("Pendulum-v1", nonfinite="skip"), 3)
    with pytest.raises(EnvError, match=r"copy 2: the policy's action is NaN"):
        play.step([[0.0], [0.0], [np.nan]])


def test_native_vector_skips_a_step_that_is_not_finite():
    play = Play(envs.gym("CartPole-v1", nonfinite="skip"), 2)
    play.env.env.unwrapped.state[0, 1] = np.nan
    views = play.step(0)
    assert views.after.obs["obs"][1].tolist() == [0, 0, 0, 0]
    assert (views.truncated[1], views.valid[1], views.terminated[1], views.after.first[1]) == (True, False, False, True)
    assert (views.truncated[0], views.valid[0]) == (False, True)
    assert "copy 1 failed and had its step skipped" in play.env.notes[0]


def test_native_vector_stops_at_a_nan():
    play = Play(envs.gym("CartPole-v1"), 2)
    play.env.env.unwrapped.state[0, 1] = np.nan
    with pytest.raises(EnvError, match="environment 'CartPole-v1', copy 1: obs is NaN"):
        play.step(0)


def result_with(**changes):
    """An environment whose second step returns something else than it should."""

    class Wrong(Script):
        def wrong(self, obs, reward, terminated, truncated, info):
            given = {"obs": obs, "reward": reward}
            given.update(changes)
            return given["obs"], given["reward"], terminated, truncated, info

    return Wrong


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"obs": np.zeros(3, np.float32)}, r"obs must be float32 of shape \(1,\).*got float32 of shape \(3,\)"),
        ({"obs": np.float32(0)}, r"obs must be float32 of shape \(1,\).*got float32 of shape \(\)"),
        ({"obs": np.zeros(1, complex)}, r"obs must be float32 .*got complex128"),
        ({"obs": None}, r"obs must be float32 .*got object"),
        ({"reward": None}, "the reward must be a number, got NoneType"),
        ({"reward": "1"}, "the reward must be a number, got str"),
        ({"reward": np.zeros(2)}, "the reward must be a number, got ndarray"),
    ],
)
def test_wrong_shape_or_type_is_named_with_copy_and_field(changes, what):
    play = Play(envs.gym(result_with(**changes), only=1), 2)
    play.step(0)
    with pytest.raises(EnvError, match=r"copy 1: " + what):
        play.step(0)


def test_float_observation_for_an_integer_field_is_refused():
    class Floats(Script):
        observation_space = spaces.Discrete(10)

        def look(self):
            return self.t if self.t < 2 else 2.0

    play = Play(envs.gym(Floats), 1)
    play.step(0)
    with pytest.raises(EnvError, match=r"obs must be int64 .*got float64"):
        play.step(0)


def test_wider_floats_are_taken():
    play = Play(envs.gym(result_with(obs=np.array([2.0], np.float64), reward=np.float32(2))), 1)
    play.step(0)
    assert row(play.step(0), 0) == (2, 2, "VA")


@pytest.mark.parametrize("reward", [2, True, np.int8(2), np.array(2.0)])
def test_all_kinds_of_numbers_are_taken_as_rewards(reward):
    play = Play(envs.gym(result_with(reward=reward)), 1)
    play.step(0)
    assert play.step(0).reward[0] == reward


def test_part_of_a_dictionary_that_is_not_there_is_named():
    class Forgets(Script):
        observation_space = spaces.Dict({"a": spaces.Box(0, 1, (1,)), "b": spaces.Box(0, 1, (1,))})

        def look(self):
            return {name: np.zeros(1, np.float32) for name in ("a", "b")[: 2 if self.t < 2 else 1]}

    play = Play(envs.gym(Forgets), 1)
    play.step(0)
    with pytest.raises(EnvError, match=r"copy 0: the observation has no 'obs/b'"):
        play.step(0)


def test_old_style_step_is_explained():
    class Old(Script):
        def step(self, action):
            return super().step(action)[:4]

    with pytest.raises(EnvError, match=r"step\(\) must return \(observation, .*, info\), got 4 values"):
        Play(envs.gym(Old), 1).step(0)


class Masked(Script):
    """One of three actions is allowed, in turn; the last observation of an episode allows nothing."""

    action_space = spaces.Discrete(3)
    observation_space = spaces.Dict({"view": Script.observation_space, "legal": spaces.MultiBinary(3)})

    def flags(self):
        return np.eye(3, dtype=np.int8)[self.t % 3] * (self.t < 4)

    def look(self):
        return {"view": super().look(), "legal": self.flags()}


class InfoMasked(Masked):
    observation_space = Script.observation_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return Script.look(self), {"legal": self.flags()}

    def step(self, action):
        _, *result, _ = super().step(action)
        return Script.look(self), *result, {"legal": self.flags()} if self.t < 4 else {}


@pytest.mark.parametrize(("cls", "mask", "path"), [(Masked, "legal", "obs/view"), (InfoMasked, "info:legal", "obs")])
def test_masks_come_from_the_observation_or_from_info(cls, mask, path):
    play = Play(envs.gym(cls, mask=mask), 2)
    assert play.env.spaces("agent").masked
    assert set(play.now[0].obs) == {path, "mask"}
    seen = [play.now[0].obs["mask"].copy()] + [play.step(0).after.obs["mask"] for _ in range(5)]
    expected = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [1, 1, 1], [1, 0, 0]]  # all is allowed where nobody acts
    assert [mask.astype(int).tolist() for mask in seen] == [[flags, flags] for flags in expected]


def test_without_being_asked_for_a_mask_is_an_ordinary_part_of_the_observation():
    play = Play(envs.gym(Masked), 1)
    assert set(play.now[0].obs) == {"obs/view", "obs/legal"}


class ManyMasked(Script):
    """Two numbers, and a nested action: their masks are one array, and a nest of the same form."""

    action_space = spaces.Dict(
        {"go": spaces.MultiDiscrete([2, 3]), "say": spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,))])}
    )

    def flags(self):
        return {"go": (np.array([1, 0]), np.array([0, 1, 1])), "say": (np.array([False, True]), None)}

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"legal": self.flags()}

    def step(self, action):
        return *super().step(action)[:4], {"legal": self.flags()}


def test_masks_of_nested_actions_have_the_actions_paths():
    play = Play(envs.gym(ManyMasked, mask="info:legal"), 2)
    views = play.step({})
    for obs in (play.now[0].obs, views.after.obs):
        assert obs["mask/go"].astype(int).tolist() == [[1, 0, 0, 1, 1]] * 2
        assert obs["mask/say/0"].astype(int).tolist() == [[0, 1]] * 2
        assert "mask/say/1" not in obs


def masked_by(flags):
    class Odd(InfoMasked):
        def flags(self):
            return flags if self.t == 1 else np.ones(3, bool)

        def step(self, action):
            result = super().step(action)
            return (*result[:4], {}) if flags is None and self.t == 1 else result

    return Odd


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (None, "info has no 'legal', where the action mask should be"),
        (np.ones(4, bool), r"mask must be 3 flags, one a choice, got bool of shape \(4,\)"),
        (np.array(["a", "b", "c"]), "mask must be 3 flags"),
        (np.zeros(3, bool), "mask allows no action at all"),
    ],
)
def test_missing_or_wrong_masks_are_named(flags, what):
    play = Play(envs.gym(masked_by(flags), mask="info:legal"), 1)
    with pytest.raises(EnvError, match="copy 0: " + what):
        play.step(0)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (envs.gym(Masked, mask="leagl"), "mask='leagl' names no entry of the observation"),
        (envs.gym(Script, mask="legal"), "has a Box space"),
        (envs.gym("Pendulum-v1", mask="info:legal"), "no discrete part to mask"),
    ],
)
def test_masks_that_cannot_be_are_refused_at_once(config, what):
    with pytest.raises(ConfigError, match=what):
        config.make(1)


def test_unknown_way_to_treat_nan_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"'stop'.*'skip'"):
        envs.gym("CartPole-v1", nonfinite="ignore")


class NativeMasked(gymnasium.vector.VectorEnv):
    """A vector whose infos hold masks and numbers for the copies that have them, as Gymnasium marks them."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs, lacking=False):
        self.num_envs, self.lacking = num_envs, lacking
        self.single_observation_space, self.single_action_space = spaces.Box(0, 10, (1,)), spaces.Discrete(3)

    def info(self):
        flags = np.eye(3, dtype=bool)[np.full(self.num_envs, self.t % 3)]
        there = np.full(self.num_envs, not (self.lacking and self.t == 1))
        even = np.arange(self.num_envs) % 2 == 0
        return {"legal": flags, "_legal": there, "score": np.arange(self.num_envs) + 10 * self.t, "_score": even}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros((self.num_envs, 1), np.float32), self.info()

    def step(self, actions):
        self.t += 1
        over, none = np.full(self.num_envs, self.t == 2), np.zeros(self.num_envs, bool)
        return np.full((self.num_envs, 1), self.t, np.float32), np.ones(self.num_envs), over, none, self.info()


@pytest.fixture(scope="module", autouse=True)
def _native():
    gymnasium.register("NativeMasked-v0", vector_entry_point=NativeMasked)
    yield
    del gymnasium.registry["NativeMasked-v0"]


def test_masks_and_numbers_of_native_vectors_are_found_in_their_infos():
    play = Play(envs.gym("NativeMasked-v0", mask="info:legal", info=("score",)), 3)
    assert play.step(0).after.obs["mask"].astype(int).tolist() == [[0, 1, 0]] * 3
    assert play.env.measured == []
    assert play.step(0).after.obs["mask"].astype(int).tolist() == [[0, 0, 1]] * 3  # the last one of the episode
    assert play.env.measured == [("score", 20.0), ("score", 22.0)]


def test_mask_that_a_native_vector_does_not_give_is_named():
    play = Play(envs.gym("NativeMasked-v0", mask="info:legal", lacking=True), 3)
    with pytest.raises(EnvError, match="copy 0: info has no 'legal'"):
        play.step(0)


class Scored(Script):
    """Has a score at every step, and a bonus only in the middle of an episode."""

    def step(self, action):
        *result, _ = super().step(action)
        return *result, {"score": self.t * 10, **({"bonus": np.float32(0.5)} if self.t == 3 else {})}


def test_last_value_of_each_number_is_reported_when_its_episode_ends():
    play = Play(envs.gym(Scored, info=("score", "bonus", "unheard of")), 1)
    for _ in range(3):
        play.step(0)
    assert play.env.measured == []
    for _ in range(6):
        play.step(0)
    assert play.env.measured == [("score", 40.0), ("bonus", 0.5)] * 2


def test_info_that_is_no_number_is_named():
    class Words(Script):
        def wrong(self, *result):
            return *result[:4], {"score": "many"}

    play = Play(envs.gym(Words, info="score"), 1)
    play.step(0)
    with pytest.raises(EnvError, match=r"copy 0: info\['score'\] must be a number, got str"):
        play.step(0)


class Tunable(Raises):
    level = 0

    def configure(self, level):
        self.level = level


def test_curriculum_reaches_every_copy_and_also_those_made_later():
    play = Play(envs.gym(Tunable), 2)
    play.env.configure({"level": 3})
    assert [env.level for env in play.env.envs] == [3, 3]
    failing = play.env.envs[0]
    play.step(0)
    play.step(0)
    assert play.env.envs[0] is not failing
    assert play.env.envs[0].level == 3


@pytest.mark.parametrize("config", [envs.gym(Script), envs.gym("CartPole-v1")])
def test_environment_without_a_curriculum_says_so(config):
    with pytest.raises(EnvError, match=r"has no method configure\(\), which would take the values \['level'\]"):
        Play(config, 1).env.configure({"level": 3})


def test_restored_loop_goes_on_exactly_also_with_its_failures():
    play = Play(envs.gym(Scored, info="score"), 2, seed=4)
    play.env.guard.failures = 3
    for _ in range(3):
        play.step(0)
    again = Play(envs.gym(Scored, info="score"), 2, seed=9)
    again.env.load_state(play.env.state())
    again.now = play.now
    assert again.env.guard.failures == 3
    for _ in range(6):
        first, second = play.step(0), again.step(0)
        assert rows(first, 2) == rows(second, 2)
    assert again.env.measured == play.env.measured != []
