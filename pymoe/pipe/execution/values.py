"""Values on their way between stages.

A stage's graph begins at its inputs and ends at its outputs. A tensor that leaves a stage is cut off from its history,
and a :class:`Crossing` remembers where its gradient has to go. A stage that takes the tensor works on an alias: the
same memory, with a history that begins there (:func:`enter`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, Node, increment_version
from torch.utils import _pytree

from pymoe.runtime.parallel.isolated import with_failing_node

__all__ = ["Crossing", "Entrance", "Origin", "Sent", "arrive", "enter", "pack", "take", "unpack"]

_anchor = torch.empty(0, device="cpu", requires_grad=True)
_PAST = "pymoe.pipe: a backward pass went past the beginning of a stage's graph"


class Origin(Protocol):
    """What has made a tensor that crosses."""

    def take(self, number: int, grad: torch.Tensor) -> None:
        """One of the gradients of its tensor ``number``."""


class Crossing:
    """A tensor that crosses. ``origin`` takes its gradients under ``number``; None: it needs none."""

    __slots__ = ("number", "origin", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, origin: Origin | None = None, number: int = 0) -> None:
        self.tensor = tensor
        self.origin = origin
        self.number = number
        self.version = version_of(tensor)


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


def take(grads: list[torch.Tensor | None], number: int, grad: torch.Tensor) -> None:
    """One of the gradients of tensor ``number``; ``grads`` has their sums."""
    before = grads[number]
    grads[number] = grad if before is None else before + grad


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


def arrive(crossing: Crossing, device: torch.device | None) -> torch.Tensor:
    """The tensor, on ``device`` if that is given.

    Raises:
        RuntimeError: another stage that has taken it has changed it in place.
    """
    tensor = crossing.tensor
    if version_of(tensor) != crossing.version:
        raise RuntimeError(
            "a tensor that goes to several stages was changed in place by one of them, which autograd could not tell "
            "the others; change a copy there (inplace=False, for example)"
        )
    return tensor if device is None or tensor.device == device else tensor.to(device, non_blocking=True)


class Entrance:
    """What a stage is given for one micro-batch, and where its graph begins."""

    __slots__ = ("_aliases", "_sources", "edges", "origins", "values")

    def __init__(self) -> None:
        self.values: list[Any] = []  # for the stage's function
        self.origins: list[tuple[Origin, int, torch.device]] = []  # who gets the gradient of each edge, and where
        self.edges: list[GradientEdge] = []
        self._sources: list[torch.Tensor] = []
        self._aliases: Sequence[torch.Tensor] = ()

    @property
    def node(self) -> Node | None:
        """The node of all edges; None without edges."""
        return self.edges[0].node if self.edges else None

    def begin(self, sources: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Aliases of tensors, with a history that begins here."""
        # Gradients are taken at the node. The anchor makes all of them require gradients.
        *made, _ = with_failing_node(_PAST, [*sources, _anchor])
        self._sources, self._aliases = sources, made
        node = made[0].grad_fn
        self.edges = [GradientEdge(node, number) for number in range(len(made))]
        return made

    def close(self) -> None:
        """After the stage's function: tell autograd of its edits, and let go of the values.

        Raises:
            RuntimeError: an input was changed in place that shares its memory with another.
        """
        sources, aliases = self._sources, self._aliases
        self.values, self._sources, self._aliases = [], [], ()
        for source, alias in zip(sources, aliases, strict=True):
            if not alias._version:
                continue
            # An alias counts its versions by itself, and the stage that has made the tensor may have saved it.
            increment_version(source)
            if len(sources) > 1 and [memory_of(other) for other in sources].count(memory_of(source)) > 1:
                raise RuntimeError(
                    "a stage has changed an input in place that shares its memory with another of its inputs: across "
                    "stages their common history cannot be kept; make one of them a copy"
                )

    def hand_on(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Give each gradient of an edge, the first of ``grads``, to whom it is due."""
        for (origin, number, device), grad in zip(self.origins, grads, strict=False):
            if grad is not None:
                origin.take(number, grad if grad.device == device else grad.to(device, non_blocking=True))


def memory_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def enter(sent: Sequence[Sent], device: torch.device | None) -> Entrance:
    """The values for a stage's function; tensors that need gradients as aliases on ``device``."""
    entrance = Entrance()
    values = entrance.values
    nested: list[tuple[int, list[Any], Any]] = []  # a place among the values, and what will be there
    places: list[tuple[list[Any], int]] = []
    sources: list[torch.Tensor] = []
    for value in sent:
        row = values
        if value.structure is not None:
            row = []
            nested.append((len(values), row, value.structure))
            values.append(None)
        for leaf in value.leaves:
            if type(leaf) is Crossing:
                tensor = arrive(leaf, device)
                if leaf.origin is not None:
                    places.append((row, len(row)))
                    sources.append(tensor)
                    entrance.origins.append((leaf.origin, leaf.number, leaf.tensor.device))
                row.append(tensor)
            else:
                row.append(leaf)
    if sources:
        for (row, position), alias in zip(places, entrance.begin(sources), strict=True):
            row[position] = alias
    for position, row, structure in nested:
        values[position] = unpack(row, structure)
    return entrance
