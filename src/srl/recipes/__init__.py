"""Named, tuned experiments. ``srl recipes`` lists them, ``srl train NAME`` runs one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from srl import envs
from srl.algorithms import DQN, MAPPO, PPO
from srl.core.errors import UnknownName
from srl.envs.boards import Board, ConnectFour, TicTacToe
from srl.envs.recall import Recall
from srl.experiment import Actors, Evaluator, Experiment, Trainer
from srl.workers.opponents import Opponent


@dataclass(frozen=True)
class Recipe:
    """An experiment with a name."""

    about: str
    extra: str
    """Which optional packages it needs, as an extra of this distribution."""
    make: Callable[[], Experiment]


def _cartpole() -> Experiment:
    return Experiment(
        env=envs.gym("CartPole-v1"),
        algorithm=PPO(lr=1e-3, horizon=64, epochs=4, minibatch=256),
        actors=Actors(envs=64),
        steps=300_000,
    )


def _halfcheetah() -> Experiment:
    return Experiment(
        env=envs.gym("HalfCheetah-v5"),
        algorithm=PPO(
            lr=3e-4,
            horizon=64,
            epochs=5,
            minibatch=512,
            gamma=0.98,
            lam=0.92,
            log_std=-1.0,
            normalize_obs=True,
            normalize_return=True,
        ),
        actors=Actors(envs=64),
        steps=3_000_000,
    )


def _pong() -> Experiment:
    return Experiment(
        env=envs.gym("ALE/Pong-v5", repeat_action_probability=0.0),
        algorithm=PPO(
            lr=5e-4,
            horizon=128,
            epochs=3,
            minibatch=256,
            clip=0.1,
            entropy=0.01,
            anneal_steps=4_000_000,
        ),
        actors=Actors(envs=16),
        steps=2_000_000,
    )


def _cartpole_dqn() -> Experiment:
    return Experiment(
        env=envs.gym("CartPole-v1"),
        algorithm=DQN(
            lr=2e-3,
            anneal_steps=150_000,
            horizon=16,
            hidden=(128, 128),
            activation="relu",
            minibatch=64,
            samples_per_insert=8,
            target_every=200,
            prioritized=False,
            epsilon=0.05,
            epsilon_spread=1.0,
            replay_steps=100_000,
        ),
        actors=Actors(envs=8),
        evaluator=Evaluator(count=1, seconds=3),
        steps=150_000,
    )


def _pendulum() -> Experiment:
    return Experiment(
        env=envs.gym("Pendulum-v1"),
        algorithm=PPO(
            lr=1e-3,
            horizon=128,
            epochs=10,
            minibatch=256,
            gamma=0.9,
            anneal_steps=600_000,
            normalize_obs=True,
            normalize_return=True,
        ),
        actors=Actors(envs=16),
        steps=400_000,
    )


def _hide_and_seek() -> Experiment:
    return Experiment(
        env=envs.hide_and_seek("quadrant"),
        algorithm=MAPPO(
            network="srl.policies.entities:Seen",
            critic_network="srl.policies.entities:Everything",
            critic_memory=True,
            memory="lstm",
            memory_size=128,
            lr=1e-3,
            horizon=80,
            chunk=10,
            epochs=2,
            minibatch=1280,
            gamma=0.99,
            lam=0.95,
            entropy=0.005,
            max_grad_norm=5.0,
        ),
        actors=Actors(envs=32),
        steps=12_000_000,
    )


def _recall() -> Experiment:
    return Experiment(
        env=envs.gym(Recall),
        algorithm=PPO(lr=2e-3, horizon=40, chunk=40, epochs=4, minibatch=640, entropy=0.01, memory="lstm"),
        actors=Actors(envs=64),
        steps=150_000,
    )


def _simple_spread() -> Experiment:
    return Experiment(
        env=envs.pettingzoo("mpe2.simple_spread_v3"),
        algorithm=_mpe(entropy=0.01),
        actors=Actors(envs=32),
        steps=1_000_000,
    )


def _spread_mappo() -> Experiment:
    return Experiment(
        env=envs.spread(state=True),
        algorithm=MAPPO(
            lr=7e-4, horizon=25, epochs=8, minibatch=1600, gamma=0.95, entropy=0.01, anneal_steps=12_000_000
        ),
        actors=Actors(envs=64),
        steps=12_000_000,
    )


def _simple_tag() -> Experiment:
    return Experiment(
        env=envs.pettingzoo("mpe2.simple_tag_v3"),
        algorithm={"predators": _mpe(entropy=0.01), "prey": _mpe(entropy=0.01)},
        agents={"adversary*": "predators", "agent*": "prey"},
        actors=Actors(envs=32),
        steps=300_000,
    )


def _mpe(entropy: float) -> PPO:
    return PPO(
        lr=7e-4,
        horizon=50,
        epochs=8,
        minibatch=800,
        gamma=0.95,
        entropy=entropy,
        normalize_obs=True,
        normalize_return=True,
    )


def _self_play(game: Board, entropy: float, hidden: tuple[int, ...], steps: int) -> Experiment:
    return Experiment(
        env=game,
        algorithm={
            "player": PPO(
                lr=2e-3,
                horizon=32,
                epochs=4,
                minibatch=1024,
                gamma=1.0,
                # Advantages as they are: what the bonus is worth beside a win or a loss stays the same all along.
                normalize_advantage=False,
                # From playing around to playing well: the bonus fades.
                entropy=entropy,
                anneal_entropy=True,
                hidden=hidden,
                anneal_steps=steps,
            )
        },
        agents={"learner": "player", "opponent": "past"},
        opponents={"past": Opponent(of="player", rule="uniform", newest=0.8)},
        actors=Actors(envs=256),
        trainer=Trainer(past_every=10),
        steps=steps,
    )


def _tictactoe() -> Experiment:
    return _self_play(TicTacToe(), 0.8, (128, 128), 1_000_000)


def _connect_four() -> Experiment:
    return _self_play(ConnectFour(), 0.03, (256, 256), 2_000_000)


RECIPES = {
    "cartpole": Recipe("balance a pole; half a minute", "", _cartpole),
    "cartpole-dqn": Recipe("the same by deep Q-learning from a replay buffer; a minute", "", _cartpole_dqn),
    "pendulum": Recipe("swing up a pendulum with continuous actions; a minute", "", _pendulum),
    "recall": Recipe("remember a cue: an LSTM where nothing else can help; a minute", "", _recall),
    "simple-spread": Recipe("three agents, one policy, cover three places; minutes", "multiagent", _simple_spread),
    "spread-mappo": Recipe("the same with a critic that sees everything; six minutes", "", _spread_mappo),
    "simple-tag": Recipe("predators and prey: two policies learn at once; minutes", "multiagent", _simple_tag),
    "tictactoe": Recipe("self-play against past versions; two minutes", "", _tictactoe),
    "connect-four": Recipe("the same on a larger board; ten minutes", "", _connect_four),
    "hide-and-seek": Recipe("two hiders, two seekers, boxes and a ramp; an hour", "mujoco", _hide_and_seek),
    "halfcheetah": Recipe("MuJoCo: run fast; ten minutes", "mujoco", _halfcheetah),
    "pong": Recipe("Atari from pixels; an hour", "atari", _pong),
}


def recipe(name: str) -> Experiment:
    """The experiment with this name."""
    if name not in RECIPES:
        raise UnknownName("recipe", name, RECIPES, "`srl recipes` lists them")
    return RECIPES[name].make()
