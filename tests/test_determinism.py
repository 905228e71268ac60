"""The inline launcher is deterministic to the bit, also across a resume."""

from __future__ import annotations

import numpy as np
import pytest

import srl
from srl import envs
from srl.config import load
from srl.experiment import check, checkpoint_store

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


def assert_same(first, second):
    """Weights, optimiser, random generators, normalisers, counters and all workers' states are equal, bit for bit."""
    assert first.values == second.values
    assert first.arrays.keys() == second.arrays.keys()
    kinds = {name.split("/")[0] + "/" + name.split("/")[1] for name in first.arrays}
    assert {"learner/policy", "learner/optimizer", "learner/generator", "peers/actor-0"} <= kinds
    for name, array in first.arrays.items():
        assert array.dtype == second.arrays[name].dtype
        assert np.array_equal(array, second.arrays[name], equal_nan=True), name


LAYOUTS = {
    "one pass a batch": {},
    "synchronous": {"algorithm": srl.PPO(horizon=16, minibatch=64, epochs=2, max_staleness=0)},
    "remote inference": {"actors": srl.Actors(count=2, envs=8, ring=1, inference="remote")},
    "batch of half the vectors": {"trainer": srl.Trainer(batch=2, threads=1)},
    "batch of no multiple of the vectors": {"trainer": srl.Trainer(batch=3, threads=1)},
    "in-turn copies and continuous actions": {"env": envs.gym("MountainCarContinuous-v0")},
    "reused batches": {"algorithm": srl.PPO(horizon=16, minibatch=64, epochs=1, reuse=2)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_seed_gives_the_same_bits(tmp_path, layout):
    for name in ("a", "b"):
        experiment(**LAYOUTS[layout]).run(tmp_path / name)
    assert_same(saved(tmp_path / "a"), saved(tmp_path / "b"))


def test_another_seed_gives_other_weights(tmp_path):
    for seed in (1, 2):
        experiment(seed=seed).run(tmp_path / str(seed))
    first, second = (saved(tmp_path / str(seed)).arrays for seed in (1, 2))
    name = "learner/policy/value.weight"
    assert not np.array_equal(first[name], second[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_and_resumed_half_equal_the_whole_bit_for_bit(tmp_path, layout):
    whole = experiment(**LAYOUTS[layout])
    whole.run(tmp_path / "whole")
    whole.run(tmp_path / "halves", steps=STEPS // 2)
    assert saved(tmp_path / "halves").values["steps"] < saved(tmp_path / "whole").values["steps"]
    srl.resume(tmp_path / "halves", steps=STEPS)
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "halves"))


def test_resume_is_exact_for_mujoco_too(tmp_path):
    pytest.importorskip("mujoco")
    whole = experiment(env=envs.gym("InvertedPendulum-v5"), actors=srl.Actors(envs=4), steps=2048)
    whole.run(tmp_path / "whole")
    whole.run(tmp_path / "halves", steps=1024)
    srl.resume(tmp_path / "halves", steps=2048)
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "halves"))
