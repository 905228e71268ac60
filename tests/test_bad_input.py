"""Bad input gets one clear line and exit code 2, before any process starts, and nothing already saved is lost."""

from __future__ import annotations

import json
import shutil
import socket
import sys

import pytest

import srl
from srl import cli, envs
from srl.launch.local import LocalLauncher


@pytest.fixture
def run_srl(monkeypatch, capsys):
    """Run an ``srl`` command in this process; (exit code, stdout, stderr). Starting a worker fails the test."""
    monkeypatch.setattr(LocalLauncher, "_start", lambda *_: pytest.fail("a process was started"))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["srl", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


@pytest.fixture
def refused(run_srl):
    """Run a command that must be refused; its one line."""

    def run(*arguments):
        code, out, err = run_srl(*arguments)
        assert code == 2
        assert out == ""
        assert err.startswith("srl: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err

    return run


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A short finished run with two checkpoints."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    x = srl.Experiment(
        envs.gym("CartPole-v1"),
        srl.PPO(horizon=8, minibatch=32, epochs=1),
        actors=srl.Actors(envs=8),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=200,
    )
    x.run(run_dir, quiet=True)
    srl.resume(run_dir, steps=400)
    return run_dir


@pytest.fixture
def run_dir(finished_run, tmp_path):
    """A copy of the finished run to be damaged."""
    return shutil.copytree(finished_run, tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["unknown command", "'train'"]),
        (["train"], ["recipe", "--env"]),
        (["train", "cartpol"], ["unknown recipe", "'cartpole'"]),
        (["train", "--env", "CartPoel-v1"], ["unknown environment", "'CartPole-v1'"]),
        (["train", "--env", "no_such_module:Env-v0"], ["no_such_module"]),
        (["train", "--env", "CartPole-v1", "--algorithm", "pp"], ["unknown algorithm", "'ppo'"]),
        (["train", "cartpole", "--env", "CartPole-v1"], ["not both"]),
        (["train", "cartpole", "--actor.count", "2"], ["--actor.count", "--actors.count"]),
        (["train", "cartpole", "--ppo.learning-rate", "1"], ["--ppo.learning-rate"]),
        (["train", "cartpole", "--steps", "many"], ["--steps", "many"]),
        (["train", "cartpole", "--steps"], ["--steps"]),
        (["train", "cartpole", "--launcher", "cluster"], ["launcher must be one of", "local"]),
        (["train", "cartpole", "--on", "slurm://here"], ["launcher must be one of", "ray"]),
        (["train", "cartpole", "--transport", "pigeon"], ["--transport", "tcp"]),
        (["train", "cartpole", "--steps", "0"], ["steps must be at least 1"]),
        (["train", "cartpole", "--seed", "-1"], ["seed must be at least 0"]),
        (["train", "cartpole", "--actors.count", "-1"], ["actors.count must be at least 0"]),
        (["train", "cartpole", "--actors", "many"], ["--actors.count", "many"]),
        (["train", "cartpole", "--actors.envs", "33", "--actors.ring", "2"], ["33 copies", "2 vectors; 32 can"]),
        (["train", "cartpole", "--actors.envs", "0"], ["actors.envs must be at least 1"]),
        (["train", "cartpole", "--actors.ring", "0"], ["actors.ring must be at least 1"]),
        (["train", "cartpole", "--actors.inference", "magic"], ["actors.inference", "remote"]),
        (["train", "cartpole", "--policies.count", "0"], ["policies.count must be at least 1"]),
        (["train", "cartpole", "--trainer.device", "tpu"], ["trainer.device", "cuda"]),
        (["train", "cartpole", "--ppo.lr", "0"], ["ppo.lr must be greater than 0"]),
        (["train", "cartpole", "--ppo.gamma", "1.5"], ["ppo.gamma must be between 0 and 1"]),
        (["train", "cartpole", "--ppo.activation", "swish"], ["ppo.activation", "tanh"]),
        (["train", "cartpole", "--ppo.max-staleness", "-1"], ["ppo.max_staleness must be at least 0"]),
        (["train", "cartpole", "--ppo.minibatch", "100000"], ["ppo.minibatch", "larger than the batch of 4096"]),
        (
            ["train", "cartpole", "--trainer.batch", "5", "--trainer.slab", "4"],
            ["larger than the slab of 4", "trainer.slab"],
        ),
        (["train", "cartpole", "--actors.envs", "100000000"], ["shared memory", "MiB are available", "actors.envs"]),
        (["train", "cartpole", "--launcher", "inline", "--transport", "tcp"], ["inline launcher"]),
        (["train", "cartpole", "--transport", "tcp", "--port", "70000"], ["port 70000"]),
        (["resume", "no/such/folder"], ["no/such/folder", "not a run directory"]),
        (["eval", "no/such/folder"], ["not a run directory"]),
        (["resume"], ["The run's folder"]),
        (["bench", "chess"], ["chess", "srl bench --help"]),
        (["bench", "throughput", "chess"], ["chess", "cartpole"]),
    ],
)
def test_mistakes_on_the_command_line_get_one_line(refused, arguments, words):
    line = refused(*arguments)
    assert all(word in line for word in words), line


