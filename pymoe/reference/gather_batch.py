"""gather_batch and split_batch: many small tensors to one batch, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pymoe.reference import checks


def check_tensors(tensors: Sequence[Tensor]) -> None:
    """Raise if the argument of :func:`gather_batch` breaks its contract."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"gather_batch: tensors must be a list or tuple of tensors, got {type(tensors).__name__}")
    if len(tensors) == 0:
        raise ValueError("gather_batch: tensors must hold at least one tensor, got none")
    first = tensors[0]
    checks.tensor("gather_batch", "tensors[0]", first)
    dims, dtype, device, trailing = first.dim(), first.dtype, first.device, first.shape[1:]
    if dims == 0:
        _refuse("tensors[0]", first, first)
    for position, tensor in enumerate(tensors):
        # One cheap test for tensors that fit; names and messages are made only for those that do not.
        if not (
            isinstance(tensor, Tensor)
            and tensor.dtype == dtype
            and tensor.dim() == dims
            and (dims == 1 or tensor.shape[1:] == trailing)
            and tensor.device == device
        ):
            _refuse(f"tensors[{position}]", tensor, first)


def _refuse(name: str, tensor: Tensor, first: Tensor) -> None:
    checks.tensor("gather_batch", name, tensor)
    if tensor.dim() == 0:
        raise ValueError(f"gather_batch: {name} must have at least one dimension, got ()")
    if tensor.dtype != first.dtype:
        raise TypeError(f"gather_batch: {name} must have the dtype of tensors[0] ({first.dtype}), got {tensor.dtype}")
    if tensor.shape[1:] != first.shape[1:]:
        raise ValueError(
            f"gather_batch: {name} must agree with tensors[0] ({tuple(first.shape)}) past dimension 0, "
            f"got {tuple(tensor.shape)}"
        )
    checks.same_device("gather_batch", name, tensor, "tensors[0]", first)


def gather_batch(tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    """Concatenate tensors along dimension 0 into one fresh, contiguous batch.

    Args:
        tensors: at least one tensor of shape (N_i, ...), any dtype, the same dtype, device and trailing shape for
            all; N_i may be 0.

    Returns:
        ``(batch, sizes)``: ``batch`` (sum of N_i, ...), an exact copy, and ``sizes`` = (N_0, N_1, ...), which
        :func:`split_batch` takes. Differentiable; the gradients of the tensors are views of the batch's gradient.

    Raises:
        TypeError: not a sequence of tensors, or dtypes differ; the message names the tensor.
        ValueError: no tensors, a tensor without dimensions, trailing shapes or devices differ.
    """
    check_tensors(tensors)
    return torch.cat([tensor.contiguous() for tensor in tensors]), tuple(tensor.shape[0] for tensor in tensors)


def check_split(batch: Tensor, sizes: Sequence[int]) -> None:
    """Raise if the arguments of :func:`split_batch` break its contract."""
    checks.tensor("split_batch", "batch", batch)
    if batch.dim() == 0:
        raise ValueError("split_batch: batch must have at least one dimension, got ()")
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError(f"split_batch: sizes must be a list or tuple of ints, got {type(sizes).__name__}")
    for position, size in enumerate(sizes):
        checks.integer("split_batch", f"sizes[{position}]", size, 0, None, "at least 0")
    if sum(sizes) != batch.shape[0]:
        raise ValueError(f"split_batch: sizes must sum to {batch.shape[0]} (dimension 0 of batch), got {sum(sizes)}")


def split_batch(batch: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Cut a batch along dimension 0 into views: the inverse of :func:`gather_batch`.

    Args:
        batch: (N, ...), any dtype.
        sizes: ints of at least 0 that sum to N; none for an empty batch.

    Returns:
        A view (sizes[i], ...) of ``batch`` for each size, without copying. Differentiable.

    Raises:
        TypeError: ``batch`` is not a tensor, or ``sizes`` not a sequence of ints.
        ValueError: a size is negative, or they do not sum to N.
    """
    check_split(batch, sizes)
    return torch.split(batch, list(sizes)) if len(sizes) else ()
