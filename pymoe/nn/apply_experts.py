"""apply_experts: runs chosen expert networks over tokens, in one native call and at most one node of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pymoe import ops
from pymoe._common import checks
from pymoe._common.dtypes import FLOATING, cast_operands
from pymoe._common.types import GATED, KINDS, ActivationKind, QuantizedWeight
from pymoe.nn.apply_experts_checks import (
    NAME,
    check_biases,
    check_choice,
    check_inner,
    check_options,
    check_quantized_networks,
    choice_for_kernels,
)
from pymoe.nn.apply_quantized_experts import apply_quantized_experts
from pymoe.nn.networks import apply_networks, grouped_networks
from pymoe.nn.recorded import apply_experts_recorded, is_one_call
from pymoe.ops import raw
from pymoe.ops.expert_activation import kernel_options
from pymoe.ops.function_calls import is_differentiated

APPLY_EXPERTS = torch.ops.pymoe.apply_experts.default
APPLY_CHOSEN_EXPERTS = torch.ops.pymoe.apply_chosen_experts.default
"""The native call that also runs the gate: it takes logits and the options of ``GATE_TOPK`` in place of a choice."""


def apply_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w_in: Tensor | QuantizedWeight,
    w_out: Tensor | QuantizedWeight,
    *,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    activation: ActivationKind | Callable[[Tensor], Tensor] = "swiglu",
    capacity: int | None = None,
    foreign_experts: bool = False,
) -> Tensor:
    """Send every token through the expert networks chosen for it, and sum their weighted outputs.

    ``y[t] = sum over k of weights[t, k] * network_e(x[t])`` for e = ``experts[t, k]``, where ``network_e(row)`` is
    ``act(row @ w_in[e].T + b_in[e]) @ w_out[e].T + b_out[e]``. This is :func:`pymoe.ops.build_routing`,
    :func:`~pymoe.ops.dispatch`, :func:`~pymoe.ops.grouped_linear`, :func:`~pymoe.ops.expert_activation`, another
    ``grouped_linear`` and :func:`~pymoe.ops.combine`, with their contracts. One native call does all of it and, with
    gradients on the CPU, one node of autograd; outputs and gradients have the same bits. This matters if there are few
    tokens, as in generating text, where the calls from Python are a large part of the cost. The operators run one after
    the other with gradients on a GPU, inside transforms of :mod:`torch.func`, under hooks of saved tensors
    (checkpoints), in compiled code with gradients, and with a function as the activation.
    Inside ``torch.autocast`` the operands of the products are cast as ``F.linear`` casts its own.

    Args:
        x: (T, H), any floating dtype.
        experts: (T, K) int32 or int64, values in 0..E-1, with T * K < 2^31; a router's choice.
        weights: (T, K), any floating dtype; float64 for float64 ``x`` only.
        w_in: (E, N, H), the dtype of ``x``, with N = 2F (gate above up) for gated activations, else N = F. Any strides:
            a transposed view of an (E, H, N) parameter is read in place. For inference, such weights in 8 or 4 bits
            from :func:`pymoe.ops.quantize_weight`: then ``w_out`` must be quantised too, the products are computed by
            :func:`pymoe.ops.quantized_linear`, and neither ``x`` nor a bias may require a gradient.
        w_out: (E, O, F), the dtype of ``x``, any strides. O is usually H.
        b_in: (E, N), the dtype of ``x``, or None.
        b_out: (E, O), the dtype of ``x``, or None.
        activation: a kind of :func:`pymoe.ops.expert_activation`; or a function that is called between the two
            products, takes rows (S, N) and returns rows (S, F), each computed from its own row alone.
        capacity: the most slots that an expert takes; further slots, in the order of tokens, add nothing. ``None``
            drops nothing.
        foreign_experts: let values of E and above stand for experts that are elsewhere (on other ranks of expert
            parallelism); they add nothing to ``y``.

    Returns:
        (T, O), the dtype of ``x`` (the autocast dtype inside ``torch.autocast``). Differentiable in ``x``, ``weights``
        and the parameters, any number of times.

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: a rank, size, device or ``capacity`` does not fit.
        IndexError: an expert index lies outside 0..E-1 (with ``foreign_experts``: it is negative).
    """
    if isinstance(w_in, tuple) or isinstance(w_out, tuple):
        x, b_in, b_out = cast_operands(x, b_in, b_out)  # type: ignore[assignment]
        check_options(activation, capacity, foreign_experts)
        check_choice(x, experts, weights)
        check_quantized_networks(x, w_in, w_out, b_in, b_out, activation)  # type: ignore[arg-type]
        return apply_quantized_experts(
            x,
            experts,
            weights,
            w_in,  # type: ignore[arg-type]  # the check above saw both
            w_out,  # type: ignore[arg-type]
            b_in,
            b_out,
            activation,
            capacity,
            foreign_experts,
        )
    x, w_in, b_in, w_out, b_out = cast_operands(x, w_in, b_in, w_out, b_out)  # type: ignore[assignment]
    if not _fits(x, experts, weights, w_in, w_out, b_in, b_out, activation, capacity, foreign_experts):
        _check(x, experts, weights, w_in, w_out, b_in, b_out, activation, capacity, foreign_experts)
    if not callable(activation) and is_one_call(x, weights, w_in, w_out, b_in, b_out):
        return apply_experts_fused(x, experts, weights, w_in, w_out, b_in, b_out, activation, capacity, foreign_experts)
    whole = capacity is None and not foreign_experts
    networks = grouped_networks(w_in, w_out, b_in, b_out, activation, whole=whole)
    number = w_in.shape[0]
    return apply_networks(
        x,
        experts,
        weights,
        number,
        networks,
        capacity=capacity,
        foreign_experts=foreign_experts,
        operators=ops if callable(activation) else raw,
    )


def apply_experts_fused(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation: ActivationKind,
    capacity: int | None,
    foreign_experts: bool = False,
) -> Tensor:
    """Do the work of :func:`apply_experts` after autocast, for arguments that fit and for which is_one_call is true."""
    experts, weights, capacity = choice_for_kernels(x, experts, weights, w_in.shape[0], capacity, foreign_experts)
    options, x = kernel_options(activation), x.contiguous()
    if is_differentiated(x, weights, w_in, w_out, b_in, b_out):
        parameters = (w_in, b_in, w_out, b_out)
        return apply_experts_recorded(x, experts, weights, parameters, options, capacity, foreign_experts)
    number, *numbers = options
    return APPLY_EXPERTS(  # type: ignore[no-any-return]
        x,
        experts,
        weights,
        w_in,
        b_in,
        w_out,
        b_out,
        number,
        capacity,
        foreign_experts,
        *numbers,
    )


@torch.library.register_fake("pymoe::apply_experts")
def _(
    x: Tensor, experts: Tensor, weights: Tensor, w_in: Tensor, b_in: Tensor | None, w_out: Tensor, *_: object
) -> Tensor:
    return x.new_empty((x.shape[0], w_out.shape[1]))


@torch.library.register_fake("pymoe::apply_chosen_experts")
def _(x: Tensor, logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    w_out = others[9]
    return x.new_empty((x.shape[0], w_out.shape[1])), logits.new_empty((logits.shape[1],), dtype=torch.int32)


def _fits(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation: object,
    capacity: object,
    foreign_experts: object,
) -> bool:
    """Return true only if :func:`_check` accepts the arguments, in one expression; see :mod:`pymoe._common.contracts`.

    This covers only activations with a name, and calls without a capacity.
    """
    for value in (x, experts, weights, w_in, w_out):
        if not isinstance(value, Tensor):
            return False
    dtype, device = x.dtype, x.device
    if not (x.dim() == experts.dim() == 2 and w_in.dim() == w_out.dim() == 3 and type(activation) is str):
        return False
    number, inner, hidden = w_in.shape
    factor = 2 if activation in GATED else 1
    return (
        dtype in FLOATING
        and experts.dtype in (torch.int32, torch.int64)
        and experts.shape[0] == x.shape[0]
        and weights.shape == experts.shape
        and weights.dtype in FLOATING
        and (weights.dtype != torch.float64 or dtype == torch.float64)
        and w_in.dtype == w_out.dtype == dtype
        and experts.device == weights.device == w_in.device == w_out.device == device
        and hidden == x.shape[1]
        and number == w_out.shape[0] > 0
        and activation in KINDS
        and inner == factor * w_out.shape[2]
        and (b_in is None or checks.is_like(b_in, (number, inner), dtype, device))
        and (b_out is None or checks.is_like(b_out, (number, w_out.shape[1]), dtype, device))
        and capacity is None
        and type(foreign_experts) is bool
    )


def _check(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation: object,
    capacity: object,
    foreign_experts: object,
) -> None:
    check_choice(x, experts, weights)
    for argument, weight in (("w_in", w_in), ("w_out", w_out)):
        checks.dtype(NAME, argument, weight, x.dtype)
        checks.rank(NAME, argument, weight, "(E, N, H)" if argument == "w_in" else "(E, O, F)")
        checks.same_device(NAME, argument, weight, "x", x)
    number, inner = w_in.shape[:2]
    checks.size(NAME, "w_in", w_in, 2, x.shape[1], "H of x")
    checks.size(NAME, "w_out", w_out, 0, number, "E of w_in")
    if number == 0:
        raise ValueError(f"{NAME}: w_in must have shape (E, N, H) with E >= 1, got {tuple(w_in.shape)}")
    check_biases(x, b_in, (number, inner), b_out, (number, w_out.shape[1]))
    check_options(activation, capacity, foreign_experts)
    check_inner(activation, tuple(w_in.shape), w_out.shape[2])
