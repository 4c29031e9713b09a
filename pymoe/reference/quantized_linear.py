"""quantized_linear: one linear layer per expert with weights in 8, 4 or 2 bits."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe._common.contracts import check_offsets, check_quantized_linear, refuse_second_gradient
from pymoe._common.types import BLOCK, GROUP, PACKED_ONLY, RUNS, QuantizedWeight, cast_operands, number_of, up
from pymoe.reference.grouped_linear import grouped_linear
from pymoe.reference.quantized_weight import dequantize_weight, fused_multiply_add, unpack, wide_weights

LARGEST_CODE = 127 * 256 + 127
"""Largest code of an activation. It consists of two signed bytes, so that a kernel may multiply one byte at a time."""


def quantized_linear(x: Tensor, weight: QuantizedWeight, offsets: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Apply the quantised linear layer of expert e to the rows ``offsets[e]`` to ``offsets[e + 1]``.

    ``y[r] = W[e] @ x[r] + bias[e]`` for the expert e that owns row r, where W are the weights of
    :func:`dequantize_weight`. Rows past ``offsets[-1]`` belong to no expert: their ``y`` is zero and their ``x`` is
    never read.

    A row of ``x`` is rounded to integers of 16 bits in blocks of 128 inputs. The step of a block is the power of two
    with which the block's largest magnitude becomes an integer from 16320 to 32639, but at least 2**-114. An activation
    changes by at most half a step. Above 2**-114 this is at most 1/32639 of the largest magnitude, and bfloat16 values
    of at least 1/64 of the largest do not change. Products with the codes of the weights are added up exactly, as
    integers: over a block of 128 inputs with 8 bits, over a group of 32 with 4 bits. These sums become float32, are
    multiplied by their scales, and are added in the order of the inputs, each step rounded. A NaN or an infinity makes
    the whole row of ``y`` NaN.

    In mxfp4 codes are multiplied as integers of twice their values, -12 to 12, and steps are halved in return. A scale
    that is NaN makes its output NaN in every row. Scales above 2**100, which no trained weights have, may make outputs
    infinite or NaN that would be finite otherwise.

    In fp8 rows are not rounded to integers, but become float32. In each block of 128 inputs, fused multiply-adds in
    float32 add up the products with the values of the codes, in the order of the inputs, beginning with zero; the sums
    are multiplied by their scales and added in the order of the blocks, each step rounded. NaN and infinities propagate
    as in this arithmetic, and a code or scale that is NaN makes its output NaN in every row.

    In affine8, affine4, affine2 and symmetric8 the same is done with the weights, ``scale * code + offset`` or
    ``scale * code`` rounded once, in place of the values of codes; as blocks have no scales, their sums are just added.
    A scale or offset that is NaN or infinite makes its output NaN or infinite in every row.

    The result is exact: the same bits on every processor. A row of ``y`` depends on its own row of ``x`` alone, not on
    the rows around it nor on the number of threads. Inside ``torch.autocast`` ``x`` and ``bias`` are cast as
    ``F.linear`` casts its operands.

    The gradient of ``x`` is that of the products with the weights W themselves, rounded to the dtype of ``x``, as if
    ``x`` had not been rounded: ``grouped_linear(grad, dequantize_weight(weight).to(x.dtype).transpose(1, 2)
    .contiguous(), offsets)``. The native gradient has the same bits as this native product, and decodes only a part of
    one expert's weights at a time (1 MiB for each thread, or 32 inputs if these take more).

    Args:
        x: (S, H), rows sorted by expert as :func:`dispatch` leaves them, or (..., H) if ``offsets`` is None; float32,
            bfloat16 or float16.
        weight: a weight (E, N, H), from :func:`quantize_weight` or :func:`pack_weight`.
        offsets: (E + 1,) int32, starting at 0, non-decreasing, at most S; or None if E is 1 and all rows belong to it.
        bias: (E, N), the dtype of ``x``, or None.

    Returns:
        (S, N), or (..., N) if ``offsets`` is None, the dtype of ``x``. Differentiable in ``x`` and ``bias``, once; the
        weights get no gradient.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a rank, size or device does not fit, or ``offsets`` does not start at 0 or decreases.
        IndexError: ``offsets`` ends past S.
        NotImplementedError: the gradient of ``x`` is differentiated again, or ``x`` or ``bias`` has a tangent of
            forward-mode differentiation. A graph of ``torch.compile``, which cannot see tangents, refuses every call
            inside forward mode.

    Example:
        >>> x, weight = torch.randn(5, 128), torch.randn(2, 64, 128)
        >>> offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> pymoe.ops.quantized_linear(x, pymoe.ops.quantize_weight(weight, bits=8), offsets).shape
        torch.Size([5, 64])
    """
    x, bias = cast_operands(x, bias)  # type: ignore[assignment]
    check_quantized_linear(x, weight, offsets, bias)
    shape = (*x.shape[:-1], weight[2])
    x = x.reshape(math.prod(x.shape[:-1]), weight[3])
    if offsets is None:
        offsets = bounds_of(x)
    check_offsets(offsets.tolist(), x.shape[0], "quantized_linear")
    differentiated = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    multiply = _Product.apply if differentiated else _multiply
    y: Tensor = multiply(x, weight[0], offsets, bias, weight)
    return y.view(shape)


