"""Blocks of GGUF files: the types that pymoe keeps without rounding, and the packing of weights of all types.

A row of a tensor is a sequence of blocks, each with its own scales; the layouts are those of ggml's ``ggml-quants.h``.

- Q4_K becomes "int" with 4 bits, and MXFP4 becomes "mxfp": the same codes and scales.
- Q8_0, Q5_K, Q5_1, Q5_0, Q4_1 and Q4_0 have codes with a scale and an offset for 32 inputs, so they become "affine"
  with 8 bits.
- Q2_K has codes with a scale and an offset for 16 inputs, so they become "affine" with 2 bits.
- Q6_K, Q3_K, IQ4_NL and IQ4_XS have signed codes with a scale for 16 or 32 inputs, so they become "symmetric".
- F32, F16 and BF16 have no blocks. Dense layers of these types take the model's dtype, and so do experts if all weights
  of their module have one of these types; otherwise such weights of experts are rounded to integers of 8 bits.
- All other types have no such format. Experts are then widened and rounded to integers of 8 bits, one expert at a time,
  and dense layers take the model's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pymoe._common.types import FORMATS, GROUP, RUNS, SUPER, TILE, QuantizedWeight, packed_shape
from pymoe.integrations.transformers.mxfp4_files import NAN
from pymoe.integrations.transformers.stored_format import Format
from pymoe.ops import pack_weight, quantize_weight
from pymoe.reference.quantized_weight import fields_of_q4_k, pack_q4_k

ROUNDED: Format = ("int", 8)
"""The format to which weights are rounded if their type has none."""
HALVES = {
    **dict.fromkeys(("Q4_K", "Q5_K", "Q5_1", "Q4_1"), slice(0, 4)),
    **dict.fromkeys(("Q8_0", "Q5_0", "Q4_0", "IQ4_NL", "IQ4_XS"), slice(0, 2)),
    **dict.fromkeys(("Q6_K", "Q3_K"), slice(-2, None)),
    "Q2_K": slice(-4, None),
}
"""The bytes of a block that contain its float16 numbers, by type."""
ONE = b"\x00\x3c"
"""The bytes of 1 in float16."""
ONES = {
    "Q6_K": (128 * b"\x11" + 64 * b"\xaa" + 16 * b"\x01" + ONE, slice(0, 192)),
    "Q3_K": (32 * b"\xff" + 64 * b"\x55" + 8 * b"\x11" + 4 * b"\xaa" + ONE, slice(0, 96)),
    "IQ4_NL": (ONE + 16 * b"\x88", slice(2, 18)),
    "IQ4_XS": (ONE + 2 * b"\xaa" + 4 * b"\x11" + 128 * b"\x88", slice(8, 136)),
}
"""For types that become "symmetric", whose values are products of codes and scales: a block with all codes and scales
1, and the slice of its bytes that contains the codes."""
ROWS = 1024
"""Number of outputs of a dense layer that are packed at a time: a head has an output for each token of the vocabulary.
"""
FLOATING = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of the types that are not quantised."""
Join = Callable[[list[Tensor]], Tensor]


