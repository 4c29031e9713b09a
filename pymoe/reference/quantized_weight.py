"""Weights of linear layers in 8, 4 or 2 bits, in the kernels' layout: rounded here, or taken over from a checkpoint.

**int8**: one scale for each output row; ``w = scale * (code - 128)`` with codes 1 to 255.
**int4**: a scale and a minimum for each group of 32 inputs of an output row; ``w = scale * code + minimum`` with
codes 0 to 15. Scale and minimum are integers of 6 bits, s and m, times the float16 factors d and dmin, which the 8
groups of a super-block share, and times a power of two for the row: ``scale = 2**(p - 127) * d * s`` and
``minimum = -2**(p - 127) * dmin * m``. Super-blocks with p = 127 are the blocks of llama.cpp's Q4_K. A weight takes
4.5 bits in all if super-blocks are full, and a row another 8 bits for p.
**mxfp4**: a scale for each group of 32 inputs of an output row; ``w = 2**(scale - 127) * value``. A code has the sign
of the value in its upper bit and its magnitude in the other three: 0, 1/2, 1, 3/2, 2, 3, 4 or 6 (e2m1). A weight
takes 4.25 bits in all. The scale is a byte (e8m0); 255 is NaN. OCP Microscaling Formats (MX) Specification 1.0.
**fp8**: a scale for each block of 128 inputs of an output row; ``w = scale * value`` with float32 scales and codes of
8 bits (e4m3: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa; magnitudes are 0 and, subnormals included,
2**-9 to 448; there is no infinity; 0x7F and 0xFF are NaN). A weight takes 8.25 bits in all. Checkpoints such as those
of DeepSeek-V3 have one scale for 128 outputs and 128 inputs; it is repeated for each of these outputs.
**affine8**, **affine4**, **affine2**: a scale and an offset for each group of inputs of an output row;
``w = scale * code + offset``, rounded once, to float32, with float32 scales and offsets of any sign. With 8 bits, codes
are 0 to 255 and groups have 32 inputs, and a weight takes 10 bits in all; with 4 bits, codes are 0 to 15 and groups
have 128 inputs, and a weight takes 4.5 bits; with 2 bits, codes are 0 to 3 and groups have 16 inputs, and a weight
takes 6 bits. pymoe rounds no weights to these formats: they represent, without loss, weights that other programs have
rounded. Q8_0, Q5_0, Q5_1, Q5_K, Q4_0 and Q4_1 of GGUF files fit into affine8; integers of 4 bits with groups of 128
inputs or more, as in AWQ and GPTQ, fit into affine4; Q2_K of GGUF files fits into affine2.
**symmetric8**: a scale for each group of 16 inputs of an output row; ``w = scale * code``, rounded once, to float32,
with float32 scales of any sign and codes -128 to 127. A weight takes 10 bits in all. pymoe rounds no weights to this
format, either. Q6_K, Q3_K, IQ4_NL and IQ4_XS of GGUF files fit into it.

Outputs are cut into tiles of :data:`TILE`, and a tile is contiguous bytes, in the order in which a kernel reads them::

    int8     64 scales (float32), then for every 4 inputs: 64 outputs x 4 codes
    int4     64 powers p (bytes), then for every 256 inputs: 64 d, 64 dmin (float16), 3 x 64 words of 32 bits, and for
             every 8 of them: 64 outputs x 4 bytes, where byte b has the code of input b in its lower half and that
             of input 4 + b in its upper half
    mxfp4    for every 32 inputs: 64 scales (bytes), then codes as in int4
    fp8      for every 128 inputs: 64 scales (float32), then for every input: 64 codes
    affine8  for every 32 inputs: 64 scales, 64 offsets (float32), then for every input: 64 codes
    affine4  for every 128 inputs: 64 scales, 64 offsets (float32), then for every 2 inputs: 64 bytes, each with the
             code of the first input in its lower half and that of the second in its upper half
    affine2  for every 16 inputs: 64 scales, 64 offsets (float32), then for every 4 inputs: 64 bytes, each with the
             four codes, the first in its lowest bits
    symmetric8  for every 16 inputs: 64 scales (float32), then for every input: 64 codes

The three words of an output are 96 bits, from the lowest bit of the first word on: 8 integers s and then 8 integers m.
If the last super-block has fewer than 8 groups, the s and m of the missing groups are zero, and these have no codes.
Inputs are padded to a multiple of 32, and outputs to a multiple of 64. Padding represents zero, except for inputs in
int4 and the affine formats: their code 0 represents the group's minimum or offset, and kernels multiply it by zero.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from pymoe._common.contracts import check_pack_weight, check_quantize_weight, check_quantized
from pymoe._common.types import (
    BLOCK,
    FORMATS,
    GROUP,
    RUNS,
    SUPER,
    SUPER_BYTES,
    TILE,
    QuantizedWeight,
    WeightFormat,
    bytes_of_tile,
    number_of,
    packed_shape,
    up,
)

ZERO = 128
"""Code of zero in int8."""
LARGEST = 2.0**100
"""Largest magnitude of a weight that :func:`quantize_weight` accepts."""
SMALLEST_STEP = 2.0**-100
"""Least step of a grid: a row, group or block that needs a smaller step becomes constant: zero, or its minimum."""
CANDIDATES = 6
"""Number of grids that the search tries for a group, in addition to one from its least to its greatest weight."""
LARGEST_FIELD = 63
"""Largest of the integers of 6 bits that represent scales and minima in int4."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes of mxfp4."""
LARGEST_E4M3 = 448.0
"""Largest value of a code of fp8."""
DTYPES = {18: torch.float8_e4m3fn, 22: torch.uint8, 24: torch.uint8, 28: torch.uint8, 38: torch.int8}
"""Dtypes of the codes, by number, for the formats of :data:`RUNS`."""


