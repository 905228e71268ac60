"""RLlib with all that it has against faults, writing down what ``benchmarks/faults.py`` needs to know.

    python rllib_faults.py RUN_DIR [resume]

PPO on CartPole with two env runners, which are restarted when they fail, and a learner of its own, under Tune, which
starts the whole trial again from its last checkpoint whenever anything else fails. The files are those of SRL's
recorded runs (``src/srl/bench/recorded.py``): who lives, in which process, how much it has done, and what was trained
on when.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.rllib.callbacks.callbacks import RLlibCallback
from rllib_ppo import configure
from works import WORKS

CONFIG = {"envs": 64, "runners": 2, "learners": 1, "threads": 1}
"""Of the work, as ``rllib_ppo.py`` has it."""
EVERY = 5
"""Updates between two checkpoints: about five seconds."""
RUN_DIR = "RIVAL_RUN_DIR"


def life(pid: int) -> int:
    """When a process was started: tells the lives of a worker apart."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


def note(file: str, **what: Any) -> None:
    line = json.dumps({"t": time.monotonic(), **what}) + "\n"
    descriptor = os.open(Path(os.environ[RUN_DIR]) / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def alive(name: str, kind: str, done: float, pid: int = 0) -> None:
    pid = pid or os.getpid()
    note("reports.jsonl", name=name, kind=kind, life=life(pid), pid=pid, done=done)


class Recorded(RLlibCallback):
    """Tells what env runners, learner and algorithm do, from inside."""

    sampled, steps, learner = 0, 0, 0

    def on_environment_created(self, *, env_runner: Any, **_: Any) -> None:
        if env_runner.worker_index:
            alive(f"actor-{env_runner.worker_index}", "actor", self.sampled)

    def on_sample_end(self, *, env_runner: Any, samples: list, **_: Any) -> None:
        self.sampled += sum(len(episode) for episode in samples)
        if env_runner.worker_index:
            alive(f"actor-{env_runner.worker_index}", "actor", self.sampled)

    def on_algorithm_init(self, *, algorithm: Any, **_: Any) -> None:
        (found,) = algorithm.learner_group.foreach_learner(lambda _: os.getpid())
        self.learner = found.get()
        self.tell(0)

    def on_train_result(self, *, algorithm: Any, result: dict, **_: Any) -> None:
        steps, update = int(result["env_runners"]["num_env_steps_sampled_lifetime"]), result["training_iteration"]
        before, self.steps = self.steps or steps, steps
        mine = life(os.getpid())
        note("trained.jsonl", blocks=[[0, mine, update, steps - before]])
        note("trained.jsonl", run=os.getppid(), life=mine, version=update, trained=steps)
        self.tell(update)

    def tell(self, done: int) -> None:
        alive("learner", "trainer", done, self.learner)
        alive("algorithm", "algorithm", done)


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    os.environ[RUN_DIR] = str(folder)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    torch.set_num_threads(CONFIG["threads"])
    # As many logical processors as there are actors, so that all of them are started whatever the machine has.
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, _temp_dir=str(folder.parent / "ray"))
    forgiving = {
        "restart_failed_env_runners": True,
        "max_num_env_runner_restarts": 10**6,
        "delay_between_env_runner_restarts_s": 0.0,
        "num_consecutive_env_runner_failures_tolerance": 10**6,
    }
    x = configure(WORKS["cartpole"], CONFIG, seed=1).callbacks(Recorded).fault_tolerance(**forgiving)
    if "resume" in sys.argv[2:]:
        tuner = tune.Tuner.restore(str(folder / "tune"), trainable="PPO", resume_unfinished=True)
    else:
        kept = tune.CheckpointConfig(checkpoint_frequency=EVERY, num_to_keep=3)
        tuner = tune.Tuner(
            "PPO",
            param_space=x,
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(folder),
                failure_config=tune.FailureConfig(max_failures=-1),
                checkpoint_config=kept,
                verbose=0,
            ),
        )
    tuner.fit()


if __name__ == "__main__":
    main()
