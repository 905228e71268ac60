"""PPO in one file on EnvPool, in the manner of CleanRL: what plain PyTorch gives with environments in C++.

EnvPool steps its copies with a thread pool. With two groups of them, one is stepped while the policy acts for the
other. Copies that ended are reset by the next step, which is not trained on.
"""

from __future__ import annotations

import math
from typing import Any

import envpool
import numpy as np
import torch
from protocol import Report, begin
from torch import Tensor, nn
from works import HIDDEN, Work, horizon


def orthogonal(layer: Any, gain: float = math.sqrt(2)) -> Any:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in HIDDEN:
        layers += [orthogonal(nn.Linear(inputs, width)), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers)


def nature_cnn() -> nn.Sequential:
    convolutions = ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
    layers = [layer for shape in convolutions for layer in (orthogonal(nn.Conv2d(*shape)), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), orthogonal(nn.Linear(3136, 512)), nn.ReLU())


class Agent(nn.Module):
    """Actor and critic: one CNN for both, or an MLP each."""

    def __init__(self, work: Work, inputs: int, actions: int, continuous: bool) -> None:
        super().__init__()
        self.pixels = work.pixels
        self.actor = nature_cnn() if work.pixels else mlp(inputs)
        self.critic = self.actor if work.pixels else mlp(inputs)
        width = 512 if work.pixels else HIDDEN[-1]
        self.policy = orthogonal(nn.Linear(width, actions), 0.01)
        self.value = orthogonal(nn.Linear(width, 1), 1.0)
        self.log_std = nn.Parameter(torch.full((actions,), work.log_std)) if continuous else None

    def forward(self, obs: Tensor) -> tuple[torch.distributions.Distribution, Tensor]:
        obs = obs / 255.0 if self.pixels else obs
        features = self.actor(obs)
        seen = features if self.pixels else self.critic(obs)
        logits = self.policy(features)
        if self.log_std is None:
            found: Any = torch.distributions.Categorical(logits=logits, validate_args=False)
        else:
            normal = torch.distributions.Normal(logits, self.log_std.exp().expand_as(logits), validate_args=False)
            found = torch.distributions.Independent(normal, 1, validate_args=False)
        return found, self.value(seen).squeeze(-1)


class Running:
    """Mean and variance of all rows that were ever seen."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, rows: np.ndarray) -> None:
        delta, total = rows.mean(0) - self.mean, self.count + len(rows)
        spread = self.var * self.count + rows.var(0) * len(rows) + delta**2 * self.count * len(rows) / total
        self.mean = self.mean + delta * len(rows) / total
        self.var, self.count = spread / total, total


class Group:
    """Environments that are stepped together, with the normalisation and the books that go with them."""

    def __init__(self, work: Work, envs: int, threads: int, seed: int) -> None:
        name = work.env.removeprefix("ALE/")
        self.pool = envpool.make(name, env_type="gymnasium", num_envs=envs, num_threads=threads, seed=seed)
        self.gamma, self.normalize = work.gamma, work.normalize
        self.shape = self.pool.observation_space.shape
        self.obs_norm, self.return_norm = Running(self.shape), Running(())
        self.discounted, self.score = np.zeros(envs), np.zeros(envs)
        self.ended = np.zeros(envs, bool)
        self.pool.async_reset()
        self.obs = self._scaled(self.pool.recv()[0])

    def send(self, actions: np.ndarray) -> None:
        self.pool.send(actions)

    def recv(self, report: Report) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reward, whether the state is a last one, whether the episode is over; ``obs`` and ``ended`` move on."""
        obs, reward, terminated, truncated, _ = self.pool.recv()
        self.ended = terminated | truncated
        self.score += reward
        report.returns.extend(self.score[self.ended].tolist())
        self.score[self.ended] = 0
        if self.normalize:
            self.discounted = self.discounted * self.gamma + reward
            self.return_norm.update(self.discounted)
            self.discounted[self.ended] = 0
            reward = np.clip(reward / np.sqrt(self.return_norm.var + 1e-8), -10, 10)
        self.obs = self._scaled(obs)
        return reward, terminated, self.ended

    def _scaled(self, obs: np.ndarray) -> np.ndarray:
        if not self.normalize:
            return obs
        self.obs_norm.update(obs)
        scaled = (obs - self.obs_norm.mean) / np.sqrt(self.obs_norm.var + 1e-8)
        return np.clip(scaled, -10, 10).astype(np.float32)


