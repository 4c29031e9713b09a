"""quantize_weight and dequantize_weight: native rounding and packing of weights.

Contract: :func:`pymoe.reference.quantize_weight`; kernel: csrc/kernels/quantized_weight.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common.contracts import check_quantize_weight
from pymoe._common.types import QuantizedWeight, packed_shape
from pymoe.reference.quantized_weight import dequantize_weight  # unpacking has no kernel
from pymoe.reference.quantized_weight import quantize_weight as reference

__all__ = ["dequantize_weight", "quantize_weight"]


def quantize_weight(weight: Tensor, bits: int) -> QuantizedWeight:
    check_quantize_weight(weight, bits)
    _, outputs, inputs = weight.shape
    return QuantizedWeight(torch.ops.pymoe.quantize_weight(weight.detach(), bits), bits, outputs, inputs)


quantize_weight.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::quantize_weight")
def _(weight: Tensor, bits: int) -> Tensor:
    experts, outputs, inputs = weight.shape
    return weight.new_empty(packed_shape(bits, outputs, inputs, experts), dtype=torch.uint8)
