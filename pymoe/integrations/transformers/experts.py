"""Runs the experts of a transformers model on pymoe's operators: this is ``experts_implementation="pymoe"``.

The model keeps its parameters, its router and its state dict. Weights are read in place; those stored as (E, in, out)
are read through strides. With one of pymoe's activations, and without adapters or a norm after the experts, a single
native call does everything wherever :func:`pymoe.nn.apply_experts` can be one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pymoe import ops
from pymoe._common import checks
from pymoe._common.types import FLOATING, autocast_enabled, cast_operands
from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import activation_of, followed_by_cast
from pymoe.integrations.transformers.adapters import Product, adapted, networks_of, take
from pymoe.integrations.transformers.quantized import run_quantized_experts
from pymoe.nn import QuantizedLinear, apply_experts
from pymoe.nn.apply_experts import Activation, apply_networks
from pymoe.nn.low_rank import LowRank


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return what the eager forward of an experts module of transformers returns, computed by pymoe's operators.

    The signature, and the flags of ``experts``, are those of transformers' ``use_experts_implementation``. The layout
    of gate and up in ``gate_up_proj`` differs between modules, so the module's own gate function is applied to the
    first product, unless a fused activation of pymoe is known to compute the same.

    Args:
        experts: a module behind transformers' experts interface.
        hidden_states: (T, H). Outside of autocast it is cast to the dtype of the weights.
        top_k_index: (T, K) integers, the experts of every token. With expert parallelism, values of E and above mean
            experts of other ranks, which add nothing.
        top_k_weights: (T, K), the weight of every choice.

    Returns:
        (T, H), the dtype of ``hidden_states``. Differentiable in it, in ``top_k_weights`` and in all parameters, but
        not in quantised weights.

    Raises:
        TypeError: the weights do not have a floating dtype in which pymoe computes, as in a model that another package
            has quantised.
    """
    flags = interface.flags(experts)
    name = "gate_up_proj" if flags.gated else "up_proj"
    w_in, w_out = getattr(experts, name), experts.down_proj
    adapters = take(experts)
    operands = (hidden_states, top_k_index, top_k_weights, w_in, w_out, activation_of(experts))
    options: dict[str, Any] = {
        "b_in": getattr(experts, f"{name}_bias") if flags.biased else None,
        "b_out": experts.down_proj_bias if flags.biased else None,
        "post_norm": experts.post_expert_norm if flags.normed else None,
        "foreign_experts": flags.expert_parallel,
        "adapters_in": adapters.get(name, []),
        "adapters_out": adapters.get("down_proj", []),
    }
    if isinstance(w_in, QuantizedLinear):
        return run_quantized_experts(*operands, **options)
    if not (isinstance(w_in, Tensor) and w_in.dtype in FLOATING):
        checks.floating(f"experts_implementation='pymoe' ({type(experts).__name__})", name, w_in)
    return run_experts(*operands, **options, transposed=flags.transposed)


def run_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: Activation,
    *,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    post_norm: Callable[[Tensor], Tensor] | None = None,
    foreign_experts: bool = False,
    transposed: bool = False,
    adapters_in: Sequence[LowRank] = (),
    adapters_out: Sequence[LowRank] = (),
) -> Tensor:
    """Run :func:`pymoe.nn.apply_experts` on operands in transformers' layouts and dtypes.

    Args:
        x: (T, H), of any floating dtype; it is cast to the weights' dtype, or by autocast.
        index: (T, K) integers, the experts of every token.
        weights: (T, K), the weight of every choice.
        w_in: (E, N, H), any strides.
        w_out: (E, H, F), any strides.
        activation: applied between the two products; a function may return any floating dtype.
        b_in: (E, N), of any floating dtype.
        b_out: (E, H), of any floating dtype.
        post_norm: a function from (S, H) to (S, H), applied to the experts' outputs before they are weighted.
        foreign_experts: True allows values of E and above in ``index``; such choices add nothing.
        transposed: True if the weights are (E, H, N) and (E, F, H) instead.
        adapters_in: adapters of the first product.
        adapters_out: adapters of the second product.

    Returns:
        (T, H), the dtype of ``x``.
    """
    if transposed:
        w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
    b_in = None if b_in is None else b_in.to(w_in.dtype)
    b_out = None if b_out is None else b_out.to(w_in.dtype)
    operand = as_operand(x, w_in)
    if callable(activation):
        activation = followed_by_cast(activation, operand.dtype)
    if post_norm is None and not adapters_in and not adapters_out:
        y = apply_experts(
            *(operand, index, weights, w_in, w_out),
            b_in=b_in,
            b_out=b_out,
            activation=activation,
            foreign_experts=foreign_experts,
        )
    else:
        first, second = adapted(_product(w_in), adapters_in), adapted(_product(w_out), adapters_out)
        networks = networks_of(first, second, b_in, b_out, activation, post_norm)
        y = apply_networks(operand, index, weights, w_in.shape[0], networks, foreign_experts=foreign_experts)
    return y.to(x.dtype)


def _product(weight: Tensor) -> Product:
    return lambda rows, offsets, bias: ops.grouped_linear(rows, weight, offsets, bias)


def as_operand(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows`` as an operand of the product with ``weight``: cast by autocast if it is on, else to its dtype."""
    if not autocast_enabled(rows.device.type):
        return rows.to(weight.dtype)
    (cast,) = cast_operands(rows)
    assert cast is not None
    return cast
