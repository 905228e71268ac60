"""What people do with a run: watch it, take its policy elsewhere, follow its numbers in other programs."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import srl
from srl import cli, config
from srl.commands import train
from srl.core.errors import ConfigError
from srl.launch.run import run as launch
from srl.launch.run import saved_seats
from srl.monitor.exporters import Prometheus, WandB, gauges
from srl.plan import check
from srl.play import play
from srl.policies.host import PolicyHost

BOX = spaces.Box(-1, 1, (3,), np.float32)


class Spin(gymnasium.Env):
    """Random observations of any space, any action, episodes of ten steps."""

    def __init__(self, kind="plain"):
        self.observation_space, self.action_space = {
            "plain": (BOX, spaces.Discrete(3, start=1)),
            "continuous": (spaces.Box(-np.inf, np.inf, (3,), np.float64), spaces.Box(-2, 2, (2,), np.float32)),
            "mixed": (
                spaces.Dict(place=BOX, tool=spaces.Discrete(4), flags=spaces.MultiBinary(2)),
                spaces.Dict(
                    push=spaces.Box(-1, 1, (2,), np.float32),
                    pick=spaces.MultiDiscrete([2, 3]),
                    buttons=spaces.MultiBinary(2),
                    turn=spaces.Discrete(3),
                ),
            ),
        }[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), self.about()

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), float(self.steps % 3), False, self.steps == 10, self.about()

    def about(self):
        return {"allowed": np.array([True, self.np_random.random() < 0.5, True])}


PPO = srl.PPO(horizon=8, minibatch=16, lr=0.02)


def trained(out, env, algorithm=PPO, steps=100, **fields):
    srl.Experiment(env, algorithm, actors=srl.Actors(envs=4), **fields).run(
        out, steps=steps, launcher="inline", quiet=True
    )
    return out


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("people") / "cartpole", srl.envs.gym("CartPole-v1"), steps=400)


def decoded(film):
    """The frames of a video, and what ffmpeg says about it."""
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    command = [ffmpeg, "-i", film, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, 400, 600, 3), done.stderr.decode()


def test_play_films_episodes_that_can_be_watched(cartpole, tmp_path, capsys):
    film = tmp_path / "films" / "cartpole.mp4"
    code = cli._command(["play", str(cartpole), "--episodes", "2", "--video", str(film), "--fps", "20"])
    assert code == 0
    out = capsys.readouterr().out
    lengths = [int(n) for n in re.findall(r"episode \d: return [\d.]+, (\d+) steps", out)]
    assert len(lengths) == 2 and f"video: {film}" in out
    frames, about = decoded(film)
    assert re.search(r"Video: h264.* 600x400.* 20 fps", about)
    assert len(frames) == sum(lengths) + 2  # one before each episode's first step
    assert len({frame.tobytes() for frame in frames}) > 5
    assert [path.name for path in film.parent.iterdir()] == ["cartpole.mp4"]


def test_play_without_a_video_tells_the_same_returns_again(cartpole):
    told = []
    first = play(cartpole, episodes=2, tell=told.append)
    assert told == first == play(cartpole, episodes=2)
    assert first[0].returns["default"] == first[0].length > 0


def test_an_environment_that_cannot_draw_itself_is_told_in_a_line(tmp_path):
    out = trained(tmp_path / "run", srl.envs.gym(Spin))
    with pytest.raises(ConfigError, match="cannot draw itself"):
        play(out, video=tmp_path / "x.mp4")
    assert not list(tmp_path.glob("*.mp4")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--video", "x.avi"], "must end in .mp4"),
        (["--policy", "defolt"], "did you mean 'default'"),
        (["--episodes", "0"], "at least 1"),
        (["--tag", "v99"], "no checkpoint 'v99'"),
    ],
)
def test_what_cannot_be_played_is_told_in_a_line(cartpole, arguments, said):
    with pytest.raises(srl.SrlError, match=re.escape(said)):
        cli._command(["play", str(cartpole), *arguments])


def host_and_inputs(out, count, seed):
    """The saved policy as workers use it, and random inputs for it."""
    (seat,) = saved_seats(check(config.load(out)), out, "latest", "latest", sample=False)
    host = PolicyHost(seat.algorithm, seat.spaces, 0, clients=1, rows=count, explore=False)
    host.load(seat.weights, seat.version)
    rng = np.random.default_rng(seed)
    spec = {**seat.spaces.observation_spec(), **seat.spaces.mask_spec()}
    inputs = {}
    for name, leaf in spec.items():
        shape = (count, *leaf.shape)
        whole = np.dtype(leaf.dtype).kind != "f"
        inputs[name] = (rng.integers(0, 2, shape) if whole else rng.normal(0, 1, shape)).astype(leaf.dtype)
    return host, inputs, tuple(seat.spaces.action_spec())


EXPORTS = {
    "discrete": (lambda: srl.envs.gym(Spin), srl.PPO(horizon=8, minibatch=16, lr=0.02, normalize_obs=True)),
    "continuous": (lambda: srl.envs.gym(Spin, kind="continuous"), PPO),
    "mixed": (lambda: srl.envs.gym(Spin, kind="mixed"), PPO),
    "masked": (lambda: srl.envs.gym(Spin, mask="info:allowed"), PPO),
    "lstm": (lambda: srl.envs.gym(Spin), srl.PPO(horizon=8, minibatch=16, lr=0.02, memory="lstm", chunk=4)),
    "dqn": (lambda: srl.envs.gym(Spin), srl.DQN(horizon=8, warmup=32, minibatch=16, minibatches=2, lr=0.02)),
}


@pytest.mark.parametrize("kind", EXPORTS)
def test_exported_policy_acts_as_the_saved_one_for_any_batch_size(tmp_path, kind, capsys):
    runtime = pytest.importorskip("onnxruntime")
    env, algorithm = EXPORTS[kind]
    out, file = trained(tmp_path / "run", env(), algorithm), tmp_path / "policy.onnx"
    assert cli._command(["export", str(out), "--onnx", str(file)]) == 0
    assert "gave the same as torch for 74 random observations" in capsys.readouterr().out
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert {each.shape[0] for each in (*session.get_inputs(), *session.get_outputs())} == {"batch"}
    outputs = [each.name for each in session.get_outputs()]
    memory = {each.name: each for each in session.get_inputs() if each.name.startswith("state/")}
    assert bool(memory) == (kind == "lstm")
    for count in (1, 5, 33):
        host, _, actions = host_and_inputs(out, count, 0)
        state = {name: np.ones((count, each.shape[1]), np.float32) for name, each in memory.items()}
        for step in range(4 if memory else 1):
            inputs = host_and_inputs(out, count, step)[1]
            first = np.full(count, step == 0) | (np.arange(count) % 3 == step)
            flags = {"first": first, "valid": np.ones(count, bool)}
            wanted = host.act({**inputs, **flags}, np.zeros(1, np.int64), np.zeros(1, bool))
            fed = {**inputs, **state, **({"first": first} if memory else {})}
            found = dict(zip(outputs, session.run(None, fed), strict=True))
            state = {name: found[f"next_{name}"] for name in memory}
            for name in actions:
                exact = found[name].dtype.kind != "f"
                np.testing.assert_allclose(found[name], wanted[name], *((0, 0) if exact else (1e-5, 1e-5)), name)
            for name in state:
                np.testing.assert_allclose(state[name], host.memory[name][0], 1e-5, 1e-5)


class Stubborn(torch.nn.Module):
    """A network whose layers depend on what it sees, which no graph can hold."""

    def __init__(self, spaces):
        super().__init__()
        self.layer, self.out_features = torch.nn.Linear(3, 4), 4

    def forward(self, obs):
        return self.layer(obs["obs"]) if obs["obs"].sum() > 0 else -self.layer(obs["obs"])


def test_a_network_that_cannot_be_exported_is_told_in_a_line_and_leaves_no_file(tmp_path):
    from srl.export import export

    algorithm = srl.PPO(horizon=8, minibatch=16, network="test_people:Stubborn")
    out = trained(tmp_path / "run", srl.envs.gym(Spin), algorithm)
    with pytest.raises(ConfigError, match="cannot be exported") as caught:
        export(out, tmp_path / "policy.onnx")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


class Look:
    """A sink that asks the endpoint for what the sink before it serves."""

    def __init__(self, prometheus):
        self.prometheus, self.seen = prometheus, []

    def fetch(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.prometheus.port}/metrics", timeout=5) as answer:
            return answer.read().decode()

    def write(self, row):
        self.seen.append((row.values, self.fetch()))

    def say(self, text):
        pass

    def close(self):
        pass


def experiment(**fields):
    return srl.Experiment(
        srl.envs.gym("CartPole-v1"), PPO, actors=srl.Actors(envs=4), steps=200, launcher="inline", **fields
    )


def test_prometheus_is_served_while_the_run_goes_on_and_not_afterwards(tmp_path):
    prometheus = Prometheus(0)
    look = Look(prometheus)
    launch(experiment(), tmp_path / "run", sinks=[prometheus, look])
    values, text = look.seen[-1]
    served = dict(re.findall(r"^(srl_\w+(?:\{.*\})?) (\S+)$", text, re.M))
    assert float(served["srl_steps"]) == values["steps"] >= 200
    assert float(served["srl_train_kl"]) == pytest.approx(values["train/kl"])
    assert served[f'srl_run_info{{env="CartPole-v1",run="{tmp_path / "run"}"}}'] == "1.0"
    with pytest.raises(urllib.error.URLError):
        look.fetch()


def test_policies_become_labels():
    row = {"steps": 1.0, "train/kl/red": 2.0, "train/kl/blue": 3.0, "env/goals-won": 4.0, "eval/return": 5.0}
    assert gauges(row, ["red", "blue", "return"]) == {
        "srl_steps": {"": 1.0},
        "srl_train_kl": {"red": 2.0, "blue": 3.0},
        "srl_env_goals_won": {"": 4.0},
        "srl_eval": {"return": 5.0},
    }


def test_a_port_in_use_is_told_in_a_line_before_anything_starts(tmp_path):
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot use port {port}"):
            launch(experiment(), tmp_path / "run", sinks=[Prometheus(port)])
    assert not (tmp_path / "run").exists()


def test_wandb_keeps_an_offline_run_in_the_run_folder_and_goes_on_with_it(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    out = tmp_path / "run"
    launch(experiment(), out, sinks=[WandB("people")])
    srl.resume(out, steps=400, sinks=[WandB("people")])
    logs = sorted((out / "wandb").glob("offline-run-*/*.wandb"))
    assert len(logs) == 2 and logs[0].name == logs[1].name  # the same id, so W&B joins them
    for part in (b"steps_per_second", b"train/kl", b"CartPole-v1", b"people"):
        assert part in logs[0].read_bytes(), part


def test_wandb_without_a_key_leaves_nothing_behind(tmp_path, monkeypatch):
    class Refuses:
        Settings = dict

        @staticmethod
        def init(**_):
            raise RuntimeError("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", Refuses)
    with pytest.raises(ConfigError, match=r"No API key.*WANDB_MODE=offline"):
        launch(experiment(), tmp_path / "run", sinks=[WandB("people")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [
        ("imageio_ffmpeg", "video", ["play", "RUN", "--video", "x.mp4"]),
        ("onnxruntime", "onnx", ["export", "RUN", "--onnx", "x.onnx"]),
        ("onnxscript", "onnx", ["export", "RUN", "--onnx", "x.onnx"]),
        ("wandb", "wandb", ["train", "cartpole", "--wandb", "people"]),
        ("prometheus_client", "prometheus", ["resume", "RUN", "--prometheus", "9100"]),
    ],
)
def test_a_missing_extra_is_told_in_a_line(cartpole, monkeypatch, tmp_path, module, extra, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=re.escape(f"pip install 'reallyscalablerl[{extra}]'")):
        cli._command([str(cartpole) if word == "RUN" else word for word in arguments])
    assert not list(tmp_path.iterdir())


def test_check_names_every_extra_that_can_be_installed():
    from srl.check import EXTRAS

    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    declared = set(re.findall(r"^(\w+) = \[", section, re.M)) - {"dev"}
    assert set(EXTRAS.values()) == declared


@pytest.fixture(scope="module")
def tag(tmp_path_factory):
    """Two policies that were trained a little on a game of tag."""
    pytest.importorskip("mpe2")
    return trained(
        tmp_path_factory.mktemp("people") / "tag",
        srl.envs.pettingzoo("mpe2.simple_tag_v3", max_cycles=10),
        {"chasers": PPO, "runners": PPO},
        agents={"adversary*": "chasers", "*": "runners"},
    )


def test_every_trained_policy_is_evaluated(tag, capsys):
    assert cli._command(["eval", str(tag), "--episodes", "2"]) == 0
    assert re.findall(r"^(\w+): return", capsys.readouterr().out, re.M) == ["chasers", "runners"]
    assert cli._command(["eval", str(tag), "--episodes", "2", "--policy", "runners", "--json"]) == 0
    assert capsys.readouterr().out.startswith('{"return_mean"')


def test_several_policies_play_together(tag, tmp_path, capsys):
    film = tmp_path / "tag.mp4"
    assert cli._command(["play", str(tag), "--episodes", "1", "--video", str(film)]) == 0
    assert re.search(r"episode 1: chasers -?[\d.]+, runners -?[\d.]+, 10 steps", capsys.readouterr().out)
    assert film.stat().st_size > 1000


def test_a_run_ends_with_an_evaluation_of_every_policy(tag, capsys):
    assert cli._command(["resume", str(tag), "--steps", "300", "--quiet"]) == 0
    assert re.findall(r"evaluation of (\w+): return", capsys.readouterr().out) == ["chasers", "runners"]


def test_an_algorithm_of_ones_own_has_its_options_on_the_command_line(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    arguments = ["--env", "CartPole-v1", "--algorithm", "own_algorithm:A2C", "--a2c.lr", "0.5"]
    x, _ = train._experiment(arguments)
    assert (x.algorithms["default"].name, x.algorithms["default"].lr) == ("a2c", 0.5)
    with pytest.raises(ConfigError, match=r"not a subclass of srl\.Algorithm"):
        train._experiment(["--env", "CartPole-v1", "--algorithm", "own_algorithm:Net"])
    with pytest.raises(ConfigError, match="has its own algorithm"):
        train._experiment(["cartpole", "--algorithm", "dqn"])
