"""Sums of the gradients of leaves: over the micro-batches of a stage, and over stages that share parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pymoe.autograd.gradient_sums import add_gradients

__all__ = ["LeafSums", "over_stages"]


FEW = 3  # tensors, for which a call for each takes less than one for all


class LeafSums:
    """The sum, for every leaf, of the gradients that are added; in the order in which they are."""

    __slots__ = ("_mine", "_numbers", "leaves", "sums")

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        # The dtype of a sum that nobody else has, and that may be changed in place; autograd may have given a gradient
        # to somebody else, too.
        self._mine: list[torch.dtype | None] = []

    def add(self, leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        """Gradients of one micro-batch."""
        numbers, sums, mine = self._numbers, self.sums, self._mine
        many = len(leaves) > FEW
        changed: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is None:
                continue
            number = numbers.get(id(leaf))
            if number is None:
                numbers[id(leaf)] = len(sums)
                self.leaves.append(leaf)
                sums.append(grad)
                mine.append(None)
            elif mine[number] is grad.dtype and _is_plain(grad):
                if many:
                    changed.append(sums[number])
                    added.append(grad)
                else:
                    sums[number].add_(grad)
            else:
                total = sums[number] = add_gradients(sums[number], grad)
                mine[number] = total.dtype if _is_plain(total) else None
        if changed:
            torch._foreach_add_(changed, added)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def over_stages(parts: Iterable[LeafSums]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All leaves that have a gradient, each once, and their sums over the stages, in the order of the stages."""
    totals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for part in parts:
        for leaf, grad in zip(part.leaves, part.sums, strict=True):
            before = totals.get(id(leaf))
            totals[id(leaf)] = leaf, grad if before is None else add_gradients(before[1], grad.to(before[1].device))
    return [leaf for leaf, _ in totals.values()], [grad for _, grad in totals.values()]
