"""Values on their way between stages.

A tensor that leaves a stage is cut off from its history, and a :class:`Crossing` remembers where its gradient has to
go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from pymoe.autograd.gradient_sums import add_gradients

__all__ = ["Crossing", "Origin", "Sent", "arrive", "is_fixed", "pack", "unpack", "version_of"]


class Origin:
    """Makes tensors that cross. They have numbers, in their order."""

    __slots__ = ("grads",)

    def __init__(self) -> None:
        self.grads: list[torch.Tensor | None] = []  # for each the sum of those that have come

    def take(self, number: int, grad: torch.Tensor) -> None:
        """One of the gradients of tensor ``number``."""
        before = self.grads[number]
        self.grads[number] = grad if before is None else add_gradients(before, grad)


class Crossing:
    """A tensor that crosses. ``origin`` takes its gradients under ``number``; None: it needs none.

    ``is_fixed``: it is in the memory of a leaf, so nobody may change it in place.
    """

    __slots__ = ("is_fixed", "number", "origin", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, origin: Origin | None = None, number: int = 0, is_fixed: bool = False
    ) -> None:
        self.tensor = tensor
        self.origin = origin
        self.number = number
        self.is_fixed = is_fixed
        self.version = -1 if tensor.is_inference() else tensor._version  # version_of(tensor), without a call


class Sent:
    """A value that crosses: its leaves, with a crossing for every tensor, and its structure (None: it is its leaf)."""

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: list[Any], structure: Any) -> None:
        self.leaves = leaves
        self.structure = structure


def pack(value: Any, cross: Callable[[torch.Tensor], Crossing]) -> Sent:
    """The value, with ``cross(tensor)`` for every tensor in it."""
    if isinstance(value, torch.Tensor):
        return Sent([cross(value)], None)
    leaves, structure = _pytree.tree_flatten(value)
    return Sent([cross(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)


def unpack(leaves: list[Any], structure: Any) -> Any:
    """The value of such leaves."""
    return leaves[0] if structure is None else _pytree.tree_unflatten(leaves, structure)


def is_fixed(tensor: torch.Tensor) -> bool:
    """Whether torch refuses changes in place of this tensor, which needs gradients: a leaf, or a view of one."""
    return tensor.is_leaf or (tensor._is_view() and tensor._base.is_leaf)  # type: ignore[union-attr]


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


def arrive(crossing: Crossing, device: torch.device | None) -> torch.Tensor:
    """The tensor, on ``device`` if that is given.

    Raises:
        RuntimeError: another stage that has taken it has changed it in place.
    """
    tensor = crossing.tensor
    if crossing.version != (-1 if tensor.is_inference() else tensor._version):
        raise RuntimeError(
            "a tensor that goes to several stages was changed in place by one of them, which autograd could not tell "
            "the others (micro-batches, too, share the memory of the pipe's input); change a copy there "
            "(inplace=False, for example)"
        )
    return tensor if device is None or tensor.device == device else tensor.to(device, non_blocking=True)