def test_too_little_shared_memory_says_how_much_is_needed(refused, monkeypatch):
    monkeypatch.setattr("srl.plan.available_memory", lambda: 64 * 1024)
    line = refused("train", "cartpole")
    assert "MiB of shared memory" in line
    assert "only 0 MiB" in line


def test_port_in_use_is_named(refused, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused("train", "cartpole", "--transport", "tcp", "--port", port, "--out", tmp_path / "run")
    assert f"port {port}" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("missing", "environment", "words"),
    [
        ("ale_py", "ALE/Pong-v5", ["package ale-py", "reallyscalablerl[atari]"]),
        ("mujoco", "HalfCheetah-v5", ["package mujoco", "reallyscalablerl[mujoco]"]),
    ],
)
def test_missing_optional_package_names_its_extra(refused, monkeypatch, missing, environment, words):
    for loaded in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)
    line = refused("train", "--env", environment)
    assert all(word in line for word in words), line


def test_folder_of_another_run_is_not_touched(refused, run_dir):
    before = sorted(path for path in run_dir.rglob("*"))
    line = refused("train", "cartpole", "--out", run_dir)
    assert "holds another run" in line
    assert f"srl resume {run_dir}" in line
    assert sorted(path for path in run_dir.rglob("*")) == before


def test_folder_with_other_files_is_not_touched(refused, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    assert "not an empty folder" in refused("train", "cartpole", "--out", tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def versions(run_dir):
    return sorted((run_dir / "checkpoints" / "default").glob("v*"))


@pytest.mark.parametrize("file", ["arrays.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_checkpoint_is_refused_and_the_good_one_offered(refused, run_srl, run_dir, file, damage):
    good, bad = versions(run_dir)
    path = bad / file
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    line = refused("eval", run_dir)
    assert "damaged" in line
    offered = f"--tag v{int(good.name[1:])}"
    assert offered in line
    code, out, _ = run_srl("eval", run_dir, "--json", *offered.split())
    assert code == 0
    assert json.loads(out)["version"] == int(good.name[1:])


def test_checkpoint_of_another_experiment_is_refused(refused, run_dir, tmp_path):
    x = srl.Experiment(
        envs.gym("Pendulum-v1"),
        srl.PPO(horizon=8, minibatch=32, epochs=1),
        actors=srl.Actors(envs=8),
        trainer=srl.Trainer(threads=1),
        launcher="inline",
        steps=100,
    )
    x.run(tmp_path / "other", quiet=True)
    shutil.copy(tmp_path / "other" / "config.json", run_dir / "config.json")
    assert "another experiment" in refused("eval", run_dir)


def test_environment_that_no_process_can_be_given_is_refused(tmp_path):
    import gymnasium

    x = srl.Experiment(envs.gym(lambda: gymnasium.make("CartPole-v1")))
    with pytest.raises(srl.ConfigError, match="top level of a module"):
        x.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_tag_lists_those_there_are(refused, run_dir):
    line = refused("eval", run_dir, "--tag", "bset")
    assert "no checkpoint 'bset'" in line
    assert "latest" in line


def test_unknown_policy_is_named(refused, run_dir):
    assert "unknown policy 'defautl'; did you mean 'default'" in refused("eval", run_dir, "--policy", "defautl")


def test_complete_run_is_not_resumed_by_accident(refused, run_dir):
    assert "is complete" in refused("resume", run_dir)


@pytest.mark.parametrize("text", ["{", '{"env": {"gym": "CartPole-v1"}}', '{"colour": 1}', "[]"])
def test_damaged_config_is_one_line(refused, run_dir, text):
    (run_dir / "config.json").write_text(text)
    refused("eval", run_dir)


def test_unknown_key_in_a_config_suggests_the_nearest(refused, run_dir):
    config = json.loads((run_dir / "config.json").read_text())
    config["algorithm"]["default"]["lrr"] = config["algorithm"]["default"].pop("lr")
    (run_dir / "config.json").write_text(json.dumps(config))
    assert "did you mean 'lr'" in refused("eval", run_dir)


def test_help_explains_every_command(run_srl):
    for command in ("train", "resume", "eval", "bench throughput", "bench roofline", "bench streams", "bench rivals"):
        code, out, err = run_srl(*command.split(), "--help")
        assert code == 0
        assert err == ""
        assert "usage: srl" in out
    code, out, _ = run_srl("--help")
    assert code == 0
    assert "srl train cartpole" in out
