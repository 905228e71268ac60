"""RLlib on its new API stack: PPO, and for one pass over Pong also IMPALA, which samples while it learns.

The Atari wrappers are RLlib's, in an order that shrinks only the frames that are kept, which stay bytes. Its own CNN
pads its layers and would have five times the weights of the one that the others train, so that one is given to it. The
cluster is a local one that keeps its files in the current folder.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import gymnasium
import ray
import torch
from protocol import begin
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.wrappers import atari_wrappers as atari
from ray.tune.registry import register_env
from torch import Tensor, nn
from works import HIDDEN, Work, horizon

FRAGMENT = 64
"""Steps of one environment that IMPALA's samplers hand over at a time."""


def make_pong(_config: object) -> gymnasium.Env:
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    env = atari.FireResetEnv(atari.MaxAndSkipEnv(atari.NoopResetEnv(env, noop_max=30), skip=4))
    return atari.FrameStack(atari.WarpFrame(env, dim=84), k=4)


class NatureCNN(TorchRLModule, ValueFunctionAPI):
    """Actor and critic on one Nature CNN."""

    def setup(self) -> None:
        convolutions = ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
        layers = [layer for shape in convolutions for layer in (nn.Conv2d(*shape), nn.ReLU())]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU())
        self.policy, self.value = nn.Linear(512, int(self.action_space.n)), nn.Linear(512, 1)
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                gain = {self.policy: 0.01, self.value: 1.0}.get(layer, math.sqrt(2))
                nn.init.orthogonal_(layer.weight, gain)
                nn.init.zeros_(layer.bias)

    def embed(self, batch: dict[str, Any]) -> Tensor:
        return self.body(batch[Columns.OBS].permute(0, 3, 1, 2) / 255.0)

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Tensor]:
        return {Columns.ACTION_DIST_INPUTS: self.policy(self.embed(batch))}

    def _forward_train(self, batch: dict[str, Any], **_: Any) -> dict[str, Tensor]:
        features = self.embed(batch)
        return {Columns.ACTION_DIST_INPUTS: self.policy(features), Columns.EMBEDDINGS: features}

    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        return self.value(self.embed(batch) if embeddings is None else embeddings).squeeze(-1)


def network(work: Work) -> dict[str, Any]:
    if work.pixels:
        return {"rl_module_spec": RLModuleSpec(module_class=NatureCNN)}
    hidden = {"fcnet_hiddens": list(HIDDEN), "fcnet_activation": "tanh", "vf_share_layers": False}
    return {"model_config": DefaultModelConfig(**hidden, free_log_std=work.normalize)}


def configure(work: Work, config: dict, seed: int) -> AlgorithmConfig:
    envs, runners = config["envs"], config["runners"]
    algorithm = config.get("algorithm", "ppo")
    filters = {"env_to_module_connector": lambda env, spaces=None, device=None: MeanStdFilter()}
    common = {
        "lr": work.lr,
        "gamma": work.gamma,
        "train_batch_size_per_learner": work.batch,
        "minibatch_size": work.minibatch,
        "num_epochs": work.epochs,
        "entropy_coeff": work.entropy,
        "vf_loss_coeff": work.value_coef,
        "grad_clip": work.grad_norm,
    }
    if algorithm == "ppo":
        clip = {"clip_param": work.clip, "vf_clip_param": float("inf")}
        x = PPOConfig().training(**common, **clip, lambda_=work.lam, use_kl_loss=False)
    else:
        # Without a time to wait it asks for samples all the time, and keeps a core from making them.
        x = IMPALAConfig().training(**common, timeout_s_sampler_manager=0.5)
    return (
        x.environment("pong" if work.pixels else work.env)
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=envs // max(1, runners),
            gym_env_vectorize_mode=config.get("vectorize", "sync"),
            rollout_fragment_length=horizon(work, envs) if algorithm == "ppo" else FRAGMENT,
            **(filters if work.normalize else {}),
        )
        .learners(num_learners=config.get("learners", 0), num_cpus_per_learner=1)
        .rl_module(**network(work))
        .reporting(min_time_s_per_iteration=0 if algorithm == "ppo" else 1)
        .debugging(seed=seed, log_level="ERROR")
    )


def trained(result: dict, work: Work, asynchronous: bool) -> int:
    """Steps trained on: all that were sampled, or as the learner counts them where it does not wait for them.

    The learner appends a row to each fragment and fills up the last minibatch, and counts these too.
    """
    if not asynchronous:
        return int(result["env_runners"]["num_env_steps_sampled_lifetime"])
    learned = result.get("learners", {}).get("__all_modules__", {}).get("num_module_steps_trained_lifetime", 0)
    rows = work.batch + work.batch // FRAGMENT
    counted = math.ceil(rows / work.minibatch) * work.minibatch
    return int(learned * work.batch / counted)


def main() -> None:
    work, config, seed, report = begin()
    torch.set_num_threads(config["threads"])
    register_env("pong", make_pong)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # As many logical processors as there are actors, so that all of them are started whatever the machine has.
    actors = config["runners"] + config.get("learners", 0) + 1
    ray.init(
        num_cpus=max(actors, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(Path.cwd() / "ray"),
    )
    algorithm = configure(work, config, seed).build_algo()
    asynchronous = config.get("algorithm", "ppo") != "ppo"
    steps, mean, ending = 0, None, False
    while not ending:
        result = algorithm.train()
        before, steps = steps, trained(result, work, asynchronous)
        newest = result["env_runners"].get("episode_return_mean", math.nan)
        mean = mean if math.isnan(newest) else newest  # of no use while no episode ends
        if steps > before:
            ending = report.update(steps, mean)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
