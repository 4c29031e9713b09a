"""The one node by which a pipeline takes part in the caller's graph.

Its inputs are the tensors that the pipeline was given and all leaves that its stages have reached; so autograd adds to
each parameter once, and calls its hooks once, however many micro-batches there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from pymoe.autograd.graph_nodes import apply_directly, once_only
from pymoe.autograd.isolated_graph import SECOND_BACKWARD

__all__ = ["accumulate", "attach", "end_history"]

_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
_NUMBER = torch.zeros((), device="cpu")  # any
Grads = Sequence[torch.Tensor | None]
Backward = Callable[[Grads, bool], Grads]


class _PipeOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backward: Backward, outputs: Sequence[torch.Tensor], tied: Collection[int], *tensors: torch.Tensor
    ) -> Any:
        ctx.run_backward = backward
        ctx.set_materialize_grads(False)
        made = [output.detach() for output in outputs]
        for number in tied:
            # torch refuses changes in place of views that are made here: nothing could tell those who share the memory.
            made[number] = made[number].view_as(made[number])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.run_backward is None:
            raise RuntimeError(SECOND_BACKWARD)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        run_backward = ctx.run_backward
        if not keep:
            ctx.run_backward = None
        found = run_backward(grads, keep)
        return None, None, None, *(once_only("Pipe", found) if torch.is_grad_enabled() else found)


class _Edited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "Pipe: a stage has changed an input of the pipe in place, and the history of what it has become is not "
            "kept: use the input before the pipe alone, or give the pipe a copy"
        )


def attach(
    backward: Backward,
    outputs: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    tied: Collection[int] = (),
) -> tuple[torch.Tensor, ...]:
    """``outputs`` as functions of ``tensors``; ``backward(grads, keep)`` takes the gradients of the one and returns
    those of the others. ``tied``: the numbers of outputs that nobody may change in place.
    """
    made: tuple[torch.Tensor, ...] = apply_directly(_PipeOutputs, backward, outputs, tied, *tensors)
    return made


def end_history(edited: Sequence[torch.Tensor]) -> None:
    """Have a backward pass raise RuntimeError that goes to what stages have made of these inputs in place."""
    with torch.enable_grad():
        for tensor in edited:
            version = tensor._version
            apply_directly(_Edited, tensor)
            # Marking it as dirty has counted as one more change, which was none.
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def accumulate(tensors: Sequence[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
    """What ``backward()`` does in the end: pass the gradients on, or add them to the tensors' ``.grad``.

    ``grads`` is emptied: what nobody else has autograd need not copy.
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
    _run_backward((start,), (_NUMBER,), False, False, (), allow_unreachable=True, accumulate_grad=True)
