"""Hide and seek (Baker et al. 2019) on MuJoCo, as a native vector.

Hiders win while no seeker sees any of them. Both can hold boxes and ramps and lock them in place; hiders have some time
to prepare. ``docs/hide-and-seek.md`` has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from srl.core.errors import UnknownName
from srl.envs.base import EnvConfig
from srl.envs.hide_and_seek.scenario import SCENARIOS

if TYPE_CHECKING:
    from srl.envs.hide_and_seek.vector import HideAndSeekVector


@dataclass(frozen=True)
class HideAndSeek(EnvConfig):
    """The agents are named ``hider-0`` and so on, ``seeker-0`` and so on."""

    scenario: str = "quadrant"
    """``quadrant``: a room in a corner, two against two. ``randomwalls``: the paper's, one to three on each side."""

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            known = " and ".join(SCENARIOS)
            raise UnknownName("scenario of hide and seek", self.scenario, SCENARIOS, f"there are {known}")

    def make(self, copies: int, *, render: bool = False) -> HideAndSeekVector:
        """See :class:`~srl.envs.base.EnvConfig`."""
        from srl.envs.hide_and_seek.vector import HideAndSeekVector

        return HideAndSeekVector(self.scenario, copies)


def hide_and_seek(scenario: str = "quadrant") -> HideAndSeek:
    """Hide and seek in this scenario; see :class:`HideAndSeek`."""
    return HideAndSeek(scenario)
