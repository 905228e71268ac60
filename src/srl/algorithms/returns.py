"""Returns and advantages of blocks, all ``[T, rows]``.

A step counts if its row is *valid*. A row that is not valid (a reset, an agent not on turn) is passed over: the reward
it is given belongs to the last valid step before it, and what follows that step is the next valid one. A terminated
episode is worth nothing afterwards; a truncated one is worth the value of its last observation, which is the next
observation in the block because the reset takes a step of its own. A step that failed is truncated and not valid, and
the observation after it is already the first of another episode; what came before is worth the value of the observation
it began with. Nothing crosses an end.
"""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import numpy as np

from srl.core import native
from srl.core.specs import Array


def gae(
    reward: Array,
    value: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    gamma: float,
    lam: float,
    first: Array | None = None,
) -> tuple[Array, Array]:
    """Generalised advantage estimates, and where they are known.

    ``value``, ``valid`` and ``first`` have one more step than the others: the observation after the last step. An
    estimate is not known if the block ended before its row was on turn again.
    """
    first = np.zeros_like(valid) if first is None else first
    library = native.library()
    if library is not None and reward.dtype == value.dtype == np.float32:
        advantage, complete = np.empty(reward.shape, reward.dtype), np.empty(reward.shape, bool)
        given = [np.ascontiguousarray(each) for each in (reward, value, terminated, truncated, valid, first)]
        sizes, discounts = [c_int64(each) for each in reward.shape], [c_float(gamma), c_float(gamma * lam)]
        places = [c_void_p(each.ctypes.data) for each in (*given, advantage, complete)]
        library.returns_gae(*sizes, *places[:6], *discounts, *places[6:])
        return advantage, complete
    ratio = np.ones_like(reward)
    return vtrace(reward, value, ratio, terminated, truncated, valid, gamma, lam, first)[::2]


def vtrace(
    reward: Array,
    value: Array,
    ratio: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    gamma: float,
    lam: float,
    first: Array | None = None,
    *,
    rho: float = 1.0,
    c: float = 1.0,
) -> tuple[Array, Array, Array]:
    """Advantages, value targets (both of V-trace, Espeholt et al. 2018), and where they are known; see :func:`gae`.

    ``ratio`` is how much likelier each action is now than it was when it was taken. It counts for up to ``rho`` in what
    is believed of a step, and for up to ``c`` in what is believed of the steps after it. Where all are 1 these are the
    advantages of :func:`gae`.
    """
    first = np.zeros_like(valid) if first is None else first
    steps, advantage, target = len(reward), np.empty_like(reward), np.empty_like(reward)
    complete = np.empty(reward.shape, bool)
    ended, weight, trace = terminated | truncated, np.minimum(ratio, rho), lam * np.minimum(ratio, c)
    following, following_error = value[steps], np.zeros_like(reward[0])
    owed, known = np.zeros_like(reward[0]), valid[steps]
    for t in range(steps - 1, -1, -1):
        over = ended[t]
        last = np.where(first[t + 1], value[t], value[t + 1])
        following = np.where(over, np.where(terminated[t], 0, last), following)
        following_error = np.where(over, 0, following_error)
        owed = np.where(over, 0, owed) + reward[t]
        known = known | over
        step = owed + gamma * following - value[t]
        error = weight[t] * step + gamma * trace[t] * following_error
        advantage[t], target[t], complete[t] = step + gamma * lam * following_error, value[t] + error, known & valid[t]
        following = np.where(valid[t], value[t], following)
        following_error = np.where(valid[t], np.where(known, error, 0), following_error)
        owed, known = np.where(valid[t], 0, owed), known | valid[t]
    return advantage, target, complete


class Transitions(NamedTuple):
    """What became of every step, each ``[T, rows]``."""

    reward: Array
    """Discounted sum of the rewards until ``after``."""
    after: Array
    """Step of the observation that follows."""
    discount: Array
    """Of the value of that observation; 0 if the episode terminated."""
    known: Array
    """Whether the step is valid and what follows it is in the block."""


def transitions(
    reward: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    gamma: float,
    n_step: int,
    first: Array | None = None,
) -> Transitions:
    """Transitions over up to ``n_step`` valid steps; fewer where an episode or the block ends.

    ``valid`` and ``first`` have one more step than the others, as in :func:`gae`.
    """
    first = np.zeros_like(valid) if first is None else first
    one = _single(reward, terminated, truncated, valid, first, gamma)
    total, after, discount = one.reward, one.after, one.discount
    ended = _last(terminated | truncated, one.after)
    rows = np.arange(reward.shape[1])
    for _ in range(n_step - 1):
        inside = np.minimum(after, len(reward) - 1)
        goes_on = one.known & ~ended & (after < len(reward)) & one.known[inside, rows]
        total = np.where(goes_on, total + discount * one.reward[inside, rows], total)
        ended = np.where(goes_on, _last(terminated | truncated, one.after)[inside, rows], ended)
        discount = np.where(goes_on, discount * one.discount[inside, rows], discount)
        after = np.where(goes_on, one.after[inside, rows], after)
    return Transitions(total, after, discount, one.known)


def _single(
    reward: Array, terminated: Array, truncated: Array, valid: Array, first: Array, gamma: float
) -> Transitions:
    steps = len(reward)
    total, discount = np.empty_like(reward), np.empty_like(reward)
    after, complete = np.empty(reward.shape, np.int64), np.empty(reward.shape, bool)
    ended = terminated | truncated
    following, factor = np.full(reward.shape[1], steps), np.full(reward.shape[1], gamma, reward.dtype)
    owed, known = np.zeros_like(reward[0]), valid[steps]
    for t in range(steps - 1, -1, -1):
        over = ended[t]
        following = np.where(over, np.where(first[t + 1], t, t + 1), following)
        factor = np.where(over, np.where(terminated[t], 0, gamma), factor)
        owed = np.where(over, 0, owed) + reward[t]
        known = known | over
        total[t], after[t], discount[t], complete[t] = owed, following, factor, known & valid[t]
        following, factor = np.where(valid[t], t, following), np.where(valid[t], gamma, factor)
        owed, known = np.where(valid[t], 0, owed), known | valid[t]
    return Transitions(total, after, discount, complete)


def _last(ended: Array, after: Array) -> Array:
    """Whether the episode ended on the way to ``after``."""
    rows = np.arange(ended.shape[1])
    return np.asarray(ended[np.maximum(after - 1, 0), rows])
