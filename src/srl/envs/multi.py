"""Copies of a PettingZoo environment stepped one after the other, and their agents' rows in each group.

Every agent that can ever be there has a row: number ``copy * agents of the group + place in the group``. Of rows
whose agent is dead or not on turn nothing is seen: their observation is zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from srl.core.errors import ConfigError, EnvError, SrlError
from srl.core.seeding import derive
from srl.core.specs import Array, Arrays, Spaces
from srl.core.worker import State
from srl.envs.base import Environment, Observed, StepViews
from srl.envs.fields import Fields
from srl.envs.games import Agent, Game, Turn
from srl.envs.guard import Guard
from srl.envs.measures import Measures
from srl.envs.single import Watch, configure
from srl.envs.snapshot import restore, snapshot

MASK = "action_mask"


class MultiAgent(Environment):
    """Games in turn. With ``roles`` each episode deals these names to the real agents at random."""

    def __init__(
        self, name: str, make: Callable[[str], Game], copies: int, watch: Watch, roles: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.copies, self.watch, self._make = copies, watch, make
        self.where = f"environment {name!r}"
        self.games = [make(f"{self.where}, copy {copy}") for copy in range(copies)]
        self.players: list[Agent] = list(self.games[0].env.possible_agents)
        self.agents = roles or tuple(str(agent) for agent in self.players)
        self.roles = bool(roles)
        self._fields = self._checked_fields()
        self.guard = Guard(self.where, watch.nonfinite, self.notes)
        #: ``seats[copy, i]``: which of our names the environment's agent number ``i`` has in this episode
        self.seats: Array = np.tile(np.arange(len(self.players)), (copies, 1))
        #: the same, as group, row and fields of each of the environment's agents in each copy
        self._places: list[dict[Agent, tuple[int, int, Fields]]] = [{} for _ in range(copies)]
        self._seed = 0
        self._deal = np.random.default_rng(0)
        self._configured: dict[str, Any] = {}

    def _checked_fields(self) -> dict[str, Fields]:
        if len(set(self.agents)) != len(self.players):
            raise ConfigError(f"{self.where} has the {len(self.players)} agents {self.players}; name as many roles")
        found = {name: self._fields_of(player, name) for player, name in zip(self.players, self.agents, strict=True)}
        if self.roles and any(fields.spaces != found[self.agents[0]].spaces for fields in found.values()):
            raise ConfigError(
                f"{self.where}: only agents that see and do alike can swap roles, but their spaces differ"
            )
        return found

    def _fields_of(self, player: Agent, name: str) -> Fields:
        env, mask = self.games[0].env, self.watch.mask
        seen = env.observation_space(player)
        if mask == "auto":
            masked = isinstance(seen, gymnasium.spaces.Dict) and MASK in seen.spaces and len(seen.spaces) > 1
            mask = MASK if masked else ""
        return Fields(self.where, seen, env.action_space(player), mask, agent=name, unwrap=True)

    def spaces(self, agent: str) -> Spaces:
        """See :class:`~srl.envs.base.Environment`."""
        return self._fields[agent].spaces

    def bind(self, groups: Sequence[Sequence[str]]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        if sorted(agent for group in groups for agent in group) != sorted(self.agents):
            raise ConfigError(f"{self.where}: every agent of {self.agents} must be in one group, got {groups}")
        for group in groups:
            odd = [agent for agent in group if self.spaces(agent) != self.spaces(group[0])]
            if odd:
                raise ConfigError(
                    f"{self.where}: agents {group[0]!r} and {odd[0]!r} cannot share a policy; spaces differ"
                )
        self.groups = [tuple(group) for group in groups]
        self._seats = {name: (g, place) for g, group in enumerate(groups) for place, name in enumerate(group)}
        self._measures = [Measures(self.watch.info, self.copies * len(group), self.measured) for group in groups]
        for copy in range(self.copies):
            self._seat(copy)

    def reset(self, seed: int, out: Sequence[Observed]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self._seed, self._deal = seed, np.random.default_rng(seed)
        self._forget(out)
        for copy in range(self.copies):
            self._observe(copy, self._begin(copy, seed + copy), out)
        for error in self._wrong(out, []).values():
            raise error

    def step(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self._check_actions(actions, out)
        after = [views.after for views in out]
        takes = [self._fields[group[0]].rows(fields) for group, fields in zip(self.groups, actions, strict=True)]
        running = [set(game.running) if game.acting else set() for game in self.games]
        self.guard.steps += self.copies
        self._clear(out)
        for copy, game in enumerate(self.games):
            try:
                turn = game.step(self._picker(copy, takes)) if game.acting else self._begin(copy, None)
            except SrlError:
                raise
            except Exception as error:
                self._replace(copy, error, running[copy], out)
            else:
                self._observe(copy, turn, after)
                self._account(copy, turn, out)
        wrong = self._wrong(after, [views.reward for views in out])
        for copy, reason in wrong.items():
            self._replace(copy, reason, running[copy], out)
        for lasting in self._wrong(after, []).values() if wrong else ():
            raise lasting

    def _begin(self, copy: int, seed: int | None) -> Turn:
        """Start an episode of one copy, and say who plays whom in it."""
        if self.roles:
            self.seats[copy] = self._deal.permutation(len(self.players))
            self._seat(copy)
        for g, measures in enumerate(self._measures):
            measures.forget(self._rows(g, copy))
        return self.games[copy].reset(seed)

    def _seat(self, copy: int) -> None:
        """Note where the environment's agents have their rows, now that they have their seats."""
        for player, seat in zip(self.players, self.seats[copy].tolist(), strict=True):
            name = self.agents[seat]
            g, place = self._seats[name]
            self._places[copy][player] = g, copy * len(self.groups[g]) + place, self._fields[name]

    def _picker(self, copy: int, takes: list[Callable[[int], Any]]) -> Callable[[Agent], Any]:
        def pick(agent: Agent) -> Any:
            g, row, _ = self._places[copy][agent]
            return takes[g](row)

        return pick

    def _place(self, copy: int, agent: Agent) -> tuple[int, int, Fields]:
        """Group, row and fields of the environment's agent ``agent``."""
        try:
            return self._places[copy][agent]
        except KeyError:
            raise EnvError(f"{self.where}, copy {copy}: {agent!r} is not one of its possible_agents") from None

    def _rows(self, g: int, copy: int | None) -> slice:
        """The rows of one copy in a group, or of all."""
        size = len(self.groups[g])
        return slice(None) if copy is None else slice(copy * size, (copy + 1) * size)

    def _forget(self, out: Sequence[Observed], copy: int | None = None) -> None:
        """Make rows say that nothing is seen and nobody acts."""
        for g, observed in enumerate(out):
            rows, fields = self._rows(g, copy), self._fields[self.groups[g][0]]
            fields.clear(observed.obs, rows)
            fields.allow_all(observed.obs, rows)
            observed.first[rows], observed.acts[rows] = False, False

    def _clear(self, out: Sequence[StepViews], copy: int | None = None) -> None:
        """Make rows say that nothing has happened."""
        self._forget([views.after for views in out], copy)
        for g, views in enumerate(out):
            rows = self._rows(g, copy)
            views.reward[rows], views.terminated[rows], views.truncated[rows] = 0, False, False

    def _observe(self, copy: int, turn: Turn, out: Sequence[Observed]) -> None:
        """Write what the agents see."""
        for agent, (found, info) in turn.seen.items():
            g, row, fields = self._place(copy, agent)
            fields.write(found, out[g].obs, row, copy)
            self._measures[g].see(row, info, partial(fields.at, copy))
            if agent in turn.acting:
                fields.write_mask(found, info, out[g].obs, row, copy)
                out[g].acts[row], out[g].first[row] = True, agent in turn.first
            else:
                fields.write_last_mask(found, info, out[g].obs, row, copy)

    def _account(self, copy: int, turn: Turn, out: Sequence[StepViews]) -> None:
        """Write what the agents are given, and whose episode has ended."""
        for agent, reward in turn.rewards.items():
            g, row, fields = self._place(copy, agent)
            out[g].reward[row] = fields.reward(reward, copy)
        ended = turn.terminated | turn.truncated
        for agent in self.players if ended else ():
            if agent in ended:
                g, row, _ = self._place(copy, agent)
                out[g].terminated[row], out[g].truncated[row] = agent in turn.terminated, agent in turn.truncated
                self._measures[g].end(row)

    def _check_actions(self, actions: Sequence[Arrays], out: Sequence[StepViews]) -> None:
        for g, group in enumerate(self.groups):
            names = self._fields[group[0]].float_actions
            self.guard.check_actions(names, actions[g], out[g].valid, partial(self._at, g))

    def _wrong(self, out: Sequence[Observed], rewards: Sequence[Array]) -> dict[int, EnvError]:
        """The copies in which something is not finite."""
        found: dict[int, EnvError] = {}
        for g, (group, observed) in enumerate(zip(self.groups, out, strict=True)):
            fields = [(path, observed.obs[path]) for path in self._fields[group[0]].float_paths]
            fields += [("reward", reward) for reward in rewards[g : g + 1]]
            for row, error in self.guard.check_results(fields, partial(self._at, g)).items():
                found.setdefault(row // len(group), error)
        return found

    def _at(self, g: int, row: int) -> str:
        copy, place = divmod(row, len(self.groups[g]))
        return self._fields[self.groups[g][place]].at(copy)

    def _replace(self, copy: int, error: Exception, running: set[Agent], out: Sequence[StepViews]) -> None:
        """Put a fresh copy in the place of one that failed and so cut short the episodes of ``running`` agents."""
        self.guard.failed(copy, error)
        with contextlib.suppress(Exception):
            self.games[copy].env.close()
        self._clear(out, copy)
        for g, views in enumerate(out):
            views.valid[self._rows(g, copy)] = False
        for agent in running:  # before roles are dealt anew
            g, row, _ = self._place(copy, agent)
            out[g].truncated[row] = True
        self._observe(copy, self.guard.remake(error, lambda: self._fresh(copy)), [views.after for views in out])

    def _fresh(self, copy: int) -> Turn:
        self.games[copy] = self._make(f"{self.where}, copy {copy}")
        if self._configured:
            configure(self.games[copy].env, self._configured, self.where)
        # another seed than the copy began with, or it would go the same way
        return self._begin(copy, derive(self._seed, "copy", copy, self.guard.failures))

    def configure(self, values: dict[str, Any]) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        for game in self.games:
            configure(game.env, values, self.where)
        self._configured = {**self._configured, **values}

    def render(self) -> Array | None:
        """See :class:`~srl.envs.base.Environment`."""
        env = self.games[0].env
        picture = env.render() if getattr(env, "render_mode", None) == "rgb_array" else None
        return picture if isinstance(picture, np.ndarray) else None

    def state(self) -> State | None:
        """See :class:`~srl.envs.base.Environment`."""
        state = snapshot([game.env for game in self.games])
        if state is not None:
            state.arrays["seats"] = self.seats.copy()
            for g, measures in enumerate(self._measures):
                state.put(f"measures/{g}", State(measures.state()))
            state.values |= {"seed": self._seed, "configured": self._configured, "guard": self.guard.state()}
            state.values["deal"] = self._deal.bit_generator.state
            state.values["games"] = [[self._numbers(who) for who in _books(game)] for game in self.games]
        return state

    def load_state(self, state: State) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        self.seats[:] = state.arrays["seats"]
        for copy in range(self.copies):
            self._seat(copy)
        for g, measures in enumerate(self._measures):
            measures.load_state(state.under(f"measures/{g}").arrays)
        self._seed, self._configured = state.values["seed"], state.values["configured"]
        self.guard.load_state(state.values["guard"])
        self._deal.bit_generator.state = state.values["deal"]
        for game, books in zip(self.games, state.values["games"], strict=True):
            for who, numbers in zip(_books(game), books, strict=True):
                who.clear()
                who.update(self.players[i] for i in numbers)
        restore([game.env for game in self.games], state)

    def _numbers(self, agents: set[Agent]) -> list[int]:
        return [i for i, agent in enumerate(self.players) if agent in agents]

    def close(self) -> None:
        """See :class:`~srl.envs.base.Environment`."""
        for game in self.games:
            game.env.close()


def _books(game: Game) -> tuple[set[Agent], set[Agent], set[Agent]]:
    return game.acting, game.running, game.begun
