"""Every kind of observation and action is learned, and what a mask forbids is never done.

The problems are one step long: the observation tells the right action, so the best return is known.
"""

from __future__ import annotations

from collections import Counter

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

import srl
from srl import envs
from srl.core.specs import Spaces
from srl.policies.actor_critic import ActorCritic


def train(env, run_dir, steps=4_096, **hyper):
    """Train PPO on one-step episodes; the mean return of its likeliest actions."""
    settings = {"lr": 1e-2, "horizon": 8, "minibatch": 256, "epochs": 6, "hidden": (32,), **hyper}
    x = srl.Experiment(
        env,
        srl.PPO(**settings),
        actors=srl.Actors(envs=64),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=steps,
    )
    x.run(run_dir, quiet=True)
    return srl.evaluate(run_dir, episodes=60, sample=False).return_mean


class Once(gymnasium.Env):
    """Draws a secret of so many bits, shows it, and rewards the action that answers it."""

    bits = 2

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = self.np_random.integers(0, 2, self.bits)
        return self.show(self.secret), {}

    def step(self, action):
        return self.show(self.secret), self.score(action), True, False, {}

    def show(self, bits):
        return bits.astype(np.float32) * 2 - 1

    def number(self):
        """The secret as one number."""
        return int(self.secret @ (1 << np.arange(self.bits)))


# Observations


def picture(bits):
    """Bright in one half or the other."""
    image = np.zeros((1, 36, 36), np.uint8)
    image[0, :, slice(0, 18) if bits[0] else slice(18, 36)] = 255
    return image


OBSERVATIONS = {
    "Box": (2, Box(-1, 1, (2,)), lambda bits: bits.astype(np.float32) * 2 - 1),
    "Box of one number": (1, Box(-1, 1, ()), lambda bits: np.float32(bits[0] * 2 - 1)),
    "image": (1, Box(0, 255, (1, 36, 36), np.uint8), picture),
    "Discrete": (2, Discrete(4, start=-2), lambda bits: int(bits @ [1, 2]) - 2),
    "MultiDiscrete": (2, MultiDiscrete([[2, 3]], start=[[7, -1]]), lambda bits: np.array([[7, -1]]) + bits),
    "MultiBinary": (2, MultiBinary(2), lambda bits: bits.astype(np.int8)),
    "Dict and Tuple": (
        3,
        Dict({"a": Tuple([Discrete(2, start=5), Box(0, 1, (1,))]), "b": Dict({"c": MultiBinary(1)})}),
        lambda bits: {"a": (int(bits[0]) + 5, bits[1:2].astype(np.float32)), "b": {"c": bits[2:].astype(np.int8)}},
    ),
    "image and Discrete": (
        2,
        Dict({"seen": Box(0, 255, (1, 36, 36), np.uint8), "told": Discrete(2)}),
        lambda bits: {"seen": picture(bits), "told": int(bits[1])},
    ),
}


class Look(Once):
    """The secret is shown in some kind of space; the action names it."""

    def __init__(self, kind):
        self.bits, self.observation_space, self.show = OBSERVATIONS[kind]
        self.action_space = Discrete(2**self.bits)

    def score(self, action):
        return float(action == self.number())


@pytest.mark.learning
@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_every_kind_of_observation_is_understood(tmp_path, kind):
    slow = {"lr": 1e-3, "hidden": (128,)} if "image" in kind else {}
    assert train(envs.gym(Look, kind=kind), tmp_path / "run", **slow) == 1.0


# Actions


