"""Stable-Baselines3: its PPO, its Atari wrappers, its vectors in one process or in several."""

from __future__ import annotations

import torch
from protocol import Report, begin
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize
from works import HIDDEN, Work, horizon


class Updates(BaseCallback):
    """Reports what has been trained on whenever a new rollout begins."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report, self.ending = report, False

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            mean = sum(returns) / len(returns) if returns else None
            self.ending = self.report.update(self.num_timesteps, mean)

    def _on_step(self) -> bool:
        return not self.ending


def make(work: Work, envs: int, subprocesses: bool, seed: int) -> VecEnv:
    """The environments, wrapped as the library recommends."""
    kind = SubprocVecEnv if subprocesses else DummyVecEnv
    if work.pixels:
        # The name of the package makes its worker processes import it.
        raw = {"frameskip": 1, "repeat_action_probability": 0.0}
        wrapper = {"terminal_on_life_loss": False}
        vector = make_atari_env(
            f"ale_py:{work.env}", envs, seed, env_kwargs=raw, wrapper_kwargs=wrapper, vec_env_cls=kind
        )
        return VecFrameStack(vector, 4)
    vector = make_vec_env(work.env, envs, seed, vec_env_cls=kind)
    return VecNormalize(vector, gamma=work.gamma) if work.normalize else vector


def main() -> None:
    work, config, seed, report = begin()
    torch.set_num_threads(config["threads"])
    envs = config["envs"]
    network = {} if work.pixels else {"net_arch": {"pi": list(HIDDEN), "vf": list(HIDDEN)}}
    model = PPO(
        "CnnPolicy" if work.pixels else "MlpPolicy",
        make(work, envs, config["subprocesses"], seed),
        n_steps=horizon(work, envs),
        batch_size=work.minibatch,
        n_epochs=work.epochs,
        learning_rate=work.lr,
        gamma=work.gamma,
        gae_lambda=work.lam,
        clip_range=work.clip,
        ent_coef=work.entropy,
        vf_coef=work.value_coef,
        max_grad_norm=work.grad_norm,
        policy_kwargs={**network, "log_std_init": work.log_std},
        seed=seed,
        device="cpu",
    )
    model.learn(10**12, callback=Updates(report))


if __name__ == "__main__":
    main()
