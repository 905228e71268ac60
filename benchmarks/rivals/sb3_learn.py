"""Stable-Baselines3's SAC or DQN on a budget of steps: python sb3_learn.py sac HalfCheetah-v5 100000 1 FILE [JSON].

Its own hyper-parameters, but for those given. FILE gets the returns of training episodes over steps, the mean return of
20 greedy episodes at the end, and the seconds it took.
"""

from __future__ import annotations

import json
import os
import sys
import time

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor


class Curve(BaseCallback):
    """The returns of training episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.found.append((self.num_timesteps, float(info["episode"]["r"])))
        return True


def main() -> None:
    name, env, steps, seed, path, *more = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if env.startswith("MinAtar"):
        from minatar.gym import register_envs

        register_envs()
    curve, begin = Curve(), time.time()
    model = {"sac": SAC, "dqn": DQN}[name](
        "MlpPolicy", Monitor(gymnasium.make(env)), seed=int(seed), device="cpu", **json.loads(more[0] if more else "{}")
    )
    model.learn(int(steps), callback=curve)
    seconds = time.time() - begin
    returns, _ = evaluate_policy(model, Monitor(gymnasium.make(env)), 20, return_episode_rewards=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"curve": curve.found, "greedy": float(np.mean(returns)), "seconds": round(seconds, 1)}, file)


if __name__ == "__main__":
    main()
