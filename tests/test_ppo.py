"""PPO's parts against numbers worked out by hand, and its whole against problems with a known answer."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

import srl
from srl import envs
from srl.algorithms.ppo import METRICS
from srl.algorithms.returns import gae
from srl.core.slab import Batch, Slab
from srl.core.specs import Spaces
from srl.policies.actor_critic import ActorCritic
from srl.policies.networks import RunningNorm
from steps import gradient_step


def column(*values):
    return np.array(values, np.float32)[:, None]


def flags(*values):
    return np.array(values, bool)[:, None]


def test_gae_of_a_run_without_ends_is_the_discounted_sum_of_deltas():
    reward, value = column(1, 2, 3), column(0.5, 1.0, 1.5, 2.0)
    none = flags(0, 0, 0)
    found, known = gae(reward, value, none, none, flags(1, 1, 1, 1), 0.9, 0.8)
    delta = [1 + 0.9 * 1.0 - 0.5, 2 + 0.9 * 1.5 - 1.0, 3 + 0.9 * 2.0 - 1.5]
    last = delta[2]
    middle = delta[1] + 0.72 * last
    assert np.allclose(found[:, 0], [delta[0] + 0.72 * middle, middle, last])
    assert known.all()


def test_terminated_is_worth_nothing_and_truncated_is_bootstrapped():
    reward, value, valid = column(1, 0), column(0, 10, 10), flags(1, 0, 1)
    ended, _ = gae(reward, value, flags(1, 0), flags(0, 0), valid, 0.9, 0.95)
    cut, _ = gae(reward, value, flags(0, 0), flags(1, 0), valid, 0.9, 0.95)
    assert ended[0, 0] == pytest.approx(1.0)
    assert cut[0, 0] == pytest.approx(1.0 + 0.9 * 10)


def test_nothing_flows_back_across_an_episode_end():
    value, valid = column(0, 0, 0, 0), flags(1, 0, 1, 1)
    quiet, _ = gae(column(1, 0, 0), value, flags(1, 0, 0), flags(0, 0, 0), valid, 0.99, 0.95)
    loud, _ = gae(column(1, 0, 100), value, flags(1, 0, 0), flags(0, 0, 0), valid, 0.99, 0.95)
    assert quiet[0, 0] == loud[0, 0]
    assert loud[2, 0] == 100


def test_reset_steps_are_not_trained_on():
    spaces = Spaces(gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2))
    algorithm = srl.PPO(horizon=4)
    slab = Slab(algorithm.block(spaces, 2), 3, shared=False)
    slab.arrays["valid"][:] = True
    slab.arrays["valid"][1, 2, 1] = False  # block 1, step 2, row 1
    learner = algorithm.learner(spaces, 0, "cpu")
    prepared = learner.prepare(Batch(slab, [2, 1]))
    assert len(prepared.known) == prepared.targets.shape[1] == len(prepared.batch.positions)
    where = prepared.batch.positions[prepared.known]
    assert len(where) == 2 * 4 * 2 - 1
    assert (1 * 5 + 2) * 2 + 1 not in where
    assert len(set(where.tolist())) == len(where)


def test_minibatch_rows_and_targets_belong_together():
    spaces = Spaces(gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2))
    slab = Slab(srl.PPO(horizon=3).block(spaces, 2), 4, shared=False)
    rng = np.random.default_rng(0)
    slab.arrays["value"][:] = rng.normal(size=slab.arrays["value"].shape)
    batch = Batch(slab, [3, 0])
    assert np.array_equal(batch.small("value")[:-1].reshape(-1), slab.flat["value"][batch.positions])


ACTIONS = [gymnasium.spaces.Discrete(3), gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.MultiBinary(2)]


@pytest.mark.parametrize("space", ACTIONS, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"entropy": 0.1}, {"value_clip": 0.3}, {"normalize_advantage": False}, {"kl_coef": 2.0}], ids=str
)
def test_gradient_and_step_are_those_of_the_loss_as_it_is_written_in_the_paper(space, options):
    config = srl.PPO(lr=0.01, clip=0.1, max_grad_norm=0.2, **options)
    spaces, rows = Spaces(gymnasium.spaces.Box(-1, 1, (4,)), space), 64
    ours, theirs = (config.learner(spaces, 0, "cpu") for _ in range(2))
    theirs.policy.by_hand = False
    generator = torch.Generator().manual_seed(0)
    obs = {"obs": torch.randn(rows, 4, generator=generator)}
    with torch.no_grad():
        acted = ours.policy.act(obs, generator)
    batch = {**obs, **acted, "log_prob": acted["log_prob"] + 0.3 * torch.randn(rows, generator=generator)}
    goal = torch.randn(3, rows, generator=generator)
    optimizer = torch.optim.Adam(theirs.policy.parameters(), lr=0.01, eps=1e-5)
    for _ in range(3):
        advantage, returns, old = goal
        found = gradient_step(ours, batch, goal.numpy())
        if config.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        log_prob, entropy, value = theirs.policy.evaluate(batch, {})
        ratio = (log_prob - batch["log_prob"]).exp()
        policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage).mean()
        error = (value - returns).square()
        if config.value_clip:
            error = torch.max(error, (old + (value - old).clamp(-0.3, 0.3) - returns).square())
        loss = policy_loss + config.value_coef * 0.5 * error.mean() - config.entropy * entropy.mean()
        loss = loss + config.kl_coef * (ratio - 1 - ratio.log()).mean()
        for weight in theirs.policy.parameters():
            weight.grad = None
        loss.backward()
        length = torch.nn.utils.clip_grad_norm_(theirs.policy.parameters(), 0.2)
        optimizer.step()
        means = dict(zip(METRICS, (found / rows).tolist(), strict=True))
        assert means["policy_loss"] == pytest.approx(policy_loss.item(), abs=1e-5)
        assert means["value_loss"] == pytest.approx(0.5 * error.mean().item(), abs=1e-5)
        assert means["grad_norm"] == pytest.approx(length.item(), rel=1e-4)
        assert 0.1 < means["clip_fraction"] < 0.9
        for mine, other in zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True):
            # Adam's steps have the gradient's sign more than its size, so where that is about 0 they may differ.
            assert (mine - other).abs().mean() < 1e-6 and (mine - other).abs().max() < 1e-3


def test_penalty_keeps_an_update_near_the_policy_it_began_with():
    spaces = Spaces(gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2))
    slab = Slab(srl.PPO(horizon=16).block(spaces, 16), 1, shared=False)
    rng = np.random.default_rng(0)
    for name in ("obs", "reward"):
        slab.arrays[name][:] = rng.normal(size=slab.arrays[name].shape)
    slab.arrays["action"][:] = rng.integers(2, size=slab.arrays["action"].shape)
    slab.arrays["log_prob"][:] = np.log(0.5)
    slab.arrays["valid"][:] = True

    def moved(kl_coef):
        config = srl.PPO(horizon=16, lr=0.003, clip=1e6, epochs=8, minibatch=64, kl_coef=kl_coef)
        learner = config.learner(spaces, 0, "cpu")
        return learner.train(learner.prepare(Batch(slab, [0])), 0, lambda: False)["kl"]

    assert moved(10.0) < 0.2 * moved(0.0)


def test_running_norm_equals_the_statistics_of_all_it_saw():
    rng = np.random.default_rng(0)
    parts = [torch.from_numpy(rng.normal(3, 5, (n, 4))) for n in (1, 7, 100)]
    norm = RunningNorm((4,))
    for part in parts:
        norm.update(part)
    whole = torch.cat(parts)
    assert torch.allclose(norm.mean, whole.mean(0))
    assert torch.allclose(norm.var, whole.var(0, correction=0))
    assert torch.allclose(norm.inverse(norm(whole[:5].float())), whole[:5].float(), atol=1e-4)


@pytest.mark.parametrize("action", [gymnasium.spaces.Discrete(3, start=1), gymnasium.spaces.Box(-2, 2, (2, 2))])
def test_acting_and_evaluating_agree(action):
    policy = ActorCritic(Spaces(gymnasium.spaces.Box(-1, 1, (5,)), action), srl.PPO(), log_std=-0.5)
    obs = {"obs": torch.randn(64, 5, generator=torch.Generator().manual_seed(0))}
    with torch.no_grad():
        outputs = policy.act(obs, torch.Generator().manual_seed(1))
    log_prob, entropy, value = policy.evaluate({**obs, "action": outputs["action"]}, {})
    (params,), _ = policy.heads(policy.trunk(obs)[0], obs)
    assert outputs["action"].shape == (64, *action.shape)
    assert torch.allclose(log_prob, outputs["log_prob"], atol=1e-5)
    assert torch.allclose(value, outputs["value"], atol=1e-6)
    if isinstance(action, gymnasium.spaces.Discrete):
        reference = torch.distributions.Categorical(logits=params)
        expected = reference.log_prob(outputs["action"] - 1)
        assert set(outputs["action"].tolist()) == {1, 2, 3}
    else:
        mean, log_std = params.chunk(2, -1)
        reference = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
        expected = reference.log_prob(outputs["action"].flatten(1))
    assert torch.allclose(log_prob, expected, atol=1e-5)
    assert torch.allclose(entropy, reference.entropy(), atol=1e-5)


class Endless(gymnasium.Env):
    """Reward 1 for ever; cut off after 5 steps. With truncation bootstrapped the value is 1 / (1 - gamma)."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    ends = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self.look(), {}

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        return self.look(), 1.0, over and self.ends, over and not self.ends, {}

    def look(self):
        return np.array([self.left / 5 if self.ends else 1.0], np.float32)


