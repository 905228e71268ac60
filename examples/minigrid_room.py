"""MiniGrid: an agent that sees seven by seven fields finds the way to the goal. Needs `pip install minigrid`.

python examples/minigrid_room.py [RUN_FOLDER]
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium

import srl


def room(render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """An empty room, as seven by seven small numbers; the mission is a text, which no policy here can read."""
    from minigrid.wrappers import ImgObsWrapper

    plain = gymnasium.make("minigrid:MiniGrid-Empty-5x5-v0", render_mode=render_mode)
    found: gymnasium.Env[Any, Any] = ImgObsWrapper(plain)
    return found


def main() -> None:
    out = sys.argv[1] if len(sys.argv) > 1 else None
    x = srl.Experiment(srl.envs.gym(room), srl.PPO(lr=1e-3, horizon=64, entropy=0.01), actors=srl.Actors(envs=16))
    result = x.run(out, steps=40_000)
    found = srl.evaluate(result.run_dir, episodes=10)
    print(f"return {found.return_mean:.2f}, best possible 0.96")


if __name__ == "__main__":
    main()
