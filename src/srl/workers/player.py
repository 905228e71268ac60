"""Playing episodes with fixed policies: for evaluation beside training, ``srl eval`` and ``srl play``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from srl.algorithms.base import Algorithm
from srl.core.seeding import derive
from srl.core.specs import Array, Arrays, Spaces
from srl.envs.base import EnvConfig, Observed, StepViews

LONGEST = 100_000
"""An episode longer than this counts as it is: an environment may have no end at all."""


@dataclass
class Seat:
    """A policy with its weights, and the agents that act by it."""

    policy: str
    agents: tuple[str, ...]
    spaces: Spaces
    algorithm: Algorithm
    weights: Arrays
    version: int
    sample: bool
    """Whether actions are drawn at random as in training, or the likeliest ones."""


@dataclass
class Scores:
    """Returns and lengths of whole episodes, one for every agent that took part."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class _Side:
    """One policy at work."""

    def __init__(self, seat: Seat, copies: int, seed: int) -> None:
        from srl.policies.host import PolicyHost

        self.seat, rows = seat, copies * len(seat.agents)
        spec = self.spec = seat.algorithm.block(seat.spaces, rows)
        self.fields = {name: np.zeros((rows, *leaf.shape), leaf.dtype) for name, leaf in spec.fields.items()}
        self.acts: Array = np.zeros(rows, bool)
        self.host = PolicyHost(seat.algorithm, seat.spaces, seed, clients=1, rows=rows, explore=seat.sample)
        self.host.load(seat.weights, seat.version)
        obs = {name: self.fields[name] for name in spec.observations}
        self.observed = Observed(obs, self.fields["first"], self.acts)
        ends = (self.fields[name] for name in ("reward", "terminated", "truncated", "valid"))
        self.views = StepViews(self.observed, *ends)
        self.total: Array = np.zeros(rows)
        self.length: Array = np.zeros(rows, np.int64)
        self.running: Array = np.ones(rows, bool)

    def begin(self) -> None:
        self.total[:], self.length[:], self.running[:] = 0, 0, True

    def act(self) -> Arrays:
        self.fields["valid"][:] = self.acts
        inputs = {name: self.fields[name] for name in self.spec.inputs}
        outputs = self.host.act(inputs, np.zeros(1, np.int64), np.zeros(1, bool))
        return {name: outputs[name] for name in self.spec.actions}

    def count(self) -> None:
        views = self.views
        self.total += views.reward * self.running
        self.length += views.valid & self.running
        self.running &= ~(views.terminated | views.truncated)

    def goes_on(self) -> bool:
        """Whether an episode is still to end, of a row that took part in it."""
        return bool((self.running & ((self.length > 0) | self.acts)).any())


class Player:
    """Plays one episode in each of ``copies`` environment copies, step by step."""

    def __init__(self, env: EnvConfig, seats: Sequence[Seat], copies: int, seed: int, *, render: bool = False) -> None:
        self.env = env.make(copies, render=render)
        self.env.bind([seat.agents for seat in seats])
        self.sides = [_Side(seat, copies, derive(seed, "play", seat.policy)) for seat in seats]

    def begin(self, seed: int) -> None:
        """Start new episodes."""
        self.env.reset(seed, [side.observed for side in self.sides])
        self.steps = 0
        for side in self.sides:
            side.begin()

    def step(self) -> bool:
        """One step of every copy; False once all episodes have ended."""
        self.env.step([side.act() for side in self.sides], [side.views for side in self.sides])
        for side in self.sides:
            side.count()
        self.steps += 1
        return self.steps < LONGEST and any(side.goes_on() for side in self.sides)

    def scores(self) -> dict[str, Scores]:
        """What came out, by policy. An agent that never took part has no score."""
        found = {}
        for side in self.sides:
            took_part = side.length > 0
            found[side.seat.policy] = Scores(side.total[took_part].tolist(), side.length[took_part].tolist())
        return found

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def play(player: Player, episodes: int, copies: int, seed: int) -> dict[str, Scores]:
    """Scores of ``episodes`` whole episodes: the first of every copy, so that short ones are not favoured."""
    found: dict[str, Scores] = {}
    for round_ in range(-(-episodes // copies)):
        player.begin(derive(seed, "evaluation", round_ * copies))
        while player.step():
            pass
        for policy, scores in player.scores().items():
            kept = found.setdefault(policy, Scores())
            kept.returns += scores.returns
            kept.lengths += scores.lengths
    return found
