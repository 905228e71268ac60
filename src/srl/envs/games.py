"""One copy of a PettingZoo environment, told as a series of turns: parallel and turn-based ones look alike.

A :class:`Turn` says, agent by agent, what one step of the copy brought. In a parallel game all live agents act in each
turn; in a turn-based one the selected agent does, and the empty steps that PettingZoo wants of dead agents are taken
here. When nobody is left to act the copy's next step is its reset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from srl.core.errors import ConfigError, EnvError
from srl.envs.fields import parts

Agent = Any
"""What PettingZoo calls an AgentID: mostly a string."""


@dataclass
class Turn:
    """What one step of a copy brought."""

    seen: dict[Agent, tuple[Any, Any]] = field(default_factory=dict)
    """Observation and info of the agents that act next, and of those whose episode has just ended."""
    acting: set[Agent] = field(default_factory=set)
    first: set[Agent] = field(default_factory=set)
    rewards: dict[Agent, Any] = field(default_factory=dict)
    terminated: set[Agent] = field(default_factory=set)
    truncated: set[Agent] = field(default_factory=set)


class Game(ABC):
    """One copy; ``at`` says where it is, for errors."""

    def __init__(self, env: Any, at: str) -> None:
        self.env, self.at = env, at
        self.acting: set[Agent] = set()
        """Who acts next; nobody if the episode is over."""
        self.running: set[Agent] = set()
        """Whose episode has not ended yet, on turn or not."""
        self.begun: set[Agent] = set()
        """Who has had a first observation in its running episode."""

    def reset(self, seed: int | None) -> Turn:
        """Begin an episode."""
        self.acting, self.running, self.begun = set(), set(), set()
        turn = Turn()
        self._reset(seed, turn)
        if not self.acting:
            raise EnvError(f"{self.at}: after reset() there is no agent that acts")
        return turn

    @abstractmethod
    def _reset(self, seed: int | None, turn: Turn) -> None: ...

    @abstractmethod
    def step(self, action: Callable[[Agent], Any]) -> Turn:
        """Take one step with the actions of the agents that act."""

    def _end(self, turn: Turn, agent: Agent, terminated: bool, truncated: bool) -> None:
        """Note the end of an agent's episode."""
        if terminated:
            turn.terminated.add(agent)
        if truncated:
            turn.truncated.add(agent)
        self.running.discard(agent)
        self.begun.discard(agent)

    def _go_on(self, turn: Turn, acting: set[Agent]) -> None:
        """Note who is left and who acts next; who went without a word has terminated."""
        for agent in self.running - set(self.env.agents):
            self._end(turn, agent, True, False)
        self.acting = turn.acting = acting
        turn.first = acting - self.begun
        self.begun |= acting


class WithState:
    """A PettingZoo environment whose agents also see the state of the whole, under ``state``."""

    def __init__(self, env: Any, at: str) -> None:
        self.env = env
        if getattr(env, "state_space", None) is None:
            raise ConfigError(f"{at}: has no state_space, so there is no state that a critic could see")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def observation_space(self, agent: Agent) -> Any:
        """With ``state`` in it."""
        from gymnasium import spaces

        seen = self.env.observation_space(agent)
        inner = dict(seen.spaces) if isinstance(seen, spaces.Dict) else {"observation": seen}
        return spaces.Dict({**inner, "state": self.env.state_space})

    def _add(self, seen: Any) -> dict[str, Any]:
        return {**(seen if isinstance(seen, dict) else {"observation": seen}), "state": self.env.state()}

    def observe(self, agent: Agent) -> dict[str, Any]:
        """See ``AECEnv``."""
        return self._add(self.env.observe(agent))

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        """See ``ParallelEnv`` and ``AECEnv``."""
        found = self.env.reset(seed=seed, options=options)
        return found if found is None else ({agent: self._add(seen) for agent, seen in found[0].items()}, *found[1:])

    def step(self, action: Any) -> Any:
        """See ``ParallelEnv`` and ``AECEnv``."""
        found = self.env.step(action)
        return found if found is None else ({agent: self._add(seen) for agent, seen in found[0].items()}, *found[1:])


class ParallelGame(Game):
    """A copy of a ``ParallelEnv``."""

    def _reset(self, seed: int | None, turn: Turn) -> None:
        found, infos = parts(self.env.reset(seed=seed), "observations, infos", lambda: f"{self.at}: reset()")
        self._see(turn, set(), found, infos)

    def step(self, action: Callable[[Agent], Any]) -> Turn:
        """See :class:`Game`."""
        turn = Turn()
        result = self.env.step({agent: action(agent) for agent in self.env.agents if agent in self.acting})
        names = "observations, rewards, terminations, truncations, infos"
        found, rewards, terminated, truncated, infos = parts(result, names, lambda: f"{self.at}: step()")
        turn.rewards = dict(rewards)
        flagged = [agent for agent in {**terminated, **truncated} if terminated.get(agent) or truncated.get(agent)]
        for agent in flagged:
            if agent in self.acting:
                self._end(turn, agent, bool(terminated.get(agent)), bool(truncated.get(agent)))
                if agent in found:
                    turn.seen[agent] = found[agent], infos.get(agent, {})
        self._see(turn, set(flagged), found, infos)
        return turn

    def _see(self, turn: Turn, flagged: set[Agent], found: Any, infos: Any) -> None:
        acting = [agent for agent in self.env.agents if agent not in flagged]
        for agent in acting:
            if agent not in found:
                raise EnvError(f"{self.at}, agent {agent!r}: is alive but has no observation")
            turn.seen[agent] = found[agent], infos.get(agent, {})
        self._go_on(turn, set(acting))
        self.running = set(acting)


class TurnGame(Game):
    """A copy of an ``AECEnv``."""

    def _reset(self, seed: int | None, turn: Turn) -> None:
        self.env.reset(seed=seed)
        self.running = set(self.env.agents)
        self._pass(turn)

    def step(self, action: Callable[[Agent], Any]) -> Turn:
        """See :class:`Game`."""
        turn = Turn()
        self.env.step(action(self.env.agent_selection))
        turn.rewards = dict(self.env.rewards)  # before the dead step, which clears them
        self.running |= {agent for agent in self.env.agents if not self._dead(agent)}
        self._pass(turn)
        return turn

    def _pass(self, turn: Turn) -> None:
        """Pass the turn on to the next agent that is alive."""
        self._flags(turn)
        for _ in range(2 * len(self.env.possible_agents) + 1):
            if not self.env.agents or not self._dead(self.env.agent_selection):
                break
            self.env.step(None)
            self._flags(turn)
        else:
            raise EnvError(f"{self.at}, agent {self.env.agent_selection!r}: is selected again and again, but dead")
        acting = {self.env.agent_selection} if self.env.agents else set()
        for agent in acting:
            turn.seen[agent] = self._look(agent)
        self._go_on(turn, acting)

    def _flags(self, turn: Turn) -> None:
        for agent in [agent for agent in self.env.agents if agent in self.running and self._dead(agent)]:
            turn.seen[agent] = self._look(agent)
            self._end(turn, agent, self.env.terminations[agent], self.env.truncations[agent])

    def _dead(self, agent: Agent) -> bool:
        return bool(self.env.terminations[agent] or self.env.truncations[agent])

    def _look(self, agent: Agent) -> tuple[Any, Any]:
        return self.env.observe(agent), self.env.infos.get(agent, {})
