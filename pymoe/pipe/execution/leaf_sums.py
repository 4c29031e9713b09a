"""Sums of the gradients of leaves: over the micro-batches of a stage, and over stages that share parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = ["LeafSums", "over_stages"]


FEW = 3  # tensors, for which a call for each takes less than one for all


class LeafSums:
    """The sum, for every leaf, of the gradients that are added; in the order in which they are."""

    __slots__ = ("_mine", "_numbers", "leaves", "sums")

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self.sums: list[torch.Tensor | None] = []
        self._numbers: dict[int, int] = {}
        self._mine: list[bool] = []  # whether nobody else has the sum, so that it may be changed in place

    def add(self, leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        """Gradients of one micro-batch."""
        known: list[torch.Tensor | None] = self.sums
        new: list[torch.Tensor] = []
        changeable: list[Any] = []
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is None:
                continue
            number = self._numbers.setdefault(id(leaf), len(self.leaves))
            if number == len(self.leaves):
                self.leaves.append(leaf)
                known.append(grad)
                self._mine.append(False)  # autograd may have given the same tensor to somebody else
            elif self._mine[number] and _is_plain(grad) and grad.dtype == known[number].dtype:  # type: ignore[union-attr]
                changeable.append(known[number])
                new.append(grad)
            else:
                known[number] = known[number] + grad  # type: ignore[operator]
                self._mine[number] = _is_plain(known[number])  # type: ignore[arg-type]
        if len(changeable) > FEW:
            torch._foreach_add_(changeable, new)
        else:
            for known_sum, grad in zip(changeable, new, strict=True):
                known_sum.add_(grad)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and type(tensor) is torch.Tensor


def over_stages(parts: Iterable[LeafSums]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All leaves that have a gradient, each once, and their sums over the stages, in the order of the stages."""
    totals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for part in parts:
        for leaf, grad in zip(part.leaves, part.sums, strict=True):
            assert grad is not None
            before = totals.get(id(leaf))
            totals[id(leaf)] = leaf, grad if before is None else before[1] + grad.to(before[1].device)
    return [leaf for leaf, _ in totals.values()], [grad for _, grad in totals.values()]
