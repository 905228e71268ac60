"""What kills or blocks workers in real life: signals at any time, environments that hang, crash or leak, NaN updates.

The kill tests count blocks by their ids from inside the trainer: none is trained twice, no version goes backwards.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import srl
from srl import envs
from srl.core.errors import TrainingError, WorkerError
from srl.experiment import Node, wire
from srl.launch.local import LocalLauncher
from srl.plan import check
from srl.recipes import recipe
from srl.workers.evaluator import read_evaluations
from srl.workers.trainer import PeerTrainer, TrainerWorker

WORK = {"actor": "steps", "policy": "rows", "buffer": "drawn", "trainer": "updates", "evaluator": "evaluations"}
WORK["peer"] = "updates"


class Published:
    """Writes down every version it has published."""

    def _publish(self, weights):
        super()._publish(weights)
        self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
        with open(self.checkpoints.folder / "versions.txt", "a") as file:
            file.write(f"{self.version}\n")


class Recording(Published, TrainerWorker):
    """And the id of every block it is about to train on."""

    def _train(self, batch, prepared, taken):
        note(self, taken)
        return super()._train(batch, prepared, taken)


class RecordingPeer(PeerTrainer):
    """Writes down the id of every block of the updates it has finished: others are taken back if a trainer is lost."""

    def _train(self, batch, prepared, taken):
        steps = super()._train(batch, prepared, taken)
        note(self, taken)
        return steps


class RecordingLeader(Published, RecordingPeer):
    kind = "trainer"


def note(trainer, taken):
    rank = 0 if trainer.group is None else trainer.group.rank
    with open(trainer.checkpoints.folder / f"trained-{rank}.txt", "a") as file:
        file.writelines(f"{full.producer} {full.incarnation} {full.sequence}\n" for full in taken)


def recorded(nodes):
    several = any(node.worker is PeerTrainer for node in nodes)
    kinds = {TrainerWorker: RecordingLeader if several else Recording, PeerTrainer: RecordingPeer}
    return [replace(node, worker=kinds.get(node.worker, node.worker)) for node in nodes]


class Killer:
    """Ends workers one after the other with SIGKILL, each once the one before has recovered.

    The run is over once it has learned enough in spite of that: the evaluator judged a version of afterwards.
    """

    def __init__(self, victims, enough, seconds):
        self.victims, self.enough, self.deadline = list(victims), enough, time.monotonic() + seconds
        self.judged = {}
        self.work, self.pid, self.since, self.victim = {}, None, 0.0, ""
        self.recovery, self.settled, self.said = {}, 0.0, []
        self.launcher: LocalLauncher

    def feed(self, name, kind, report):
        self.work[name] = report["counters"].get(WORK[kind], 0.0)
        found = report["gauges"]
        if not self.victims and self.pid is None and "eval/version/default" in found:
            self.judged.setdefault(found["eval/version/default"], found["eval/return/default"])

    @property
    def learned(self):
        """Returns after the last recovery; the first two may be of a version before it."""
        return list(self.judged.values())[2:]

    def ending(self):
        """Called by the launcher again and again."""
        now = time.monotonic()
        assert now < self.deadline, f"stuck after killing {self.victim}: {self.work} {self.said[-3:]}"
        if self.pid is not None:
            if self.launcher.children[self.victim].process.pid != self.pid and self.work[self.victim] > self.before:
                self.recovery.setdefault(self.victim, []).append(now - self.since)
                self.pid, self.settled = None, now
        elif self.victims and now - self.settled > 0.3 and all(self.work.get(v, 0) > 0 for v in self.victims):
            self.victim = self.victims.pop(0)
            self.pid, self.since = self.launcher.children[self.victim].process.pid, now
            # A trainer goes on counting from its checkpoint, the others from 0.
            self.before = self.work[self.victim] if self.victim.startswith("trainer") else 0.0
            self.work[self.victim] = 0.0
            os.kill(self.pid, signal.SIGKILL)
        return now if max(self.learned, default=self.enough - 1) >= self.enough else None


def survive(x, run_dir, victims, enough, seconds=240):
    """Run ``x`` while killing, until an evaluation afterwards gives ``enough``, after checking what was trained."""
    from srl import config

    config.save(x, run_dir)
    killer = Killer(victims, enough, seconds)
    nodes = recorded(wire(x, check(x), run_dir, None))
    killer.launcher = LocalLauncher(nodes, killer.feed, run_dir / "logs", len(victims), 0, killer.said.append)
    killer.launcher.run(killer.ending)
    assert not killer.victims, "the run ended before all were killed"
    assert len([text for text in killer.said if "killed by SIGKILL; started again" in text]) == len(victims)
    for folder in (run_dir / "checkpoints").iterdir():
        trained = [
            f"{file.stem} {line}" for file in folder.glob("trained*.txt") for line in file.read_text().split("\n")[:-1]
        ]
        assert len(trained) == len(set(trained)) > 20, "a block was trained twice"
        versions = [int(line) for line in (folder / "versions.txt").read_text().splitlines()]
        assert versions == sorted(set(versions)), "a version went backwards"
    for victim, times in killer.recovery.items():
        print(f"{victim:18} recovery p50 {np.percentile(times, 50):.2f} s  p95 {np.percentile(times, 95):.2f} s")
    assert max(killer.learned) >= enough, f"it did not learn: {killer.learned}"


@pytest.mark.learning
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_killed_actors_policies_trainer_and_evaluator_do_not_keep_ppo_from_learning(tmp_path, transport):
    x = replace(
        recipe("cartpole"),
        actors=srl.Actors(count=2, envs=16, ring=2, inference="remote"),
        trainer=srl.Trainer(checkpoint_seconds=0.5),
        evaluator=srl.Evaluator(count=1, seconds=0.5),
        transport=transport,
        steps=10**9,
    )
    victims = ["actor-0", "policy-default-0", "trainer-default", "evaluator"] * 2 + ["actor-1", "policy-default-0"]
    survive(x, tmp_path / "run", victims, enough=475)
    judged = [found["version"] for found in read_evaluations(tmp_path / "run")]
    assert judged == sorted(set(judged))  # one version at a time, none twice


@pytest.mark.learning
@pytest.mark.parametrize(("transport", "inference"), [("shm", "inline"), ("tcp", "remote")])
def test_killed_trainers_are_replaced_and_the_others_lose_nothing(tmp_path, transport, inference):
    x = replace(
        recipe("cartpole"),
        actors=srl.Actors(count=2, envs=32, inference=inference),
        policies=srl.Policies(count=2),
        trainer=srl.Trainer(count=2, checkpoint_seconds=1000.0),  # so nothing can come from a checkpoint
        evaluator=srl.Evaluator(count=1, seconds=0.5),
        transport=transport,
        steps=10**9,
    )
    victims = ["trainer-default-1", "trainer-default", "actor-1", "trainer-default-1", "trainer-default"]
    survive(x, tmp_path / "run", victims, enough=475)


@pytest.mark.learning
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_killed_buffer_and_others_do_not_keep_dqn_from_learning(tmp_path, transport):
    x = replace(
        recipe("cartpole-dqn"),
        actors=srl.Actors(count=1, envs=8, inference="remote"),
        trainer=srl.Trainer(checkpoint_seconds=0.5),
        evaluator=srl.Evaluator(count=1, seconds=0.5),
        transport=transport,
    )
    victims = ["buffer-default", "actor-0", "policy-default-0", "trainer-default", "buffer-default"]
    survive(x, tmp_path / "run", victims, enough=150)  # an untrained one gets 10 to 20


class Troubled(gymnasium.Env):
    """Does what ``trouble`` says at its 50th step."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, trouble, marker=""):
        self.trouble, self.marker, self.steps, self.hoard = trouble, marker, 0, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.trouble == "leak":
            self.hoard.append(np.ones(250_000))  # 2 MB a step
        if self.steps == 50 and not (self.marker and os.path.exists(self.marker)):
            if self.marker:
                Path(self.marker).touch()
            getattr(self, self.trouble, lambda: None)()
        reward = float("nan") if self.trouble == "nan" and self.steps == 50 else 1.0
        return np.zeros(1, np.float32), reward, self.steps % 10 == 0, False, {}

    def hang(self):
        time.sleep(1000)

    def crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)