ACTIONS = {
    "Discrete": (2, Discrete(4, start=3), lambda env, action: float(action - 3 == env.number())),
    "MultiDiscrete": (2, MultiDiscrete([2, 3]), lambda env, action: np.mean(action == env.secret)),
    "MultiDiscrete with a shape and a start": (
        4,
        MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [-5, 0]]),
        lambda env, action: np.mean(action - [[0, 1], [-5, 0]] == env.secret.reshape(2, 2)),
    ),
    "MultiBinary": (4, MultiBinary([2, 2]), lambda env, action: np.mean(action == env.secret.reshape(2, 2))),
    "Box": (2, Box(-1, 1, (2,)), lambda env, action: 1 - np.square(action - env.secret + 0.5).mean()),
    "Dict": (
        2,
        Dict({"arm": Box(-1, 1, (1,)), "hand": Discrete(2)}),
        lambda env, action: (
            (action["hand"] == env.secret[0]) / 2 + (1 - np.square(action["arm"] - env.secret[1] + 0.5).sum()) / 2
        ),
    ),
    "Tuple": (
        3,
        Tuple([MultiDiscrete([2, 2]), Dict({"x": Box(-1, 1, (1, 1))})]),
        lambda env, action: (
            np.mean(action[0] == env.secret[:2]) / 2 + (1 - np.square(action[1]["x"] - env.secret[2] + 0.5).sum()) / 2
        ),
    ),
}


class Act(Once):
    """The secret is answered by an action of some kind; the best return is 1."""

    def __init__(self, kind):
        self.bits, self.action_space, self._score = ACTIONS[kind]
        self.observation_space = Box(-1, 1, (self.bits,))

    def score(self, action):
        assert self.action_space.contains(action), action
        return float(self._score(self, action))


@pytest.mark.learning
@pytest.mark.parametrize("kind", ACTIONS)
def test_every_kind_of_action_is_learned(tmp_path, kind):
    continuous = kind in ("Box", "Dict", "Tuple")
    more = {"steps": 6_144, "log_std": -1.0} if continuous else {}
    found = train(envs.gym(Act, kind=kind), tmp_path / "run", **more)
    assert found >= 0.99 if continuous else found == 1.0


# Networks of one's own


class Squares(torch.nn.Module):
    """Sees the product of the two inputs, which no linear network does."""

    out_features = 1
    made = 0

    def __init__(self, spaces):
        super().__init__()
        Squares.made += 1
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.width = spaces.observation.shape[0]

    def forward(self, obs):
        assert obs["obs"].shape[1] == self.width
        return obs["obs"].prod(-1, keepdim=True) * self.scale


class Parity(Once):
    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)

    def score(self, action):
        return float(action == self.secret.sum() % 2)


@pytest.mark.learning
def test_a_network_of_ones_own_is_used_and_trained(tmp_path):
    Squares.made = 0
    assert train(envs.gym(Parity), tmp_path / "run", network="test_spaces:Squares", hidden=()) == 1.0
    assert Squares.made > 0
    weights = next((tmp_path / "run" / "checkpoints" / "default").glob("v*"))
    from safetensors.numpy import load_file

    saved = load_file(weights / "arrays.safetensors")
    assert saved["learner/policy/trunk.encoder.scale"] != 1.0
    assert not [name for name in saved if "encoder.mlp" in name]


@pytest.mark.learning
def test_without_hidden_layers_and_that_network_parity_is_not_learned(tmp_path):
    assert train(envs.gym(Parity), tmp_path / "run", hidden=()) < 0.9


# Masks


TAKEN: Counter[str] = Counter()
"""What was done in the environments below: "allowed", "forbidden"."""


