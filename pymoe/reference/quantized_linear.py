"""quantized_linear: one linear layer per expert with weights in 8 or 4 bits, for inference."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe._common.contracts import check_offsets, check_quantized_linear
from pymoe._common.dtypes import cast_operands
from pymoe._common.types import GROUP, QuantizedWeight, number_of, up
from pymoe.reference.quantized_weight import unpack

BLOCK = 128
"""Number of inputs that share one step, to which a row's activations are rounded."""
LARGEST_CODE = 127 * 256 + 127
"""Largest code of an activation: two signed bytes, so that a kernel may multiply them one after the other."""


def quantized_linear(x: Tensor, weight: QuantizedWeight, offsets: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Apply the quantised linear layer of expert e to the rows ``offsets[e]`` to ``offsets[e + 1]``.

    ``y[r] = W[e] @ x[r] + bias[e]`` for the expert e that owns row r, where W are the weights of
    :func:`dequantize_weight`. Rows past ``offsets[-1]`` belong to no expert: their ``y`` is zero and their ``x`` is
    never read.

    A row of ``x`` is rounded to integers of 16 bits in blocks of 128 inputs. The step of a block is a power of two,
    chosen so that the block's largest magnitude becomes an integer of 16320 to 32639 (steps stop at 2**-114). An
    activation moves by at most 1/32639 of the largest in its block, and bfloat16 values of at least 1/64 of the largest
    do not change. Products with the codes of the weights are added up exactly, as integers: over a block of 128 with 8
    bits, over a group of 32 with 4 bits. These sums become float32 and are multiplied by their scales and added in the
    order of the inputs, each step rounded. A NaN or an infinity makes the whole row of ``y`` NaN.

    The integers of mxfp4 are twice the values, -12 to 12; the 2 is taken out again with the step. A scale that is NaN
    makes its output NaN in every row. Scales above 2**100, which no trained weights have, may make outputs infinite or
    NaN that would be finite otherwise.

    The result is exact: the same bits on every processor. A row of ``y`` depends on its own row of ``x`` alone, not on
    the rows around it nor on the number of threads. Inside ``torch.autocast`` ``x`` and ``bias`` are cast as
    ``F.linear`` casts its operands.

    Args:
        x: (S, H), rows sorted by expert as :func:`dispatch` leaves them, or (..., H) if ``offsets`` is None; float32,
            bfloat16 or float16.
        weight: a weight (E, N, H), from :func:`quantize_weight` or :func:`pack_weight`.
        offsets: (E + 1,) int32, starting at 0, non-decreasing, at most S; or None if E is 1 and all rows belong to it.
        bias: (E, N), the dtype of ``x``, or None.

    Returns:
        (S, N), or (..., N) if ``offsets`` is None, the dtype of ``x``. Not differentiable.

    Raises:
        TypeError: a dtype is not as above, or ``weight`` is not a :class:`QuantizedWeight`.
        ValueError: a rank, size or device does not fit, ``offsets`` does not start at 0 or decreases, or ``x`` or
            ``bias`` requires a gradient while gradients are recorded.
        IndexError: ``offsets`` ends past S.
        NotImplementedError: ``x`` or ``bias`` has a tangent of forward-mode differentiation. A graph of
            ``torch.compile`` does not check this, and drops tangents.
    """
    x, bias = cast_operands(x, bias)  # type: ignore[assignment]
    check_quantized_linear(x, weight, offsets, bias)
    weight = QuantizedWeight(*weight)
    outputs, inputs, number = weight.output_features, weight.input_features, number_of(weight)
    shape = (*x.shape[:-1], outputs)
    x = x.reshape(math.prod(x.shape[:-1]), inputs)
    bounds = [0, x.shape[0]] if offsets is None else offsets.tolist()
    check_offsets(bounds, x.shape[0], "quantized_linear")
    codes, scale, minimum = unpack(weight)
    if number == 14:
        codes = codes * 2  # integers
    rows = x.new_zeros(x.shape[0], outputs)
    for expert in range(len(bounds) - 1):
        begin, end = bounds[expert], bounds[expert + 1]
        integers, steps = round_rows(x[begin:end])
        y = integers.new_zeros(end - begin, outputs, dtype=torch.float32)
        for block, first in enumerate(range(0, up(inputs, GROUP), BLOCK)):
            last = min(first + BLOCK, up(inputs, GROUP))
            total = torch.zeros_like(y)
            for start in range(first, last, last - first if number == 8 else GROUP):
                stop = last if number == 8 else start + GROUP
                left, right = integers[:, start:stop], codes[expert, :outputs, start:stop].double()
                dot = (left @ right.T).float()  # exact in float64 in any order, then rounded once
                total = dot if number == 8 else total + dot * scale[expert, :outputs, start // GROUP]
                if minimum is not None:
                    total = total + left.sum(dim=1).float()[:, None] * minimum[expert, :outputs, start // GROUP]
            y = y + total * (steps[:, block, None] / 2 if number == 14 else steps[:, block, None])
        if number == 8:
            y = y * scale[expert, :outputs, 0]
        if bias is not None:
            y = y + bias[expert].float()
        rows[begin:end] = y.to(x.dtype)
    return rows.view(shape)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of ``x`` as integers (rows, inputs) float64, padded to whole blocks, and steps (rows, blocks)."""
    rows, inputs = x.shape
    wide = F.pad(x.float(), (0, up(inputs, BLOCK) - inputs)).view(rows, up(inputs, BLOCK) // BLOCK, BLOCK)
    largest = wide.abs().amax(dim=2)
    finite = largest.isfinite()
    exponent = torch.where(finite, largest, 1).clamp(min=2.0**-100).view(torch.int32) >> 23
    steps = (exponent - 14 << 23).view(torch.float32)
    steps = torch.where(largest > LARGEST_CODE * steps, steps * 2, steps)
    integers = torch.where(finite[:, :, None], torch.round(wide / steps[:, :, None]), 0)
    return integers.double().flatten(1), torch.where(finite, steps, torch.nan)