class Batch:
    """What one update is made of, ``[steps, envs, …]``."""

    def __init__(self, steps: int, groups: list[Group], envs: int, action: tuple[int, ...], kind: torch.dtype) -> None:
        pixels = len(groups[0].shape) == 3
        self.obs = torch.zeros(steps, envs, *groups[0].shape, dtype=torch.uint8 if pixels else torch.float32)
        self.action = torch.zeros(steps, envs, *action, dtype=kind)
        self.log_prob = torch.zeros(steps, envs)
        self.value = np.zeros((steps + 1, envs), np.float32)
        self.reward = np.zeros((steps, envs), np.float32)
        self.terminated, self.ended, self.valid = (np.zeros((steps, envs), bool) for _ in range(3))

    def advantages(self, gamma: float, lam: float) -> np.ndarray:
        found, after = np.zeros_like(self.reward), np.zeros_like(self.reward[0])
        for t in reversed(range(len(found))):
            ahead = self.value[t + 1] * ~self.terminated[t]
            delta = self.reward[t] + gamma * ahead - self.value[t]
            found[t] = after = delta + gamma * lam * ~self.ended[t] * after
        return found


@torch.no_grad()
def collect(agent: Agent, groups: list[Group], batch: Batch, report: Report) -> None:
    """Fill the batch, a step of each group at a time."""
    steps, envs = batch.reward.shape
    each = envs // len(groups)
    for t in range(steps + 1):
        for i, group in enumerate(groups):
            part = slice(i * each, (i + 1) * each)
            if t:
                row = group.recv(report)
                batch.reward[t - 1, part], batch.terminated[t - 1, part], batch.ended[t - 1, part] = row
            obs = torch.from_numpy(group.obs)
            distribution, value = agent(obs)
            batch.value[t, part] = value.numpy()
            if t == steps:
                continue
            action = distribution.sample()
            batch.obs[t, part], batch.valid[t, part] = obs, ~group.ended
            batch.action[t, part], batch.log_prob[t, part] = action, distribution.log_prob(action)
            group.send(action.numpy() if agent.log_std is None else action.double().numpy())


def train(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, work: Work) -> int:
    """Pass over the batch; the steps that were trained on."""
    raw = batch.advantages(work.gamma, work.lam)
    advantages = torch.from_numpy(raw).flatten()
    returns = torch.from_numpy(raw + batch.value[:-1]).flatten()
    obs, actions, old = batch.obs.flatten(0, 1), batch.action.flatten(0, 1), batch.log_prob.flatten()
    index = torch.from_numpy(np.flatnonzero(batch.valid))
    for _ in range(work.epochs):
        for rows in torch.split(index[torch.randperm(len(index))], work.minibatch):
            distribution, value = agent(obs[rows])
            ratio = (distribution.log_prob(actions[rows]) - old[rows]).exp()
            advantage = advantages[rows]
            advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
            clipped = ratio.clamp(1 - work.clip, 1 + work.clip)
            policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
            value_loss = 0.5 * (value - returns[rows]).square().mean()
            loss = policy_loss + work.value_coef * value_loss - work.entropy * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), work.grad_norm)
            optimizer.step()
    return len(index)


def main() -> None:
    work, config, seed, report = begin()
    torch.manual_seed(seed)
    torch.set_num_threads(config["threads"])
    count = config["groups"]
    envs = config["envs"]
    groups = [Group(work, envs // count, config["env_threads"], seed * 1000 + i) for i in range(count)]
    space = groups[0].pool.action_space
    continuous = bool(space.shape)
    agent = Agent(work, groups[0].shape[0], space.shape[0] if continuous else int(space.n), continuous)
    optimizer = torch.optim.Adam(agent.parameters(), lr=work.lr, eps=1e-5, fused=True)
    kind = torch.float32 if continuous else torch.int64
    batch = Batch(horizon(work, envs), groups, envs, space.shape if continuous else (), kind)
    steps, ending = 0, False
    while not ending:
        collect(agent, groups, batch, report)
        steps += train(agent, optimizer, batch, work)
        ending = report.update(steps)


if __name__ == "__main__":
    main()