class Forbidden(Once):
    """The best action by far is never allowed; of the others one is right.

    ``where`` says how the mask is told; ``parts`` how many numbers an action has. An action of part i that equals the
    secret would be worth 10.
    """

    def __init__(self, where, parts):
        self.bits, self.parts, self.where = 2, parts, where
        self.action_space = Discrete(5, start=1) if parts == 1 else MultiDiscrete([5, 4])
        seen = Box(-1, 1, (2,))
        self.observation_space = Dict({"seen": seen, "may": MultiBinary(self.mask_size())}) if where == "may" else seen

    def mask_size(self):
        return 5 if self.parts == 1 else 9

    def allowed(self):
        """One array of flags for every part."""
        found = [np.ones(count, np.int8) for count in (5, 4)[: self.parts]]
        for flags in found:
            flags[self.number()] = 0
        return found

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.look(), self.tell()

    def look(self):
        seen = super().show(self.secret)
        return {"seen": seen, "may": np.concatenate(self.allowed())} if self.where == "may" else seen

    def tell(self):
        flags = self.allowed()
        if self.where == "may":
            return {}
        return {"legal": flags[0] if self.parts == 1 else tuple(flags)}

    def step(self, action):
        chosen = np.atleast_1d(action) - (self.parts == 1)
        good = sum(bool(flags[i]) for flags, i in zip(self.allowed(), chosen, strict=True))
        TAKEN["allowed"] += good
        TAKEN["forbidden"] += self.parts - good
        right = np.array([(self.number() + 1) % 5, (self.number() + 1) % 4][: self.parts])
        reward = np.mean(np.where(chosen == right, 1.0, 0.0)) + 10.0 * (self.parts - good)
        return self.look(), float(reward), True, False, {} if self.where == "may" else self.tell()


MASKS = {"may": "may", "info": "info:legal"}


@pytest.mark.learning
@pytest.mark.parametrize("where", MASKS)
@pytest.mark.parametrize("parts", [1, 2])
def test_masked_actions_are_never_taken_in_a_whole_run_of_ppo(tmp_path, where, parts):
    TAKEN.clear()
    env = envs.gym(Forbidden, mask=MASKS[where], where=where, parts=parts)
    assert train(env, tmp_path / "run", entropy=0.01) == 1.0
    assert TAKEN["allowed"] >= 4_096 * parts
    assert TAKEN["forbidden"] == 0


@pytest.mark.learning
@pytest.mark.parametrize("where", MASKS)
def test_masked_actions_are_never_taken_in_a_whole_run_of_dqn(tmp_path, where):
    TAKEN.clear()
    x = srl.Experiment(
        envs.gym(Forbidden, mask=MASKS[where], where=where, parts=1),
        srl.DQN(
            horizon=8,
            lr=3e-3,
            minibatch=128,
            minibatches=2,
            warmup=512,
            epsilon_steps=3_000,
            epsilon=0.05,
            hidden=(32,),
            target_every=10,
        ),
        actors=srl.Actors(envs=32),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=6_000,
    )
    x.run(tmp_path / "run", quiet=True)
    assert srl.evaluate(tmp_path / "run", episodes=60).return_mean == 1.0
    assert TAKEN["allowed"] >= 6_000
    assert TAKEN["forbidden"] == 0


SEEN = Box(-1, 1, (3,))
MASKED = {
    "Discrete": (Discrete(4, start=2), {"mask": (4,)}),
    "MultiDiscrete": (MultiDiscrete([3, 2], start=[1, 5]), {"mask": (3, 2)}),
    "Dict": (
        Dict({"x": Box(-1, 1, (1,)), "y": Discrete(3), "z": MultiDiscrete([2, 2])}),
        {"mask/y": (3,), "mask/z": (2, 2)},
    ),
}


def random_masks(sizes, rows, generator):
    """Random flags, at least one allowed in every choice."""
    found = {}
    for name, counts in sizes.items():
        parts = []
        for count in counts:
            flags = torch.rand(rows, count, generator=generator) < 0.5
            flags[torch.arange(rows), torch.randint(0, count, (rows,), generator=generator)] = True
            parts.append(flags)
        found[name] = torch.cat(parts, -1)
    return found


def choices(space, name, actions):
    """The chosen indices of the discrete action ``name``, ``[rows, numbers]``."""
    leaf = space if name == "mask" else space[name.removeprefix("mask/")]
    chosen = actions[name.replace("mask", "action", 1)]
    return chosen.reshape(len(chosen), -1) - torch.as_tensor(np.asarray(getattr(leaf, "start", 0)))


