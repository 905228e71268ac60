"""Opponents: agents that act by past versions of a policy that is being trained, or was trained in another run.

The trainer tags versions now and then (``past-…``); an opponent draws one of them for every row at the start of an
episode and keeps it until the episode ends. Which version played is written into the block with every step, so results
can be told apart by opponent. It is an inference stream like any other: the actor does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from srl.algorithms.base import Algorithm
from srl.core.seeding import derive
from srl.core.slab import PEEK, Slab
from srl.core.specs import Array, Arrays, Spaces
from srl.core.worker import State
from srl.services.checkpoints import CheckpointStore
from srl.streams.inference import LocalInference
from srl.streams.protocols import InferenceServer

PAST = "past-"
_TURNOVER = 0.2
"""Probability that one version of a full pool gives way to another when an opponent is drawn."""
_FAIR = 0.1
"""Share that every version keeps under the prioritized rule, however weak it is."""


@dataclass(frozen=True)
class Opponent:
    """Who plays against the policies being trained."""

    of: str = "default"
    """The policy whose past versions play."""
    rule: Literal["latest", "uniform", "prioritized"] = "uniform"
    """latest: the newest tagged version. uniform: any. prioritized: the more often it wins, the more often it plays."""
    newest: float = 0.5
    """Share of episodes against the newest version of all, whatever the rule."""
    pool: int = 4
    """Versions in play at the same time, in one actor."""
    run: str = ""
    """Folder of another run the policy is taken from; then its versions are fixed."""


class OpponentInference:
    """An inference stream that answers from the past."""

    def __init__(
        self,
        opponent: Opponent,
        algorithm: Algorithm,
        spaces: Spaces,
        store: CheckpointStore,
        seed: int,
        clients: int,
        rows: int,
    ) -> None:
        self.opponent, self.algorithm, self.spaces, self.store = opponent, algorithm, spaces, store
        self.seed, self.clients, self.rows = seed, clients, rows
        self.hosts: dict[int, Any] = {}
        self.rng: Any = None
        self.pool: list[int] = []
        """Versions that opponents are drawn from just now."""
        self.versions = np.full((clients, rows), -1)
        self.results: dict[int, tuple[int, float]] = {}
        """Games and wins of each version."""

    def client(self, index: int, slab: Slab, incarnation: int) -> LocalInference:
        """See :class:`~srl.streams.protocols.InferenceStream`."""
        if self.rng is None:
            self.rng = np.random.default_rng(derive(self.seed, incarnation))
        me = np.array([index])

        def act(inputs: Arrays, kind: int, _: int) -> tuple[Arrays, Array] | None:
            mine = self.versions[index]
            if (mine < 0).any() and not self._draw(mine):
                return None
            outputs: Arrays = {}
            for version in np.unique(mine).tolist():
                found = self._host(version).act(inputs, me, np.array([kind == PEEK]))
                for name, value in found.items():
                    here = (mine == version).reshape(-1, *[1] * (value.ndim - 1))
                    outputs[name] = np.where(here, value, outputs.get(name, value))
            return outputs, mine

        def ended(rows: Array, returns: Array) -> None:
            for row, value in zip(rows.tolist(), returns.tolist(), strict=True):
                version = int(self.versions[index, row])
                games, wins = self.results.get(version, (0, 0.0))
                self.results[version] = games + 1, wins + (np.sign(value) + 1) / 2
            self.versions[index, rows] = -1

        return LocalInference(slab, act, ended=ended)

    def server(self, index: int) -> InferenceServer:
        """There is none."""
        raise RuntimeError("opponents act in the actor")

    def _draw(self, mine: Array) -> bool:
        """Give every row without one an opponent; False if no version is tagged yet."""
        known = sorted(v for tag, v in self.store.tags().items() if tag.startswith(PAST))
        if not known and self.opponent.run:
            known = [self.store.resolve("latest")]
        if not known:
            return False
        self._change_pool(known)
        missing = np.flatnonzero(mine < 0)
        drawn = self.rng.choice(self.pool, len(missing), p=self._shares(self.pool))
        mine[missing] = np.where(self.rng.random(len(missing)) < self.opponent.newest, known[-1], drawn)
        for version in set(self.hosts) - set(self.pool) - set(np.unique(self.versions).tolist()):
            del self.hosts[version]
        return True

    def _change_pool(self, known: list[int]) -> None:
        """Keep the pool full, and now and then let another version in; who leaves plays its episodes to the end."""
        size = 1 if self.opponent.rule == "latest" else self.opponent.pool
        if self.opponent.rule == "latest":
            self.pool = known[-1:]
        elif len(self.pool) == size < len(known) and self.rng.random() < _TURNOVER:
            self.pool.pop(int(self.rng.integers(size)))
        while len(self.pool) < min(size, len(known)):
            others = [version for version in known if version not in self.pool]
            self.pool.append(int(self.rng.choice(others, p=self._shares(others))))

    def _shares(self, versions: list[int]) -> Array:
        if self.opponent.rule != "prioritized":
            return np.full(len(versions), 1 / len(versions))
        games = [self.results.get(version, (0, 0.0)) for version in versions]
        strength = np.asarray([_FAIR + ((wins + 1) / (played + 2)) ** 2 for played, wins in games])
        return np.asarray(strength / strength.sum())

    def _host(self, version: int) -> Any:
        if version not in self.hosts:
            from srl.policies.host import PolicyHost

            seed = derive(self.seed, version)
            host = PolicyHost(self.algorithm, self.spaces, seed, clients=self.clients, rows=self.rows)
            host.load(self.store.load(f"v{version}").under("learner").under("policy").arrays, version)
            self.hosts[version] = host
        return self.hosts[version]

    def state(self) -> State:
        """Who plays whom, and the random generators."""
        whole = State({"versions": self.versions.copy()}, {"rng": self.rng.bit_generator.state, "pool": self.pool})
        whole.values["results"] = {str(version): list(found) for version, found in self.results.items()}
        for version, host in self.hosts.items():
            whole.put(f"host/{version}", host.state())
        return whole

    def load_state(self, state: State) -> None:
        """Go on where ``state`` was taken."""
        self.versions[...] = state.arrays["versions"]
        self.rng.bit_generator.state, self.pool = state.values["rng"], list(state.values["pool"])
        self.results = {int(version): (found[0], found[1]) for version, found in state.values["results"].items()}
        for version in {name.split("/")[0] for name in state.under("host").arrays}:
            self._host(int(version)).load_state(state.under(f"host/{version}"))
