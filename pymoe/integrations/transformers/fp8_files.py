"""Checkpoints that hold weights in FP8 with scales of blocks, as DeepSeek-V3 and Qwen3-FP8: experts out of them.

Next to a weight NAME, (N, H) float8_e4m3fn, the files have NAME_scale_inv, (ceil(N / 128), ceil(H / 128)), by which the
values are multiplied. Experts are stored one by one, and transformers' own converters stack them and put gate and up
next to each other. So that they do it to codes and scales at once, :func:`joined` makes rows of bytes of both. These
are the rules of ``transformers.integrations.finegrained_fp8``, which needs whole blocks, however.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pymoe._common.types import BLOCK, QuantizedWeight, up
from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.stored_format import StoredFormat
from pymoe.nn import QuantizedLinear
from pymoe.ops import dequantize_weight, pack_weight

STORED = StoredFormat("fp8", "FP8", 8, "fp", "", transposed=False, layout="(E, out, in)")

ENDING = "_scale_inv"
"""What the name of a weight's scales has in addition to that of the weight."""

SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""Dtypes of scales, which all become float32 without rounding."""


def scales_pattern(pattern: str) -> str:
    """Return the pattern for the name of a weight's scales, from that for the name of the weight."""
    return f"{pattern[:-1]}{ENDING}$" if pattern.endswith("$") else pattern + ENDING


def check_configuration(entries: Mapping[str, Any]) -> None:
    """Raise if the configuration of a folder is of other files in FP8.

    Raises:
        ValueError: the blocks have other sizes, or the experts are in FP4.
    """
    block, dtype = entries.get("weight_block_size"), entries.get("expert_dtype") or STORED.method
    if block is None or list(block) != [BLOCK, BLOCK] or dtype != STORED.method:
        raise ValueError(
            f"from_pretrained: expected a checkpoint in FP8 whose weight_block_size is [{BLOCK}, {BLOCK}], got {block} "
            f"and experts in {dtype}"
        )


def codes_in(files: Iterable[str]) -> set[str]:
    """Return the names of the tensors of float8_e4m3fn in those files that are safetensors."""
    from safetensors import safe_open

    found: set[str] = set()
    for file in (file for file in files if str(file).endswith(".safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            found.update(name for name in names if tensors.get_slice(name).get_dtype() == "F8_E4M3")
    return found


def check_conversions(model: Any, conversions: Iterable[Any], names: Iterable[str], weights: Iterable[str]) -> None:
    """Raise if a weight in FP8 would reach the model without its scales, or another one in a lower precision.

    Args:
        model: the model, before its weights are loaded.
        conversions: transformers' own converters that get no scales.
        names: names of the tensors of float8_e4m3fn in the files.
        weights: last parts of the names of stacked weights.

    Raises:
        ValueError: a name is neither that of a stacked weight nor ends in ``weight``; one of the converters takes it;
            or transformers keeps a weight in float32 in a model of another dtype.
    """
    names = sorted(names)
    other = next((name for name in names if name.rpartition(".")[2] not in (*weights, "weight")), None)
    taken = (interface.reads(one, names) for one in conversions)
    if name := other or next(filter(None, taken), None):
        raise ValueError(
            f"from_pretrained: expected a checkpoint whose weights in FP8 transformers does not convert without their "
            f"scales, got {name!r} for {type(model).__name__}"
        )
    kept = [name for name in interface.kept_in_float32(model) if name.endswith(".weight")]
    if kept:
        raise ValueError(
            f"from_pretrained: expected a model of a dtype in which all its weights may be, got {model.dtype} for "
            f"{kept[0]!r}, which stays in float32; pass dtype=torch.float32"
        )


def pairs(tensors: Mapping[str, list[Tensor]]) -> dict[str, list[tuple[Tensor, Tensor | None]]]:
    """Return the weights that a converter has collected, each with its scales, by the patterns of the weights' names.

    Raises:
        ValueError: weights and scales are not equally many.
    """
    of_scales = {pattern for pattern in tensors if pattern.removesuffix("$").endswith(ENDING)}
    found = {}
    for pattern in tensors.keys() - of_scales:
        weights: list[Tensor] = tensors[pattern]
        scales: Any = tensors.get(scales_pattern(pattern), [None] * len(weights))
        if len(scales) != len(weights):
            raise ValueError(f"expected scales of {len(weights)} weights, got {len(scales)}")
        found[pattern] = list(zip(weights, scales, strict=True))
    if alone := of_scales - {scales_pattern(pattern) for pattern in found}:
        raise ValueError(f"expected weights with their scales, got scales alone ({min(alone)})")
    return {pattern: found[pattern] for pattern in tensors if pattern in found}


def joined(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Return the bytes of a weight's outputs: its codes, and then a float32 scale for each block of inputs.

    Args:
        codes: (..., N, H).
        scales: (..., ceil(N / 128), ceil(H / 128)).

    Returns:
        (..., N, H + 4 * ceil(H / 128)) uint8.

    Raises:
        ValueError: scales are missing, or a shape or dtype is not as above.
    """
    if scales is None or codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"expected float8_e4m3fn with {ENDING}, got {codes.dtype}" + " alone" * (scales is None))
    *before, outputs, inputs = codes.shape
    expected = (*before, up(outputs, BLOCK) // BLOCK, up(inputs, BLOCK) // BLOCK)
    if scales.dtype not in SCALES or tuple(scales.shape) != expected:
        raise ValueError(f"expected scales {expected} in float32, got {tuple(scales.shape)} {scales.dtype}")
    wide = scales.float().repeat_interleave(BLOCK, dim=-2)[..., :outputs, :].contiguous()
    return torch.cat([codes.view(torch.uint8), wide.view(torch.uint8)], dim=-1)


def packed_weight(name: str, rows: Tensor, layer: QuantizedLinear) -> Tensor:
    """Return the packed bytes of a stacked weight, with every code and scale as it is.

    Args:
        name: name of the weight, for errors.
        rows: (E, N, bytes), from :func:`joined`.
        layer: a layer of the sizes that the model needs.

    Raises:
        ValueError: the sizes are others, or a code or a scale is not a finite number.
    """
    inputs = layer.input_features
    expected = (layer.num_experts, layer.output_features, inputs + 4 * (up(inputs, BLOCK) // BLOCK))
    if tuple(rows.shape) != expected:
        raise ValueError(
            f"expected {name!r} of {expected[0]} experts, {expected[1]} outputs and {inputs} inputs, got "
            f"{tuple(rows.shape[:2])} and rows of {rows.shape[-1]} bytes with scales"
        )
    codes, scales = rows[..., :inputs], rows[..., inputs:].contiguous().view(torch.float32)
    if bool(((codes & 127) == 127).any()) or not bool(scales.isfinite().all()):
        raise ValueError(f"expected {name!r} to be numbers, got NaN or an infinity among its codes and scales")
    return pack_weight(codes.view(torch.float8_e4m3fn), scales).packed


def widened(codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a weight of another layer, which stays in floating point, in the dtype of the model.

    Raises:
        ValueError: as for :func:`joined`, except that weights in other dtypes may have no scales.
    """
    if scales is None and codes.dtype.itemsize > 1:
        return codes.to(dtype)
    rows = joined(codes, scales)[None]
    inputs = codes.shape[-1]
    by_output = rows[..., inputs:].contiguous().view(torch.float32)
    weight: QuantizedWeight = pack_weight(rows[..., :inputs].view(torch.float8_e4m3fn), by_output)
    return dequantize_weight(weight)[0].to(dtype)
