"""Several trainers of one policy: they learn what one would from all their samples, and lose nothing to a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import srl
from srl.core.errors import ConfigError
from srl.core.slab import Batch, Slab
from srl.core.specs import Spaces
from srl.launch.run import evaluate
from srl.monitor.sinks import read_metrics
from srl.policies.host import arrays_of
from srl.recipes import recipe
from srl.services.names import FileNames
from srl.workers.group import Group, PeersLost

BOX = gymnasium.spaces.Box(-1, 1, (5,), np.float32)
IMAGE = gymnasium.spaces.Box(0, 255, (1, 36, 36), np.uint8)
CHOICE, PUSH = gymnasium.spaces.Discrete(3), gymnasium.spaces.Box(-1, 1, (2,), np.float32)
SIZE, ROWS = 2, 6
CASES = {
    "choice in C": (srl.PPO(), Spaces(BOX, CHOICE)),
    "push in C, normalised": (srl.PPO(normalize_obs=True, normalize_return=True), Spaces(BOX, PUSH)),
    "as they come, with an entropy bonus": (srl.PPO(normalize_advantage=False, entropy=0.01), Spaces(BOX, CHOICE)),
    "torch": (srl.PPO(activation="elu", normalize_obs=True), Spaces(BOX, CHOICE)),
    "images": (srl.PPO(), Spaces(IMAGE, CHOICE)),
    "memory": (srl.PPO(memory="lstm", chunk=4), Spaces(BOX, CHOICE)),
}
UPDATES = 3


def slab_of(algorithm, spaces, uneven):
    """Made-up samples: a block for every trainer."""
    slab = Slab(algorithm.block(spaces, ROWS), SIZE, shared=False)
    rng = np.random.default_rng(0)
    for name, array in slab.arrays.items():
        kind = array.dtype.kind
        made = rng.normal(size=array.shape) if kind == "f" else rng.integers(0, 2, array.shape)
        array[...] = True if name == "valid" else 60 * made if kind == "u" else made
    slab.arrays["log_prob"][...] = -1.1
    slab.arrays["valid"][1, : 7 if uneven else 0] = False
    return slab


def learned(algorithm, spaces, blocks, uneven, order, peers=None):
    """A learner after some updates on these blocks; ``order`` stands in for the random one."""
    slab = slab_of(algorithm, spaces, uneven)
    learner = algorithm.learner(spaces, 0, "cpu")
    learner.peers = peers
    random, torch.randperm = torch.randperm, lambda count, generator: order(count)
    try:
        for number in range(UPDATES):
            found = learner.train(learner.prepare(Batch(slab, blocks)), number, lambda: False)
    finally:
        torch.randperm = random
    return learner, found


def one_of_several(rank, folder, case, minibatch, uneven):
    """What one trainer does in its process; its weights and metrics are kept in the folder."""
    torch.set_num_threads(1)
    algorithm, spaces = CASES[case]
    group = Group("trainers/default", rank, SIZE, FileNames(folder / "names"), folder / "names")
    group.join(1, "gloo")
    while not group.form(1.0):
        pass
    algorithm = replace(algorithm, horizon=16, minibatch=minibatch, epochs=2)
    learner, found = learned(algorithm, spaces, [rank], uneven, torch.arange, group)
    metrics = {f"metric {name}": np.array(value) for name, value in found.items()}
    np.savez(folder / f"{rank}.npz", **arrays_of(learner.policy), **metrics)
    group.close()


def together(count, columns, minibatch):
    """The order in which one trainer takes all samples, so that its minibatches are those of two, put together."""
    each = count // SIZE // columns  # steps, or chunks, of one row
    entries = torch.arange(count).reshape(each, SIZE, columns).swapaxes(0, 1).reshape(SIZE, -1)
    return torch.cat([part.reshape(-1) for part in entries.split(minibatch, dim=1)])


def in_processes(*calls):
    """Run Python code in processes of their own, at the same time."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); from pathlib import Path; import test_trainers as t; "
    running = [subprocess.Popen([sys.executable, "-c", code + call]) for call in calls]
    assert [process.wait(timeout=100) for process in running] == [0] * len(calls)


