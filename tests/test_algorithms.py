"""Every algorithm on a problem whose best answer is known, and what each of them must refuse."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

import srl
from problems import Alike, Copycat, Pick, TwoSteps
from srl import envs
from srl.algorithms.r2d2 import teams
from srl.core.errors import ConfigError
from srl.envs.recall import Recall
from srl.plan import check

REPLAY = {"warmup": 500, "replay_steps": 20_000, "epsilon_steps": 3_000, "horizon": 16}
TEAM = {"warmup": 200, "replay_steps": 20_000, "epsilon_steps": 0, "epsilon": 1.0, "epsilon_spread": 0.0}
SMALL = {"hidden": (32, 32), "lr": 3e-3}


def greedy(x, folder, seconds=60, **how):
    """The mean return of what was learned, without luck."""
    run = replace(x, launcher="inline", **how)
    srl.run(run, folder, seconds=seconds)
    return srl.evaluate(folder, episodes=20, seed=3, sample=False).return_mean


@pytest.mark.learning
@pytest.mark.parametrize("correction", ["decoupled", "vtrace", "none"])
def test_appo_finds_the_right_choice(tmp_path, correction):
    algorithm = srl.APPO(horizon=16, minibatch=128, correction=correction, **SMALL)
    x = srl.Experiment(envs.gym(Pick), algorithm, actors=srl.Actors(count=2, envs=16), steps=20_000)
    assert greedy(x, tmp_path / "run") == 8


@pytest.mark.learning
@pytest.mark.parametrize("memory", ["", "gru"])
def test_impala_finds_the_right_choice(tmp_path, memory):
    algorithm = srl.IMPALA(minibatch=160, memory=memory, memory_size=32, chunk=20, **SMALL)
    x = srl.Experiment(envs.gym(Pick), algorithm, actors=srl.Actors(count=2, envs=16), steps=30_000)
    assert greedy(x, tmp_path / "run") == 8


@pytest.mark.learning
def test_sac_does_what_it_sees(tmp_path):
    algorithm = srl.SAC(hidden=(64, 64), lr=3e-3, minibatch=64, updates_per_step=0.25, warmup=500, gamma=0.5)
    x = srl.Experiment(envs.gym(Copycat), algorithm, actors=srl.Actors(count=1, envs=8), steps=6_000)
    assert greedy(x, tmp_path / "run") > -0.1


@pytest.mark.learning
def test_discrete_sac_finds_the_right_choice(tmp_path):
    algorithm = srl.SAC(hidden=(64, 64), lr=3e-3, minibatch=64, updates_per_step=0.25, warmup=500, gamma=0.5)
    x = srl.Experiment(envs.gym(Pick), algorithm, actors=srl.Actors(count=1, envs=8), steps=6_000)
    assert greedy(x, tmp_path / "run") == 8


@pytest.mark.learning
def test_r2d2_remembers(tmp_path):
    algorithm = srl.R2D2(
        **{**REPLAY, "horizon": 24},
        chunk=12,
        burn_in=4,
        memory="gru",
        memory_size=32,
        samples_per_insert=4,
        n_step=1,
        target_every=50,
        **SMALL,
    )
    x = srl.Experiment(envs.gym(Recall, cues=3, delay=2), algorithm, actors=srl.Actors(count=1, envs=8), steps=25_000)
    assert greedy(x, tmp_path / "run") > 0.9


@pytest.mark.learning
def test_ape_x_finds_the_right_choice_with_the_actors_priorities(tmp_path):
    algorithm = srl.DQN(**REPLAY, actor_priorities=True, samples_per_insert=2, gamma=0.5, **SMALL)
    x = srl.Experiment(envs.gym(Pick), algorithm, actors=srl.Actors(count=2, envs=8), steps=10_000)
    assert greedy(x, tmp_path / "run") == 8


@pytest.mark.learning
@pytest.mark.parametrize(("kind", "best"), [(srl.QMIX, 8), (srl.VDN, 7)])
def test_qmix_dares_what_vdn_cannot_see(tmp_path, kind, best):
    algorithm = kind(**TEAM, horizon=16, chunk=2, minibatch=64, target_every=50, samples_per_insert=8, **SMALL)
    game = envs.pettingzoo(TwoSteps, state=True)
    x = srl.Experiment(game, algorithm, actors=srl.Actors(count=1, envs=8), steps=12_000)
    assert greedy(x, tmp_path / "run") == best


@pytest.mark.learning
def test_mappo_agrees(tmp_path):
    algorithm = srl.MAPPO(horizon=16, minibatch=128, **SMALL)
    x = srl.Experiment(envs.pettingzoo(Alike, state=True), algorithm, actors=srl.Actors(envs=16), steps=20_000)
    assert greedy(x, tmp_path / "run") == 8


def refused(algorithm, env, message):
    with pytest.raises(ConfigError, match=message):
        check(srl.Experiment(env, algorithm))


def test_what_an_algorithm_cannot_do_is_said_before_anything_starts():
    pendulum, cartpole = envs.gym("Pendulum-v1"), envs.gym("CartPole-v1")
    for kind in (srl.QMIX, srl.VDN):
        refused(kind(), pendulum, "gives every action a value")
    refused(srl.MAPPO(), cartpole, "a part 'state' for the critic")
    refused(srl.SAC(memory="gru"), pendulum, "without a memory")
    refused(srl.APPO(correction="hope"), cartpole, "correction must be one of")
    refused(srl.R2D2(horizon=20, chunk=20, burn_in=10), cartpole, "a window of 30 steps")
    refused(srl.R2D2(actor_priorities=True), cartpole, "priorities of windows")
    refused(srl.DQN(actor_priorities=True, prioritized=False), cartpole, "prioritized")
    refused(srl.QMIX(prioritized=True), cartpole, "whole teams")


class Several(gymnasium.Env):
    """Two choices at once."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([2, 2])


