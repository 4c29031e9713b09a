"""Runs expert networks with quantised weights over tokens, in one native call if the activation is one of pymoe's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe import ops
from pymoe._common.types import QuantizedWeight
from pymoe.nn.apply_experts_checks import choice_for_kernels
from pymoe.nn.networks import Activation, activate, apply_networks
from pymoe.ops.expert_activation import kernel_options
from pymoe.ops.function_calls import is_recorded

_APPLY_QUANTIZED_EXPERTS = torch.ops.pymoe.apply_quantized_experts.default
APPLY_CHOSEN_QUANTIZED_EXPERTS = torch.ops.pymoe.apply_chosen_quantized_experts.default
"""The native call that also runs the gate: it takes logits and the options of ``GATE_TOPK`` in place of a choice."""


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
    """Return the result of :func:`apply_experts` for quantised weights and arguments that fit.

    It is differentiable in ``weights`` alone: ``x`` and the biases must not require a gradient while gradients are
    recorded.
    """
    if callable(activation) or is_recorded(x, weights, b_in, b_out):

        def networks(rows: Tensor, offsets: Tensor) -> Tensor:
            inner = activate(ops.quantized_linear(rows, w_in, offsets, b_in), activation)
            return ops.quantized_linear(inner, w_out, offsets, b_out)

        number = w_in[0].shape[0]
        return apply_networks(x, experts, weights, number, networks, capacity=capacity, foreign_experts=foreign_experts)
    experts, weights, capacity = choice_for_kernels(x, experts, weights, w_in[0].shape[0], capacity, foreign_experts)
    number, *numbers = kernel_options(activation)
    return _APPLY_QUANTIZED_EXPERTS(  # type: ignore[no-any-return]
        x.contiguous(),
        experts,
        weights,
        w_in[0].contiguous(),
        None if b_in is None else b_in.contiguous(),
        w_out[0].contiguous(),
        None if b_out is None else b_out.contiguous(),
        [w_in[1], w_in[2], w_out[1], w_out[2]],
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


@torch.library.register_fake("pymoe::apply_chosen_quantized_experts")
def _(x: Tensor, logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    layout = others[11]
    return x.new_empty((x.shape[0], layout[3])), logits.new_empty((logits.shape[1],), dtype=torch.int32)
