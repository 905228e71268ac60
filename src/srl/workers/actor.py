"""The actor: steps a ring of environment vectors and writes trajectories into blocks.

Each vector of the ring is a small state machine. It waits for leave to start a block, then, step by step, asks for
actions and steps its environment as soon as they are there; while one vector waits the next one steps. Agents are
mapped to policies once, at start-up; from then on a policy's agents are a group of rows with a block of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from srl.core.seeding import derive
from srl.core.specs import Array, Arrays
from srl.core.worker import Metrics, Progress, State, Worker
from srl.envs.base import EnvConfig, Environment, Observed, StepViews
from srl.streams.protocols import Grant, InferenceClient, InferenceStream, SampleProducer, SampleStream
from srl.streams.wait import wait

_KEPT = 4096
"""Steps whose views a group keeps at most: where there are many blocks, one may come back once in an hour."""


@dataclass(frozen=True)
class Route:
    """How the agents of one policy get their actions and where their samples go."""

    policy: str
    agents: tuple[str, ...]
    inference: InferenceStream
    samples: SampleStream


class Group:
    """The rows of one policy in one vector: its block under construction and its running episodes."""

    def __init__(self, route: Route, client: InferenceClient, samples: SampleProducer, metrics: Metrics) -> None:
        self.policy, self.client, self.samples, self.metrics = route.policy, client, samples, metrics
        self.spec = samples.slab.spec
        self.grant: Grant | None = None
        self.block: Arrays = {}
        self.step = -1  # -1: no block yet
        #: the observation a new block starts with, and its flags
        carried = (*self.spec.observations, "first", "valid")
        self.carried = {name: np.zeros_like(samples.slab.arrays[name][0, 0]) for name in carried}
        #: the beginning of a block saved by an earlier run, and whether its last step still lacks an action
        self.saved: Arrays = {}
        self.saved_waiting = False
        #: actions and views of steps of blocks there have been
        self.kept: dict[int, tuple[Arrays, StepViews]] = {}
        self.returns: Array = np.zeros(self.spec.rows)
        self.lengths: Array = np.zeros(self.spec.rows, np.int64)

    def prepare(self) -> str:
        """Nothing if the actions of the next step are there, else what this group waits for."""
        if self.step < 0 and not self._begin():
            return "parameters"
        if not self.client.ready():
            return "inference"
        if self.step < self.spec.horizon:
            return ""
        self._finish()
        return self.prepare()

    def pollable(self) -> Any:
        """What this group waits for. Nothing else: it would not be read, and a wait for it would not be one."""
        return self.samples.pollable() if self.step < 0 else self.client.pollable()

    def places(self) -> tuple[Arrays, StepViews]:
        """The actions of the next step, and where the environment writes what comes of it."""
        assert self.grant is not None
        number = self.grant.block * (self.spec.horizon + 1) + self.step
        found = self.kept.get(number)
        if found is None:
            if len(self.kept) >= _KEPT:
                self.kept.clear()
            found = self.kept[number] = self._places(self.block, self.step)
        return found

    def _places(self, block: Arrays, step: int) -> tuple[Arrays, StepViews]:
        after = self.observed({name: block[name][step + 1] for name in self.carried})
        fields = (block[name][step] for name in ("reward", "terminated", "truncated", "valid"))
        return {name: block[name][step] for name in self.spec.actions}, StepViews(after, *fields)

    def observed(self, fields: Arrays) -> Observed:
        """Where the environment writes an observation."""
        return Observed({name: fields[name] for name in self.spec.observations}, fields["first"], fields["valid"])

    def stepped(self, views: StepViews) -> int:
        """Keep the books of the running episodes and ask for the next actions; the number of agent steps taken."""
        self.returns += views.reward
        self.lengths += views.valid
        if 1 in views.terminated.tobytes() or 1 in views.truncated.tobytes():  # numpy takes ten times as long
            ended = (views.terminated | views.truncated).nonzero()[0]
            versions = self.block["version"][self.step][ended].tolist()
            found = zip(self.returns[ended].tolist(), self.lengths[ended].tolist(), versions, strict=True)
            self.metrics.episodes.extend((self.policy, *episode) for episode in found)
            self.client.ended(ended, self.returns[ended])
            self.returns[ended] = 0
            self.lengths[ended] = 0
        self.step += 1
        self._ask()
        return views.valid.tobytes().count(1)

    def _ask(self) -> None:
        assert self.grant is not None
        self.client.submit(self.grant.block * (self.spec.horizon + 1) + self.step, self.grant.version)

    def _begin(self) -> bool:
        """Begin a block, if one is granted."""
        self.grant = self.samples.acquire()
        if self.grant is None:
            return False
        self.block, self.step = self.samples.slab.block(self.grant.block), 0
        for name, kept in self.carried.items():
            self.block[name][0] = kept
        for name, part in self.saved.items():
            self.block[name][: len(part)] = part
        if self.saved:
            self.step = len(self.saved["reward"]) - 1
        if not self.saved or self.saved_waiting:
            self._ask()
        self.saved = {}
        return True

    def _finish(self) -> None:
        """Hand the full block over, keeping the observation the next one starts with."""
        assert self.grant is not None
        for name, kept in self.carried.items():
            np.copyto(kept, self.block[name][-1])
        self.samples.commit(self.grant.block)
        self.grant, self.block, self.step = None, {}, -1

    def state(self) -> State:
        """Running episodes and the block under construction."""
        whole = State({"returns": self.returns.copy(), "lengths": self.lengths.copy()})
        whole.put("carried", State({name: kept.copy() for name, kept in self.carried.items()}))
        ends = dict.fromkeys(self.spec.state, -(-(self.step + 1) // max(self.spec.chunk, 1)))
        built = {name: field[: ends.get(name, self.step + 1)].copy() for name, field in self.block.items()}
        waiting = self.client.waiting()
        known = {*self.carried, *self.spec.state, *(() if waiting else (*self.spec.outputs, "version"))}
        for name in built.keys() - known:
            built[name][self.step :] = 0  # what the block was last used for
        whole.put("block", State(built))
        whole.values["waiting"] = waiting
        return whole

    def load_state(self, state: State) -> None:
        """Go on where ``state`` was taken."""
        self.returns[:], self.lengths[:] = state.arrays["returns"], state.arrays["lengths"]
        for name, kept in state.under("carried").arrays.items():
            self.carried[name][...] = kept
        self.saved, self.saved_waiting = state.under("block").arrays, state.values["waiting"]


class Slot:
    """One vector of the ring."""

    def __init__(self, env: Environment, groups: Sequence[Group]) -> None:
        self.env, self.groups = env, groups
        self.blocked_on = ""

    def advance(self) -> int | None:
        """Do one step if that is possible now; the number of agent steps taken (0: all were resets), None if not."""
        blocked = [reason for group in self.groups if (reason := group.prepare())]
        if blocked:
            self.blocked_on = min(blocked)  # "inference" before "parameters"
            return None
        places = [group.places() for group in self.groups]
        self.env.step([actions for actions, _ in places], [views for _, views in places])
        return sum(group.stepped(views) for group, (_, views) in zip(self.groups, places, strict=True))


class ActorWorker(Worker):
    """Steps ``ring`` vectors of ``copies`` environment copies."""

    kind = "actor"

    def __init__(
        self,
        name: str,
        index: int,
        env: EnvConfig,
        copies: int,
        ring: int,
        routes: Sequence[Route],
        seed: int,
        niceness: int = 0,
    ) -> None:
        super().__init__(name)
        self.niceness = niceness
        self.index, self.env, self.copies, self.ring = index, env, copies, ring
        self.routes, self.seed = routes, seed
        self.slots: list[Slot] = []

    def start(self) -> None:
        """See :class:`Worker`."""
        for place in range(self.ring):
            number = self.index * self.ring + place
            groups = []
            for route in self.routes:
                samples = route.samples.producer(number, self.incarnation)
                client = route.inference.client(number, samples.slab, self.incarnation)
                groups.append(Group(route, client, samples, self.metrics))
            env = self.env.make(self.copies)
            env.bind([route.agents for route in self.routes])
            seed = derive(self.seed, self.name, place, self.incarnation)
            env.reset(seed, [group.observed(group.carried) for group in groups])
            self.slots.append(Slot(env, groups))

    def poll(self, timeout: float) -> Progress:
        """See :class:`Worker`: one step of every vector whose actions are there."""
        taken = [steps for slot in self.slots if (steps := slot.advance()) is not None]
        if taken:
            self.metrics.add("steps", sum(taken))
            for slot in self.slots:
                self.metrics.take(slot.env.measured, slot.env.notes)
        elif timeout > 0:
            reason = min(slot.blocked_on for slot in self.slots)  # "inference" before "parameters"
            with self.metrics.wait(reason):
                wait(self._pollables(), timeout)
        return Progress(sum(taken))

    def tell(self, values: dict[str, Any]) -> None:
        """See :class:`Worker`."""
        for slot in self.slots:
            slot.env.configure(values)

    def _pollables(self) -> list[Any]:
        found = (group.pollable() for slot in self.slots for group in slot.groups)
        return list({id(pollable): pollable for pollable in found}.values())

    def close(self) -> None:
        """See :class:`Worker`."""
        for slot in self.slots:
            for group in slot.groups:
                group.client.close()
                group.samples.close()
            slot.env.close()

    def state(self) -> State | None:
        """See :class:`Worker`: environments, running episodes and half-built blocks."""
        whole = State()
        for place, slot in enumerate(self.slots):
            env = slot.env.state()
            if env is None:
                return None
            whole.put(f"{place}/env", env)
            for group in slot.groups:
                whole.put(f"{place}/{group.policy}", group.state())
        for route in self.routes:
            saved = getattr(route.inference, "state", None)
            if saved is not None:
                whole.put(f"inference/{route.policy}", saved())
        return whole

    def load_state(self, state: State) -> None:
        """See :class:`Worker`."""
        for place, slot in enumerate(self.slots):
            slot.env.load_state(state.under(f"{place}/env"))
            for group in slot.groups:
                group.load_state(state.under(f"{place}/{group.policy}"))
        for route in self.routes:
            part = state.under(f"inference/{route.policy}")
            if part.arrays:
                route.inference.load_state(part)  # type: ignore[attr-defined]


def groups_of(agents: Sequence[str], mapping: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Which agents each policy has, by the first pattern in ``mapping`` that an agent's name matches."""
    from fnmatch import fnmatchcase

    found: dict[str, list[str]] = {}
    for agent in agents:
        policy = next((policy for pattern, policy in mapping.items() if fnmatchcase(agent, pattern)), None)
        if policy is not None:
            found.setdefault(policy, []).append(agent)
    return {policy: tuple(names) for policy, names in found.items()}
