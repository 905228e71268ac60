"""PettingZoo environments as vectors: rows, deaths and returns, turns, masks, roles, seeds, failures, snapshots."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")
pytest.importorskip("mpe2")
from pettingzoo import AECEnv, ParallelEnv

from srl import envs
from srl.core.errors import ConfigError, EnvError
from test_envs import Play, row


def table(views, count):
    """The rows of a step; see :func:`test_envs.row`."""
    return [row(views, i) for i in range(count)]


class Lives(ParallelEnv):
    """Three agents and a script of who lives; each observes 10 × its number + the step, and is given its number.

    ``b`` terminates at step 1 and returns at step 3, ``c`` is truncated at step 2, all that live end at step 4.
    """

    possible_agents = ["a", "b", "c"]  # noqa: RUF012
    metadata = {"name": "lives"}  # noqa: RUF012
    alive = ["abc", "ac", "a", "ab", ""]  # noqa: RUF012
    wrong = None

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def observation_space(self, agent):
        return spaces.Box(-100, 100, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(5)

    def look(self, agents):
        return {a: np.array([10 * "abc".index(a) + self.t], np.float32) for a in agents}

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, ["a", "b", "c"]
        return self.look(self.agents), {a: {} for a in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.actions = actions
        self.t += 1
        before, self.agents = self.agents, list(self.alive[self.t])
        everyone = sorted({*before, *self.agents})
        gone = set(before) - set(self.agents)
        terminated = {a: a in gone and a != "c" for a in everyone}
        truncated = {a: a in gone and a == "c" for a in everyone}
        rewards = {a: float("abc".index(a) + 1) for a in everyone}
        infos = {a: {"alive": len(self.agents)} for a in everyone}
        return self.look(everyone), rewards, terminated, truncated, infos

    def render(self):
        return np.zeros((2, 2, 3), np.uint8)


def test_rows_are_ordered_copy_by_copy_and_agents_keep_their_rows():
    play = Play(envs.pettingzoo(Lives), 2, groups=[("c", "a"), ("b",)])
    both, single = play.now
    assert both.obs["obs"].ravel().tolist() == [20, 0, 20, 0]
    assert single.obs["obs"].ravel().tolist() == [10, 10]
    play.step([1, 2, 3, 4], [0, 1])
    games = [game.env for game in play.env.games]
    assert [dict(game.actions) for game in games] == [{"a": 2, "b": 0, "c": 1}, {"a": 4, "b": 1, "c": 3}]


def test_agents_of_a_parallel_game_die_return_and_begin_anew():
    play = Play(envs.pettingzoo(Lives, info="alive"), 1)
    first = play.now[0]
    assert (first.first.all(), first.acts.all(), first.obs["obs"].ravel().tolist()) == (True, True, [0, 10, 20])
    steps = [table(play.step(0), 3) for _ in range(6)]
    assert steps == [
        [(1, 1, "VA"), (11, 2, "TV"), (21, 3, "VA")],  # b dies; its last observation is there
        [(2, 1, "VA"), (0, 0, ""), (22, 3, "UV")],  # c is truncated; of b nothing is seen
        [(3, 1, "VA"), (13, 2, "FA"), (0, 0, "")],  # b is back: a first observation, on which it acts
        [(4, 1, "TV"), (14, 2, "TV"), (0, 0, "")],  # the end of all
        [(0, 0, "FA"), (10, 0, "FA"), (20, 0, "FA")],  # the reset
        [(1, 1, "VA"), (11, 2, "TV"), (21, 3, "VA")],
    ]
    assert play.env.measured == [("alive", 2.0), ("alive", 1.0), ("alive", 0.0), ("alive", 0.0), ("alive", 2.0)]


class Leaves(Lives):
    """Agents go without being terminated or truncated, which PettingZoo does not allow."""

    def step(self, actions):
        found, rewards, flags, _, infos = super().step(actions)
        none = dict.fromkeys(flags, False)
        return found, rewards, none, none, infos


def test_agent_that_goes_without_a_word_has_terminated():
    play = Play(envs.pettingzoo(Leaves), 1)
    assert table(play.step(0), 3)[1] == (0, 2, "TV")


class Duel(AECEnv):
    """Two players in turn. A move of 1 takes a point from the other; the first to make three such moves wins.

    After eight moves both are truncated. Each observes the number of moves so far, plus 100 if it is "right".
    """

    possible_agents = ["left", "right"]  # noqa: RUF012
    metadata = {"name": "duel"}  # noqa: RUF012
    limit = 8

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def observation_space(self, agent):
        return spaces.Dict({"observation": spaces.Box(0, 200, (1,)), "action_mask": spaces.MultiBinary(3)})

    def action_space(self, agent):
        return spaces.Discrete(3)

    def observe(self, agent):
        flags = np.array([1, 1, self.t % 2], np.int8) * (agent == self.agent_selection)
        return {"observation": np.array([self.t + 100 * (agent == "right")], np.float32), "action_mask": flags}

    def reset(self, seed=None, options=None):
        self.t, self.agents, self.agent_selection = 0, ["left", "right"], "left"
        self.hits = {"left": 0, "right": 0}
        self.rewards = {"left": 0, "right": 0}
        self._cumulative_rewards = {"left": 0, "right": 0}
        self.terminations = {"left": False, "right": False}
        self.truncations = {"left": False, "right": False}
        self.infos = {"left": {}, "right": {}}

    def step(self, action):
        me = self.agent_selection
        if self.terminations[me] or self.truncations[me]:
            self._was_dead_step(action)
            return
        other = "right" if me == "left" else "left"
        self.t += 1
        self.hits[me] += int(action == 1)
        self.rewards = {me: int(action == 1), other: -int(action == 1)}
        if self.hits[me] == 3:
            self.terminations = {"left": True, "right": True}
        elif self.t == self.limit:
            self.truncations = {"left": True, "right": True}
        self.agent_selection = other
        self._accumulate_rewards()


def test_turn_based_game_is_told_move_by_move_to_both_players():
    play = Play(envs.pettingzoo(Duel), 1)
    assert set(play.now[0].obs) == {"obs", "mask"}
    assert play.now[0].acts.tolist() == play.now[0].first.tolist() == [True, False]
    masks = [play.now[0].obs["mask"].astype(int).tolist()]
    steps = []
    for action in (1, 0, 1, 0, 1, 0, 0):
        views = play.step(action)
        steps.append(table(views, 2))
        masks.append(views.after.obs["mask"].astype(int).tolist())
    assert steps == [
        [(0, 1, "V"), (101, -1, "FA")],  # left hits; right is given -1 before its first move
        [(2, 0, "A"), (0, 0, "V")],
        [(0, 1, "V"), (103, -1, "A")],  # right loses a point while not on turn
        [(4, 0, "A"), (0, 0, "V")],
        [(5, 1, "TV"), (105, -1, "T")],  # left wins: both end, each with its last observation
        [(0, 0, "FA"), (0, 0, "")],  # the reset
        [(0, 0, "V"), (101, 0, "FA")],
    ]
    assert masks[0] == [[1, 1, 0], [1, 1, 1]]  # who does not act may do anything
    assert masks[1] == [[1, 1, 1], [1, 1, 1]]
    assert masks[2] == [[1, 1, 0], [1, 1, 1]]


def test_turn_based_game_is_truncated_for_both_players_at_once():
    play = Play(envs.pettingzoo(Duel), 1)
    steps = [table(play.step(0), 2) for _ in range(9)]
    assert steps[6] == [(0, 0, "V"), (107, 0, "A")]
    assert steps[7] == [(8, 0, "U"), (108, 0, "UV")]
    assert steps[8] == [(0, 0, "FA"), (0, 0, "")]


class Elimination(AECEnv):
    """Three players in turn; the second is out after its first move, the others after their second."""

    possible_agents = ["a", "b", "c"]  # noqa: RUF012
    metadata = {"name": "elimination"}  # noqa: RUF012
    render_mode = None

    def observation_space(self, agent):
        return spaces.Discrete(10)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def observe(self, agent):
        return self.moves[agent]

    def reset(self, seed=None, options=None):
        self.agents = ["a", "b", "c"]
        self.agent_selection = "a"
        self.moves = dict.fromkeys(self.agents, 0)
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0), dict.fromkeys(self.agents, 0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def step(self, action):
        me = self.agent_selection
        if self.terminations[me]:
            self._was_dead_step(action)
            return
        self.moves[me] += 1
        self._clear_rewards()
        self.rewards[me] = 1
        self.terminations[me] = self.moves[me] == (1 if me == "b" else 2)
        self.agent_selection = self.agents[(self.agents.index(me) + 1) % len(self.agents)]
        self._accumulate_rewards()
        self._deads_step_first()


def test_players_that_are_out_are_passed_over():
    play = Play(envs.pettingzoo(Elimination), 1)
    assert [table(play.step(0), 3) for _ in range(6)] == [
        [(0, 1, "V"), (0, 0, "FA"), (0, 0, "")],
        [(0, 0, ""), (1, 1, "TV"), (0, 0, "FA")],  # b is out, and passed over from now on
        [(1, 0, "A"), (0, 0, ""), (0, 1, "V")],
        [(2, 1, "TV"), (0, 0, ""), (1, 0, "A")],
        [(0, 0, ""), (0, 0, ""), (2, 1, "TV")],
        [(0, 0, "FA"), (0, 0, ""), (0, 0, "")],
    ]


def test_masks_of_parallel_games_may_come_from_info():
    class Told(Lives):
        def reset(self, seed=None, options=None):
            found, _ = super().reset()
            return found, {a: {"legal": np.arange(5) == "abc".index(a)} for a in found}

    play = Play(envs.pettingzoo(Told, mask="info:legal"), 1)
    assert play.now[0].obs["mask"].tolist() == np.eye(5, dtype=bool)[:3].tolist()
    with pytest.raises(EnvError, match="copy 0, agent 'a': info has no 'legal'"):
        play.step(0)


def test_masks_can_be_left_in_the_observation():
    play = Play(envs.pettingzoo(Duel, mask=""), 1)
    assert set(play.now[0].obs) == {"obs/observation", "obs/action_mask"}


def test_roles_are_dealt_anew_each_episode_and_rows_follow_them():
    play = Play(envs.pettingzoo(Duel, roles=("learner", "opponent")), 1, groups=[("learner",), ("opponent",)], seed=1)
    seats = []
    for _ in range(40):
        learner, opponent = play.now
        left = 0 if learner.acts[0] else 1  # "left" moves first, whoever plays it
        assert opponent.acts[0] != learner.acts[0]
        seats.append(left)
        assert play.now[left].obs["obs"].item() == 0
        for move in range(5):
            mover = (left + move) % 2
            actions = [0, 0]
            actions[mover] = int(mover == left)
            views = play.step(*actions)
            assert views[mover].valid[0]
            assert not views[1 - mover].valid[0]
            assert views[mover].reward[0] == -views[1 - mover].reward[0] == actions[mover]
        assert views[0].terminated[0]
        assert views[1].terminated[0]
        play.step(0, 0)
    assert 10 < sum(seats) < 30


def test_roles_must_be_as_many_as_agents_and_alike():
    with pytest.raises(ConfigError, match="has the 2 agents"):
        envs.pettingzoo(Duel, roles=("one",)).make(1)
    with pytest.raises(ConfigError, match="only agents that see and do alike"):
        envs.pettingzoo("mpe2.simple_tag_v3", roles=("a", "b", "c", "d")).make(1)


def test_agents_that_differ_cannot_share_a_policy():
    env = envs.pettingzoo("mpe2.simple_tag_v3").make(1)
    with pytest.raises(ConfigError, match="cannot share a policy"):
        env.bind([env.agents])
    with pytest.raises(ConfigError, match="must be in one group"):
        env.bind([env.agents[:3]])


TAG = [("adversary_0", "adversary_1", "adversary_2"), ("agent_0",)]


def wander(play, steps, seed=0):
    """Random allowed moves; everything that came of them."""
    rng = np.random.default_rng(seed)
    seen = []
    for _ in range(steps):
        actions = []
        for observed, (_, spec, rows) in zip(play.now, play.specs, strict=True):
            assert set(spec) == {"action"}
            allowed = observed.obs.get("mask", np.ones((rows, 5), bool))
            actions.append((rng.random(allowed.shape) * allowed).argmax(1))
        views = play.step(*actions)
        for view in views if isinstance(views, list) else [views]:
            parts = (*view.after.obs.values(), view.reward, view.terminated, view.truncated, view.valid.copy())
            seen += [*parts, view.after.first, view.after.acts.copy()]
    return seen


def same(first, second):
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("name", "groups"),
    [("mpe2.simple_spread_v3", None), ("mpe2.simple_tag_v3", TAG), ("pettingzoo.classic.tictactoe_v3", None)],
)
def test_real_games_are_played_and_seeds_make_them_repeat_themselves(name, groups):
    def play(seed):
        game = Play(envs.pettingzoo(name), 2, groups=groups, seed=seed)
        seen = wander(game, 60, seed)
        game.env.close()
        return seen

    first = play(5)
    assert same(first, play(5))
    assert not same(first, play(6))


def test_spread_is_truncated_for_all_at_its_limit():
    play = Play(envs.pettingzoo("mpe2.simple_spread_v3", max_cycles=4), 2)
    assert play.now[0].obs["obs"].shape == (6, 18)
    for t in range(10):
        views = play.step(t % 5)
        assert views.truncated.tolist() == [t % 5 == 3] * 6
        assert views.valid.tolist() == [t % 5 != 4] * 6
        assert views.after.first.tolist() == [t % 5 == 4] * 6
        assert not views.terminated.any()


def test_tictactoe_is_won_by_three_in_a_row():
    play = Play(envs.pettingzoo("pettingzoo.classic.tictactoe_v3"), 1)
    assert play.env.spaces("player_1").observation.shape == (3, 3, 2)
    for move in (0, 3, 1, 4):
        play.step(move)
    assert play.now[0].obs["mask"][0].astype(int).tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 1]
    views = play.step(2)
    assert views.reward.tolist() == [1, -1]
    assert views.terminated.tolist() == [True, True]
    assert views.valid.tolist() == [True, False]
    assert play.step(0).after.first.tolist() == [True, False]


def test_continuous_actions_reach_the_game():
    play = Play(envs.pettingzoo("mpe2.simple_spread_v3", continuous_actions=True), 1)
    play.step(np.full((3, 5), 0.2, np.float32))
    with pytest.raises(EnvError, match="copy 0, agent 'agent_1': the policy's action is NaN"):
        play.step([[0.0] * 5, [np.nan] * 5, [0.0] * 5])


class Breaks(Lives):
    """The first one made goes wrong at its second step, in the way ``wrong`` says."""

    made = 0

    def __init__(self, wrong="raise"):
        super().__init__()
        self.number, self.wrong = Breaks.made, wrong
        Breaks.made += 1

    def step(self, actions):
        found, rewards, *rest = super().step(actions)
        if self.number == 0 and self.t == 2:
            if self.wrong == "raise":
                raise RuntimeError("lost the server")
            if self.wrong == "nan":
                found["a"] = found["a"] * np.nan
            if self.wrong == "shape":
                found["a"] = np.zeros(2, np.float32)
            if self.wrong == "reward":
                rewards["a"] = None
            if self.wrong == "stranger":
                rewards["x"] = 0.0
        return found, rewards, *rest


@pytest.fixture(autouse=True)
def _count_anew():
    Breaks.made = 0


@pytest.mark.parametrize("wrong", ["raise", "nan"])
def test_game_that_fails_is_made_anew_and_the_others_go_on(wrong):
    play = Play(envs.pettingzoo(Breaks, wrong=wrong, nonfinite="skip"), 2)
    play.step(0)
    assert table(play.step(0), 6) == [
        (0, 0, "UFA"),
        (10, 0, "FA"),  # b was dead: no episode of it was cut
        (20, 0, "UFA"),
        (2, 1, "VA"),
        (0, 0, ""),
        (22, 3, "UV"),
    ]
    assert (
        "copy 0 failed and was made anew" in play.env.notes[0] or "copy 0, agent 'a': obs is NaN" in play.env.notes[0]
    )
    assert table(play.step(0), 3) == [(1, 1, "VA"), (11, 2, "TV"), (21, 3, "VA")]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("nan", "copy 0, agent 'a': obs is NaN; correct the environment"),
        ("shape", r"copy 0, agent 'a': obs must be float32 of shape \(1,\)"),
        ("reward", "copy 0, agent 'a': the reward must be a number, got NoneType"),
        ("stranger", "copy 0: 'x' is not one of its possible_agents"),
    ],
)
def test_wrong_values_are_named_with_copy_and_agent(wrong, what):
    play = Play(envs.pettingzoo(Breaks, wrong=wrong), 2)
    play.step(0)
    with pytest.raises(EnvError, match=what):
        play.step(0)


def test_game_that_always_fails_ends_with_the_original_exception():
    class Hopeless(Lives):
        def step(self, actions):
            raise ZeroDivisionError("broken for good")

    play = Play(envs.pettingzoo(Hopeless), 4)
    with pytest.raises(ZeroDivisionError, match="broken for good"):
        for _ in range(3):
            play.step(0)


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (envs.pettingzoo("mpe2.simple_tag_v3"), TAG),
        (envs.pettingzoo("pettingzoo.classic.tictactoe_v3", roles=("learner", "opponent")), None),
    ],
)
def test_restored_game_goes_on_exactly(config, groups):
    play = Play(config, 2, groups=groups, seed=3)
    wander(play, 33)
    state = play.env.state()
    json.dumps(state.values)  # plain enough for a checkpoint
    again = Play(config, 2, groups=groups, seed=8)
    wander(again, 7)
    again.env.load_state(state)
    again.now = play.now
    assert same(wander(play, 60), wander(again, 60))


def test_games_draw_themselves_and_take_a_curriculum():
    assert Play(envs.pettingzoo(Lives), 1).env.render() is None
    env = envs.pettingzoo("mpe2.simple_tag_v3").make(1, render=True)
    env.bind(TAG)
    env.games[0].reset(0)
    assert env.render().shape == (700, 700, 3)
    with pytest.raises(EnvError, match=r"has no method configure\(\)"):
        env.configure({"level": 2})
    env.close()


@pytest.mark.parametrize(
    "config",
    [
        envs.pettingzoo("mpe2.simple_tag_v3", max_cycles=50, info="score", nonfinite="skip"),
        envs.pettingzoo("pettingzoo.classic.tictactoe_v3", mask="", roles=("learner", "opponent")),
        envs.pettingzoo(Duel),
    ],
)
def test_config_survives_a_saved_configuration(config):
    assert envs.from_json(json.loads(json.dumps(config.describe()))) == config


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (envs.pettingzoo("mpe2.simple_tga_v3"), "there is no module 'mpe2.simple_tga_v3'"),
        (envs.pettingzoo("json"), "is no PettingZoo environment"),
        (envs.pettingzoo("mpe2.simple_tag_v3", number=3), r"refused its arguments \{'number': 3\}"),
        (envs.pettingzoo(dict), "a dict is neither a PettingZoo ParallelEnv nor an AECEnv"),
    ],
)
def test_what_is_no_game_is_refused_with_a_reason(config, what):
    with pytest.raises(ConfigError, match=what):
        config.make(1)
