"""Sample Factory: its PPO, synchronous or asynchronous, in one process or in several.

It needs Gymnasium before 1.0, which has HalfCheetah-v4 but not v5 (the same body and reward), and for which ALE does
not register its games, so that Pong is made directly. The wrappers are Sample Factory's, except that the emulator
gives grey frames, which spares it the conversion.
"""

from __future__ import annotations

import gymnasium
import torch
from protocol import Report, begin
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.envs.env_wrappers import FireResetEnv, MaxAndSkipEnv, NoopResetEnv, NumpyObsWrapper
from sample_factory.train import make_runner
from works import HIDDEN, Work, horizon


class Updates(AlgoObserver):
    """Reports every training iteration."""

    def __init__(self, report: Report, batch: int) -> None:
        self.report, self.batch = report, batch

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        returns = runner.policy_avg_stats.get("reward", [[]])[0]
        mean = float(sum(returns) / len(returns)) if returns else None
        if self.report.update(training_iteration_since_resume * self.batch, mean):
            runner.cfg.train_for_seconds = -1  # so that it ends after this step


def make_env(name: str, _cfg: object, _env_config: object, render_mode: str | None = None) -> gymnasium.Env:
    """The environment with this name of a work."""
    if not name.startswith("ALE/"):
        return gymnasium.make(name.replace("HalfCheetah-v5", "HalfCheetah-v4"), render_mode=render_mode)
    from ale_py import AtariEnv

    env = AtariEnv("pong", obs_type="grayscale", frameskip=1, repeat_action_probability=0.0, render_mode=render_mode)
    env = FireResetEnv(MaxAndSkipEnv(NoopResetEnv(env, noop_max=30), skip=4))
    env = gymnasium.wrappers.ResizeObservation(env, (84, 84))
    return NumpyObsWrapper(gymnasium.wrappers.FrameStack(env, 4))


def arguments(work: Work, config: dict, seed: int) -> list[str]:
    """Its command line."""
    workers, envs = config["workers"], config["envs"]
    options = {
        "env": work.env,
        "experiment": "rival",
        "train_dir": "train_dir",
        "device": "cpu",
        "seed": seed,
        "async_rl": config["async"],
        "serial_mode": config.get("serial", False),
        "set_workers_cpu_affinity": config.get("affinity", True),
        "num_workers": workers,
        "num_envs_per_worker": envs // workers,
        # Nobody else plays thousands of steps before the first that counts.
        "decorrelate_envs_on_one_worker": False,
        "worker_num_splits": config.get("splits", 2),
        "rollout": horizon(work, envs),
        "batch_size": work.minibatch,
        "num_batches_per_epoch": work.batch // work.minibatch,
        "num_epochs": work.epochs,
        "shuffle_minibatches": work.epochs > 1,
        "learning_rate": work.lr,
        "gamma": work.gamma,
        "gae_lambda": work.lam,
        "ppo_clip_ratio": work.clip,
        "exploration_loss_coeff": work.entropy,
        "value_loss_coeff": work.value_coef,
        "max_grad_norm": work.grad_norm,
        "adam_eps": 1e-5,
        "use_rnn": False,
        "normalize_input": work.normalize,
        "normalize_returns": True,
        "value_bootstrap": True,
        "adaptive_stddev": False,
        "initial_stddev": 2.718281828**work.log_std,
        "actor_critic_share_weights": work.pixels,
        "nonlinearity": "relu" if work.pixels else "tanh",
        "encoder_conv_architecture": "convnet_atari",
        "obs_scale": 255.0 if work.pixels else 1.0,
        "save_every_sec": 10**6,
        "save_best_every_sec": 10**6,
    }
    found = [f"--{name}={value}" for name, value in options.items()]
    return [*found, "--encoder_mlp_layers", *map(str, HIDDEN)]


def main() -> None:
    work, config, seed, report = begin()
    register_env(work.env, make_env)
    torch.set_num_threads(config.get("threads", 1))  # its processes have one each; this is for the serial mode
    argv = arguments(work, config, seed)
    parser, _ = parse_sf_args(argv)
    _, runner = make_runner(parse_full_cfg(parser, argv))
    runner.register_observer(Updates(report, work.batch))
    if runner.init() == ExperimentStatus.SUCCESS:
        runner.run()


if __name__ == "__main__":
    main()
