"""Several policies in one run: each with its own spaces, streams, trainer and algorithm; samples shared or dropped;
past versions as opponents; evaluation, targets and curricula."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import srl
from srl import envs
from srl.config import load
from srl.core.errors import ConfigError
from srl.monitor.sinks import read_metrics
from srl.plan import check, checkpoint_store
from srl.services.checkpoints import CheckpointStore
from srl.workers.evaluator import Target, read_evaluations
from srl.workers.opponents import PAST, Opponent, OpponentInference

pettingzoo = pytest.importorskip("pettingzoo")

LENGTH = 8


class Duet(pettingzoo.ParallelEnv):
    """Two agents with different spaces; each is rewarded for naming what it sees, and costs the other nothing."""

    metadata = {"name": "duet"}  # noqa: RUF012
    possible_agents = ["singer", "drummer"]  # noqa: RUF012
    seen = {"singer": gymnasium.spaces.Box(0, 1, (3,)), "drummer": gymnasium.spaces.Discrete(2)}  # noqa: RUF012

    def __init__(self):
        self.agents = []
        self.rng = np.random.default_rng(0)
        self.truth = {"singer": 0, "drummer": 0}
        self.time = 0

    def observation_space(self, agent):
        return self.seen[agent]

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(3 if agent == "singer" else 2)

    def _look(self):
        self.truth = {"singer": int(self.rng.integers(3)), "drummer": int(self.rng.integers(2))}
        return {"singer": np.eye(3, dtype=np.float32)[self.truth["singer"]], "drummer": self.truth["drummer"]}

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        return self._look(), {agent: {} for agent in self.agents}

    def step(self, actions):
        reward = {agent: float(actions[agent] == self.truth[agent]) for agent in self.agents}
        self.time += 1
        over = dict.fromkeys(self.agents, self.time == LENGTH)
        seen = self._look()
        infos = {agent: {} for agent in self.agents}
        if self.time == LENGTH:
            self.agents = []
        return seen, reward, over, dict.fromkeys(over, False), infos


PPO = srl.PPO(horizon=16, minibatch=64, epochs=4, lr=5e-3, gamma=0.5, entropy=0.01)
DQN = srl.DQN(
    horizon=16,
    minibatch=32,
    minibatches=4,
    gamma=0.5,
    n_step=1,
    warmup=256,
    replay_steps=2048,
    epsilon_steps=2000,
    lr=2e-3,
)


def duet(**changes):
    base = srl.Experiment(
        envs.pettingzoo(Duet),
        {"voice": PPO, "drums": DQN},
        agents={"singer": "voice", "drummer": "drums"},
        actors=srl.Actors(envs=8),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=8000,
    )
    return replace(base, **changes)


@pytest.mark.learning
@pytest.mark.parametrize(
    "layout",
    [
        {"launcher": "inline"},
        {"launcher": "local", "actors": srl.Actors(envs=8, inference="remote")},
        {"launcher": "local", "transport": "tcp"},
    ],
    ids=["inline", "local, remote inference", "local, tcp"],
)
def test_a_ppo_policy_and_a_dqn_policy_learn_in_the_same_environment_in_one_run(tmp_path, layout):
    duet(**layout).run(tmp_path / "run", quiet=True)
    for policy in ("voice", "drums"):
        found = srl.evaluate(tmp_path / "run", policy=policy)
        assert found.return_mean >= 0.9 * LENGTH, policy
        assert found.return_max <= LENGTH
    last = read_metrics(tmp_path / "run")[-1]
    assert last["updates/voice"] > 10
    assert last["updates/drums"] > 10


def saved(run_dir):
    plans = check(load(run_dir))
    return [checkpoint_store(run_dir, plan).load("latest") for plan in plans if not plan.opponent]


def assert_equal(first_dir, second_dir):
    for first, second in zip(saved(first_dir), saved(second_dir), strict=True):
        assert first.values == second.values
        assert first.arrays.keys() == second.arrays.keys()
        for name, array in first.arrays.items():
            assert np.array_equal(array, second.arrays[name], equal_nan=True), name


def self_play(**changes):
    base = srl.Experiment(
        envs.pettingzoo("pettingzoo.classic.tictactoe_v3", roles=("learner", "opponent")),
        {"player": srl.PPO(horizon=16, minibatch=32, epochs=2, gamma=1.0)},
        agents={"learner": "player", "opponent": "past"},
        opponents={"past": srl.Opponent(of="player", rule="prioritized", pool=3)},
        actors=srl.Actors(envs=4),
        trainer=srl.Trainer(threads=1, past_every=2),
        launcher="inline",
        steps=1000,
    )
    return replace(base, **changes)


TWO = {
    "ppo and dqn": duet(steps=1600),
    "two ppo policies with memory": duet(
        steps=1600, algorithm=dict.fromkeys(("voice", "drums"), replace(PPO, memory="gru"))
    ),
    "opponents of the past": self_play(),
}


@pytest.mark.parametrize("name", TWO)
def test_runs_of_two_policies_are_exact_to_the_bit_and_so_is_their_resume(tmp_path, name):
    x = TWO[name]
    x.run(tmp_path / "whole", quiet=True)
    x.run(tmp_path / "again", quiet=True)
    assert_equal(tmp_path / "whole", tmp_path / "again")
    x.run(tmp_path / "halves", quiet=True, steps=x.steps // 2)
    assert saved(tmp_path / "halves")[0].values["steps"] < saved(tmp_path / "whole")[0].values["steps"]
    srl.resume(tmp_path / "halves", steps=x.steps)
    assert_equal(tmp_path / "whole", tmp_path / "halves")


def test_results_are_kept_by_opponent_version(tmp_path):
    self_play().run(tmp_path / "run", quiet=True)
    found = json.loads((tmp_path / "run" / "opponents.json").read_text())["past"]
    plan = next(plan for plan in check(self_play()) if not plan.opponent)
    tagged = {v for tag, v in checkpoint_store(tmp_path / "run", plan).tags().items() if tag.startswith(PAST)}
    assert len(found) > 2
    assert {int(version[1:]) for version in found} <= tagged
    assert sum(each["games"] for each in found.values()) > 50
    assert all(-1 <= each["return_mean"] <= 1 for each in found.values())


def stored(tmp_path, versions):
    """A store with these versions tagged as past ones, and the plan of the policy in it."""
    plan = next(plan for plan in check(self_play()) if not plan.opponent)
    learner = plan.algorithm.learner(plan.spaces, 0, "cpu")
    store = CheckpointStore(tmp_path / "player", "test")
    for version in versions:
        from srl.core.worker import State

        whole = State(values={"version": version})
        whole.put("learner", learner.state())
        store.save(version, "player", whole)
        store.tag(f"{PAST}{version}", version)
    return store, plan


@pytest.mark.parametrize("rule", ["latest", "uniform", "prioritized"])
def test_opponents_are_drawn_by_the_rule_and_kept_until_their_episode_ends(tmp_path, rule):
    store, plan = stored(tmp_path, [3, 5, 8])
    rows = 60
    past = OpponentInference(Opponent("player", rule, newest=0), plan.algorithm, plan.spaces, store, 0, 1, rows)
    from srl.core.slab import Slab

    slab = Slab(plan.algorithm.block(plan.spaces, rows), 1, shared=False)
    slab.arrays["mask"][:] = True
    client = past.client(0, slab, 0)
    played = np.zeros((400, rows), int)
    for game in range(400):
        client.submit(game % 10, 0)
        assert client.ready()
        played[game] = slab.steps["version"][game % 10]
        ended = np.flatnonzero(np.arange(rows) % 2 == 0)  # the others never end
        returns = np.where(played[game, ended] == 3, 1.0, -1.0)  # version 3 always wins
        client.ended(ended, returns)
    assert (played[:, 1::2] == played[0, 1::2]).all()
    share = {version: float(np.mean(played[200:, ::2] == version)) for version in (3, 5, 8)}
    if rule == "latest":
        assert share[8] == 1
    elif rule == "uniform":
        assert all(abs(each - 1 / 3) < 0.05 for each in share.values())
    else:
        assert share[3] > 2 * share[5]
        assert min(share.values()) > 0.03


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_samples_may_go_to_two_trainers_whose_algorithms_differ(tmp_path, order):
    algorithms = {"a": replace(PPO, reuse=2), "b": DQN}
    x = srl.Experiment(
        envs.gym("CartPole-v1"),
        algorithms,
        agents={"*": "a"},
        samples={"a": order},
        actors=srl.Actors(envs=8),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=3000,
    )
    x.run(tmp_path / "run", quiet=True)
    last = read_metrics(tmp_path / "run")[-1]
    assert last["steps"] >= 3000  # of the slower one
    assert last["dropped/a"] == last["dropped/b"] == 0


def test_samples_of_an_agent_may_go_nowhere(tmp_path):
    x = duet(samples={"drums": []}, algorithm={"voice": PPO, "drums": PPO})
    with pytest.raises(ConfigError, match="the trainer of 'drums' gets nobody's samples"):
        check(x)
    x = duet(
        algorithm={"voice": PPO}, agents={"singer": "voice", "drummer": "past"}, opponents={"past": Opponent("voice")}
    )
    with pytest.raises(ConfigError, match="whose past it is"):  # another agent's weights do not fit these spaces
        check(x)


def test_mistakes_in_the_flow_of_samples_are_named():
    with pytest.raises(ConfigError, match="unknown policy in samples"):
        check(duet(samples={"voice": ["voice", "choir"]}))
    with pytest.raises(ConfigError, match="do not fit the trainer of 'drums'"):
        check(duet(samples={"voice": ["voice", "drums"]}))
    with pytest.raises(ConfigError, match="unknown policy for the opponent"):
        check(
            duet(algorithm={"voice": PPO}, agents={"singer": "voice", "drummer": "x"}, opponents={"x": Opponent("y")})
        )
    with pytest.raises(ConfigError, match="differ in their spaces"):
        check(duet(algorithm=PPO, agents={"*": "default"}))


def test_a_target_ends_the_run_and_the_best_version_is_tagged(tmp_path):
    x = srl.Experiment(
        envs.pettingzoo(Duet),
        {"voice": PPO, "drums": PPO},
        agents={"singer": "voice", "drummer": "drums"},
        actors=srl.Actors(envs=8),
        trainer=srl.Trainer(threads=1),
        evaluator=srl.Evaluator(seconds=0.1, episodes=10),
        until="return/drums>=7",
        launcher="inline",
        steps=10**7,
    )
    result = x.run(tmp_path / "run", quiet=True)
    assert result.steps < 200_000
    found = [each for each in read_evaluations(tmp_path / "run") if each["policy"] == "drums"]
    assert found[-1]["return_mean"] >= 7
    best = max(found, key=lambda each: each["return_mean"])
    plan = next(plan for plan in check(x) if plan.policy == "drums")
    assert checkpoint_store(tmp_path / "run", plan).tags()["best"] == best["version"]
    versions = [each["version"] for each in found]
    assert versions == sorted(set(versions))


@pytest.mark.parametrize("text", ["return>475>3", "reward>=3", "return/nobody>=3", "return>="])
def test_target_that_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigError):
        Target.parse(text, ["default"])


class Stairs(gymnasium.Env):
    """Episodes of ``level`` steps: the return is the level."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    level, time = 1, 0

    def configure(self, level):
        self.level = level

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(1, np.float32), 1.0, self.time >= self.level, False, {}