def check_values(weight: Tensor) -> None:
    if weight.is_meta or isinstance(weight, FakeTensor):  # meta and fake tensors have no values
        return
    bad = ~(weight.abs() <= LARGEST)
    if bool(bad.any()):
        place = ", ".join(str(int(i)) for i in bad.nonzero()[0])
        raise ValueError(
            f"quantize_weight: weight must be finite and at most 2**100 in magnitude, which it is not at [{place}]"
        )


def quantize_weight(weight: Tensor, bits: int, format: WeightFormat = "int") -> QuantizedWeight:
    """Round the weights of E linear layers to 8 or 4 bits.

    The weights are first rounded to float32. With 8 bits, each output row has one scale, its largest magnitude over
    127, and a weight changes by at most half the scale. With 4 bits, each group of 32 inputs has a grid of 16 values,
    at first from the group's least weight (zero if that weight is positive) to its greatest. Six slightly wider or
    narrower grids, each fitted again by least squares, are tried as well, and the grid with the smallest sum of squared
    errors is kept. Eight groups form a super-block: their scales are rounded to integers of 6 bits, in units of 1/63 of
    the largest scale in the super-block, and their minima likewise. For each group, the rounded scale and its two
    neighbours are tried (for the neighbours, the minimum is fitted again), and the one with the smallest sum of squared
    errors is kept. This follows llama.cpp's ``quantize_row_q4_K_ref``. On normally distributed weights the error is
    7.1 % of their norm with 4 bits; with 8 bits it grows with the rows, from 0.7 % (128 inputs) to 0.9 % (7168).

    With 8 bits, rows whose largest magnitude is below 127 * 2**-100 become zero. With 4 bits, the groups of a
    super-block become constant if all its weights are much smaller than the largest of the row: below 2**-34 to 2**-36
    of that weight, depending on its value and on the signs of the others.

    With the format "mxfp" the scale of a group of 32 inputs is the greatest power of two that is at most a quarter of
    its largest magnitude (2**-127 at least), and weights become the nearest values of the grid, which ends at 6 times
    the scale; a weight halfway between two values takes the one with the even code. This is the conversion of section
    6.3 of the OCP Microscaling Formats (MX) Specification 1.0. The error is 11.5 % on normally distributed weights, so
    use this format only for weights that a checkpoint already stores in it, see :func:`pack_weight`.

    With the format "fp" the scale of a block of 128 outputs and 128 inputs (fewer at the ends) is its largest magnitude
    over 448, and each weight divided by its scale becomes the nearest value of e4m3; halfway between two values, the
    one with the even code. Blocks whose largest magnitude is below 448 * 2**-100 become zero. DeepSeek-V3 has weights
    in this format; its ``act_quant`` rounds activations in the same way. The error is 2.6 % on normally distributed
    weights, more than with integers of 8 bits, so use this format, too, only for weights of checkpoints.

    The packed bytes are the same on every processor and for any number of threads.

    Args:
        weight: (E, N, H), any floating dtype, any strides; finite, at most 2**100 in magnitude.
        bits: 8 or 4; 4 for "mxfp", 8 for "fp".
        format: "int", "mxfp" or "fp". Weights on the meta device, which have no values, may also be laid out as
            "affine" with 8, 4 or 2 bits, or as "symmetric" with 8.

    Returns:
        The packed weight: (E, ceil(N / 64), bytes) uint8 with N and H. Not differentiable.

    Raises:
        TypeError: ``weight`` is not a floating tensor, ``bits`` not an int, or ``format`` not a str.
        ValueError: the rank does not fit, ``bits`` and ``format`` are not as above, or a weight is not as above.

    Example:
        >>> weight = torch.randn(4, 64, 128)  # E linear layers, (E, N, H)
        >>> packed = pymoe.ops.quantize_weight(weight, bits=4)
        >>> weight.nbytes, packed.packed.nbytes
        (131072, 20736)
    """
    check_quantize_weight(weight, bits, format)
    weight = weight.detach()
    check_values(weight)
    experts, outputs, inputs = weight.shape
    number = FORMATS[format, bits]
    if weight.is_meta:
        packed = weight.new_empty(packed_shape(number, outputs, inputs, experts), dtype=torch.uint8)
    else:
        packed = {8: _pack_rows, 4: _pack_int4, 14: _pack_mxfp4, 18: _pack_fp8}[number](weight.float())
    return QuantizedWeight(packed, bits, outputs, inputs, format)