class Boundless(gymnasium.Env):
    """An action without bounds."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)


@pytest.mark.parametrize(("env", "message"), [(Several, "a Box of real numbers"), (Boundless, "bounded")])
def test_sac_refuses_spaces_it_cannot_act_in(env, message):
    refused(srl.SAC(), envs.gym(env), message)


def test_an_environment_without_a_state_has_none_for_a_critic():
    refused(srl.MAPPO(), envs.pettingzoo(Stateless, state=True), "no state_space")


class Stateless(TwoSteps):
    """Nothing is known of the whole."""

    state_space = None


def test_a_team_goes_on_until_nobody_is_left():
    # Two agents over five steps: the first dies at step 1, the second at step 3; step 4 is the reset.
    def field(*columns):
        return np.array(columns).T

    ends = {
        "reward": field([1.0, 2, 0, 0, 0], [3.0, 4, 5, 6, 0]).astype(np.float32),
        "terminated": field([0, 1, 0, 0, 0], [0, 0, 0, 1, 0]).astype(bool),
        "truncated": np.zeros((5, 2), bool),
    }
    flags = {
        "valid": field([1, 1, 0, 0, 0, 1], [1, 1, 1, 1, 0, 1]).astype(bool),
        "first": field([1, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 1]).astype(bool),
    }
    found, seen, alive = teams(ends, flags, 2)
    assert found["reward"][:, 0].tolist() == [2, 3, 2.5, 3, 0]
    assert found["terminated"][:, 0].tolist() == [False, False, False, True, False]
    assert not found["truncated"].any()
    assert seen["valid"][:, 0].tolist() == [True, True, True, True, False, True]
    assert alive[:, 0].tolist() == [True, True, False, False, False, True]
    assert alive[:, 1].tolist() == [True, True, True, True, True, True]


def test_a_single_agent_is_a_team_of_its_own():
    rng = np.random.default_rng(0)
    ends = {"reward": rng.normal(size=(6, 3)), "terminated": rng.random((6, 3)) < 0.3}
    ends["truncated"] = (rng.random((6, 3)) < 0.3) & ~ends["terminated"]
    flags = {name: rng.random((7, 3)) < 0.7 for name in ("valid", "first")}
    found, seen, _ = teams(ends, flags, 1)
    for given, made in ((ends, found), (flags, seen)):
        for name, value in given.items():
            np.testing.assert_array_equal(made[name], value)


def test_squeezed_values_can_be_grown_again():
    learner = srl.R2D2().learner(check(srl.Experiment(envs.gym("CartPole-v1")))[0].spaces, 0, "cpu")
    values = torch.tensor([-1e4, -3.0, 0.0, 0.5, 200.0], dtype=torch.float64)
    np.testing.assert_allclose(learner._grown(learner._squeezed(values)), values, atol=1e-6, rtol=1e-9)


def team_spaces():
    return check(srl.Experiment(envs.pettingzoo(TwoSteps, state=True), srl.QMIX()))[0].spaces


def test_what_is_better_for_an_agent_is_never_worse_for_its_team():
    spaces = team_spaces()
    assert spaces.agents == 2
    mixer = srl.QMIX().mixer(spaces)
    seen = {"obs/state": torch.rand(20, 3), "obs/observation": torch.rand(20, 3)}
    values = torch.randn(10, 2, requires_grad=True)
    mixer(values, seen).sum().backward()
    assert (values.grad >= 0).all()
    assert (values.grad > 0).any()


def test_agents_do_not_see_what_is_for_the_mixer_or_the_critic():
    spaces = team_spaces()
    seen = {"obs/observation": torch.rand(4, 3), "rank": torch.zeros(4)}
    for algorithm in (srl.QMIX(), srl.VDN()):
        assert algorithm.policy(spaces).act(seen, None)["action"].shape == (4,)
    actor = srl.MAPPO().policy(spaces)
    whole = {**seen, "obs/state": torch.rand(4, 3)}
    first, second = (actor.act({**whole, "obs/state": each}, None) for each in (torch.zeros(4, 3), torch.ones(4, 3)))
    assert torch.equal(first["log_prob"], second["log_prob"])
    assert not torch.allclose(first["value"], second["value"])


def test_what_a_critic_says_stays_the_same_when_its_normalisation_moves():
    policy = srl.MAPPO().policy(team_spaces())
    seen = {"obs/observation": torch.rand(8, 3), "obs/state": torch.rand(8, 3)}
    for norm in (policy.trunk.encoder.norm, policy.critic.encoder.norm):
        norm.update = lambda *_: None  # of what it sees, so that only that of returns moves
    policy.observe(seen, torch.randn(100) * 3 + 50)
    before = policy.act(seen, None)["value"].detach()
    policy.observe(seen, torch.randn(1000) * 20 - 5)
    np.testing.assert_allclose(policy.act(seen, None)["value"].detach(), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [srl.SAC, srl.QMIX, srl.R2D2])
def test_a_learner_goes_on_where_it_was_saved(kind):
    spaces = team_spaces() if kind is srl.QMIX else check(srl.Experiment(envs.gym("CartPole-v1")))[0].spaces
    first, second = (kind(hidden=(8,)).learner(spaces, seed, "cpu") for seed in (1, 2))
    saved = first.state()
    second.load_state(saved)
    again = second.state()
    assert again.arrays.keys() == saved.arrays.keys()
    for name, value in saved.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], value, err_msg=name)
