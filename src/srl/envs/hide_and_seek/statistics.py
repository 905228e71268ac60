"""What each episode was like, for the stages that hide and seek goes through: reported at its end.

Runs show them as ``env/<name>``. How far something moved is how far the one that went farthest is from where it was
when the phase began.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from srl.core.specs import Array, Arrays
from srl.envs.hide_and_seek.scenario import Scenario

PHASES = "_in_preparation", ""
KINDS = "box_moved", "ramp_moved", "boxes_locked", "ramps_locked"


class Statistics:
    """The running episodes of all copies; what is measured goes to ``reported``."""

    def __init__(self, scenario: Scenario, copies: int, reported: list[tuple[str, float]]) -> None:
        self.scenario, self.reported = scenario, reported
        #: where objects were when the phase began
        self.start: Array = np.zeros((copies, scenario.objects, 2))
        #: by phase and kind
        self.phases: Array = np.zeros((copies, len(PHASES), len(KINDS)))
        #: steps after preparation in which hiders were seen
        self.seen: Array = np.zeros(copies)
        #: of hiders and seekers, the mean over the members of a team
        self.returns: Array = np.zeros((copies, 2))

    def begin(self, copy: int, places: Array) -> None:
        """An episode begins with objects at ``places``."""
        self.start[copy], self.seen[copy], self.returns[copy] = places, 0, 0

    def step(self, seen: Array, reward: Array, there: Array) -> None:
        """Take note of a step; ``seen`` are flags ``[copies]``, of agents there are ``reward`` and ``there``."""
        self.seen += seen
        hiders = self.scenario.hiders[1]
        for team, members in enumerate((slice(0, hiders), slice(hiders, None))):
            self.returns[:, team] += reward[:, members].sum(1) / there[:, members].sum(1)

    def end_phase(self, copies: Sequence[int], phase: int, places: Array, there: Array, locked: Array) -> None:
        """A phase has ended in these copies, with objects at ``places``; ``there`` and ``locked`` are of objects."""
        boxes = self.scenario.boxes[1]
        moved = np.linalg.norm(places[copies] - self.start[copies], axis=-1) * there[copies]
        locked = locked[copies]
        found = moved[:, :boxes].max(1), moved[:, boxes:].max(1), locked[:, :boxes].sum(1), locked[:, boxes:].sum(1)
        self.phases[copies, phase] = np.stack(found, -1)
        self.start[copies] = places[copies]

    def end(self, copy: int) -> None:
        """An episode has ended."""
        for phase, suffix in enumerate(PHASES):
            self.reported += [(k + suffix, float(v)) for k, v in zip(KINDS, self.phases[copy, phase], strict=True)]
        steps = self.scenario.horizon - self.scenario.preparation
        self.reported.append(("hiders_seen", float(self.seen[copy]) / steps))
        self.reported.append(("hiders_return", float(self.returns[copy, 0])))
        self.reported.append(("seekers_return", float(self.returns[copy, 1])))

    def state(self) -> Arrays:
        """What a resumed run must know."""
        return {name: getattr(self, name).copy() for name in ("start", "phases", "seen", "returns")}

    def load_state(self, state: Arrays) -> None:
        """Go on from ``state``."""
        for name, value in state.items():
            getattr(self, name)[...] = value