def pack_weight(codes: Tensor, scales: Tensor, offsets: Tensor | None = None, bits: int = 8) -> QuantizedWeight:
    """Pack the already quantised weights of E linear layers for the kernels, without rounding them again.

    With ``offsets`` the format is "affine", and a weight is ``scale * code + offset``: there is a scale and an offset
    for each output and G inputs, where G is 32 with 8 bits, 128 with 4 bits, and 16 with 2 bits. If groups are larger,
    or whole rows share a scale, repeat scales and offsets. Where another program has a zero point z,
    ``scale * (code - z)``, the offset is ``-scale * z``, exact if the scale is a 16-bit float and z has at most 8 bits.

    Without ``offsets`` the dtype of the codes determines the format:

    - uint8: MXFP4 in the layout of GPT-OSS (``gate_up_proj_blocks`` and ``gate_up_proj_scales``). Byte j of a group of
      32 inputs has the code of input 2j in its lower half and that of input 2j + 1 in its upper half.
    - int8: "symmetric", where a weight is ``scale * code``, with a scale for each output and 16 inputs. If groups are
      larger, repeat scales.
    - float8_e4m3fn: FP8 in the layout of DeepSeek-V3 and Qwen3 (``weight`` and ``weight_scale_inv``), with a scale for
      each block of 128 outputs and 128 inputs, of which the last may be cut short; or with a scale for each output and
      128 inputs. If there is only one scale for each output, (E, N, 1), expand it to all blocks of inputs.

    Every code, scale and offset is kept, NaN included (a scale of 255 in MXFP4): :func:`unpack_weight` returns it.

    Args:
        codes: with offsets (E, N, H) uint8, below 2**bits; for MXFP4 (E, N, H / 32, 16) uint8; for
            "symmetric" (E, N, H) int8; for FP8 (E, N, H) float8_e4m3fn; any strides.
        scales: with offsets (E, N, ceil(H / G)) float32; for MXFP4 (E, N, H / 32) uint8, exponents of two plus 127; for
            "symmetric" (E, N, ceil(H / 16)) float32; for FP8 (E, ceil(N / 128), ceil(H / 128)) or (E, N, ceil(H / 128))
            float32, the factors of the codes' values; any strides.
        offsets: (E, N, ceil(H / G)) float32, any strides; or None.
        bits: 8, 4 or 2 with offsets; must be 8 without them, also for MXFP4.

    Returns:
        The packed weight, in the format "affine", "mxfp", "symmetric" or "fp".

    Raises:
        TypeError: an argument is not a tensor, its dtype is not as above, or ``bits`` is not an int.
        ValueError: a rank, size or device does not fit, ``bits`` is not as above, or a code has more bits.

    Example:
        >>> codes = torch.randint(0, 256, (4, 64, 32), dtype=torch.uint8)
        >>> scales, offsets = torch.rand(4, 64, 1), torch.randn(4, 64, 1)  # for each output and 32 inputs
        >>> weight = pymoe.ops.pack_weight(codes, scales, offsets, bits=8)
        >>> weight.format, torch.equal(pymoe.ops.unpack_weight(weight)[0], codes)
        ('affine', True)
    """
    check_pack_weight(codes, scales, offsets, bits)
    if offsets is not None:
        _check_codes(codes, bits)
        _, outputs, inputs = codes.shape
        packed = _runs_in_tiles(FORMATS["affine", bits], (scales, offsets), codes)
        return QuantizedWeight(packed, bits, outputs, inputs, "affine")
    if codes.dtype == torch.int8:
        _, outputs, inputs = codes.shape
        packed = _runs_in_tiles(FORMATS["symmetric", 8], (scales,), codes.view(torch.uint8))
        return QuantizedWeight(packed, 8, outputs, inputs, "symmetric")
    if codes.dtype == torch.float8_e4m3fn:
        _, outputs, inputs = codes.shape
        if scales.shape[1] != outputs:
            scales = scales.repeat_interleave(BLOCK, dim=1)[:, :outputs]
        packed = _runs_in_tiles(FORMATS["fp", 8], (scales,), codes.view(torch.uint8))
        return QuantizedWeight(packed, 8, outputs, inputs, "fp")
    experts, outputs, groups = scales.shape
    number = FORMATS["mxfp", 4]
    packed = codes.new_empty(packed_shape(number, outputs, groups * GROUP, experts))
    for expert in range(experts):  # one expert at a time, since unpacked codes take twice the memory
        pairs = codes[expert : expert + 1]
        wide = torch.stack([pairs & 15, pairs >> 4], dim=4).flatten(3)
        packed[expert : expert + 1] = _groups_in_tiles(scales[expert : expert + 1, ..., None], wide)
    return QuantizedWeight(packed, 4, outputs, groups * GROUP, "mxfp")


def _check_codes(codes: Tensor, bits: int) -> None:
    # All codes of 8 bits are valid, and meta and fake tensors have no values.
    if bits == 8 or codes.is_meta or isinstance(codes, FakeTensor):
        return
    most = 2**bits - 1
    above = codes > most
    if bool(above.any()):
        place = above.nonzero()[0].tolist()
        raise ValueError(
            f"pack_weight: codes must be at most {most} with {bits} bits, got {int(codes[tuple(place)])} at {place}"
        )