@pytest.mark.parametrize("kind", MASKED)
def test_what_is_masked_has_probability_zero_and_gradients_stay_finite(kind):
    space, sizes = MASKED[kind]
    policy = ActorCritic(Spaces(SEEN, space, masked=True), srl.PPO(entropy=0.1))
    generator, rows = torch.Generator().manual_seed(0), 512
    inputs = {"obs": torch.randn(rows, 3, generator=generator), **random_masks(sizes, rows, generator)}
    for draw in (generator, None):
        actions = policy.act(inputs, draw)
        for name, counts in sizes.items():
            for i, (flags, chosen) in enumerate(
                zip(torch.split(inputs[name], counts, -1), choices(space, name, actions).unbind(-1), strict=True)
            ):
                assert flags[torch.arange(rows), chosen].all(), (name, i)
                if draw is not None and name == "mask":  # and everything that is allowed is done now and then
                    assert len(set(chosen.tolist())) == counts[i]
    params, _ = policy.heads(policy.trunk(inputs)[0], inputs)
    found = 0
    for name, part in zip(policy.action.masks, params, strict=True):
        if name in sizes:
            found += 1
            assert (part[~inputs[name]].exp() == 0.0).all()
            sums = [piece.exp().sum(-1) for piece in torch.split(part, sizes[name], -1)]
            assert torch.allclose(torch.stack(sums), torch.ones(len(sums), rows))
    assert found == len(sizes)
    log_prob, entropy, value = policy.evaluate({**inputs, **actions}, {})
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(entropy).all()
    (log_prob.mean() - entropy.mean() + value.mean()).backward()
    gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    assert len(gradients) == len(list(policy.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("kind", ["Discrete", "MultiDiscrete"])
def test_entropy_under_a_mask_is_that_of_the_allowed_choices(kind):
    space, sizes = MASKED[kind]
    policy = ActorCritic(Spaces(SEEN, space, masked=True), srl.PPO())
    for weight in policy.action.parameters():
        torch.nn.init.zeros_(weight)  # all that is allowed is equally likely
    generator = torch.Generator().manual_seed(0)
    inputs = {"obs": torch.randn(64, 3, generator=generator), **random_masks(sizes, 64, generator)}
    actions = policy.act(inputs, generator)
    log_prob, entropy, _ = policy.evaluate({**inputs, **actions}, {})
    counts = torch.stack([part.sum(-1) for part in torch.split(inputs["mask"], sizes["mask"], -1)])
    assert torch.allclose(entropy, counts.float().log().sum(0), atol=1e-5)
    assert torch.allclose(log_prob, -counts.float().log().sum(0), atol=1e-5)


def test_a_row_without_any_allowed_action_gives_no_nan():
    space, _ = MASKED["MultiDiscrete"]
    policy = ActorCritic(Spaces(SEEN, space, masked=True), srl.PPO())
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    mask[2, :3] = False
    inputs = {"obs": torch.zeros(3, 3), "mask": mask}
    for generator in (torch.Generator().manual_seed(0), None):
        outputs = policy.act(inputs, generator)
        assert all(torch.isfinite(value).all() for value in outputs.values())
        assert all(space.contains(action.numpy()) for action in outputs["action"])
    log_prob, entropy, value = policy.evaluate({**inputs, **outputs}, {})
    (log_prob.sum() + entropy.sum() + value.sum()).backward()
    assert all(torch.isfinite(weight.grad).all() for weight in policy.parameters() if weight.grad is not None)


# Masks and values


Q_SPACES = Spaces(SEEN, Discrete(4, start=2), masked=True)


@pytest.mark.parametrize("dueling", [False, True])
def test_q_policy_takes_the_best_or_any_allowed_action_but_no_other(dueling):
    policy = srl.DQN(dueling=dueling, epsilon_spread=0.0).policy(Q_SPACES)
    generator, rows = torch.Generator().manual_seed(0), 4096
    inputs = {"obs": torch.randn(rows, 3, generator=generator), **random_masks({"mask": (4,)}, rows, generator)}
    inputs["rank"] = torch.linspace(0, 1, rows)
    for epsilon in (1.0, 0.0):
        policy.epsilon.fill_(epsilon)
        chosen = policy.act(inputs, generator)["action"] - 2
        assert inputs["mask"][torch.arange(rows), chosen].all()
        values = policy(inputs).masked_fill(~inputs["mask"], -torch.inf)
        share = (values.argmax(-1) == chosen).float().mean()
        assert share == 1.0 if epsilon == 0 else share < 0.9
    assert torch.equal(policy.act(inputs, None)["action"], chosen + 2)
    free = inputs["mask"].all(-1)
    policy.epsilon.fill_(1.0)
    counts = torch.bincount(policy.act(inputs, generator)["action"][free] - 2, minlength=4) / free.sum()
    assert (counts - 0.25).abs().max() < 0.08  # random is random
    inputs["mask"][:] = False
    assert set(policy.act(inputs, generator)["action"].tolist()) == {2, 3, 4, 5}


@pytest.mark.parametrize("double", [False, True])
def test_q_target_is_the_value_of_the_best_allowed_action(double):
    algorithm = srl.DQN(minibatch=64, minibatches=1, double=double)
    learner = algorithm.learner(Q_SPACES, 0, "cpu")
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(2, 64, 3, generator=generator)
    mask = torch.stack([random_masks({"mask": (4,)}, 64, generator)["mask"] for _ in range(2)])
    action = torch.randint(2, 6, (2, 64), generator=generator)
    with torch.no_grad():
        now, later = (learner.policy({"obs": part}) for part in obs)
    expected = 1.0 + 0.5 * later.masked_fill(~mask[1], -torch.inf).max(-1).values
    error = (expected - now.gather(-1, action[0].unsqueeze(-1) - 2).squeeze(-1)).abs()
    fields = {"obs": obs, "mask": mask, "action": action}
    fields |= {
        name: torch.full((2, 64), value) for name, value in (("reward", 1.0), ("discount", 0.5), ("weight", 1.0))
    }
    learner.train({name: value.numpy() for name, value in fields.items()}, 0, lambda: False)
    np.testing.assert_allclose(learner.priorities, error.numpy(), rtol=1e-5)
    unmasked = 1.0 + 0.5 * later.max(-1).values
    assert (unmasked > expected).any()  # or this would say nothing


class Cut(gymnasium.Env):
    """-1 a step, and cut off after every step; the second action is never allowed. The value is -1 / (1 - gamma)."""

    observation_space = Dict({"seen": Box(0, 1, (1,)), "may": MultiBinary(2)})
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.look(), {}

    def step(self, action):
        return self.look(), -1.0, False, True, {}

    def look(self):
        return {"seen": np.ones(1, np.float32), "may": np.array([1, 0], np.int8)}


@pytest.mark.learning
def test_a_truncated_episode_is_bootstrapped_from_what_was_allowed_at_its_end(tmp_path):
    x = srl.Experiment(
        envs.gym(Cut, mask="may"),
        srl.DQN(gamma=0.8, lr=3e-3, horizon=8, minibatch=64, minibatches=4, warmup=256, target_every=20, hidden=(16,)),
        actors=srl.Actors(envs=16),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=6_000,
    )
    x.run(tmp_path / "run", quiet=True)
    from srl.plan import check, checkpoint_store
    from srl.policies.host import load_arrays

    plan = check(x)[0]
    policy = plan.algorithm.policy(plan.spaces)
    load_arrays(policy, checkpoint_store(tmp_path / "run", plan).load().under("learner").under("policy").arrays)
    assert policy({"obs/seen": torch.ones(1, 1)})[0, 0].item() == pytest.approx(-5.0, rel=0.05)