def troubled(trouble, **changes):
    env = envs.gym(Troubled, trouble=trouble, **changes.pop("kwargs", {}))
    algorithm = srl.PPO(horizon=16, minibatch=32, epochs=1)
    return replace(srl.Experiment(env, algorithm, actors=srl.Actors(count=1, envs=2)), steps=4000, **changes)


def watched(x, run_dir):
    """Run ``x``; what it said to the user."""
    said = []
    watched_for = {"stall_seconds": x.stall_seconds, "memory_mb": x.actors.memory_mb}
    nodes = wire(x, check(x), run_dir, None)
    launcher = LocalLauncher(nodes, lambda *_: None, run_dir / "logs", x.restarts, 0, said.append, **watched_for)
    deadline = time.monotonic() + 60

    def ending():
        assert time.monotonic() < deadline, said
        return None

    launcher.run(ending)
    return said


def test_hanging_environment_is_named_with_its_stack_and_replaced(tmp_path):
    x = troubled("hang", kwargs={"marker": str(tmp_path / "hung")}, stall_seconds=2.0)
    said = watched(x, tmp_path / "run")
    assert "trainer-default: trainer waits for samples" in said
    stuck = next(text for text in said if text.startswith("actor-0 has not come back"))
    assert "in hang" in stuck
    assert "test_survival.py" in stuck
    assert "actor-0 killed by SIGKILL; started again (1 of 3 restarts used)" in said