def bounds_of(rows: Tensor) -> Tensor:
    """Return the offsets, (2,) int32, of a single expert that owns all rows."""
    return torch.arange(2, dtype=torch.int32, device=rows.device) * rows.shape[0]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, packed: Tensor, offsets: Tensor, bias: Tensor | None, weight: QuantizedWeight) -> Tensor:
        return _multiply(x, packed, offsets, bias, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, packed, offsets, _, ctx.weight = inputs
        ctx.save_for_backward(packed, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        packed, offsets = ctx.saved_tensors
        needs_x, _, _, needs_bias, _ = ctx.needs_input_grad
        grad_bias = None
        if needs_bias:
            parts = [grad[begin:end].float().sum(dim=0, keepdim=True) for begin, end in pairwise(offsets.tolist())]
            grad_bias = torch.cat([grad.new_zeros(0, grad.shape[1]), *parts]).to(grad.dtype)
        return _InputGrad.apply(grad, packed, offsets, ctx.weight) if needs_x else None, None, None, grad_bias, None


class _InputGrad(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, packed: Tensor, offsets: Tensor, weight: QuantizedWeight) -> Tensor:
        wide = dequantize_weight(QuantizedWeight(packed, *weight[1:]))
        # Autocast may be on where the backward pass runs; it would change the dtypes of the product.
        with torch.autocast(grad.device.type, enabled=False):
            return grouped_linear(grad, wide.to(grad.dtype).transpose(1, 2).contiguous(), offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing, since there is no second derivative."""

    backward = staticmethod(refuse_second_gradient)  # type: ignore[assignment]


def _multiply(x: Tensor, packed: Tensor, offsets: Tensor, bias: Tensor | None, weight: QuantizedWeight) -> Tensor:
    weight = QuantizedWeight(packed, *weight[1:])
    outputs, number, bounds = weight.output_features, number_of(weight), offsets.tolist()
    codes, scale, minimum = (wide_weights(weight), None, None) if weight.format in PACKED_ONLY else unpack(weight)
    rows = x.new_zeros(x.shape[0], outputs)
    for expert in range(len(bounds) - 1):
        begin, end = bounds[expert], bounds[expert + 1]
        right, factors, low = (None if part is None else part[expert, :outputs] for part in (codes, scale, minimum))
        assert right is not None
        if number in RUNS:
            y = _multiply_blocks(x[begin:end].float(), right, factors)
        else:
            assert factors is not None
            y = _multiply_integers(x[begin:end], right, factors, low, number)
        if bias is not None:
            y = y + bias[expert].float()
        rows[begin:end] = y.to(x.dtype)
    return rows


def _multiply_integers(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, number: int) -> Tensor:
    """Return the products of ``x`` with weights in integers or MXFP4, (rows, N), as :func:`quantized_linear` specifies
    them.
    """
    if number == 14:
        codes = codes * 2  # twice a value of MXFP4 is an integer
    integers, steps = round_rows(x)
    inputs = codes.shape[1]
    y = x.new_zeros(x.shape[0], codes.shape[0], dtype=torch.float32)
    for block, first in enumerate(range(0, inputs, BLOCK)):
        last = min(first + BLOCK, inputs)
        total = torch.zeros_like(y)
        for start in range(first, last, last - first if number == 8 else GROUP):
            stop = last if number == 8 else start + GROUP
            left, right = integers[:, start:stop], codes[:, start:stop].double()
            # In float64 the product is exact, whatever the order of its sums. It is then rounded once, to float32.
            dot = (left @ right.T).float()
            total = dot if number == 8 else total + dot * scale[:, start // GROUP]
            if minimum is not None:
                total = total + left.sum(dim=1).float()[:, None] * minimum[:, start // GROUP]
        y = y + total * (steps[:, block, None] / 2 if number == 14 else steps[:, block, None])
    return y * scale[:, 0] if number == 8 else y


def _multiply_blocks(x: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    """Return the products of ``x`` with the weights ``values``, (rows, N), as :func:`quantized_linear` specifies them.

    ``scale`` has a factor for each output and block of inputs; None means that there are no factors. The sums of
    different blocks do not depend on each other, so each step adds the next input of all blocks. Rows are processed in
    parts that fit into a cache.
    """
    outputs, blocks = len(values), up(values.shape[1], BLOCK) // BLOCK
    left = F.pad(x, (0, blocks * BLOCK - x.shape[1])).view(len(x), 1, blocks, BLOCK)
    right = F.pad(values, (0, blocks * BLOCK - values.shape[1])).view(outputs, blocks, BLOCK)
    right = right.permute(2, 0, 1).contiguous()  # (BLOCK, N, blocks): each step reads contiguous memory
    some = max(1, 2**16 // max(1, outputs * blocks))
    return torch.cat([_multiply_rows(rows, right, scale) for rows in left.split(some)])


def _multiply_rows(left: Tensor, right: Tensor, scale: Tensor | None) -> Tensor:
    # Values of e4m3 have 4 significant bits. If x has at most 20 significant bits, and is neither too small nor too
    # large, a product has at most 24 and is exact in float32. Multiplying and adding then give the bits of the fused
    # operation. This is so for x in float16, and for x in bfloat16 within these bounds.
    size = left.abs()
    fit = ((left.view(torch.int32) & 15) == 0) & ((size == 0) | ((size >= 2.0**-117) & (size < 2.0**119)))
    exact = scale is not None and bool(fit.all())
    total = left.new_zeros(left.shape[0], *right.shape[1:])
    for factor, value in zip(left.unbind(3), right, strict=True):
        total = total + factor * value if exact else fused_multiply_add(factor, value, total)
    y = total.new_zeros(total.shape[:2])
    for block in range(total.shape[2]):
        y = y + (total[:, :, block] if scale is None else total[:, :, block] * scale[:, block])
    return y


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of ``x`` to integers times a step, with a separate step for every block of inputs.

    Return the integers, (rows, inputs) float64 with inputs padded to whole blocks, and the steps, (rows, blocks). A
    block with a NaN or an infinity has zeros, and the step NaN.
    """
    rows, inputs = x.shape
    wide = F.pad(x.float(), (0, up(inputs, BLOCK) - inputs)).view(rows, up(inputs, BLOCK) // BLOCK, BLOCK)
    largest = wide.abs().amax(dim=2)
    finite = largest.isfinite()
    exponent = torch.where(finite, largest, 1).clamp(min=2.0**-100).view(torch.int32) >> 23
    steps = (exponent - 14 << 23).view(torch.float32)
    steps = torch.where(largest > LARGEST_CODE * steps, steps * 2, steps)
    integers = torch.where(finite[:, :, None], torch.round(wide / steps[:, :, None]), 0)
    return integers.double().flatten(1), torch.where(finite, steps, torch.nan)