def unpack_weight(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    """Return the codes, scales and offsets from which :func:`pack_weight` made a weight.

    In FP8 there is a row of scales for each output. If :func:`pack_weight` was called with a scale for each block,
    ``scales[:, ::128]`` are those scales.

    Args:
        weight: in the format "affine", "symmetric", "mxfp" or "fp".

    Returns:
        Codes, scales and, for "affine", offsets; exact. "affine": (E, N, H) uint8 and twice (E, N, ceil(H / G))
        float32. "symmetric": (E, N, H) int8 and (E, N, ceil(H / 16)) float32. "mxfp": (E, N, H / 32, 16) and
        (E, N, H / 32), both uint8; H is rounded up to a multiple of 32. "fp": (E, N, H) float8_e4m3fn and
        (E, N, ceil(H / 128)) float32.

    Raises:
        TypeError: ``weight`` is not a :class:`QuantizedWeight`, or a field has the wrong type or dtype.
        ValueError: its fields do not agree, or it is in a format that :func:`pack_weight` does not make.

    Example:
        >>> codes, scales = torch.zeros(4, 64, 32, dtype=torch.int8), torch.ones(4, 64, 2)
        >>> [part.shape for part in pymoe.ops.unpack_weight(pymoe.ops.pack_weight(codes, scales))]
        [torch.Size([4, 64, 32]), torch.Size([4, 64, 2])]
    """
    check_quantized("unpack_weight", "weight", weight)
    weight = QuantizedWeight(*weight)
    number, rows = number_of(weight), slice(weight.output_features)
    if number in RUNS:
        codes, *ends = _runs_of_tiles(number, weight.packed, weight.input_features)
        inputs, (size, _) = weight.input_features, RUNS[number]
        runs = up(inputs, size) // size
        codes = codes[:, rows, :inputs].contiguous().view(DTYPES[number])
        return codes, *(end[:, rows, :runs].contiguous() for end in ends)
    if weight.format != "mxfp":
        raise ValueError(
            f"unpack_weight: weight.format must be 'affine', 'symmetric', 'mxfp' or 'fp', got {weight.format!r}"
        )
    heads, codes = _groups_of_tiles(weight.packed, 1)
    pairs = codes.unflatten(3, (GROUP // 2, 2))[:, rows]
    return pairs[..., 0] | pairs[..., 1] << 4, heads[:, rows, :, 0].contiguous()


def dequantize_weight(weight: QuantizedWeight) -> Tensor:
    """Return the weights that a packed weight represents.

    Args:
        weight: from :func:`quantize_weight` or :func:`pack_weight`.

    Returns:
        (E, N, H) float32, exact: W in :func:`quantized_linear`, each weight rounded once. Not differentiable.

    Raises:
        TypeError: ``weight`` is not a :class:`QuantizedWeight`, or a field has the wrong type or dtype.
        ValueError: its fields do not agree.

    Example:
        >>> weight = torch.randn(4, 64, 32)
        >>> restored = pymoe.ops.dequantize_weight(pymoe.ops.quantize_weight(weight, bits=8))
        >>> restored.shape, (restored - weight).abs().max() < 0.05
        (torch.Size([4, 64, 32]), tensor(True))
    """
    check_quantized("dequantize_weight", "weight", weight)
    weight = QuantizedWeight(*weight)
    return wide_weights(weight)[:, : weight.output_features, : weight.input_features].contiguous()


def wide_weights(weight: QuantizedWeight) -> Tensor:
    """Return the weights, (E, tiles * 64, inputs) float32, with outputs and inputs padded."""
    codes, scale, minimum = unpack(weight)
    inputs, number = codes.shape[2], number_of(weight)
    # ``alike`` is the number of successive inputs that share a scale.
    alike = max(inputs, 1) if number == 8 else RUNS[number][0] if number in RUNS else GROUP

    def by_input(ends: Tensor) -> Tensor:
        return ends.repeat_interleave(alike, dim=-1)[..., :inputs]

    if weight.format != "affine":
        wide = by_input(scale) * codes
        return wide if minimum is None else wide + by_input(minimum)
    assert minimum is not None
    for expert in range(codes.shape[0]):  # one expert at a time, since this takes many bytes per weight
        codes[expert] = fused_multiply_add(by_input(scale[expert]), codes[expert], by_input(minimum[expert]))
    return codes


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return ``a * b + c`` of float32 tensors with one rounding, the fusedMultiplyAdd of IEEE 754."""
    product, addend = a.double() * b.double(), c.double()  # the product is exact: its 48 bits fit into a float64
    total = product + addend
    part = total - product
    # The difference to the larger operand is exact, so an inexact sum fails one of these. Most sums are exact.
    if torch.equal(part, addend) and torch.equal(total - addend, product):
        return total.float()
    error = (product - (total - part)) + (addend - part)  # Knuth's two-sum: the exact error of the sum.
    # If the sum was rounded to a float64 whose last bit is 0, take its neighbour on the other side of the exact sum.
    # Rounding that to float32 gives the exact sum, rounded (Boldo and Melquiond, "Emulation of FMA and ...", 2008).
    bits = total.view(torch.int64)
    even = (error != 0) & total.isfinite() & ((bits & 1) == 0)
    return torch.where(even, bits + torch.where((error > 0) == (total > 0), 1, -1), bits).view(torch.float64).float()


def unpack(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes, the scales, and the minima or offsets of a weight, all in float32.

    Codes are (E, tiles * 64, inputs) with inputs padded; those of int8 have 128 subtracted, and those of mxfp4 and fp8
    are the values that they represent. Scales are (E, tiles * 64, 1) in int8, and (E, tiles * 64, groups) in the other
    formats. The third result has the shape of the scales: minima in int4, offsets in the affine formats; else None.
    """
    packed, number = weight.packed, number_of(weight)
    experts, tiles, _ = packed.shape
    rows, inputs = tiles * TILE, up(weight.input_features, GROUP)
    if number == 8:
        scale = packed[:, :, : 4 * TILE].reshape(-1).view(torch.float32)
        quads = packed[:, :, 4 * TILE :].reshape(experts, tiles, inputs // 4, TILE, 4)
        return quads.transpose(2, 3).reshape(experts, rows, inputs).float() - ZERO, scale.view(experts, rows, 1), None
    if number == 14:
        heads, groups = _groups_of_tiles(packed, 1)
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
        return values[groups.flatten(2).int()], power_of_two(heads[..., 0]), None
    if number in RUNS:
        codes, scale, *offset = _runs_of_tiles(number, packed, inputs)
        return codes.view(DTYPES[number]).float(), scale, offset[0] if offset else None
    codes, factors, fields, powers = _unpack_supers(packed, inputs // GROUP)
    ends = (factors * power_of_two(powers)[..., None, None])[..., None] * fields
    scales, minima = ends.transpose(2, 3).flatten(3)[..., : inputs // GROUP].unbind(2)
    return codes.flatten(2).float(), scales, -minima


def pack_q4_k(blocks: Tensor) -> QuantizedWeight:
    """Pack weights in llama.cpp's Q4_K format for the kernels.

    This is lossless: a super-block of int4 has the same scales, minima and codes as a Q4_K block. A block has 256
    inputs: the float16 d and dmin, 12 bytes with 8 integers s and 8 integers m of 6 bits, and 128 bytes of codes. Every
    32 bytes of codes belong to two groups: byte j has the code of input j of the first group in its lower half, and
    that of the second group in its upper half (``block_q4_K`` of ``ggml-common.h``).

    Args:
        blocks: (E, N, B, 144) uint8, for 256 * B inputs; any strides.

    Returns:
        The packed weight, in the format "int" with 4 bits.
    """
    _, outputs, supers, _ = blocks.shape
    rows = F.pad(blocks, (0, 0, 0, 0, 0, up(outputs, TILE) - outputs))
    halves = rows[..., 16:].unflatten(3, (SUPER // 2, 1, GROUP))
    codes = torch.cat([halves & 15, halves >> 4], dim=4).flatten(2, 4)
    factors = rows[..., :4].contiguous().view(torch.float16)
    powers = rows.new_full(rows.shape[:2], 127)  # p = 127: the power of a row is 2**0
    packed = _pack_supers(codes, factors, fields_of_q4_k(rows[..., 4:16]), powers)
    return QuantizedWeight(packed, 4, outputs, supers * SUPER * GROUP)


def fields_of_q4_k(fields: Tensor) -> Tensor:
    """Unpack the 12 bytes of Q4_K or Q5_K with a scale s and a minimum m of 6 bits for each of 8 groups.

    Returns (..., 2, 8) uint8: s, then m. The lower 6 bits of bytes 0 to 3 are s of groups 0 to 3, those of bytes 4 to 7
    are m of groups 0 to 3. Bytes 8 to 11 have the lower 4 bits of s and m of groups 4 to 7, s in the lower
    nibble and m in the upper; the upper 2 bits of s and m are those of bytes 0 to 3 (s) and 4 to 7 (m).
    """
    first, second, last = fields.unflatten(-1, (3, 4)).unbind(-2)
    s = torch.cat([first & 63, last & 15 | first >> 6 << 4], dim=-1)
    m = torch.cat([second & 63, last >> 4 | second >> 6 << 4], dim=-1)
    return torch.stack([s, m], dim=-2)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2**(e - 127) in float32 for e8m0 exponents e (bytes): 2**-127 to 2**127, and NaN for 255."""
    bits = exponents.int()
    ends = (bits == 0) | (bits == 255)  # 0 gives 2**-127, a subnormal, and 255 NaN: both need a bit of the mantissa
    return (bits << 23 | torch.where(ends, 1 << 22, 0).int()).view(torch.float32)


def _unpack_supers(packed: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the parts of an int4 weight with ``groups`` groups for each row, in B super-blocks.

    Returns:
        codes (E, rows, groups, 32) uint8, factors (E, rows, B, 2) float32, the integers of 6 bits (E, rows, B, 2, 8)
        float32, and the powers (E, rows) uint8.
    """
    experts, tiles, size = packed.shape
    supers, rows = up(groups, SUPER) // SUPER, (experts, tiles * TILE)
    whole = SUPER_BYTES + SUPER * TILE * GROUP // 2
    by_super = F.pad(packed[:, :, TILE:], (0, TILE + supers * whole - size)).view(experts, tiles, supers, whole)
    factors = by_super[..., : 4 * TILE].reshape(-1).view(torch.float16).view(experts, tiles, supers, 2, TILE)
    words = by_super[..., 4 * TILE : SUPER_BYTES].reshape(-1).view(torch.int32).view(experts, tiles, supers, 3, TILE)
    bits = words[..., None, :] >> torch.arange(32, dtype=torch.int32, device=packed.device)[:, None] & 1
    sixes = bits.reshape(experts, tiles, supers, 2, SUPER, 6, TILE).float()
    fields = (sixes * 2.0 ** torch.arange(6, device=packed.device)[:, None]).sum(5)  # the sum is exact in any order
    _, codes = _groups_of_tiles(by_super[..., SUPER_BYTES:].flatten(2), 0)
    return (
        codes[:, :, :groups],
        factors.permute(0, 1, 4, 2, 3).reshape(*rows, supers, 2).float(),
        fields.permute(0, 1, 5, 2, 3, 4).reshape(*rows, supers, 2, SUPER),
        packed[:, :, :TILE].reshape(rows),
    )


def _pack_supers(codes: Tensor, factors: Tensor, fields: Tensor, powers: Tensor) -> Tensor:
    """Do the inverse of :func:`_unpack_supers`; the rows must fill whole tiles."""
    experts, rows, groups, _ = codes.shape
    tiles, supers = rows // TILE, factors.shape[2]
    halves = factors.half().view(experts, tiles, TILE, supers, 2).permute(0, 1, 3, 4, 2)
    sixes = fields.to(torch.uint8).flatten(3).unflatten(3, (4, 4)).unbind(4)
    # Four fields of 6 bits fill three bytes.
    three = torch.stack([sixes[i] >> 2 * i | sixes[i + 1] << 6 - 2 * i for i in range(3)], dim=4)
    words = three.view(experts, tiles, TILE, supers, 3, 4).permute(0, 1, 3, 4, 2, 5)
    head = torch.cat([_bytes(halves.flatten(3)), words.flatten(3)], dim=3)
    filled = F.pad(codes, (0, 0, 0, supers * SUPER - groups)).to(torch.uint8)
    by_super = _groups_in_tiles(filled[..., :0], filled).view(experts, tiles, supers, SUPER * TILE * GROUP // 2)
    whole = torch.cat([head, by_super], dim=3).flatten(2)[..., : bytes_of_tile(4, groups * GROUP) - TILE]
    return torch.cat([powers.view(experts, tiles, TILE), whole], dim=2)


def _groups_of_tiles(packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the bytes before each group's codes, (E, rows, groups, heads), and the codes, (E, rows, groups, 32) uint8.

    ``packed`` are tiles of groups; ``heads`` is the number of bytes that precede the codes of a group and output.
    """
    experts, tiles, _ = packed.shape
    head_bytes = heads * TILE
    group_bytes = head_bytes + TILE * GROUP // 2
    groups = packed.shape[2] // group_bytes
    by_group = packed.reshape(experts, tiles, groups, group_bytes)
    first = by_group[..., :head_bytes].reshape(experts, tiles, groups, heads, TILE)
    halves = by_group[..., head_bytes:].reshape(experts, tiles, groups, GROUP // 8, TILE, 4)
    codes = torch.stack([halves & 15, halves >> 4], dim=5)  # codes: (E, tiles, groups, 4, 64, 2, 4)
    rows = (experts, tiles * TILE, groups)
    return first.permute(0, 1, 4, 2, 3).reshape(*rows, heads), codes.permute(0, 1, 4, 2, 3, 5, 6).reshape(*rows, GROUP)


def _groups_in_tiles(heads: Tensor, codes: Tensor) -> Tensor:
    """Do the inverse of :func:`_groups_of_tiles`. Rows need not fill whole tiles: zeros are appended."""
    experts, outputs, groups, _ = codes.shape
    heads, codes = (F.pad(part, (0, 0, 0, 0, 0, up(outputs, TILE) - outputs)) for part in (heads, codes))
    shape = experts, up(outputs, TILE) // TILE, TILE, groups
    first = heads.view(*shape, heads.shape[3]).permute(0, 1, 3, 4, 2).flatten(3)
    lower, upper = codes.view(*shape, GROUP // 8, 2, 4).unbind(5)
    halves = (lower | upper << 4).permute(0, 1, 3, 4, 2, 5)
    return torch.cat([first, halves.flatten(3)], dim=3).flatten(2)


def _runs_of_tiles(number: int, packed: Tensor, input_features: int) -> list[Tensor]:
    """Return the codes of a weight in a format of :data:`RUNS`, then its scales and, in "affine", its offsets.

    Codes are (E, rows, inputs) uint8 with inputs padded; scales and offsets are (E, rows, runs) float32.
    """
    experts, tiles, _ = packed.shape
    size, heads = RUNS[number]
    bits = number % 10
    line, head = TILE * bits // 8, TILE * 4 * heads  # line: bytes of an input's codes; head: bytes before a run's codes
    padded = up(input_features, GROUP)
    whole, rest = padded // size, padded % size  # not divmod(), because Dynamo cannot trace it for sizes
    first, last = packed.split([whole * (head + size * line), head + rest * line if rest else 0], dim=2)
    runs = first.reshape(experts, tiles, whole, head + size * line)
    numbers = torch.cat([runs[..., :head].flatten(2), last[..., :head]], dim=2).reshape(-1).view(torch.float32)
    codes = torch.cat([runs[..., head:].flatten(2), last[..., head:]], dim=2)
    if line < TILE:
        together = codes.view(experts, tiles, padded * bits // 8, TILE)
        codes = torch.stack([together >> place & 2**bits - 1 for place in range(0, 8, bits)], dim=3)
    by_input = codes.view(experts, tiles, padded, TILE)
    by_run = numbers.view(experts, tiles, whole + (rest > 0), heads, TILE).permute(3, 0, 1, 4, 2)
    return [by_input.transpose(2, 3).flatten(1, 2), *by_run.flatten(2, 3).unbind()]


def _runs_in_tiles(number: int, heads: tuple[Tensor, ...], codes: Tensor) -> Tensor:
    """Do the inverse of :func:`_runs_of_tiles`. Rows and inputs need not be padded: zeros are appended."""
    experts, outputs, inputs = codes.shape
    size, _ = RUNS[number]
    bits = number % 10
    line = TILE * bits // 8
    tiles, padded = up(outputs, TILE) // TILE, up(inputs, GROUP)
    packed = codes.new_empty(packed_shape(number, outputs, inputs, experts), dtype=torch.uint8)
    for expert in range(experts):  # one expert at a time, since this makes copies
        filled = F.pad(codes[expert], (0, padded - inputs, 0, tiles * TILE - outputs))
        by_input = filled.view(tiles, TILE, padded).transpose(1, 2)
        if line < TILE:
            places = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)[:, None]
            together = by_input.unflatten(1, (padded * bits // 8, 8 // bits)) << places
            by_input = together.sum(2, dtype=torch.uint8)
        more = up(padded, size) // size - heads[0].shape[2], tiles * TILE - outputs
        numbers = torch.stack([F.pad(head[expert], (0, more[0], 0, more[1])) for head in heads])
        by_run = numbers.view(len(heads), tiles, TILE, numbers.shape[2]).permute(1, 3, 0, 2)
        parts = zip(
            _bytes(by_run.flatten(1)).split(4 * TILE * len(heads), dim=1),
            by_input.flatten(1).split(size * line, dim=1),
            strict=True,
        )
        packed[expert] = torch.cat([part for both in parts for part in both], dim=1)
    return packed


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


def _pack_int4(wide: Tensor) -> Tensor:
    _, outputs, inputs = wide.shape
    wide = F.pad(wide, (0, 0, 0, up(outputs, TILE) - outputs))
    largest = wide.abs().amax(dim=2) if inputs else wide.new_zeros(wide.shape[:2])
    powers = ((largest.view(torch.int32) >> 23) - 19).clamp(min=0)  # p: a row divided by 2**(p - 127) is below 2**20
    wide = wide * (254 - powers << 23).view(torch.float32)[..., None]
    whole, rest = divmod(inputs, GROUP)
    parts = [wide[:, :, : whole * GROUP].unflatten(2, (whole, GROUP))]
    if rest:
        parts.append(wide[:, :, None, whole * GROUP :])
    scales, minima = (torch.cat(ends, dim=2) for ends in zip(*(_fit_groups(part) for part in parts), strict=True))
    ends = torch.stack([scales, 0 - minima])  # negate the minima, which are at most zero
    groups, supers = ends.shape[3], up(inputs, SUPER * GROUP) // (SUPER * GROUP)
    by_super = F.pad(ends, (0, supers * SUPER - groups)).unflatten(3, (supers, SUPER))
    factors = (by_super.amax(dim=4) / LARGEST_FIELD).half().float()
    its_factors = factors.repeat_interleave(SUPER, dim=3)[..., :groups]
    fields, codes, first = [], [], 0
    for part in parts:
        some = slice(first, first := first + part.shape[2])
        rounded = _round_groups(part, ends[..., some], its_factors[..., some])
        fields.append(rounded[0])
        codes.append(F.pad(rounded[1], (0, GROUP - part.shape[3])))
    filled = F.pad(torch.cat(fields, dim=3), (0, supers * SUPER - groups)).unflatten(3, (supers, SUPER))
    return _pack_supers(
        torch.cat(codes, dim=2), factors.permute(1, 2, 3, 0), filled.permute(1, 2, 3, 0, 4), powers.to(torch.uint8)
    )


def _pack_mxfp4(wide: Tensor) -> Tensor:
    inputs = wide.shape[2]
    groups = F.pad(wide, (0, up(inputs, GROUP) - inputs)).unflatten(2, (up(inputs, GROUP) // GROUP, GROUP))
    magnitudes = groups.abs()
    # The exponent of the group's largest magnitude, minus 2: the largest value of a code, 6, has the exponent 2.
    scales = ((magnitudes.amax(dim=3).view(torch.int32) >> 23) - 2).clamp(min=0)
    scaled = magnitudes * (254 - scales << 23).view(torch.float32)[..., None]
    codes = groups.signbit().to(torch.uint8) << 3
    for code, (lower, upper) in enumerate(pairwise(E2M1), start=1):
        middle = (lower + upper) / 2
        codes += scaled >= middle if code % 2 == 0 else scaled > middle
    return _groups_in_tiles(scales[..., None].to(torch.uint8), codes)


def _pack_fp8(wide: Tensor) -> Tensor:
    _, outputs, inputs = wide.shape
    filled = F.pad(wide, (0, up(inputs, BLOCK) - inputs, 0, up(outputs, BLOCK) - outputs)).abs()
    blocks = filled.unflatten(2, (up(inputs, BLOCK) // BLOCK, BLOCK)).unflatten(1, (up(outputs, BLOCK) // BLOCK, BLOCK))
    scales = blocks.amax(dim=(2, 4)) / LARGEST_E4M3
    scales = torch.where(scales >= SMALLEST_STEP, scales, 0).repeat_interleave(BLOCK, dim=1)[:, :outputs]
    divisors = torch.where(scales > 0, scales, 1).repeat_interleave(BLOCK, dim=2)[:, :, :inputs]
    return _runs_in_tiles(18, (scales,), (wide / divisors).to(torch.float8_e4m3fn).view(torch.uint8))


def _bytes(values: Tensor) -> Tensor:
    """Reinterpret the elements of the last dimension as bytes; return (..., bytes) uint8."""
    *sizes, last = values.shape
    return values.reshape(-1).view(torch.uint8).view(*sizes, last * values.element_size())


def _fit_groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return unrounded scales and minima, (E, N, G) each, for groups of weights (E, N, G, count).

    Every step is one IEEE operation on elements, and sums run in the order of the inputs, so a kernel can compute the
    same bits. The same is true of :func:`_round_groups`.
    """
    least, greatest = values.amin(dim=3).clamp(max=0), values.amax(dim=3)
    reach = greatest - least
    scale = reach / 15
    scale = torch.where(scale >= SMALLEST_STEP, scale, 0)
    best = scale, least, _codes(values, scale, least)[1]
    above = values - least[..., None]
    inverse_reach = _inverse(torch.where(reach >= SMALLEST_STEP, reach, 0))
    for candidate in range(CANDIDATES):
        steps = inverse_reach * (14.0 + 0.4 * candidate)
        scale, minimum = _fit(above, torch.round(above * steps[..., None]).clamp(0, 15), least)
        usable = (inverse_reach > 0) & (scale >= SMALLEST_STEP)
        scale = torch.where(usable, scale, best[0])
        minimum = torch.where(usable, minimum, best[1])
        error = _codes(values, scale, minimum)[1]
        better = usable & (error < best[2])
        trial = scale, minimum, error
        best = tuple(torch.where(better, new, old) for new, old in zip(trial, best, strict=True))  # type: ignore[assignment]
    return best[:2]


def _round_groups(values: Tensor, ends: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Round groups' scales and minima to integers s and m; return these, (2, E, N, G), and codes, (E, N, G, count).

    Args:
        values: (E, N, G, count), the weights of the groups.
        ends: (2, E, N, G), the scales of the groups, and their minima with the opposite sign.
        factors: (2, E, N, G), d and dmin of each group's super-block.
    """
    d, dmin = factors
    inverse_d, inverse_dmin = _inverse(factors)
    rounded, minimum = _nearest_field(ends[0], inverse_d), _nearest_field(ends[1], inverse_dmin)
    codes, error = _codes(values, d * rounded, -(dmin * minimum))
    sum_codes, sum_values, count = _sum(codes), _sum(values), float(values.shape[3])
    best = rounded, minimum, codes, error
    for side in (-1, 1):
        scale = (rounded + side).clamp(0, LARGEST_FIELD)
        minimum = _nearest_field((d * scale * sum_codes - sum_values) / count, inverse_dmin)
        trial = scale, minimum, *_codes(values, d * scale, -(dmin * minimum))
        better = trial[3] < best[3]
        best = tuple(  # type: ignore[assignment]
            torch.where(better if new.dim() == 3 else better[..., None], new, old)
            for new, old in zip(trial, best, strict=True)
        )
    return torch.stack(best[:2]), best[2]


def _nearest_field(values: Tensor, inverse: Tensor) -> Tensor:
    return torch.round(values * inverse).clamp(0, LARGEST_FIELD)


def _fit(above: Tensor, codes: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Fit ``scale * codes + minimum`` to the weights of each group by least squares; return the scale and the minimum.

    ``above`` are the weights minus ``least``. The minimum must not be positive: where it would be, the result is the
    minimum zero and the scale that fits best with it.
    """
    count = float(codes.shape[3])
    sum_codes, sum_squares = _sum(codes), _sum(codes * codes)
    sum_values, sum_products = _sum(above), _sum(above * codes)
    determinant = count * sum_squares - sum_codes * sum_codes
    determinant = torch.where(determinant > 0, determinant, 1)
    minimum = least + (sum_squares * sum_values - sum_codes * sum_products) / determinant
    from_zero = (sum_products + least * sum_codes) / torch.where(sum_squares > 0, sum_squares, 1)
    scale = (count * sum_products - sum_values * sum_codes) / determinant
    return torch.where(minimum > 0, from_zero, scale), torch.where(minimum > 0, 0, minimum)


def _codes(values: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes nearest to ``values`` in each group's grid, and each group's sum of squared errors."""
    inverse = _inverse(scale)
    codes = torch.round((values - minimum[..., None]) * inverse[..., None]).clamp(0, 15)
    error = values - (scale[..., None] * codes + minimum[..., None])
    return codes, _sum(error * error)


def _inverse(step: Tensor) -> Tensor:
    """Return 1 / ``step``, and 0 where ``step`` is 0; ``step`` must not be negative."""
    return torch.where(step > 0, torch.where(step > 0, step, 1).reciprocal(), 0)


def _sum(values: Tensor) -> Tensor:
    """Return the sum over the last dimension, added from first to last."""
    total = torch.zeros_like(values[..., 0])
    for value in values.unbind(-1):
        total = total + value
    return total
