"""FLOPs of the native operators, for :class:`torch.utils.flop_counter.FlopCounterMode` and tools that use it.

As torch counts its own operators, a matrix product counts two FLOPs for each pair of a multiplication and an addition,
and everything else counts zero. A formula only sees the shapes of tensors, so it counts the choices that exceed a
capacity and are dropped, too.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from pymoe._common.types import GATED, KINDS

Shape = tuple[int, ...]


def _grouped_linear(x: Shape, weight: Shape, offsets: Shape, bias: Any, order: Shape | None = None, *_: Any) -> int:
    return 2 * (x if order is None else order)[0] * weight[1] * weight[2]


def _weight_grad(grad: Shape, x: Shape, offsets: Shape, order: Shape | None = None, *_: Any) -> int:
    return 2 * (x if order is None else order)[0] * grad[1] * x[1]


def _quantized_linear(x: Shape, packed: Shape, offsets: Any, bias: Any, format: int, output_features: int) -> int:
    return 2 * prod(x) * output_features


def _input_grad(grad: Shape, packed: Shape, offsets: Any, format: int, input_features: int) -> int:
    return 2 * prod(grad) * input_features


def _networks(rows: int, w_in: Shape, w_out: Shape) -> int:
    return 2 * rows * (w_in[1] * w_in[2] + w_out[1] * w_out[2])


def _apply_experts(x: Shape, experts: Shape, weights: Shape, w_in: Shape, b_in: Any, w_out: Shape, *_: Any) -> int:
    return _networks(experts[0] * experts[1], w_in, w_out)


def _apply_chosen_experts(
    x: Shape, logits: Shape, bias: Any, k: int, score: str, renormalize: bool, num_groups: int, topk_groups: int,
    scale: float, w_in: Shape, b_in: Any, w_out: Shape, *_: Any,
) -> int:  # fmt: skip
    return _networks(x[0] * k, w_in, w_out)


def _apply_quantized_experts(
    x: Shape, experts: Shape, weights: Shape, w_in: Shape, b_in: Any, w_out: Shape, b_out: Any, layout: list[int],
    kind: int, *_: Any,
) -> int:  # fmt: skip
    hidden_out, output = layout[1], layout[3]
    gated = kind == len(KINDS) or KINDS[kind] in GATED
    return 2 * experts[0] * experts[1] * (x[1] * hidden_out + (hidden_out // 2 if gated else hidden_out) * output)


def _apply_chosen_quantized_experts(
    x: Shape, logits: Shape, bias: Any, k: int, score: str, renormalize: bool, num_groups: int, topk_groups: int,
    scale: float, w_in: Shape, b_in: Any, w_out: Shape, b_out: Any, layout: list[int], kind: int, *_: Any,
) -> int:  # fmt: skip
    return _apply_quantized_experts(x, (x[0], k), (), w_in, b_in, w_out, b_out, layout, kind)


def _none(*_: Any) -> int:
    return 0


FORMULAS: dict[str, Callable[..., int]] = {
    "apply_chosen_experts": _apply_chosen_experts,
    "apply_chosen_experts_recorded": _apply_chosen_experts,
    "apply_chosen_quantized_experts": _apply_chosen_quantized_experts,
    "apply_experts": _apply_experts,
    "apply_experts_recorded": _apply_experts,
    "apply_quantized_experts": _apply_quantized_experts,
    "grouped_linear": _grouped_linear,
    "grouped_linear_weight_grad": _weight_grad,
    "quantized_linear": _quantized_linear,
    "quantized_linear_input_grad": _input_grad,
    **dict.fromkeys(
        (
            "build_routing",
            "combine",
            "combine_backward",
            "dispatch",
            "dispatch_out",
            "expert_activation",
            "expert_activation_backward",
            "gate_routing",
            "gate_topk",
            "gate_topk_backward",
            "gather_batch",
            "grouped_linear_bias_grad",
            "quantize_weight",
            "router_losses",
            "router_losses_backward",
        ),
        _none,
    ),
}
"""Formula of each operator, by name; it takes the operator's arguments, with shapes in place of tensors."""


def _registered(formula: Callable[..., int]) -> Callable[..., int]:
    # torch also passes the output's shape, as a keyword argument; no formula needs it.
    return lambda *shapes, out_shape=None, **named: formula(*shapes, **named)


def register() -> None:
    """Register the formula of every operator."""
    for name, formula in FORMULAS.items():
        register_flop_formula(getattr(torch.ops.pymoe, name))(_registered(formula))
    register_flop_formula(torch.ops.pymoe_packages.grouped_linear)(_registered(_grouped_linear))
