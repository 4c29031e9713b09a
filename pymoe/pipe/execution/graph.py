"""The graph of one pass of a micro-batch through a stage.

It begins at the stage's inputs and ends at its outputs. The stage works on aliases of the tensors that it takes: the
same memory, with a history that begins there. They count changes in place together with the tensors, so whoever has
saved the memory for a backward pass, in any stage, is told of all. What a stage sends is cut off from its history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from pymoe.autograd.compiled_nodes import are_compiled
from pymoe.autograd.graph_nodes import apply_directly, edge_of, find_leaves_and_nodes
from pymoe.autograd.random_streams import Stream
from pymoe.pipe.execution.values import Crossing, Origin, Sent, arrive, is_fixed, pack, unpack

__all__ = ["Graph"]

_anchor = torch.empty(0, device="cpu", requires_grad=True)
_PAST = "pymoe.pipe: a backward pass went past the beginning of a stage's graph"
_edge: Any = tuple.__new__  # skips the Python function that makes a GradientEdge


class _StageInputs(torch.autograd.Function):
    """Makes the aliases, after one that keeps this node alive. Gradients are taken before they come here."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, fixed: Sequence[bool], *sources: torch.Tensor) -> Any:
        aliases = [source.detach() for source in sources]
        if True in fixed:
            # torch refuses changes in place of views that are made here.
            aliases = [alias.view_as(alias) if own else alias for alias, own in zip(aliases, fixed, strict=True)]
        return anchor.detach(), *aliases

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(_PAST)


class Graph:
    """Where the graph begins and ends, and the leaves that it has reached. :meth:`begin`, the stage, :meth:`end`."""

    __slots__ = (
        "_aliases",
        "_device",
        "_guard",
        "_sources",
        "edges",
        "entry",
        "is_compiled",
        "leaves",
        "origins",
        "roots",
        "stream",
    )

    def __init__(self, stream: Stream | None = None, device: torch.device | None = None) -> None:
        """``stream``: of its random numbers. ``device``: of the stage; None: that of whatever comes."""
        self.stream = stream  # going on in the backward where the forward has left it
        self.entry: Node | None = None  # where it begins, if it has inputs
        self.edges: list[GradientEdge] = []  # of the entry, one for each of these inputs
        self.origins: list[tuple[Origin, int, torch.device | None]] = []  # who gets its gradient, and where
        self.roots: list[GradientEdge | None] = []  # one for each tensor that was sent
        self.leaves: Sequence[torch.Tensor] = ()
        self.is_compiled = False  # it must not be kept then
        self._device = device
        self._sources: list[torch.Tensor] = []
        self._aliases: Sequence[torch.Tensor] = ()
        self._guard: torch.Tensor | None = None  # keeps the entry alive

    def begin(self, sent: Sequence[Sent]) -> list[Any]:
        """The values for the stage's function: tensors that need gradients as aliases."""
        device, sources = self._device, self._sources
        values: list[Any] = []
        nested: list[tuple[int, list[Any], Any]] = []  # a place among the values, and what will be there
        places: list[tuple[list[Any], int]] = []
        fixed: list[bool] = []
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
                        fixed.append(leaf.is_fixed)
                        home = None if device is None else leaf.tensor.device
                        self.origins.append((leaf.origin, leaf.number, home))
                    row.append(tensor)
                else:
                    row.append(leaf)
        if sources:
            # The anchor makes all aliases require gradients.
            aliases = apply_directly(_StageInputs, _anchor, fixed, *sources)
            self._aliases, self._guard = aliases, aliases[0]
            self.entry = entry = aliases[0].grad_fn
            for number, (row, position) in enumerate(places, 1):
                row[position] = aliases[number]
                self.edges.append(_edge(GradientEdge, (entry, number, None)))
        for position, row, structure in nested:
            values[position] = unpack(row, structure)
        return values

    def end(self, outputs: Sequence[Any], origin: Origin) -> list[Sent]:
        """What the stage sends: ``outputs``, their gradients going to ``origin``. :meth:`close` is a part of it."""
        self.close()
        roots = self.roots
        nodes: list[Node] = []

        def cross(tensor: torch.Tensor) -> Crossing:
            if not tensor.requires_grad:
                roots.append(None)
                return Crossing(tensor)
            root = edge_of(tensor)
            roots.append(root)
            nodes.append(root.node)
            return Crossing(tensor.detach(), origin, len(roots) - 1, is_fixed(tensor))

        sent = []
        for output in outputs:  # no comprehension, and no pack for lone tensors: this is on every micro-batch's way
            sent.append(Sent([cross(output)], None) if isinstance(output, torch.Tensor) else pack(output, cross))
        self.leaves, reached = find_leaves_and_nodes(nodes, self.entry)
        self.is_compiled = are_compiled(reached)
        return sent

    def close(self) -> None:
        """Let go of the inputs.

        Raises:
            RuntimeError: an input was changed in place that shares its memory with another.
        """
        sources, aliases, entry = self._sources, self._aliases[1:], self.entry
        self._sources, self._aliases = [], ()
        for source, alias in zip(sources, aliases, strict=True):
            if alias.grad_fn is not entry:
                refuse_shared_memory(source, sources)

    def hand_on(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Give each gradient of an edge, the first of ``grads``, to whom it is due."""
        for (origin, number, home), grad in zip(self.origins, grads, strict=False):
            if grad is not None:
                origin.take(number, grad if home is None else grad.to(home, non_blocking=True))


def refuse_shared_memory(changed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError if another of the tensors shares the memory of the one that was changed."""
    if [memory_of(tensor) for tensor in tensors].count(memory_of(changed)) > 1:
        raise RuntimeError(
            "a stage has changed an input in place that shares its memory with another of its inputs: across stages "
            "their common history cannot be kept; make one of them a copy"
        )


def memory_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
