"""The inline launcher is deterministic to the bit, also across a resume."""

from __future__ import annotations

import numpy as np
import pytest

import srl
from srl import envs
from srl.config import load
from srl.plan import check, checkpoint_store

STEPS = 2048


def experiment(**changes):
    from dataclasses import replace

    base = srl.Experiment(
        env=envs.gym("CartPole-v1"),
        algorithm=srl.PPO(horizon=16, minibatch=64, epochs=2, normalize_obs=True, normalize_return=True),
        actors=srl.Actors(count=2, envs=8, ring=2),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=STEPS,
    )
    return replace(base, **changes)


def saved(run_dir):
    return checkpoint_store(run_dir, check(load(run_dir))[0]).load("latest")


def assert_same(first, second, *also):
    """Weights, optimiser, random generators, normalisers, counters and all workers' states are equal, bit for bit.

    ``also`` are parts that must be there to be compared at all.
    """
    assert first.values == second.values
    assert first.arrays.keys() == second.arrays.keys()
    for part in ("learner/policy", "learner/optimizer", "learner/generator", "peers/actor-0", *also):
        assert any(name == part or name.startswith(part + "/") for name in first.arrays), part
    for name, array in first.arrays.items():
        assert array.dtype == second.arrays[name].dtype
        assert np.array_equal(array, second.arrays[name], equal_nan=True), name


SMALL = {"horizon": 16, "minibatch": 64, "epochs": 2}
# So small that the oldest steps have gone by the time of a resume, and most by the end.
REPLAY = {"horizon": 8, "minibatch": 32, "minibatches": 2, "replay_steps": 768, "warmup": 256, "hidden": (16,)}
STORE = ("store/weights", "store/stamps", "store/block/0/obs", "samples/granted")
LAYOUTS = {
    "one pass a batch": {},
    "synchronous": {"algorithm": srl.PPO(horizon=16, minibatch=64, epochs=2, max_staleness=0)},
    "remote inference": {"actors": srl.Actors(count=2, envs=8, ring=1, inference="remote")},
    "batch of half the vectors": {"trainer": srl.Trainer(batch=2, threads=1)},
    "batch of no multiple of the vectors": {"trainer": srl.Trainer(batch=3, threads=1)},
    "in-turn copies and continuous actions": {"env": envs.gym("MountainCarContinuous-v0")},
    "reused batches": {"algorithm": srl.PPO(horizon=16, minibatch=64, epochs=1, reuse=2)},
    "lstm": {"algorithm": srl.PPO(**SMALL, memory="lstm", memory_size=16, chunk=8, normalize_obs=True)},
    "gru, remote inference": {
        "algorithm": srl.PPO(**SMALL, memory="gru", memory_size=16, chunk=8),
        "actors": srl.Actors(count=2, envs=8, ring=1, inference="remote"),
    },
    "dqn with prioritized replay": {"algorithm": srl.DQN(**REPLAY)},
    "dqn uniform": {"algorithm": srl.DQN(**REPLAY, prioritized=False)},
    "dqn whose replay is kept": {"algorithm": srl.DQN(**REPLAY, keep_replay=True)},
    "fifo buffer with relabel": {"algorithm": srl.PPO(**SMALL, relabel="test_determinism:halve_rewards")},
}
# What a layout has beside the rest, and must save.
PARTS = {
    "remote inference": ["peers/policy-default-0/generator"],
    "lstm": ["peers/actor-0/inference/default/memory/state/c", "peers/actor-0/0/default/block/state/h"],
    "gru, remote inference": ["peers/policy-default-0/memory/state/h"],
    "dqn with prioritized replay": ["learner/target", *(f"peers/buffer-default/{part}" for part in STORE)],
    "dqn uniform": ["learner/target", *(f"peers/buffer-default/{part}" for part in STORE)],
    "dqn whose replay is kept": ["learner/target", *(f"peers/buffer-default/{part}" for part in STORE)],
    "fifo buffer with relabel": ["peers/buffer-default/granted"],
}


def halve_rewards(block):
    block["reward"] /= 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_seed_gives_the_same_bits(tmp_path, layout):
    for name in ("a", "b"):
        experiment(**LAYOUTS[layout]).run(tmp_path / name, quiet=True)
    assert_same(saved(tmp_path / "a"), saved(tmp_path / "b"), *PARTS.get(layout, ()))


def test_another_seed_gives_other_weights(tmp_path):
    for seed in (1, 2):
        experiment(seed=seed).run(tmp_path / str(seed))
    first, second = (saved(tmp_path / str(seed)).arrays for seed in (1, 2))
    name = "learner/policy/value.weight"
    assert not np.array_equal(first[name], second[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_and_resumed_half_equal_the_whole_bit_for_bit(tmp_path, layout):
    whole = experiment(**LAYOUTS[layout])
    whole.run(tmp_path / "whole", quiet=True)
    whole.run(tmp_path / "halves", quiet=True, steps=STEPS // 2)
    assert saved(tmp_path / "halves").values["steps"] < saved(tmp_path / "whole").values["steps"]
    srl.resume(tmp_path / "halves", steps=STEPS)
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "halves"), *PARTS.get(layout, ()))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("dqn")])
def test_the_replay_of_these_tests_has_evicted_steps_before_the_resume(tmp_path, layout):
    experiment(**LAYOUTS[layout]).run(tmp_path / "run", quiet=True, steps=STEPS // 2)
    state = saved(tmp_path / "run")
    places = len(state.arrays["peers/buffer-default/store/stamps"])
    assert state.values["peers/buffer-default/store/came"] > places
    assert state.values["peers/buffer-default/drawn"] > 1000


def test_resume_is_exact_for_mujoco_too(tmp_path):
    pytest.importorskip("mujoco")
    whole = experiment(env=envs.gym("InvertedPendulum-v5"), actors=srl.Actors(envs=4), steps=2048)
    whole.run(tmp_path / "whole")
    whole.run(tmp_path / "halves", steps=1024)
    srl.resume(tmp_path / "halves", steps=2048)
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "halves"))
