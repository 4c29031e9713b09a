"""Checkpoints with weights in FP8 and scales of blocks, such as DeepSeek-V3 and Qwen3-FP8.

Next to a weight NAME, (N, H) float8_e4m3fn, the files have its scales NAME_scale_inv, (ceil(N / 128), ceil(H / 128));
the codes of a block are multiplied by its scale. These are the rules of ``transformers.integrations.finegrained_fp8``,
except that transformers needs whole blocks. The row of bytes that is made for an output has its codes, then a float32
scale for each block of inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pymoe._common.types import BLOCK, QuantizedWeight, up
from pymoe.integrations.transformers.stored_format import WEIGHT, StoredRows, opened
from pymoe.nn import QuantizedLinear
from pymoe.ops import dequantize_weight, pack_weight

ENDING = "_scale_inv"
"""Suffix of the name of a weight's scales after the name of the weight."""

SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""Dtypes of scales, which all become float32 without rounding."""


def stored(entries: Mapping[str, Any]) -> StoredRows:
    """Return the format of a folder whose configuration has these entries.

    Raises:
        ValueError: the blocks are not 128 x 128, or the experts are not in FP8.
    """
    block, dtype = entries.get("weight_block_size"), entries.get("expert_dtype") or STORED.method
    if not isinstance(block, list | tuple) or list(block) != [BLOCK, BLOCK] or dtype != STORED.method:
        raise ValueError(
            f"from_pretrained: expected a checkpoint in FP8 whose weight_block_size is [{BLOCK}, {BLOCK}], got {block} "
            f"and experts in {dtype}"
        )
    return STORED


class _Blocks(StoredRows):
    """Codes with a scale for each block of 128 outputs and 128 inputs."""

    parts = (WEIGHT, WEIGHT + ENDING)

    def tensors_in(self, files: Iterable[str]) -> set[str]:
        """Return the names of the tensors of float8_e4m3fn in the safetensors files among ``files``."""
        return {
            name
            for file in opened(files)
            for name in list(file.keys())
            if file.get_slice(name).get_dtype() == "F8_E4M3"
        }

    def joined(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return rows of bytes, (..., N, H + 4 * ceil(H / 128)) uint8: codes, then scales.

        Args:
            parts: codes (..., N, H), and scales (..., ceil(N / 128), ceil(H / 128)).

        Raises:
            ValueError: codes or scales are missing, or a shape or dtype is not as above.
        """
        codes, scales = (parts.get(part) for part in self.parts)
        if codes is None:
            raise ValueError("expected weights with their scales, got scales alone")
        if scales is None or codes.dtype != torch.float8_e4m3fn:
            raise ValueError(f"expected float8_e4m3fn with {ENDING}, got {codes.dtype}" + " alone" * (scales is None))
        *before, outputs, inputs = codes.shape
        expected = (*before, up(outputs, BLOCK) // BLOCK, up(inputs, BLOCK) // BLOCK)
        if scales.dtype not in SCALES or tuple(scales.shape) != expected:
            raise ValueError(f"expected scales {expected} in float32, got {tuple(scales.shape)} {scales.dtype}")
        wide = scales.float().repeat_interleave(BLOCK, dim=-2)[..., :outputs, :].contiguous()
        return torch.cat([codes.view(torch.uint8), wide.view(torch.uint8)], dim=-1)

    def packed_weight(self, name: str, rows: Tensor, layer: QuantizedLinear) -> Tensor:
        """Return the packed bytes of a stacked weight; every code and scale is kept unchanged."""
        inputs = layer.input_features
        self.check_rows(name, rows, layer, inputs + 4 * (up(inputs, BLOCK) // BLOCK))
        codes, scales = rows[..., :inputs], self.numbers_after(rows, inputs)
        if bool(((codes & 127) == 127).any()) or not bool(scales.isfinite().all()):
            raise ValueError(f"expected {name!r} to be numbers, got NaN or an infinity among its codes and scales")
        return pack_weight(codes.view(torch.float8_e4m3fn), scales).packed

    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return a weight as (N, H) float32; raise ValueError if a value is not finite."""
        rows, inputs = self.joined(parts)[None], parts[WEIGHT].shape[-1]
        by_output = self.numbers_after(rows, inputs)
        weight: QuantizedWeight = pack_weight(rows[..., :inputs].view(torch.float8_e4m3fn), by_output)
        wide = dequantize_weight(weight)[0]
        if not bool(wide.isfinite().all()):
            raise ValueError("expected numbers, got NaN or an infinity among codes, scales or their products")
        return wide


STORED = _Blocks("fp8", "FP8", 8, "fp", "", transposed=False, layout="(E, out, in)")