class Order(NamedTuple):
    """The order in which rows and columns of a file's tensor become those of a dense weight.

    A field that is None means that the order does not change.
    """

    rows: Tensor | None = None
    """(N,) integers: for each row of the weight, the row of the tensor."""
    columns: Tensor | None = None
    """(H,) integers: for each column of the weight, the column of the tensor."""

    def keeps_groups(self, size: int) -> bool:
        """Return whether all groups of ``size`` columns stay together and keep the order of their columns."""
        if self.columns is None:
            return True
        groups = self.columns.view(-1, size)
        within = torch.arange(size, device="cpu")
        return not bool((groups[:, 0] % size).any()) and bool((groups == groups[:, :1] + within).all())

    def of_columns(self, parts: list[Tensor]) -> Tensor:
        """Return the only tensor in ``parts``, (N, groups of columns, ...), with its groups in the order of the weight.

        This is the ``join`` of a dense layer, which has a single tensor.
        """
        (part,) = parts
        if self.columns is None:
            return part
        size = len(self.columns) // part.shape[1]
        return part[:, self.columns[::size] // size]


def format_of(types: Iterable[str], keeps_groups: Callable[[int], bool] = lambda size: True) -> Format:
    """Return a format that represents all of these types without rounding, or ``ROUNDED`` if there is none.

    Args:
        types: the types of the tensors that make up a weight.
        keeps_groups: takes the size of a group of columns; returns whether all groups of this size stay together in the
            weight.
    """
    first, *others = (_formats(one) for one in types)
    held = (one for one in first if all(one in other for other in others) and keeps_groups(_columns(one)))
    return next(held, ROUNDED)


def _formats(kind: str) -> list[Format]:
    """Return the formats that represent the GGUF type ``kind`` without rounding, the one with the fewest bits first."""
    # Q4_K also fits into "affine": its codes have 4 bits, with a scale and a minimum for 32 inputs.
    if kind == "Q4_K":
        return [KEPT["Q4_K"], KEPT["Q8_0"]]
    return [KEPT[kind]] if kind in KEPT else []


def _columns(format: Format) -> int:
    """Return the number of neighbouring columns that must stay together in a format: those of a group that shares a
    scale, or in int4 those of a super-block.
    """
    number = FORMATS[format]
    return RUNS[number][0] if number in RUNS else GROUP * SUPER if format == ("int", 4) else GROUP


def is_held(types: Iterable[str], dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` represents all values of ``types``, which are keys of ``FLOATING``, without rounding."""
    return all(torch.promote_types(FLOATING[one], dtype) == dtype for one in types)


def packed_weight(tensors: Sequence[Any], format: Format, join: Join, gguf: Any) -> Tensor:
    """Return the packed bytes of a stacked weight, packing one expert at a time.

    Args:
        tensors: tensors of ``GGUFReader``, (E, N, H) each, which together have the weight's rows.
        format: from :func:`format_of` for their types.
        join: takes an expert's rows from each tensor, (N, ...), and returns all of them in the order of the model.
        gguf: the Python package ``gguf``.

    Raises:
        ValueError: a scale or, where weights are rounded, a weight is not a finite number.
    """
    inputs, outputs, experts = (int(size) for size in tensors[0].shape)
    outputs *= len(tensors)
    packed = torch.empty(packed_shape(FORMATS[format], outputs, inputs, experts), dtype=torch.uint8)
    for expert in range(experts):
        parts = [(one.tensor_type.name, one.data[expert]) for one in tensors]
        if format == ROUNDED:
            wide = [torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[name])) for name, data in parts]
            weight = quantize_weight(join(wide)[None], ROUNDED[1])
        else:
            blocks = [(name, _blocks(name, torch.from_numpy(data), gguf)) for name, data in parts]
            weight = _PACK[format](blocks, join, gguf)
        packed[expert] = weight.packed[0]
    return packed


def packed_rows(tensor: Any, shape: tuple[int, int], format: Format, order: Order, gguf: Any) -> Tensor:
    """Return the packed bytes of the weight of a dense layer, packing ``ROWS`` outputs at a time.

    Args:
        tensor: a tensor of ``GGUFReader`` with N rows.
        shape: (N, H).
        format: a format that represents the tensor's type without rounding; its groups must stay together in ``order``.
        order: the order of the weight's rows and columns.
        gguf: as for :func:`packed_weight`.

    Raises:
        ValueError: a scale is not a finite number.
    """
    name, (outputs, inputs) = tensor.tensor_type.name, shape
    blocks = _blocks(name, torch.from_numpy(tensor.data.reshape(outputs, -1)), gguf)
    packed = torch.empty(packed_shape(FORMATS[format], outputs, inputs, 1), dtype=torch.uint8)
    for first, tiles in zip(range(0, outputs, ROWS), packed.split(ROWS // TILE, dim=1), strict=True):
        rows = blocks[first : first + ROWS] if order.rows is None else blocks[order.rows[first : first + ROWS]]
        tiles.copy_(_PACK[format]([(name, rows)], order.of_columns, gguf).packed)
    return packed


def floating_weight(tensors: Sequence[Any], join: Join) -> Tensor:
    """Return a stacked weight (E, N, H) of types of ``FLOATING``: in their dtype if they share one, else in float32.

    Args:
        tensors: as for :func:`packed_weight`.
        join: as for :func:`packed_weight`.
    """
    dtypes = [FLOATING[one.tensor_type.name] for one in tensors]
    inputs, outputs, experts = (int(size) for size in tensors[0].shape)
    weight = torch.empty(
        experts, outputs * len(tensors), inputs, dtype=dtypes[0] if len(set(dtypes)) == 1 else torch.float32
    )
    for expert, rows in enumerate(weight):
        parts = [torch.from_numpy(one.data[expert]).view(dtype) for one, dtype in zip(tensors, dtypes, strict=True)]
        rows.copy_(join([part.to(weight.dtype) for part in parts]))
    return weight


def _blocks(name: str, rows: Tensor, gguf: Any) -> Tensor:
    """Return rows (N, bytes) as blocks (N, blocks, bytes); raise ValueError if a scale is not finite."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    blocks = rows.unflatten(1, (rows.shape[1] // size, size))
    bad = blocks[..., 0] == NAN if name == "MXFP4" else ~_halves(blocks, name).isfinite().all(dim=-1)
    if bool(bad.any()):
        place = ", ".join(str(int(i)) for i in bad.nonzero()[0])
        raise ValueError(f"expected scales that are finite, got another one in {name} at block [{place}]")
    return blocks


def _halves(blocks: Tensor, name: str) -> Tensor:
    """Return the values that each block stores in float16, (..., values), converted to float32."""
    return blocks[..., HALVES[name]].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor, run: int) -> Tensor:
    """Unpack codes of 4 bits: for each ``run`` bytes, the lower halves of all these bytes, then their upper halves."""
    runs = codes.unflatten(-1, (codes.shape[-1] // run, run))
    return torch.cat([runs & 15, runs >> 4], dim=-1).flatten(-2)


def _pack_int4(blocks: list[tuple[str, Tensor]], join: Join, _: Any) -> QuantizedWeight:
    return pack_q4_k(join([one for _, one in blocks])[None])


def _pack_mxfp4(blocks: list[tuple[str, Tensor]], join: Join, _: Any) -> QuantizedWeight:
    rows = join([one for _, one in blocks])
    codes = _nibbles(rows[..., 1:], GROUP // 2)
    return pack_weight((codes[..., ::2] | codes[..., 1::2] << 4)[None], rows[None, ..., 0].contiguous())


def _pack_affine(blocks: list[tuple[str, Tensor]], join: Join, _: Any, bits: int = 8) -> QuantizedWeight:
    parts = zip(*(_affine(name, one) for name, one in blocks), strict=True)
    codes, scales, offsets = (join(list(part))[None] for part in parts)
    return pack_weight(codes, scales, offsets, bits)


def _affine(name: str, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of blocks, (N, H) uint8, and their scales and offsets in float32, all exact.

    Scales and offsets are (N, H / 32), but (N, H / 16) for Q2_K.
    """
    halves = _halves(blocks, name)
    if name == "Q2_K":  # in each half of the 256 inputs, bits 2 g and 2 g + 1 of byte j belong to input 32 g + j
        both = blocks[..., :16]
        scales, minima = halves[..., :1] * (both & 15), halves[..., 1:] * (both >> 4)
        places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
        codes = blocks[..., 16:80].unflatten(-1, (2, 1, GROUP)) >> places & 3
        return codes.flatten(1), scales.flatten(1), -minima.flatten(1)
    rest = blocks[..., HALVES[name].stop :]
    if name in ("Q4_K", "Q5_K"):
        scales, minima = (halves[..., None] * fields_of_q4_k(rest[..., :12])).unbind(-2)
        codes = _nibbles(rest[..., -128:], GROUP)
        if name == "Q5_K":  # bit g of byte j belongs to input j of group g
            groups = torch.arange(SUPER, dtype=torch.uint8)[:, None]
            codes = codes + ((rest[..., None, 12:-128] >> groups & 1) << 4).flatten(-2)
        return codes.flatten(1), scales.flatten(1), -minima.flatten(1)
    if name == "Q8_0":
        codes, zero = rest ^ 128, 128
    else:
        codes, zero = _nibbles(rest[..., -GROUP // 2 :], GROUP // 2), 8
    if name in ("Q5_0", "Q5_1"):  # bit i % 8 of byte i / 8 belongs to input i
        bits = rest[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes, zero = codes + (bits.flatten(-2) << 4), 16
    scales = halves[..., 0]
    return codes.flatten(1), scales, halves[..., 1] if halves.shape[-1] == 2 else -zero * scales


def _pack_symmetric(blocks: list[tuple[str, Tensor]], join: Join, gguf: Any) -> QuantizedWeight:
    parts = zip(*(_symmetric(name, one, gguf) for name, one in blocks), strict=True)
    codes, scales = (join(list(part))[None] for part in parts)
    return pack_weight(codes, scales)


def _symmetric(name: str, blocks: Tensor, gguf: Any) -> tuple[Tensor, Tensor]:
    """Return the codes of blocks, (N, H) int8, and their scales, (N, H / 16) float32, both exact.

    The package gguf computes them: the codes are the values of the blocks with all scales set to 1, and the scales are
    the values with all codes set to 1.
    """
    block, codes = ONES[name]
    ones = torch.tensor(list(block), dtype=torch.uint8)
    no_scales, no_codes = ones.expand(blocks.shape).clone(), blocks.clone()
    no_scales[..., codes], no_codes[..., codes] = blocks[..., codes], ones[codes]
    of_codes, of_scales = (
        torch.from_numpy(gguf.dequantize(one.flatten(1).numpy(), gguf.GGMLQuantizationType[name]))
        for one in (no_scales, no_codes)
    )
    return of_codes.to(torch.int8), of_scales[:, :: GROUP // 2]


_PACK: dict[Format, Callable[[list[tuple[str, Tensor]], Join, Any], QuantizedWeight]] = {
    ("int", 4): _pack_int4,
    ("mxfp", 4): _pack_mxfp4,
    ("affine", 8): _pack_affine,
    ("affine", 2): functools.partial(_pack_affine, bits=2),
    ("symmetric", 8): _pack_symmetric,
}
KEPT: dict[str, Format] = {
    **dict.fromkeys(HALVES, ("affine", 8)),
    **dict.fromkeys(ONES, ("symmetric", 8)),
    "Q4_K": ("int", 4),
    "Q2_K": ("affine", 2),
    "MXFP4": ("mxfp", 4),
}
"""Formats of the types that are kept without rounding."""
