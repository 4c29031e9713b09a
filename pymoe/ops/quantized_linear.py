"""quantized_linear: native grouped products with quantised weights, and the gradient of their input.

Contract: :func:`pymoe.reference.quantized_linear`; kernel: csrc/kernels/quantized_linear.h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe._common.contracts import check_quantized_linear, refuse_second_gradient, refuse_tangents
from pymoe._common.types import QuantizedWeight, cast_operands, number_of
from pymoe.ops import index_checks
from pymoe.ops.function_calls import call
from pymoe.ops.grouped_linear import BiasGrad
from pymoe.reference.quantized_linear import bounds_of
from pymoe.reference.quantized_linear import quantized_linear as reference

QUANTIZED_LINEAR = torch.ops.pymoe.quantized_linear.default
"""The native call, without checks: ``(x, packed, offsets, bias, number of the format, N)``."""
INPUT_GRAD = torch.ops.pymoe.quantized_linear_input_grad.default


class QuantizedLinear(torch.autograd.Function):
    """Computes y[r] = W[e] @ x[r] + bias[e] for the expert e of row r; the packed weights W get no gradient."""

    tangent = staticmethod(refuse_tangents)

    @staticmethod
    def forward(
        x: Tensor, packed: Tensor, offsets: Tensor | None, bias: Tensor | None, number: int, output_features: int
    ) -> Tensor:
        return QUANTIZED_LINEAR(x, packed, offsets, bias, number, output_features)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, packed, offsets, _, ctx.number, _ = inputs
        ctx.input_features = x.shape[-1]
        ctx.save_for_backward(packed, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        packed, offsets = ctx.saved_tensors
        needs_x, _, _, needs_bias, _, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        grad_x = call(InputGrad, grad, packed, offsets, ctx.number, ctx.input_features) if needs_x else None
        grad_bias = None
        if needs_bias:
            rows = grad.flatten(0, -2) if grad.dim() > 1 else grad[None]
            grad_bias = call(BiasGrad, rows, bounds_of(rows) if offsets is None else offsets, None)
        return grad_x, None, None, grad_bias, None, None


class InputGrad(torch.autograd.Function):
    """Computes dx[r] = W[e].T @ grad[r] for the expert e of row r."""

    @staticmethod
    def forward(grad: Tensor, packed: Tensor, offsets: Tensor | None, number: int, input_features: int) -> Tensor:
        return INPUT_GRAD(grad, packed, offsets, number, input_features)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing, since there is no second derivative."""

    backward = staticmethod(refuse_second_gradient)  # type: ignore[assignment]
    tangent = staticmethod(refuse_tangents)


def quantized_linear(x: Tensor, weight: QuantizedWeight, offsets: Tensor | None, bias: Tensor | None = None) -> Tensor:
    x, bias = cast_operands(x, bias)  # type: ignore[assignment]
    check_quantized_linear(x, weight, offsets, bias)
    if offsets is not None:
        index_checks.offsets_in_range("quantized_linear", offsets, x.shape[0])
        offsets = offsets.contiguous()
    bias = None if bias is None else bias.contiguous()
    y: Tensor = call(
        QuantizedLinear, x.contiguous(), weight[0].contiguous(), offsets, bias, number_of(weight), weight[2]
    )
    return y


quantized_linear.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::quantized_linear")
def _(
    x: Tensor, packed: Tensor, offsets: Tensor | None, bias: Tensor | None, format: int, output_features: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], output_features))


@torch.library.register_fake("pymoe::quantized_linear_input_grad")
def _(grad: Tensor, packed: Tensor, offsets: Tensor | None, format: int, input_features: int) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], input_features))
