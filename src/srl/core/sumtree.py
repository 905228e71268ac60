"""A sum tree: draw leaves with probabilities proportional to their weights, many at a time.

Level by level the tree is one array; the children of node ``i`` are ``2i`` and ``2i + 1``, the leaves begin at
``capacity``. Setting and drawing are a handful of array operations per level, whatever the number of leaves asked for.
"""

from __future__ import annotations

import numpy as np

from srl.core.specs import Array


class SumTree:
    """``size`` weights, all 0 at first."""

    def __init__(self, size: int) -> None:
        self.capacity = 1 << max(0, size - 1).bit_length()
        self.nodes = np.zeros(2 * self.capacity)

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self.nodes[1])

    def __getitem__(self, leaves: Array) -> Array:
        return np.asarray(self.nodes[self.capacity + leaves])

    def __setitem__(self, leaves: Array, weights: Array) -> None:
        nodes, places = self.nodes, self.capacity + np.asarray(leaves, np.int64)
        nodes[places] = weights
        parents = np.unique(places >> 1)
        while parents[0] > 0:
            nodes[parents] = nodes[2 * parents] + nodes[2 * parents + 1]
            parents = np.unique(parents >> 1)

    def find(self, marks: Array) -> Array:
        """The leaf each mark falls on, if all weights (of sum :attr:`total`) were laid end to end."""
        nodes, places = self.nodes, np.ones(len(marks), np.int64)
        marks = np.minimum(marks, np.nextafter(self.total, 0))
        while places[0] < self.capacity:
            left = nodes[2 * places]
            # A left sum of a rounding error below the mark must not lead into an empty right half.
            right = (marks >= left) & (nodes[2 * places + 1] > 0)
            marks = np.where(right, marks - left, marks)
            places = 2 * places + right
        return places - self.capacity
