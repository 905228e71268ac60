"""The evaluator: plays whole episodes beside training, with exactly one saved version at a time.

It takes the newest checkpoint of every policy, plays, and writes what came out to ``evaluations.jsonl``; a version that
scored higher than any before is tagged ``best``. It may end the run when a target is reached, and what it finds may
drive a curriculum: a function of the user's own says what the actors' environments are told.
"""

from __future__ import annotations

import json
import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from srl.algorithms.base import Algorithm, load_object
from srl.core.errors import ConfigError
from srl.core.seeding import derive
from srl.core.specs import Spaces, is_image
from srl.core.worker import Progress, State, Worker
from srl.envs.base import EnvConfig
from srl.services.checkpoints import CheckpointStore
from srl.workers.player import Player, Scores, Seat

EVALUATIONS = "evaluations.jsonl"
_SLICE = 0.1
"""Seconds of play between two looks at the clock."""
_OPERATORS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, ">": operator.gt, "<=": operator.le}
_TARGET = re.compile(r"return(?:/(?P<policy>[^<>=]+))?\s*(?P<sign>>=|>|<=)\s*(?P<value>-?[\d.]+(?:e[+-]?\d+)?)")


@dataclass(frozen=True)
class Target:
    """When a run has learned enough: ``return>=475``, or ``return/policy>=475``."""

    policy: str
    sign: str
    value: float

    @classmethod
    def parse(cls, text: str, policies: Sequence[str]) -> Target | None:
        """The target that ``text`` describes; None if it is empty."""
        if not text:
            return None
        found = _TARGET.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"a target looks like 'return>=475' or 'return/policy>=475', not {text!r}")
        policy = found["policy"] or policies[0]
        if policy not in policies:
            raise ConfigError(f"until={text!r}: there is no policy {policy!r}; there are: {', '.join(policies)}")
        return cls(policy, found["sign"], float(found["value"]))

    def reached(self, policy: str, value: float) -> bool:
        """Whether this value of this policy is good enough."""
        return policy == self.policy and _OPERATORS[self.sign](value, self.value)


@dataclass(frozen=True)
class EvalSeat:
    """A policy to be evaluated, or one that plays along."""

    policy: str
    agents: tuple[str, ...]
    spaces: Spaces
    algorithm: Algorithm
    store: CheckpointStore
    trained: bool


class EvalWorker(Worker):
    """Evaluates one version after the other."""

    kind = "evaluator"
    niceness = 5  # training comes first, but where cores are many times taken 15 is as good as never

    def __init__(
        self,
        name: str,
        env: EnvConfig,
        seats: Sequence[EvalSeat],
        episodes: int,
        seed: int,
        sample: bool | None,
        until: Target | None,
        curriculum: str,
        run_dir: Path,
        own_process: bool,
    ) -> None:
        super().__init__(name)
        self.env, self.seats, self.episodes, self.seed, self.sample = env, seats, episodes, seed, sample
        self.until, self.curriculum, self.run_dir, self.own_process = until, curriculum, run_dir, own_process
        self.player: Player | None = None
        self.playing: dict[str, int] = {}
        self.evaluated: dict[str, int] = {}
        self.best: dict[str, float] = {}
        self.order: dict[str, Any] = {}
        self.reached = False

    def start(self) -> None:
        """See :class:`Worker`."""
        self.decide = load_object(self.curriculum, "the curriculum") if self.curriculum else None
        for found in read_evaluations(self.run_dir):
            self.evaluated[found["policy"]] = found["version"]
            self.best[found["policy"]] = max(found["return_mean"], self.best.get(found["policy"], float("-inf")))
            self.order = found.get("order") or self.order
        if self.order:
            self.metrics.orders.append(self.order)
        if self.own_process:
            import torch

            torch.set_num_threads(1)

    def poll(self, timeout: float) -> Progress:
        """See :class:`Worker`: some steps of play, if there is a version that was not evaluated yet."""
        if self.player is None and not self._begin():
            if timeout > 0:
                with self.metrics.wait("versions"):
                    time.sleep(timeout)
            return Progress(done=self.reached)
        assert self.player is not None
        until = time.monotonic() + _SLICE
        steps = 0
        while time.monotonic() < until:
            steps += 1
            if not self.player.step():
                self._finish(self.player)
                break
        return Progress(steps, done=self.reached)

    def _begin(self) -> bool:
        """Load the newest version of every policy and start to play, if one of them is new."""
        newest = {seat.policy: seat.store.tags().get("latest", -1) for seat in self.seats}
        new = any(newest[seat.policy] > self.evaluated.get(seat.policy, -1) for seat in self.seats if seat.trained)
        if not new or min(newest.values()) < 0:
            return False
        seats = []
        for seat in self.seats:
            state = seat.store.load("latest")
            self.playing[seat.policy] = state.values["version"]
            if seat.trained:
                seat.store.tag("evaluating", state.values["version"])  # so that it is still there when it is judged
            weights = state.under("learner").under("policy").arrays
            sample = sampled(seat.spaces, self.sample)
            args = (seat.policy, seat.agents, seat.spaces, seat.algorithm, weights, state.values["version"], sample)
            seats.append(Seat(*args))
        self.player = Player(self.env, seats, self.episodes, self.seed)
        if self.order:
            self.player.env.configure(self.order)
        self.player.begin(derive(self.seed, "evaluation", 0))
        return True

    def _finish(self, player: Player) -> None:
        for seat in self.seats:
            scores = player.scores()[seat.policy]
            if seat.trained and scores.returns:
                self._judge(seat, scores)
        player.close()
        self.player = None
        self.metrics.add("evaluations")

    def _judge(self, seat: EvalSeat, scores: Scores) -> None:
        policy, version = seat.policy, self.playing[seat.policy]
        found = summary(policy, version, scores)
        mean = found["return_mean"]
        self.evaluated[policy] = version
        if mean > self.best.get(policy, float("-inf")):
            self.best[policy] = mean
            seat.store.tag("best", version)
        self.reached |= self.until is not None and self.until.reached(policy, mean)
        order = self.decide({**found, "order": self.order}) if self.decide is not None else None
        if order:
            self.order = found["order"] = order
            self.metrics.orders.append(order)
        with open(self.run_dir / EVALUATIONS, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(found) + "\n")
        shown = {"return": mean, "length": found["length_mean"], "version": version, "best": self.best[policy]}
        self.metrics.gauges.update({f"eval/{name}/{policy}": float(value) for name, value in shown.items()})

    def close(self) -> None:
        """See :class:`Worker`."""
        if self.player is not None:
            self.player.close()

    def state(self) -> State:
        """See :class:`Worker`: what it knows is in ``evaluations.jsonl``."""
        return State()


def sampled(spaces: Spaces, choice: bool | None) -> bool:
    """Whether to draw actions at random; unless chosen, where observations are images.

    Emulators are deterministic, and the likeliest actions would play the same few episodes over and over.
    """
    return any(is_image(leaf) for leaf in spaces.observation_spec().values()) if choice is None else choice


def summary(policy: str, version: int, scores: Scores) -> dict[str, Any]:
    """Scores in a few numbers."""
    return {
        "policy": policy,
        "version": version,
        "return_mean": float(np.mean(scores.returns)),
        "return_std": float(np.std(scores.returns)),
        "return_min": float(np.min(scores.returns)),
        "return_max": float(np.max(scores.returns)),
        "length_mean": float(np.mean(scores.lengths)),
        "episodes": len(scores.returns),
    }


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """All evaluations of a run, oldest first."""
    path = run_dir / EVALUATIONS
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:  # cut off by a crash
            continue
    return found