class Ending(Endless):
    """The same, but really over after 5 steps, and the observation tells how many are left."""

    ends = True


class Target(gymnasium.Env):
    """One step: the reward is best for the action that equals the observation."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.goal, {}

    def step(self, action):
        return self.goal, -float(np.square(action - self.goal).sum()), True, False, {}


def train(env, run_dir, steps, **hyper):
    settings = {"lr": 3e-3, "horizon": 16, "minibatch": 128, "epochs": 4, "max_staleness": 0, **hyper}
    x = srl.Experiment(
        envs.gym(env),
        srl.PPO(**settings),
        actors=srl.Actors(envs=32),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=steps,
    )
    x.run(run_dir)
    return x


def saved_policy(x, run_dir):
    from srl.plan import check, checkpoint_store
    from srl.policies.host import PolicyHost

    plan = check(x)[0]
    host = PolicyHost(plan.algorithm, plan.spaces, 0, clients=1, rows=1, explore=False)
    host.load(checkpoint_store(run_dir, plan).load("latest").under("learner").under("policy").arrays, 0)
    return host


@pytest.mark.learning
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("env", "value"), [(Endless, 10.0), (Ending, (1 - 0.9**5) / (1 - 0.9))])
def test_value_converges_to_the_known_number(tmp_path, env, value, normalize):
    x = train(env, tmp_path / "run", 40_000, gamma=0.9, normalize_return=normalize)
    seen = {"obs": np.ones((1, 1), np.float32)}
    found = saved_policy(x, tmp_path / "run").act(seen, np.zeros(1, np.int64), np.zeros(1, bool))
    assert found["value"][0] == pytest.approx(value, rel=0.05)


@pytest.mark.learning
def test_continuous_actions_find_the_target(tmp_path):
    train(Target, tmp_path / "run", 60_000, log_std=-0.5, normalize_obs=True)
    assert srl.evaluate(tmp_path / "run").return_mean > -0.01


class Mixed(gymnasium.Env):
    """A dictionary in, with a discrete leaf, and a dictionary out: press the button, and move the arm to 0.5."""

    observation_space = gymnasium.spaces.Dict(
        {"n": gymnasium.spaces.Discrete(3), "x": gymnasium.spaces.Box(0, 1, (2,))}
    )
    action_space = gymnasium.spaces.Dict(
        {"arm": gymnasium.spaces.Box(-1, 1, (1,)), "button": gymnasium.spaces.Discrete(2)}
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"n": 1, "x": np.zeros(2, np.float32)}, {}

    def step(self, action):
        reward = float(action["button"]) - float(np.square(action["arm"] - 0.5).sum())
        return {"n": 2, "x": np.ones(2, np.float32)}, reward, True, False, {}


@pytest.mark.learning
def test_dictionaries_of_discrete_and_continuous_leaves_are_learned(tmp_path):
    train(Mixed, tmp_path / "run", 40_000, log_std=-0.5)
    assert srl.evaluate(tmp_path / "run").return_mean > 0.97


def test_one_file_of_at_most_250_lines():
    import inspect

    from srl.algorithms import ppo

    assert len(inspect.getsource(ppo).splitlines()) <= 250
