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
from srl.envs.base import EnvConfig, Environment, StepViews
from srl.streams.protocols import Grant, InferenceClient, InferenceStream, SampleProducer, SampleStream
from srl.streams.wait import wait


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
        self.actions = [name for name in self.spec.outputs if name.split("/")[0] == "action"]
        self.grant: Grant | None = None
        self.block: Arrays = {}
        #: the observation a new block starts with
        self.first = {name: np.zeros_like(samples.slab.arrays[name][0, 0]) for name in self.spec.observations}
        #: the beginning of a block saved by an earlier run, and whether its last step still lacks an action
        self.saved: Arrays = {}
        self.saved_waiting = False
        self.returns: Array = np.zeros(self.spec.rows)
        self.lengths: Array = np.zeros(self.spec.rows, np.int64)

    def acquire(self) -> bool:
        """Get a block to fill, if this group has none."""
        if self.grant is None:
            self.grant = self.samples.acquire()
            if self.grant is not None:
                self.block = self.samples.slab.block(self.grant.block)
        return self.grant is not None

    def ask(self, step: int) -> None:
        """Ask for the actions of one step."""
        assert self.grant is not None
        self.client.submit(self.grant.block * (self.spec.horizon + 1) + step, self.grant.version)

    def views(self, step: int) -> StepViews:
        """Where the environment writes what comes of ``step``."""
        block = self.block
        return StepViews(
            {name: block[name][step + 1] for name in self.spec.observations},
            block["reward"][step],
            block["terminated"][step],
            block["truncated"][step],
            block["valid"][step],
        )

    def count(self, views: StepViews) -> int:
        """Keep the books of the running episodes; the number of agent steps taken."""
        self.returns += views.reward
        self.lengths += views.valid
        ended = np.flatnonzero(views.terminated | views.truncated)
        if len(ended):
            found = zip(self.returns[ended].tolist(), self.lengths[ended].tolist(), strict=True)
            self.metrics.episodes.extend((self.policy, value, length) for value, length in found)
            self.returns[ended] = 0
            self.lengths[ended] = 0
        return int(np.count_nonzero(views.valid))

    def finish(self) -> None:
        """Hand the full block over, keeping the observation the next one starts with."""
        assert self.grant is not None
        for name, kept in self.first.items():
            np.copyto(kept, self.block[name][-1])
        self.samples.commit(self.grant.block)
        self.grant, self.block = None, {}


class Slot:
    """One vector of the ring."""

    def __init__(self, env: Environment, groups: Sequence[Group], metrics: Metrics) -> None:
        self.env, self.groups, self.metrics = env, groups, metrics
        self.horizon = groups[0].spec.horizon
        self.step = -1  # -1: no block yet
        self.blocked_on = ""

    def advance(self) -> int | None:
        """Do one step if that is possible now; the number of agent steps taken (0: all were resets), None if not."""
        if self.step < 0 and not self._begin():
            self.blocked_on = "parameters"
            return None
        if not all(group.client.ready() for group in self.groups):
            self.blocked_on = "inference"
            return None
        if self.step == self.horizon:
            for group in self.groups:
                group.finish()
            self.step = -1
            return self.advance()
        actions = [{name: group.block[name][self.step] for name in group.actions} for group in self.groups]
        views = [group.views(self.step) for group in self.groups]
        self.env.step(actions, views)
        self.step += 1
        for group in self.groups:
            group.ask(self.step)
        return sum(group.count(view) for group, view in zip(self.groups, views, strict=True))

    def _begin(self) -> bool:
        missing = [group for group in self.groups if not group.acquire()]
        if missing:
            return False
        self.step = 0
        for group in self.groups:
            for name, first in group.first.items():
                group.block[name][0] = first
            for name, part in group.saved.items():
                group.block[name][: len(part)] = part
                self.step = len(part) - 1
            if not group.saved or group.saved_waiting:
                group.ask(self.step)
            group.saved = {}
        return True


class ActorWorker(Worker):
    """Steps ``ring`` vectors of ``copies`` environment copies."""

    kind = "actor"

    def __init__(
        self, name: str, index: int, env: EnvConfig, copies: int, ring: int, routes: Sequence[Route], seed: int
    ) -> None:
        super().__init__(name)
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
            env.reset(derive(self.seed, self.name, place, self.incarnation), [group.first for group in groups])
            self.slots.append(Slot(env, groups, self.metrics))

    def poll(self, timeout: float) -> Progress:
        """See :class:`Worker`: one step of every vector whose actions are there."""
        taken = [steps for slot in self.slots if (steps := slot.advance()) is not None]
        if taken:
            self.metrics.add("steps", sum(taken))
        elif timeout > 0:
            reason = min(slot.blocked_on for slot in self.slots)  # "inference" before "parameters"
            with self.metrics.wait(reason):
                wait(self._pollables(), timeout)
        return Progress(sum(taken))

    def _pollables(self) -> list[Any]:
        groups = [group for slot in self.slots for group in slot.groups]
        return list({id(p): p for g in groups for p in (g.client.pollable(), g.samples.pollable())}.values())

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
                part = State({"returns": group.returns.copy(), "lengths": group.lengths.copy()})
                part.put("first", State({name: kept.copy() for name, kept in group.first.items()}))
                built = {name: field[: slot.step + 1].copy() for name, field in group.block.items() if slot.step >= 0}
                part.put("block", State(built))
                part.values["waiting"] = group.client.waiting()
                whole.put(f"{place}/{group.policy}", part)
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
                part = state.under(f"{place}/{group.policy}")
                group.returns[:], group.lengths[:] = part.arrays["returns"], part.arrays["lengths"]
                for name, kept in part.under("first").arrays.items():
                    group.first[name][...] = kept
                group.saved, group.saved_waiting = part.under("block").arrays, part.values["waiting"]
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