def harder(evaluation):
    """One level more whenever the present one is reached."""
    level = evaluation["order"].get("level", 1)
    return {"level": level + 1} if evaluation["return_mean"] >= level else None


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_a_curriculum_makes_the_environment_harder_as_evaluations_get_better(tmp_path, launcher):
    x = srl.Experiment(
        envs.gym(Stairs),
        srl.PPO(horizon=16, minibatch=64, epochs=1),
        actors=srl.Actors(envs=4),
        trainer=srl.Trainer(threads=1),
        evaluator=srl.Evaluator(seconds=0.05, episodes=2),
        curriculum="test_several_policies:harder",
        until="return>=5",
        launcher=launcher,
        steps=10**8,
    )
    x.run(tmp_path / "run", quiet=True)
    levels = [each["return_mean"] for each in read_evaluations(tmp_path / "run")]
    assert levels == sorted(levels)
    assert levels[-1] >= 5  # the evaluator's own environment was told
    assert max(row.get("return_mean", 0) for row in read_metrics(tmp_path / "run")) > 1  # and so were the actors'
    assert srl.evaluate(tmp_path / "run", episodes=2).return_mean >= 5


def test_the_run_directory_of_several_policies_says_it_all(tmp_path):
    x = self_play(until="", curriculum="")
    x.run(tmp_path / "run", quiet=True, steps=200)
    again = load(tmp_path / "run")
    assert again.opponents == x.opponents
    assert again.algorithms == x.algorithms
    assert again.samples == x.samples
    assert Path(tmp_path / "run" / "checkpoints" / "player").is_dir()
