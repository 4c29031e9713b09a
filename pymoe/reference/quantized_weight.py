"""quantize_weight and dequantize_weight: weights of linear layers in 8 or 4 bits, laid out for the kernels.

**8 bits**: one scale for each output row; ``w = scale * (code - 128)`` with codes 1 to 255.
**4 bits**: a scale and a minimum for each group of 32 inputs of an output row; ``w = scale * code + minimum`` with
codes 0 to 15. Both are bfloat16, so that a weight takes 5 bits in all.

Outputs are cut into tiles of :data:`TILE`, and a tile is one run of bytes, in the order in which a kernel reads it::

    8 bits   64 scales (float32), then for every 4 inputs: 64 outputs x 4 codes
    4 bits   for every 32 inputs: 64 scales, 64 minima (bfloat16), then for every 8 inputs: 64 outputs x 4 bytes,
             where byte b holds the code of input b in its lower half and that of input 4 + b in its upper half

The inputs are padded to a multiple of 32, and the outputs to a multiple of 64. Padding stands for zero, except for
inputs at 4 bits: their code is 0, which stands for the minimum of the group. Kernels multiply them by zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from pymoe._common.contracts import check_quantize_weight, check_quantized
from pymoe._common.types import GROUP, TILE, QuantizedWeight, up

ZERO = 128
"""Code of zero at 8 bits."""
LARGEST = 2.0**100
"""Largest magnitude of a weight."""
SMALLEST_STEP = 2.0**-100
"""Least step of a grid: a row or group with a smaller step is constant, namely zero or its minimum."""
CANDIDATES = 8
"""Number of grids that the search tries for a group, in addition to one from its least to its greatest weight."""


def check_values(weight: Tensor) -> None:
    if weight.is_meta or isinstance(weight, FakeTensor):  # they hold no numbers
        return
    bad = ~(weight.abs() <= LARGEST)
    if bool(bad.any()):
        place = ", ".join(str(int(i)) for i in bad.nonzero()[0])
        raise ValueError(
            f"quantize_weight: weight must be finite and at most 2**100 in magnitude, which it is not at [{place}]"
        )


def quantize_weight(weight: Tensor, bits: int) -> QuantizedWeight:
    """Round the weights of E linear layers to 8 or 4 bits.

    The weights are rounded to float32 first. With 8 bits the scale of an output row is its largest magnitude over 127,
    and every weight is within half a scale of its value. With 4 bits a group of 32 inputs starts from a minimum just
    below its least weight and a scale that just reaches its greatest, which leaves every weight within half a scale.
    A search over eight narrower and wider grids, each fitted by least squares, replaces this grid if the sum of squared
    errors becomes smaller. On normally distributed weights the error is 0.7 % (8 bits) or 7.0 % (4 bits; 7.8 % without
    the search) of the weights' norm. The grids follow ``make_qkx2_quants`` of llama.cpp.

    Rows whose largest magnitude is below 127 * 2**-100 become zero, and groups whose range is below 15 * 2**-100 become
    constant: their minimum.

    The packed bytes are exact: they are the same on every processor and for any number of threads.

    Args:
        weight: (E, N, H), any floating dtype, any strides; finite, at most 2**100 in magnitude.
        bits: 8 or 4.

    Returns:
        The packed weight: (E, ceil(N / 64), bytes) uint8 with N and H. Not differentiable.

    Raises:
        TypeError: ``weight`` is not a floating tensor, or ``bits`` not an int.
        ValueError: the rank does not fit, ``bits`` is neither 8 nor 4, or a weight is NaN, infinite or too large.
    """
    check_quantize_weight(weight, bits)
    weight = weight.detach()
    check_values(weight)
    packed = (_pack_rows if bits == 8 else _pack_groups)(weight.float())
    return QuantizedWeight(packed, bits, *weight.shape[1:])


def dequantize_weight(weight: QuantizedWeight) -> Tensor:
    """Return the weights for which a packed weight stands.

    Args:
        weight: from :func:`quantize_weight`.

    Returns:
        (E, N, H) float32, exact: :func:`quantized_linear` multiplies with these weights. Not differentiable.

    Raises:
        TypeError: ``weight`` is not a :class:`QuantizedWeight`, or its bytes are not uint8.
        ValueError: its parts do not fit each other.
    """
    check_quantized("dequantize_weight", "weight", weight)
    codes, scale, minimum = unpack(QuantizedWeight(*weight))
    inputs = codes.shape[2]
    wide = scale.repeat_interleave(GROUP if minimum is not None else max(inputs, 1), dim=2)[:, :, :inputs] * codes
    if minimum is not None:
        wide = wide + minimum.repeat_interleave(GROUP, dim=2)
    return wide[:, : weight[2], : weight[3]].contiguous()


def unpack(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes (E, tiles * 64, inputs), scales and minima, each float32 and padded in the inputs.

    With 8 bits, 128 is subtracted from the codes, the scales are (E, tiles * 64, 1) and the minima None; with 4 bits
    scales and minima are (E, tiles * 64, groups).
    """
    packed, bits, _, input_features = weight
    experts, tiles, _ = packed.shape
    groups = up(input_features, GROUP) // GROUP
    rows, inputs = tiles * TILE, groups * GROUP
    if bits == 8:
        scale = packed[:, :, : 4 * TILE].reshape(-1).view(torch.float32)
        quads = packed[:, :, 4 * TILE :].reshape(experts, tiles, inputs // 4, TILE, 4)
        return quads.transpose(2, 3).reshape(experts, rows, inputs).float() - ZERO, scale.view(experts, rows, 1), None
    by_group = packed.reshape(experts, tiles, groups, 20 * TILE)
    ends = by_group[..., : 4 * TILE].reshape(-1).view(torch.bfloat16).float()
    scale, minimum = ends.view(experts, tiles, groups, 2, TILE).permute(3, 0, 1, 4, 2).reshape(2, experts, rows, groups)
    halves = by_group[..., 4 * TILE :].reshape(experts, tiles, groups, 4, TILE, 4)
    codes = torch.stack([halves & 15, halves >> 4], dim=5)  # (E, tiles, groups, 4, 64, 2, 4)
    return codes.permute(0, 1, 4, 2, 3, 5, 6).reshape(experts, rows, inputs).float(), scale, minimum


def _pack_rows(wide: Tensor) -> Tensor:
    experts, outputs, inputs = wide.shape
    largest = wide.abs().amax(dim=2) if inputs else wide.new_zeros(experts, outputs)
    scale = largest / 127
    scale = torch.where(scale >= SMALLEST_STEP, scale, 0)
    codes = torch.round(wide / torch.where(scale > 0, scale, 1)[:, :, None]).clamp(-127, 127) + ZERO
    below = up(outputs, TILE) - outputs
    codes = F.pad(codes, (0, up(inputs, GROUP) - inputs, 0, below), value=ZERO).to(torch.uint8)
    scale = F.pad(scale, (0, below)).view(experts, (outputs + below) // TILE, TILE)
    quads = codes.view(experts, scale.shape[1], TILE, codes.shape[2] // 4, 4).transpose(2, 3)
    return torch.cat([_bytes(scale), quads.flatten(2)], dim=2)


def _pack_groups(wide: Tensor) -> Tensor:
    experts, outputs, inputs = wide.shape
    whole, rest = divmod(inputs, GROUP)
    parts = [_quantize_groups(wide[:, :, : whole * GROUP].reshape(experts, outputs, whole, GROUP))]
    if rest:
        parts.append(_quantize_groups(wide[:, :, None, whole * GROUP :]))
    below = up(outputs, TILE) - outputs
    scale, minimum = (
        F.pad(torch.cat([part[i] for part in parts], dim=2), (0, 0, 0, below)).to(torch.bfloat16) for i in (0, 1)
    )
    codes = torch.cat([F.pad(part[2], (0, GROUP - part[2].shape[3])) for part in parts], dim=2)
    codes = F.pad(codes, (0, 0, 0, 0, 0, below)).to(torch.uint8)
    shape = experts, (outputs + below) // TILE, TILE, codes.shape[2]
    ends = torch.stack([scale, minimum], dim=3).view(*shape, 2).permute(0, 1, 3, 4, 2)
    lower, upper = codes.view(*shape, GROUP // 8, 2, 4).unbind(5)
    halves = (lower | upper << 4).permute(0, 1, 3, 4, 2, 5)
    return torch.cat([_bytes(ends.flatten(3)), halves.flatten(3)], dim=3).flatten(2)


def _bytes(values: Tensor) -> Tensor:
    """Return the bytes of the elements, along the last dimension."""
    *sizes, last = values.shape
    return values.reshape(-1).view(torch.uint8).view(*sizes, last * values.element_size())


def _quantize_groups(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale (E, N, G), minimum (E, N, G) and codes (E, N, G, count) of groups (E, N, G, count).

    Every step is one IEEE operation on elements, and sums run in the order of the inputs, so a kernel gets the same
    bits.
    """
    least, greatest = values.amin(dim=3) + 0.0, values.amax(dim=3)  # no negative zero
    minimum = _round_away(least, up=False)
    scale = _round_away((greatest - minimum) / 15, up=True)
    scale = torch.where(scale >= SMALLEST_STEP, scale, 0)
    best = (scale, minimum, *_codes(values, scale, minimum))
    above = values - least[..., None]
    reach = greatest - least
    inverse_reach = _inverse(torch.where(reach >= SMALLEST_STEP, reach, 0))
    for candidate in range(CANDIDATES):
        steps = inverse_reach * (14.0 + 0.4 * candidate)
        fitted = _fit(above, torch.round(above * steps[..., None]).clamp(0, 15))
        scale, minimum = fitted[0].bfloat16().float(), (least + fitted[1]).bfloat16().float()
        usable = (inverse_reach > 0) & (scale >= SMALLEST_STEP)
        scale = torch.where(usable, scale, best[0])
        minimum = torch.where(usable, minimum, best[1])
        codes, error = _codes(values, scale, minimum)
        better = usable & (error < best[3])
        trial = (scale, minimum, codes, error)
        best = tuple(  # type: ignore[assignment]
            torch.where(better if new.dim() == 3 else better[..., None], new, old)
            for new, old in zip(trial, best, strict=True)
        )
    return best[:3]


def _fit(above: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and minimum that fit ``scale * codes + minimum`` to ``above`` by least squares."""
    count = float(codes.shape[3])
    sum_codes, sum_squares = _sum(codes), _sum(codes * codes)
    sum_values, sum_products = _sum(above), _sum(above * codes)
    determinant = count * sum_squares - sum_codes * sum_codes
    determinant = torch.where(determinant > 0, determinant, 1)
    scale = (count * sum_products - sum_values * sum_codes) / determinant
    return scale, (sum_squares * sum_values - sum_codes * sum_products) / determinant


def _codes(values: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes of a grid and the sum of their squared errors."""
    inverse = _inverse(scale)
    codes = torch.round((values - minimum[..., None]) * inverse[..., None]).clamp(0, 15)
    error = values - (scale[..., None] * codes + minimum[..., None])
    return codes, _sum(error * error)


def _inverse(step: Tensor) -> Tensor:
    """Return 1 / step, or 0 if the step is 0."""
    return torch.where(step > 0, torch.where(step > 0, step, 1).reciprocal(), 0)


def _sum(values: Tensor) -> Tensor:
    """Add up the last dimension from first to last."""
    total = torch.zeros_like(values[..., 0])
    for value in values.unbind(-1):
        total = total + value
    return total


def _round_away(value: Tensor, *, up: bool) -> Tensor:
    """Round float32 to bfloat16, towards plus infinity or towards minus infinity; the result is float32."""
    bits = value.contiguous().view(torch.int32)
    away = ((bits & 0xFFFF) != 0) & ((value > 0) if up else (value < 0))
    return ((bits & -0x10000) + torch.where(away, 0x10000, 0).int()).view(torch.float32)
