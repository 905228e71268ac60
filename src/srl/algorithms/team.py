"""Threads that divide a minibatch between them, each with a copy of the policy and gradients of its own.

torch divides every operation over its threads, which wait for each other after each of them. Where they share their
cores with actors one is always late, and to wake a thread takes as long as an operation. A team divides the minibatch
instead and meets once, when gradients are summed (ADR 15).

Images that repeat stay together: what is found once in all of them is found again in every part, and the code in C that
trains on them divides its own work (ADR 22).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from srl.algorithms.adam import Adam
from srl.core.specs import Array
from srl.policies.networks import NatureCNN

Policy = TypeVar("Policy", bound=nn.Module)
_LEAST = 64
"""Samples below which a part is not divided any further: the smaller it is, the less there is in common in it."""


class Team(Generic[Policy]):
    """As many threads as torch has, the caller's among them; with ``divide`` False only the caller's.

    Where a minibatch is divided, ``policy`` must not change itself when it is used.
    """

    def __init__(self, policy: Policy, optimizer: Adam, *, divide: bool) -> None:
        self.policy, self.optimizer = policy, optimizer
        self.size = torch.get_num_threads() if divide and optimizer.flat.device.type == "cpu" else 1
        self.eyes = [part for part in policy.modules() if isinstance(part, NatureCNN)]
        self.others = [self._other() for _ in range(1, self.size)]
        self.pool = ThreadPoolExecutor(max(1, self.size - 1), "team", partial(torch.set_num_threads, 1))

    def _other(self) -> tuple[Policy, Tensor]:
        """A copy that shares weights and buffers with the policy, and its gradients in one piece."""
        weights = [weight for weight in self.policy.parameters() if weight.requires_grad]
        shared: dict[int, Tensor] = {id(buffer): buffer for buffer in self.policy.buffers()}
        shared |= {id(weight): nn.Parameter(weight.detach()) for weight in weights}
        flat = torch.zeros_like(self.optimizer.grad)
        place = 0
        for weight in weights:
            end = place + weight.numel()
            shared[id(weight)].grad = flat[place:end].as_strided(weight.size(), weight.stride())
            place = end
        return copy.deepcopy(self.policy, shared), flat

    def share(self, entries: Array, samples: int, work: Callable[[Policy, Array], Array]) -> Array:
        """The sum of what ``work`` returns for parts of ``entries``, which have so many samples in all.

        It adds to the gradients of the policy it is given; they are added to the optimizer's, in the order of parts.
        Entries of one row of the environment should stand together: they are alike, and what repeats in a part is
        computed once.
        """
        most = 1 if self.eyes and all(eye.repeats for eye in self.eyes) else self.size
        parts = np.array_split(entries, min(most, max(1, samples // _LEAST), len(entries)))
        if len(parts) == 1:
            return work(self.policy, entries)
        others = self.others[: len(parts) - 1]
        pairs = zip(others, parts[1:], strict=True)
        running = [self.pool.submit(_work, work, policy, flat, part) for (policy, flat), part in pairs]
        torch.set_num_threads(1)
        try:
            found = work(self.policy, parts[0])
        finally:
            ended = [each.exception() for each in running]  # waits: nobody may still write when the caller goes on
            torch.set_num_threads(self.size)
        for error in ended:
            if error is not None:
                raise error
        for _, gradient in others:
            self.optimizer.grad.add_(gradient)
        return sum((each.result() for each in running), found)


def _work(work: Callable[[Policy, Array], Array], policy: Policy, gradient: Tensor, part: Array) -> Array:
    gradient.zero_()
    return work(policy, part)
