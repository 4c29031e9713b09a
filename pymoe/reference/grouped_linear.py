"""grouped_linear: one linear layer per expert over rows that are sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common.contracts import check_grouped_linear, check_offsets, check_order
from pymoe._common.types import cast_operands


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, *, order: Tensor | None = None
) -> Tensor:
    """Apply the linear layer of expert e to the rows ``offsets[e]`` to ``offsets[e + 1]``.

    ``y[r] = weight[e] @ x[r] + bias[e]`` for the expert e that owns row r. Rows past ``offsets[-1]`` belong to no
    expert: their ``y`` is zero, their ``x`` is never read, and no gradient comes from or reaches them. An expert may
    own no rows; the gradients of its weight and bias are then zero.

    With ``order`` the rows need not be sorted in memory: the r-th sorted row is row ``order[r]`` of both ``x`` and
    ``y``, so ``y[order[r]] = weight[e] @ x[order[r]] + bias[e]``. Rows that ``order[:offsets[-1]]`` does not name
    belong to no expert. This saves a sorted copy of ``x`` and the copy back. Outputs and gradients have the same bits
    as with sorted copies, since sums over an expert's rows run in the given order, except on CUDA in bfloat16, where
    torch may multiply sorted rows and rounds its sums differently. ``Routing.token`` is an order if every token has
    exactly one choice.

    Sums are kept in float32 (float64 for float64) over the whole of H and rounded once to the dtype of ``x``; the
    same holds for the gradients, whose sums run over N (``x``) or over an expert's rows (``weight``, ``bias``). A row
    of ``y`` depends on its own row of ``x`` alone: in the native operator, its bits do not change with the rows around
    it, nor with the number of threads. Inside ``torch.autocast`` the operands are cast as ``F.linear`` casts its own.

    Args:
        x: (S, H), rows sorted by expert as :func:`dispatch` leaves them; any floating dtype.
        weight: (E, N, H), the dtype of ``x``. Any strides: a transposed view of an (E, H, N) tensor is read in place.
        offsets: (E + 1,) int32, starting at 0, non-decreasing, at most S.
        bias: (E, N), the dtype of ``x``, or None.
        order: (S,) int32, or None for rows that are sorted. The first ``offsets[-1]`` values lie in [0, S) and name no
            row twice; the others are not read. With an order, an ``x`` that is not contiguous is copied first.

    Returns:
        (S, N), the dtype of ``x``. Differentiable in ``x``, ``weight`` and ``bias``, any number of times.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a rank, size or device does not fit, ``offsets`` does not start at 0 or decreases, or ``order``
            names a row twice.
        IndexError: ``offsets`` ends past S, or ``order`` names a row that does not exist.

    Example:
        >>> x, weight = torch.randn(5, 16), torch.randn(3, 8, 16)
        >>> offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)  # rows 0 and 1 go to expert 0, 2 to 4 to expert 2
        >>> y = pymoe.ops.grouped_linear(x, weight, offsets)
        >>> torch.allclose(y[2:], x[2:] @ weight[2].T, atol=1e-5)
        True
    """
    x, weight, bias = cast_operands(x, weight, bias)  # type: ignore[assignment]
    check_grouped_linear(x, weight, offsets, bias, order=order)
    bounds = offsets.tolist()
    check_offsets(bounds, x.shape[0])
    if order is not None:
        places = order[: bounds[-1]].long()
        check_order(places.tolist(), x.shape[0])
        y = x.new_zeros(x.shape[0], weight.shape[1])
        return y.index_copy(0, places, grouped_linear(x[places], weight, offsets, bias))
    accumulate = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        blocks = []
        for expert in range(weight.shape[0]):
            rows = x[bounds[expert] : bounds[expert + 1]].to(accumulate)
            block = rows @ weight[expert].to(accumulate).T
            if bias is not None:
                block = block + bias[expert].to(accumulate)
            blocks.append(block.to(x.dtype))
        blocks.append(x.new_zeros(x.shape[0] - bounds[-1], weight.shape[1]))
        return torch.cat(blocks)
