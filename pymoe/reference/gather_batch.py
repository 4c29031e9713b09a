"""gather_batch and split_batch: many small tensors to one batch, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pymoe._common.contracts import check_gather_batch, check_split_batch


def gather_batch(tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    """Concatenate tensors along dimension 0 into one fresh, contiguous batch.

    Args:
        tensors: at least one tensor of shape (N_i, ...), any dtype, the same dtype, device and trailing shape for
            all; N_i may be 0.

    Returns:
        ``(batch, sizes)``: ``batch`` (sum of N_i, ...), an exact copy, and ``sizes`` = (N_0, N_1, ...), which
        :func:`split_batch` takes. Differentiable; the gradients of the tensors are views of the batch's gradient.

    Raises:
        TypeError: ``tensors`` is not a sequence of tensors, or dtypes differ.
        ValueError: there are no tensors, one has no dimensions, or trailing shapes or devices differ.

    Example:
        >>> pymoe.ops.gather_batch([torch.zeros(2, 8), torch.ones(3, 8)])[1]
        (2, 3)
    """
    check_gather_batch(tensors)
    return torch.cat([tensor.contiguous() for tensor in tensors]), tuple(tensor.shape[0] for tensor in tensors)


def split_batch(batch: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Cut a batch along dimension 0 into views: the inverse of :func:`gather_batch`.

    Args:
        batch: (N, ...), any dtype.
        sizes: ints of at least 0 that sum to N; may be empty if N is 0.

    Returns:
        A view (sizes[i], ...) of ``batch`` for each size, without copying. Differentiable.

    Raises:
        TypeError: ``batch`` is not a tensor, or ``sizes`` not a sequence of ints.
        ValueError: ``batch`` has no dimensions, a size is negative, or they do not sum to N.

    Example:
        >>> [part.tolist() for part in pymoe.ops.split_batch(torch.arange(5), (2, 3))]
        [[0, 1], [2, 3, 4]]
    """
    check_split_batch(batch, sizes)
    return torch.split(batch, list(sizes)) if len(sizes) else ()