@pytest.mark.parametrize(("minibatch", "uneven"), [(24, False), (1000, True)], ids=["minibatches", "uneven"])
@pytest.mark.parametrize("case", CASES)
def test_two_trainers_find_the_weights_that_one_finds_with_twice_the_batch(case, minibatch, uneven, tmp_path):
    in_processes(*(f"t.one_of_several({r}, Path({str(tmp_path)!r}), {case!r}, {minibatch}, {uneven})" for r in (0, 1)))
    algorithm, spaces = CASES[case]
    chunk = algorithm.chunk if algorithm.memory else 1
    order = partial(together, columns=ROWS, minibatch=minibatch // chunk) if not uneven else torch.arange
    algorithm = replace(algorithm, horizon=16, minibatch=SIZE * minibatch, epochs=2)
    alone, expected = learned(algorithm, spaces, [0, 1], uneven, order)
    first, second = (dict(np.load(tmp_path / f"{rank}.npz")) for rank in (0, 1))
    begin = arrays_of(algorithm.learner(spaces, 0, "cpu").policy)
    moved = apart = 0.0
    for name, weights in arrays_of(alone.policy).items():
        np.testing.assert_array_equal(first[name], second[name])  # both trainers have the same, to the bit
        if case != "images":  # where a ReLU is all but 0 the two may see different sides of it
            np.testing.assert_allclose(first[name], weights, atol=2e-5, rtol=1e-4)
        moved += np.square(weights - begin[name]).sum()
        apart += np.square(weights - first[name]).sum()
    assert moved > 0 and apart <= (1e-3 if case == "images" else 1e-5) * moved
    for name, value in expected.items():
        assert first[f"metric {name}"] == pytest.approx(value, abs=1e-4, rel=1e-3), name


def wait_alone(folder):
    """The first of two trainers, whose peer leaves in the middle of an update."""
    group = Group("trainers/default", 0, SIZE, FileNames(folder / "names"), folder / "names")
    group.join(1, "gloo")
    while not group.form(1.0):
        pass
    with pytest.raises(PeersLost):
        while True:
            group.sum(torch.ones(3))
    group.leave()
    assert not group.form(0.3), "the one that is gone was taken for there"


def leave_early(folder):
    group = Group("trainers/default", 1, SIZE, FileNames(folder / "names"), folder / "names")
    group.join(1, "gloo")
    while not group.form(1.0):
        pass
    group.sum(torch.ones(3))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainer_that_dies_is_noticed_at_once_and_not_taken_for_there(tmp_path):
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); from pathlib import Path; import test_trainers as t; "
    calls = [f"t.{name}(Path({str(tmp_path)!r}))" for name in ("wait_alone", "leave_early")]
    running = [subprocess.Popen([sys.executable, "-c", code + call]) for call in calls]
    assert [process.wait(timeout=60) for process in running] == [0, -signal.SIGKILL]


@pytest.mark.learning
@pytest.mark.parametrize(
    ("name", "changes", "enough"), [("cartpole", {}, 475), ("cartpole-dqn", {"minibatch": 32}, 150)]
)
def test_two_trainers_learn_and_go_on_when_resumed(name, changes, enough, tmp_path):
    x = recipe(name)
    x = replace(
        x,
        algorithm=replace(x.algorithm, **changes),
        actors=replace(x.actors, count=2, envs=x.actors.envs // 2),
        trainer=srl.Trainer(count=2),
        evaluator=srl.Evaluator(count=1, seconds=1.0),
        until=f"return>={enough}",  # an untrained one gets 10 to 20
        steps=10**8,  # the evaluator decides, however busy the machine is
    )
    result = x.run(tmp_path / "run", quiet=True)
    assert evaluate(tmp_path / "run", tag="best").return_mean >= 0.8 * enough
    before = read_metrics(tmp_path / "run")[-1]
    srl.resume(tmp_path / "run", steps=result.steps + 10_000, until="")
    assert read_metrics(tmp_path / "run")[-1]["version"] > before["version"]


class Lonely(srl.PPO):
    parallel = False


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"actors": srl.Actors(count=3)}, "actors.count 3 cannot be divided evenly over 2 trainers"),
        ({"actors": srl.Actors(count=2, inference="remote")}, "policies.count 1 cannot be divided evenly"),
        ({"launcher": "inline", "actors": srl.Actors(count=2)}, "inline launcher has one trainer"),
        ({"algorithm": Lonely()}, "ppo cannot be trained by several trainers"),
        ({"trainer": srl.Trainer(count=0)}, "trainer.count must be at least 1, got 0"),
    ],
)
def test_what_several_trainers_cannot_do_is_said_before_anything_starts(changes, reason, tmp_path):
    x = replace(recipe("cartpole"), **{"trainer": srl.Trainer(count=2), **changes})
    with pytest.raises(ConfigError, match=reason):
        x.run(tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
