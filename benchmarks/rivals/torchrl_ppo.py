"""TorchRL: its collectors, advantages and PPO loss, on Gymnasium's vectors.

Pong runs on ALE's own vector in C++, the rest on Gymnasium's synchronous vector, which TorchRL drives three times as
fast as its own serial one. With collectors in processes of their own, each has its share of the environments.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from protocol import begin
from tensordict import TensorDict
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import Compose, DoubleToFloat, EnvBase, GymWrapper, RewardSum, TransformedEnv, VecNormV2
from torchrl.modules import MLP, ActorValueOperator, ConvNet, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from works import HIDDEN, Work, horizon


def make_env(work: Work, envs: int) -> EnvBase:
    transforms: list[Any] = [RewardSum()]
    if work.pixels:
        import ale_py

        gymnasium.register_envs(ale_py)
        mode = {"vectorization_mode": "vector_entry_point", "autoreset_mode": AutoresetMode.SAME_STEP}
        vector = gymnasium.make_vec(work.env, envs, repeat_action_probability=0.0, **mode)
    else:
        vector = SyncVectorEnv([partial(gymnasium.make, work.env)] * envs, autoreset_mode=AutoresetMode.DISABLED)
    if work.normalize:
        transforms += [DoubleToFloat(), VecNormV2(in_keys=["observation"]), VecNormV2(in_keys=["reward"])]
    return TransformedEnv(GymWrapper(vector, categorical_action_encoding=True), Compose(*transforms))


class Bytes(nn.Module):
    """Makes images of bytes what a network takes."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image / 255.0


def orthogonal(network: nn.Module, last: float) -> nn.Module:
    layers = [layer for layer in network.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, last if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return network


def networks(work: Work, env: EnvBase) -> tuple[Any, Any, Any]:
    """Actor, critic, and what the loss is given of the critic: not the CNN, whose features the actor leaves there."""
    space = env.action_spec_unbatched
    if work.pixels:
        convolutions = ConvNet(
            in_features=4, num_cells=[32, 64, 64], kernel_sizes=[8, 4, 3], strides=[4, 2, 1], activation_class=nn.ReLU
        )
        dense = MLP(
            in_features=3136, out_features=512, num_cells=[], activation_class=nn.ReLU, activate_last_layer=True
        )
        body = orthogonal(nn.Sequential(Bytes(), convolutions, dense), 2**0.5)
        common = TensorDictModule(body, in_keys=["observation"], out_keys=["common"])
        head = TensorDictModule(orthogonal(nn.Linear(512, space.n), 0.01), in_keys=["common"], out_keys=["logits"])
        policy = _probabilistic(head, ["logits"], torch.distributions.Categorical, space)
        value = ValueOperator(orthogonal(nn.Linear(512, 1), 1.0), in_keys=["common"])
        both = ActorValueOperator(common, policy, value)
        return both.get_policy_operator(), both.get_value_operator(), both.get_value_head()
    inputs = env.observation_spec["observation"].shape[-1]
    shape = {"in_features": inputs, "num_cells": list(HIDDEN), "activation_class": nn.Tanh}
    continuous = len(space.shape) > 0
    mlp = orthogonal(MLP(out_features=space.shape[-1] if continuous else space.n, **shape), 0.01)
    critic = ValueOperator(orthogonal(MLP(out_features=1, **shape), 1.0), in_keys=["observation"])
    if continuous:
        scale = AddStateIndependentNormalScale(space.shape[-1], scale_lb=1e-8)
        nn.init.constant_(scale.state_independent_scale, work.log_std)
        keys = ["loc", "scale"]
        module = TensorDictModule(nn.Sequential(mlp, scale), in_keys=["observation"], out_keys=keys)
        return _probabilistic(module, keys, IndependentNormal, space), critic, critic
    module = TensorDictModule(mlp, in_keys=["observation"], out_keys=["logits"])
    return _probabilistic(module, ["logits"], torch.distributions.Categorical, space), critic, critic


def _probabilistic(module: TensorDictModule, keys: list[str], kind: type, space: Any) -> ProbabilisticActor:
    return ProbabilisticActor(
        module,
        in_keys=keys,
        distribution_class=kind,
        spec=space,
        return_log_prob=True,
        default_interaction_type="random",
    )


def collector(work: Work, config: dict, actor: Any) -> Collector:
    count = config["collectors"]
    makers = [partial(make_env, work, config["envs"] // max(1, count))] * max(1, count)
    apart = {"num_collectors": count, "sync": True, "cat_results": "stack"} if count else {}
    return Collector(makers if count else makers[0], actor, frames_per_batch=work.batch, **apart)


def main() -> None:
    work, config, seed, report = begin()
    torch.manual_seed(seed)
    torch.set_num_threads(config["threads"])
    horizon(work, config["envs"])
    actor, critic, head = networks(work, make_env(work, 1))
    advantage = GAE(gamma=work.gamma, lmbda=work.lam, value_network=critic, average_gae=False)
    loss = ClipPPOLoss(
        actor,
        head,
        clip_epsilon=work.clip,
        entropy_bonus=bool(work.entropy),
        entropy_coeff=work.entropy,
        critic_coeff=work.value_coef,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=work.lr, eps=1e-5)
    steps = 0
    batches = collector(work, config, actor)
    for data in batches:
        ended = data["next", "done"]
        report.returns.extend(data["next", "episode_reward"][ended].tolist())
        with torch.no_grad():
            data = advantage(data)
        train(work, data.reshape(-1), loss, optimizer)
        batches.update_policy_weights_()
        steps += data.numel()
        if report.update(steps):
            break
    batches.shutdown()


def train(work: Work, data: TensorDict, loss: ClipPPOLoss, optimizer: torch.optim.Optimizer) -> None:
    wanted = ["observation", "action", "action_log_prob", "advantage", "value_target"]
    data = data.select(*wanted)
    for _ in range(work.epochs):
        for rows in torch.split(torch.randperm(len(data)), work.minibatch):
            found = loss(data[rows])
            total = sum(value for name, value in found.items() if name.startswith("loss_"))
            optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(loss.parameters(), work.grad_norm)
            optimizer.step()


if __name__ == "__main__":
    main()
