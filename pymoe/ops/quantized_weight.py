"""quantize_weight: native rounding and packing of weights. Unpacking, and packing of codes, has no kernels.

Contract: :func:`pymoe.reference.quantize_weight`; kernel: csrc/kernels/quantized_weight.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe.reference.quantized_weight import (
    FORMATS,
    check,
    dequantize_weight,
    pack_weight,
    packed_shape,
    unpack_weight,
)
from pymoe.reference.quantized_weight import quantize_weight as reference
from pymoe.reference.types import QuantizedWeight, WeightFormat

__all__ = ["dequantize_weight", "pack_weight", "quantize_weight", "unpack_weight"]


def quantize_weight(weight: Tensor, bits: int, format: WeightFormat = "int") -> QuantizedWeight:
    check(weight, bits, format)
    _, outputs, inputs = weight.shape
    packed = torch.ops.pymoe.quantize_weight(weight.detach(), FORMATS[format, bits])
    return QuantizedWeight(packed, bits, outputs, inputs, format)


quantize_weight.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::quantize_weight")
def _(weight: Tensor, format: int) -> Tensor:
    experts, outputs, inputs = weight.shape
    return weight.new_empty(packed_shape(format, outputs, inputs, experts), dtype=torch.uint8)
