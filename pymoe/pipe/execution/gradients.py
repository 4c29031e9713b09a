"""Sums of gradients of leaves, and the one autograd node by which a pipeline takes part in the caller's graph.

The inputs of that node are the tensors that the pipeline was given and all leaves that its stages have reached. So
autograd adds to each parameter once, and calls its hooks once, for any number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import (
    foreach_add_,
    get_current_graph_task_keep_graph,
    run_backward,
    unsafe_set_version_counter,
)
from pymoe.autograd.graph_nodes import add_gradients, apply_directly, once_only
from pymoe.autograd.isolated_graph import SECOND_BACKWARD

_NUMBER = torch.zeros((), device="cpu")  # any number
FOREACH_FROM = 4
"""With at least this many leaves, one call for all is faster than a call for each."""
Grads = Sequence[torch.Tensor | None]
Backward = Callable[[Grads, bool], Grads]


class LeafSums:
    """Sums gradients for every leaf, in the order in which they are added."""

    __slots__ = ("_numbers", "_own", "leaves", "sums")

    def __init__(self) -> None:
        canaries.graphs()
        self.leaves: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        # The dtype of every sum that has no other reference, so that it may be changed in place; None for other sums.
        # (Autograd may have passed the first gradient to others, too.)
        self._own: list[torch.dtype | None] = []

    def add(self, leaves: Sequence[torch.Tensor], grads: Grads) -> None:
        """Add the gradients of one micro-batch."""
        numbers, sums, own = self._numbers, self.sums, self._own
        many = len(leaves) >= FOREACH_FROM
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
                own.append(None)
            elif own[number] is grad.dtype and _is_plain(grad):
                if many:
                    changed.append(sums[number])
                    added.append(grad)
                else:
                    sums[number].add_(grad)
            else:
                result = sums[number] = add_gradients(sums[number], grad)
                own[number] = result.dtype if _is_plain(result) else None
        if changed:
            foreach_add_(changed, added)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def total(
    parts: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], float]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return all leaves in ``parts``, each once, and the sums of their gradients over the parts, in the order of the
    parts.

    A part has leaves, their gradients (which other ranks may have sent to another device) and the weight of the
    gradients.
    """
    sums = LeafSums()
    for leaves, grads, weight in parts:
        here = [grad.to(leaf.device) for leaf, grad in zip(leaves, grads, strict=True)]
        sums.add(leaves, here if weight == 1.0 else [grad * weight for grad in here])
    return sums.leaves, sums.sums


class WeightedSums:
    """Sums the gradients of one stage if their weights are only known at the end of a step: one sum per size of
    micro-batch.

    If losses are means, a micro-batch is weighted by its share of the rows of the mini-batch. The number of rows, and
    whether losses are means, is known only at the end.
    """

    def __init__(self) -> None:
        self._of_rows: dict[int, LeafSums] = {}

    def of(self, rows: int) -> LeafSums:
        """Return the sums for micro-batches with this number of rows."""
        return self._of_rows.setdefault(rows, LeafSums())

    def total(self, weight_of: dict[int, float]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the leaves, and their sums weighted by ``weight_of[rows]``. Release the sums of each size."""
        parts, self._of_rows = self._of_rows, {}
        return total(
            (part.leaves, part.sums, weight_of[rows])
            for rows, part in ((rows, parts.pop(rows)) for rows in sorted(parts, reverse=True))
        )


class _PipeOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backward: Backward, outputs: Sequence[torch.Tensor], tied: Collection[int], *tensors: torch.Tensor
    ) -> Any:
        ctx.run_backward = backward
        ctx.set_materialize_grads(False)
        made = [output.detach() for output in outputs]
        for number in tied:
            # Torch refuses in-place changes of views that are made here. Tensors that share their memory would not
            # notice such changes.
            made[number] = made[number].view_as(made[number])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.run_backward is None:
            raise RuntimeError(SECOND_BACKWARD)
        keep = get_current_graph_task_keep_graph()
        backward = ctx.run_backward
        if not keep:
            ctx.run_backward = None
        found = backward(grads, keep)
        return None, None, None, *(once_only("Pipe", found) if torch.is_grad_enabled() else found)


class _Edited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "Pipe: a stage has changed an input of the pipe in place, and the history of the result is not kept: use "
            "the input only before the pipe, or give the pipe a copy"
        )


def attach(
    backward: Backward,
    outputs: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    tied: Collection[int] = (),
) -> tuple[torch.Tensor, ...]:
    """Give ``outputs``, which have no autograd history, a node that makes them functions of ``tensors``.

    ``backward(grads, keep)`` takes the gradients of the outputs and returns the gradients of ``tensors``; ``keep``: it
    will be called again. ``tied``: indices of outputs that must not be changed in place.
    """
    made: tuple[torch.Tensor, ...] = apply_directly(_PipeOutputs, backward, outputs, tied, *tensors)
    return made


def end_history(edited: Sequence[torch.Tensor]) -> None:
    """Make a backward pass raise RuntimeError where it reaches an in-place change that a stage has made to one of these
    inputs of the pipe.
    """
    with torch.enable_grad():
        for tensor in edited:
            version = tensor._version
            apply_directly(_Edited, tensor)
            # Marking the tensor as dirty has increased its version, although nothing was changed, so the version is
            # reset.
            unsafe_set_version_counter((tensor,), (version,))


def accumulate(tensors: Sequence[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
    """Pass gradients on to the tensors' histories, or add them to ``.grad``, as ``backward()`` does.

    Empties ``grads``, because autograd does not copy a gradient to which no other reference exists.
    """
    kept = [tensor for tensor, grad in zip(tensors, grads, strict=True) if grad is not None]
    grads[:] = [grad for grad in grads if grad is not None]
    if not kept:
        return

    def hand_over(_: Grads, keep: bool) -> Grads:
        handed = tuple(grads)
        grads.clear()
        return handed

    with torch.enable_grad():
        (start,) = attach(hand_over, (_NUMBER,), kept)
    run_backward((start,), (_NUMBER,), False, False, (), allow_unreachable=True, accumulate_grad=True)
