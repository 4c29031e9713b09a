"""quantized_linear: native grouped products with quantised weights, for inference.

Contract: :func:`pymoe.reference.quantized_linear`; kernel: csrc/kernels/quantized_linear.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common.contracts import check_quantized_linear
from pymoe._common.dtypes import cast_operands
from pymoe._common.types import QuantizedWeight, number_of
from pymoe.ops import index_checks
from pymoe.reference.quantized_linear import quantized_linear as reference

QUANTIZED_LINEAR = torch.ops.pymoe.quantized_linear.default
"""The native call, without checks: ``(x, packed, offsets, bias, number of the format, N)``."""


def quantized_linear(x: Tensor, weight: QuantizedWeight, offsets: Tensor | None, bias: Tensor | None = None) -> Tensor:
    x, bias = cast_operands(x, bias)  # type: ignore[assignment]
    check_quantized_linear(x, weight, offsets, bias)
    if offsets is not None:
        index_checks.offsets_in_range("quantized_linear", offsets, x.shape[0])
        offsets = offsets.contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    y: Tensor = QUANTIZED_LINEAR(
        x.detach().contiguous(), weight[0].contiguous(), offsets, bias, number_of(weight), weight[2]
    )
    return y


quantized_linear.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::quantized_linear")
def _(
    x: Tensor, packed: Tensor, offsets: Tensor | None, bias: Tensor | None, format: int, output_features: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], output_features))
