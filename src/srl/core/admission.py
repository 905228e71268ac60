"""Admission: staleness is bounded by what may be started, not by luck.

A batch that will be trained on as the (k+1)-th may be started once version k − max_staleness is out. Counted in
blocks, with ``trained`` batches of ``batch`` blocks behind us, that is the inequality of AReaL (Fu et al. 2025)::

    accepted + running  ≤  (max_staleness + trained + 1) · batch
"""

from __future__ import annotations


def capacity(*, max_staleness: int, trained: int, batch: int, accepted: int, running: int, max_running: int) -> int:
    """How many more blocks may be started now.

    ``accepted`` blocks were ever handed over and not dropped (trained on, in training, or waiting), ``running`` ones
    are being filled. Both, like ``trained``, count from the start of this trainer, so that a resumed run at
    version a million admits exactly what a new run would.
    """
    return max(0, min(max_running - running, (max_staleness + trained + 1) * batch - (accepted + running)))
