"""Atari's screens made smaller in C against ALE's own."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from srl.core import native
from srl.envs import atari

ale_py = pytest.importorskip("ale_py")
compiled = pytest.mark.skipif(native.library() is None, reason="there was no compiler")
PLAIN = {"num_threads": 1, "repeat_action_probability": 0.0}


def ids() -> dict[str, str]:
    """The id of every game."""
    gymnasium.register_envs(ale_py)
    found = (spec for spec in gymnasium.registry.values() if spec.id.startswith("ALE/") and spec.id.endswith("-v5"))
    return {spec.kwargs["game"]: spec.id for spec in found}


@compiled
@pytest.mark.parametrize(
    ("game", "options"),
    [
        ("pong", {}),
        ("pong", {"frameskip": 1, "noop_max": 0, "repeat_action_probability": 0.25}),
        ("breakout", {"life_loss_info": True, "reward_clipping": False, "full_action_space": True}),
        ("ms_pacman", {"frameskip": 3, "use_fire_reset": False, "episodic_life": True}),
        ("breakout", {"episodic_life": True, "max_num_frames_per_episode": 900}),
        ("carnival", {}),
        ("lost_luggage", {}),  # nobody can fire there
        ("seaquest", {"img_height": 64, "img_width": 64, "stack_num": 2, "maxpool": False}),
        ("seaquest", {"img_height": 105, "img_width": 70, "stack_num": 1}),
    ],
)
def test_screens_are_to_the_bit_those_of_ale(game, options):
    name, options = ids()[game], {**PLAIN, **options}
    theirs, ours = gymnasium.make_vec(name, num_envs=3, **options), atari.vector(name, 3, options)
    assert isinstance(ours, atari.Games)
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.observation_space == theirs.observation_space
    luck, ends = np.random.default_rng(0), 0
    for seed in (5, 6):
        (found, _), (expected, _) = ours.reset(seed=seed), theirs.reset(seed=seed)
        np.testing.assert_array_equal(found, expected)
        for step in range(300):
            actions = luck.integers(0, theirs.single_action_space.n, 3)
            place = np.full(theirs.observation_space.shape, 7, np.uint8) if step % 3 else None
            ours.out = place
            mine, other = ours.step(actions), theirs.step(actions)
            assert place is None or mine[0] is place
            for one, two in zip(mine[:4], other[:4], strict=True):
                np.testing.assert_array_equal(one, two)
                assert one.dtype == two.dtype
            assert mine[4].keys() == other[4].keys()
            for name in other[4]:
                np.testing.assert_array_equal(mine[4][name], other[4][name], err_msg=name)
            ends += int((other[2] | other[3]).sum())
    assert ends or not options.get("episodic_life")
    ours.close(), theirs.close()


@pytest.mark.parametrize("options", [{"img_height": 105, "img_width": 80}, {"grayscale": False}, {"img_height": 300}])
def test_what_is_not_made_smaller_in_c_is_left_to_ale(options):
    made = atari.vector(ids()["pong"], 1, {**PLAIN, **options})
    assert not isinstance(made, atari.Games)
    made.close()
