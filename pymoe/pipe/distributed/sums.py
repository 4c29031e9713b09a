"""Sums of a stage's gradients that can be weighted afterwards.

Of a mean over the rows of a mini-batch a micro-batch counts its share, but how many rows there are, and whether losses
are means at all, is known at the end of a step alone. So there is a sum for every size of micro-batches: one, or two
where they do not come out even.
"""

from __future__ import annotations

import torch

from pymoe.autograd.gradient_sums import add_gradients
from pymoe.pipe.execution.leaf_sums import LeafSums

__all__ = ["Sums"]


class Sums:
    """Of one stage."""

    def __init__(self) -> None:
        self._of_rows: dict[int, LeafSums] = {}

    def of(self, rows: int) -> LeafSums:
        """Where the gradients of a micro-batch of so many rows are added."""
        return self._of_rows.setdefault(rows, LeafSums())

    def total(self, weight_of: dict[int, float]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The leaves, and their weighted sums. Lets go of the parts."""
        totals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        parts, self._of_rows = self._of_rows, {}
        for rows in sorted(parts, reverse=True):
            part, weight = parts.pop(rows), weight_of[rows]
            for leaf, grad in zip(part.leaves, part.sums, strict=True):
                assert grad is not None
                weighted = grad if weight == 1.0 else grad * weight
                before = totals.get(id(leaf))
                totals[id(leaf)] = leaf, weighted if before is None else add_gradients(before[1], weighted)
        return [leaf for leaf, _ in totals.values()], [grad for _, grad in totals.values()]
