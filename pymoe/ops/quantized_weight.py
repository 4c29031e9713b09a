"""quantize_weight: native rounding and packing of weights. Packing of codes and unpacking have no kernels.

Contract: :func:`pymoe.reference.quantize_weight`; kernel: csrc/kernels/quantized_weight.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common.contracts import check_quantize_weight
from pymoe._common.types import FORMATS, PACKED_ONLY, QuantizedWeight, WeightFormat, packed_shape
from pymoe.reference.quantized_weight import dequantize_weight, pack_weight, unpack_weight
from pymoe.reference.quantized_weight import quantize_weight as reference

__all__ = ["dequantize_weight", "pack_weight", "quantize_weight", "unpack_weight"]


def quantize_weight(weight: Tensor, bits: int, format: WeightFormat = "int") -> QuantizedWeight:
    # These formats are allowed on the meta device only, where just the sizes matter.
    if format in PACKED_ONLY:
        return reference(weight, bits, format)
    check_quantize_weight(weight, bits, format)
    _, outputs, inputs = weight.shape
    packed = torch.ops.pymoe.quantize_weight(weight.detach(), FORMATS[format, bits])
    return QuantizedWeight(packed, bits, outputs, inputs, format)


quantize_weight.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::quantize_weight")
def _(weight: Tensor, format: int) -> Tensor:
    if format not in (8, 4, 14, 18):
        raise ValueError(f"quantize_weight: format must be 8, 4, 14 or 18, got {format}")
    experts, outputs, inputs = weight.shape
    return weight.new_empty(packed_shape(format, outputs, inputs, experts), dtype=torch.uint8)
