"""The experts of a transformers model on pymoe's operators: what ``experts_implementation="pymoe"`` runs.

The model keeps its parameters, its router and its state dict. Weights are read where they lie: those stored
(E, in, out) through strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pymoe import ops
from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import Activation, activation_of
from pymoe.reference import checks
from pymoe.reference.autocast import autocast_enabled, cast_operands
from pymoe.reference.types import Routing


class Weights(NamedTuple):
    """The parameters of E experts, or views of them, with output features before input features."""

    w_in: Tensor
    """(E, N, H), N what the activation takes: 2F with a gate, else F."""
    w_out: Tensor
    """(E, H, F)."""
    b_in: Tensor | None = None
    """(E, N)."""
    b_out: Tensor | None = None
    """(E, H)."""


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute what the eager forward of an experts module of transformers computes.

    The signature, and the flags that ``experts`` carry, are those of transformers' ``use_experts_implementation``. The
    layout of gate and up in ``gate_up_proj`` is the module's own business: its gate splits it, unless a fused
    activation of pymoe is known to do the same.

    Args:
        experts: a module behind transformers' experts interface.
        hidden_states: (T, H). Outside of autocast it is cast to the dtype of the weights.
        top_k_index: (T, K) integers, the experts of every token. With expert parallelism, E and above name experts
            of other ranks, which add nothing.
        top_k_weights: (T, K), the factor of every choice.

    Returns:
        (T, H), the dtype of ``hidden_states``. Differentiable in it, in ``top_k_weights`` and in all parameters.

    Raises:
        TypeError: the weights are not of a floating dtype that pymoe computes in, such as those of a quantised model.
    """
    flags = interface.flags(experts)
    name = "gate_up_proj" if flags.gated else "up_proj"
    w_in, w_out = getattr(experts, name), experts.down_proj
    checks.floating(f"experts_implementation='pymoe' ({type(experts).__name__})", name, w_in)
    if flags.transposed:
        w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
    biases = (getattr(experts, f"{name}_bias"), experts.down_proj_bias) if flags.biased else (None, None)
    return run_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        Weights(w_in, w_out, *biases),
        activation_of(experts),
        post_norm=experts.post_expert_norm if flags.normed else None,
        others_follow=flags.expert_parallel,
    )


def run_experts(
    x_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    parameters: Weights,
    activation: Activation,
    *,
    post_norm: Callable[[Tensor], Tensor] | None = None,
    others_follow: bool = False,
) -> Tensor:
    """Send every token through its experts and sum what they return.

    Args:
        x_TH: (T, H); cast to the dtype of the weights, or by autocast.
        index_TK: (T, K) integers in 0..E-1.
        weights_TK: (T, K), the factor of every choice.
        parameters: of the E experts.
        activation: between the two products.
        post_norm: applied to every expert's output, (S, H) to (S, H), before it is weighted.
        others_follow: ``index_TK`` may hold numbers from E on, which add nothing.

    Returns:
        (T, H), the dtype of ``x_TH``.
    """
    w_in, w_out, b_in, b_out = parameters
    routing = _routing(index_TK, w_in.shape[0], others_follow)
    rows = ops.dispatch(as_operand(x_TH, w_in), routing)
    rows = activate(ops.grouped_linear(rows, w_in, routing.offsets, _as(b_in, w_in)), activation)
    rows = ops.grouped_linear(as_operand(rows, w_out), w_out, routing.offsets, _as(b_out, w_out))
    if post_norm is not None:
        rows = post_norm(rows)
    return ops.combine(rows, routing, weights_TK).to(x_TH.dtype)


def activate(rows: Tensor, activation: Activation) -> Tensor:
    """Apply an activation, fused or not, to (S, N) rows; return (S, F)."""
    return ops.expert_activation(rows, activation) if isinstance(activation, str) else activation(rows)


def as_operand(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows`` in the dtype in which they meet ``weight``: that of autocast, else that of the weight."""
    if not autocast_enabled(rows.device.type):
        return rows.to(weight.dtype)
    (cast,) = cast_operands(rows)
    assert cast is not None
    return cast


def _as(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(weight.dtype)


def _routing(index_TK: Tensor, num_experts: int, others_follow: bool) -> Routing:
    if not others_follow:
        return ops.build_routing(index_TK, num_experts)
    # One more expert, the last, gathers what is not computed here; then its rows are taken for dropped ones.
    slot, token, offsets = ops.build_routing(index_TK.clamp(max=num_experts), num_experts + 1)
    kept = offsets[-2]
    row = torch.arange(token.shape[0], device=token.device)
    return Routing(torch.where(slot < kept, slot, -1), torch.where(row < kept, token, -1), offsets[:-1])
