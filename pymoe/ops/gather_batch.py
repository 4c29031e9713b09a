"""gather_batch and split_batch: gather many tensors into one batch by one parallel copy, and split a batch into views.

Contract: :func:`pymoe.reference.gather_batch`; kernel: csrc/kernels/gather_batch.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pymoe._common.contracts import check_gather_batch
from pymoe._transforms import has_tangent, in_torch_func
from pymoe.reference.gather_batch import gather_batch as reference
from pymoe.reference.gather_batch import split_batch  # split_batch makes views and needs no kernel

__all__ = ["gather_batch", "split_batch"]


def gather_batch(tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    check_gather_batch(tensors)
    # The derivative of the native operator, registered below, covers backward passes only. The reference computes all
    # other derivatives, which would be lost silently here.
    if in_torch_func() or has_tangent(*tensors):
        return reference(tensors)
    batch = torch.ops.pymoe.gather_batch([tensor.contiguous() for tensor in tensors])
    return batch, tuple(tensor.shape[0] for tensor in tensors)


gather_batch.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::gather_batch")
def _(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    return first.new_empty((sum(tensor.shape[0] for tensor in tensors), *first.shape[1:]))


# The backward is registered with the operator. Other operators use a torch.autograd.Function, but torch.compile cannot
# trace a Function that gets the same tensor twice, and a list may contain a tensor twice.
def _setup_context(ctx: Any, inputs: tuple[Sequence[Tensor]], output: Tensor) -> None:
    ctx.sizes = [tensor.shape[0] for tensor in inputs[0]]


def _backward(ctx: Any, grad: Tensor) -> list[Tensor]:
    return list(grad.split(ctx.sizes))


torch.library.register_autograd("pymoe::gather_batch", _backward, setup_context=_setup_context)