def test_environment_that_always_crashes_the_process_ends_the_run_with_the_signal(tmp_path):
    with pytest.raises(WorkerError, match=r"actor-0 failed after 1 restarts: killed by SIGSEGV; see .*actor-0.log"):
        watched(troubled("crash", restarts=1), tmp_path / "run")
    assert "Segmentation fault" in (tmp_path / "run" / "logs" / "actor-0.log").read_text()


def test_environment_that_crashed_once_is_forgiven(tmp_path):
    said = watched(troubled("crash", kwargs={"marker": str(tmp_path / "crashed")}), tmp_path / "run")
    assert said == ["actor-0 killed by SIGSEGV; started again (1 of 3 restarts used)"]


def test_leaking_environment_is_started_anew_at_its_limit_and_that_costs_no_restart(tmp_path):
    x = troubled("leak", restarts=0, actors=srl.Actors(count=1, envs=2, inference="remote", memory_mb=400))
    said = watched(x, tmp_path / "run")
    assert said
    assert all("more than 400; started again" in text for text in said)


def test_nan_reward_ends_the_run_at_once_and_names_the_copy(tmp_path):
    with pytest.raises(WorkerError, match=r"actor-0 failed: .*copy \d.*reward.*NaN"):
        watched(troubled("nan"), tmp_path / "run")


def exploding(nonfinite):
    return troubled(
        "",
        trainer=srl.Trainer(nonfinite=nonfinite, threads=1),
        algorithm=srl.PPO(horizon=16, minibatch=32, epochs=1, lr=1e38, max_grad_norm=1e38),
        launcher="inline",
    )


def test_update_of_nan_ends_the_run_and_names_the_update(tmp_path):
    with pytest.raises(TrainingError, match=r"trainer-default: update \d+ .* went wrong: .*lower the learning rate"):
        exploding("stop").run(tmp_path / "run", quiet=True)


def test_update_of_nan_is_taken_back_if_the_user_says_so(tmp_path):
    x = replace(exploding("skip"), steps=10**9)
    from srl.launch.run import run

    run(x, tmp_path / "run", seconds=2)
    plan = check(x)[0]
    from srl.plan import checkpoint_store

    state = checkpoint_store(tmp_path / "run", plan).load("latest")
    weights = state.under("learner").under("policy").arrays
    assert all(np.isfinite(array).all() for array in weights.values())


def test_nodes_of_a_graph_can_be_replaced_by_ones_own():
    x = recipe("cartpole")
    nodes = recorded(wire(x, check(x), Path("nowhere"), None))
    assert [node.worker for node in nodes if node.name == "trainer-default"] == [Recording]
    assert all(isinstance(node, Node) for node in nodes)
