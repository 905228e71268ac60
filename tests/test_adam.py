"""Adam on all weights at once, in C and by torch, against torch's own optimiser."""

from __future__ import annotations

import copy

import pytest
import torch

from srl.algorithms.adam import Adam
from srl.core import native


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("longest", [1e-3, 1e9])
def test_steps_are_those_of_torch(compiled, longest, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("there is no C compiler here")
    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Linear(37, 53), torch.nn.Linear(53, 5))
    theirs = copy.deepcopy(mine)
    own, other = Adam(mine, 0.01), torch.optim.Adam(theirs.parameters(), lr=0.01, eps=1e-5)
    for step in range(6):
        x = torch.randn(20, 37)
        own.zero_grad()
        other.zero_grad()
        for network in (mine, theirs):
            network(x).square().sum().backward()
        length = torch.nn.utils.clip_grad_norm_(theirs.parameters(), longest)
        if step < 5:
            assert own.clip(longest) == pytest.approx(float(length), rel=1e-5)
        else:  # a step that nobody asked to shorten
            theirs.zero_grad()
            theirs(x).square().sum().backward()
        own.step()
        other.step()
        for weight, twin in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(weight, twin, rtol=1e-4, atol=1e-6)
    assert float(own.steps) == 6
