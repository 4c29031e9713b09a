"""Expert networks with quantised weights over tokens, in one native call where the activation is one of pymoe's."""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe import ops
from pymoe.nn.apply_experts_checks import choice_for_kernels
from pymoe.nn.networks import Activation, activate, apply_networks
from pymoe.ops.expert_activation import kernel_options
from pymoe.ops.function_calls import is_recorded
from pymoe.reference.quantized_weight import number_of
from pymoe.reference.types import QuantizedWeight


def apply_quantized_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w_in: QuantizedWeight,
    w_out: QuantizedWeight,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation: Activation,
    capacity: int | None,
    foreign_experts: bool = False,
) -> Tensor:
    """Return what :func:`apply_experts` returns, for quantised weights and arguments that fit.

    Differentiable in ``weights`` alone: ``x`` and the biases must not require a gradient while gradients are recorded.
    """
    if callable(activation) or is_recorded(x, weights, b_in, b_out):

        def networks(rows: Tensor, offsets: Tensor) -> Tensor:
            inner = activate(ops.quantized_linear(rows, w_in, offsets, b_in), activation)
            return ops.quantized_linear(inner, w_out, offsets, b_out)

        number = w_in[0].shape[0]
        return apply_networks(x, experts, weights, number, networks, capacity=capacity, foreign_experts=foreign_experts)
    experts, weights, capacity = choice_for_kernels(x, experts, weights, w_in[0].shape[0], capacity, foreign_experts)
    number, *numbers = kernel_options(activation)
    return torch.ops.pymoe.apply_quantized_experts(  # type: ignore[no-any-return]
        x.contiguous(),
        experts,
        weights,
        w_in[0].contiguous(),
        None if b_in is None else b_in.contiguous(),
        w_out[0].contiguous(),
        None if b_out is None else b_out.contiguous(),
        [number_of(w_in), w_in[2], number_of(w_out), w_out[2]],
        number,
        capacity,
        foreign_experts,
        *numbers,
    )


@torch.library.register_fake("pymoe::apply_quantized_experts")
def _(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    layout: list[int],
    *_: object,
) -> Tensor:
    return x.new_empty((x.shape[0], layout[3]))
