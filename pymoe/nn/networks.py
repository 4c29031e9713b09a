"""Runs expert networks over tokens by one operator after the other, for code that differentiates or replaces them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from pymoe import ops
from pymoe._common.contracts import check_grouped_linear
from pymoe._common.dtypes import cast_operands
from pymoe._common.types import ActivationKind, Routing
from pymoe.ops import index_checks, raw

Activation = ActivationKind | Callable[[Tensor], Tensor]
"""A kind of :func:`pymoe.ops.expert_activation`, or a function of rows (S, N) that returns rows (S, F)."""

Networks = Callable[[Tensor, Tensor], Tensor]
"""Takes rows (S, H), sorted by expert, and their offsets (E + 1,); returns rows (S, O), each from its own row."""


def apply_networks(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    networks: Networks,
    *,
    capacity: int | None = None,
    foreign_experts: bool = False,
    operators: ModuleType = ops,
    routing: Routing | None = None,
) -> Tensor:
    """Send every token through the networks chosen for it, and sum their weighted outputs.

    Args:
        x: (T, H).
        experts: (T, K), as :func:`pymoe.ops.build_routing` takes them, with ``capacity`` and ``foreign_experts``.
        weights: (T, K).
        num_experts: E.
        networks: all E networks.
        capacity: the most slots that an expert takes, or None.
        foreign_experts: allow values of E and above, which add nothing.
        operators: :mod:`pymoe.ops`, which checks what ``networks`` returns, :mod:`pymoe.reference`, or
            :mod:`pymoe.ops.raw` if the arguments have been checked and ``networks`` are pymoe's own.
        routing: the routing of ``experts`` with ``capacity``, if it has been built.

    Returns:
        (T, O), the dtype of the rows that ``networks`` returns.
    """
    if routing is None:
        if operators is raw:
            index_checks.experts_in_range("build_routing", experts, num_experts, foreign_experts)
        routing = operators.build_routing(experts, num_experts, capacity=capacity, foreign_experts=foreign_experts)
    rows = networks(operators.dispatch(x, routing), routing.offsets)
    y: Tensor = operators.combine(rows, routing, weights)
    return y


def grouped_networks(
    w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None, activation: Activation, *, whole: bool
) -> Networks:
    """Return the networks of :func:`pymoe.nn.apply_experts`, with its arguments, for :func:`apply_networks` to call.

    Args:
        w_in: (E, N, H).
        w_out: (E, O, F).
        b_in: (E, N), or None.
        b_out: (E, O), or None.
        activation: the activation between the two products.
        whole: true if every choice has a row: there is no capacity, and no expert is elsewhere.
    """

    def networks(rows: Tensor, offsets: Tensor) -> Tensor:
        inner = activate(raw.grouped_linear(rows, w_in, offsets, b_in, whole=whole), activation)
        weight, bias = w_out, b_out
        if callable(activation):  # the rows that it returns have not been checked
            inner, weight, bias = cast_operands(inner, w_out, b_out)  # type: ignore[assignment]
            check_grouped_linear(inner, weight, offsets, bias)
        return raw.grouped_linear(inner, weight, offsets, bias, whole=whole)

    return networks


def activate(rows: Tensor, activation: Activation) -> Tensor:
    """Apply an activation, either one of pymoe's or a function, to (S, N) rows; return (S, F)."""
    return activation(rows) if callable(activation) else raw.expert_activation(rows, activation)
