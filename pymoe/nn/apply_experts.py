"""apply_experts: sends every token through the experts chosen for it, in one native call and one autograd node.

Where one call is not possible (:func:`is_one_call`), :func:`apply_networks` runs the operators one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pymoe import ops
from pymoe._common import checks
from pymoe._common.contracts import (
    QUANTIZED_FLOATING,
    ROW_LIMIT,
    check_grouped_linear,
    check_kind,
    check_quantized,
    is_like,
)
from pymoe._common.types import (
    FLOATING,
    GATED,
    KINDS,
    ActivationKind,
    QuantizedWeight,
    Routing,
    accumulate_dtype,
    activation_options,
    cast_operands,
    is_gated,
    number_of,
)
from pymoe.nn.options import check_choice
from pymoe.nn.recorded import apply_experts_recorded, is_one_node
from pymoe.ops import index_checks, package_products, raw
from pymoe.ops.function_calls import is_differentiated, is_recorded, is_transformed
from pymoe.ops.grouped_linear import leaves_bias

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
    ``grouped_linear`` and :func:`~pymoe.ops.combine`, with their contracts, in one native call and, with gradients on
    the CPU, one autograd node. Outputs and gradients are bit for bit those of the separate operators. One call is
    faster for few tokens, as in text generation, where the overhead of Python is a large part of the time. The
    operators run one after the other if the activation is a function, inside transforms of :mod:`torch.func`, and on a
    GPU with :class:`pymoe.ops.use_products_of`. With gradients, they also do so on a GPU, for quantised weights, under
    hooks of saved tensors (checkpoints), and in traced or compiled code.

    Inside ``torch.autocast`` the operands of the products are cast as ``F.linear`` casts its own. In bfloat16 on GPUs
    of compute capability 9.0 and 10.0, where torch computes the products, a bias is added in float32 to a product
    that is already rounded; everywhere else, only the sum of product and bias is rounded.

    Args:
        x: (T, H), any floating dtype.
        experts: (T, K) int32 or int64, values in 0..E-1, with T * K < 2^31; a router's choice.
        weights: (T, K), any floating dtype; float64 for float64 ``x`` only.
        w_in: (E, N, H), the dtype of ``x``, with N = 2F (gate above up) for gated activations, else N = F. Any strides:
            a transposed view of an (E, H, N) parameter is read in place. Or weights quantised by
            :func:`pymoe.ops.quantize_weight`: then ``w_out`` must be quantised too, the products are computed by
            :func:`pymoe.ops.quantized_linear`, and the weights get no gradient.
        w_out: (E, O, F), the dtype of ``x``, any strides. O is usually H.
        b_in: (E, N), the dtype of ``x``, or None.
        b_out: (E, O), the dtype of ``x``, or None.
        activation: a kind of :func:`pymoe.ops.expert_activation`; or a function that is called between the two
            products, takes rows (S, N) and returns rows (S, F), computing each row independently of the others.
        capacity: the maximum number of slots of an expert; further slots, in the order of tokens, add nothing. ``None``
            drops nothing.
        foreign_experts: allow indices of E and above, for experts on other ranks of expert parallelism; these choices
            add nothing to ``y``.

    Returns:
        (T, O), the dtype of ``x`` (the autocast dtype inside ``torch.autocast``). Differentiable in ``x``, ``weights``
        and the parameters, any number of times; in ``x`` and the biases once if weights are quantised.

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: a rank, size, device or ``capacity`` does not fit.
        IndexError: an expert index lies outside 0..E-1 (with ``foreign_experts``: it is negative). On a GPU, this is
            checked only with :class:`pymoe.ops.check_indices`.

    Example:
        >>> x, w_in, w_out = torch.randn(5, 16), torch.randn(4, 64, 16), torch.randn(4, 16, 32)
        >>> weights, experts = torch.randn(5, 4).softmax(dim=1).topk(2)  # a router of your own
        >>> pymoe.nn.apply_experts(x, experts, weights, w_in, w_out, activation="swiglu").shape
        torch.Size([5, 16])
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
    b_out, left = bias_of_product(x, b_out)
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
        bias=left,
    )


def is_one_call(x: Tensor, *others: Any) -> bool:
    """Return whether one native call may run the experts for rows ``x``, as one node if an argument needs a gradient.

    This is not possible if autograd must see each operator: inside a transform, in a graph that is being compiled with
    gradients, and if gradients are needed and :func:`is_one_node` returns false. Nor is it possible if another package
    makes the products (:class:`pymoe.ops.use_products_of`).
    """
    if package_products.chosen is not None and x.device.type == package_products.DEVICE:
        return False
    if is_compiling():
        return not is_recorded(x, *others)
    return not is_transformed() and (not is_differentiated(x, *others) or is_one_node(x))


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
    """Return the result of :func:`apply_experts` in one native call.

    The caller must have checked the arguments and cast them for autocast, and :func:`is_one_call` must be true for
    them.
    """
    experts, weights, capacity = choice_for_kernels(x, experts, weights, w_in.shape[0], capacity, foreign_experts)
    options, x = activation_options(activation), x.contiguous()
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
    """Return true only if :func:`_check` would accept the arguments; see :mod:`pymoe._common.contracts`.

    For an activation without a name, and for a call with a capacity, this returns false.
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
        and (b_in is None or is_like(b_in, (number, inner), dtype, device))
        and (b_out is None or is_like(b_out, (number, w_out.shape[1]), dtype, device))
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


# Checks and conversions of the arguments, for plain and for quantised weights.


NAME = "apply_experts"


def choice_for_kernels(
    x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, capacity: int | None, foreign_experts: bool
) -> tuple[Tensor, Tensor, int | None]:
    """Return experts, weights and capacity as native calls take them; on a GPU in debug mode, check every index."""
    if not experts.is_cpu:  # on the CPU the kernel checks the indices
        index_checks.experts_in_range(NAME, experts, num_experts, foreign_experts)
    wide = accumulate_dtype(x.dtype)
    if weights.dtype != wide:  # test first, since to() takes time even if it changes nothing
        weights = weights.to(wide)
    return experts.contiguous(), weights.contiguous(), None if capacity is None else min(capacity, ROW_LIMIT)


def check_biases(
    x: Tensor, b_in: Tensor | None, shape_in: tuple[int, int], b_out: Tensor | None, shape_out: tuple[int, int]
) -> None:
    """Raise unless each bias is None, or has its shape and the dtype and the device of ``x``."""
    for argument, bias, expected in (("b_in", b_in, shape_in), ("b_out", b_out, shape_out)):
        if bias is not None:
            checks.dtype(NAME, argument, bias, x.dtype)
            checks.same_device(NAME, argument, bias, "x", x)
            if bias.shape != expected:
                raise ValueError(f"{NAME}: {argument} must have shape {expected}, got {tuple(bias.shape)}")


def check_options(activation: object, capacity: object, foreign_experts: object) -> None:
    """Raise unless each option has the right type and is in range."""
    if not callable(activation):
        check_kind(NAME, "activation", activation)
    if capacity is not None:
        checks.integer(NAME, "capacity", capacity, 0, None, "None or at least 0")
    checks.flag(NAME, "foreign_experts", foreign_experts)


def check_inner(activation: object, shape_in: tuple[int, ...], ffn_size: int) -> None:
    """Raise unless the activation turns N into F = ``ffn_size`` features; ``shape_in`` is the (E, N, H) of ``w_in``."""
    if not callable(activation) and shape_in[1] != ffn_size * (2 if is_gated(activation) else 1):
        rule = "2F" if is_gated(activation) else "F"
        raise ValueError(
            f"{NAME}: w_in must have shape (E, {rule}, H) with the F of w_out ({ffn_size}) for {activation!r}, "
            f"got {shape_in}"
        )


def check_quantized_networks(
    x: Tensor,
    w_in: QuantizedWeight,
    w_out: QuantizedWeight,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation: object,
) -> None:
    """Raise unless quantised weights fit ``x`` and each other."""
    checks.dtype(NAME, "x", x, *QUANTIZED_FLOATING)
    for argument, weight in (("w_in", w_in), ("w_out", w_out)):
        check_quantized(NAME, argument, weight)
        checks.same_device(NAME, f"{argument}.packed", weight[0], "x", x)
    number, inner, outputs = w_in[0].shape[0], w_in[2], w_out[2]
    checks.size(NAME, "x", x, 1, w_in[3], "w_in.input_features")
    checks.size(NAME, "w_out.packed", w_out[0], 0, number, "E of w_in.packed")
    if number == 0:
        raise ValueError(
            f"{NAME}: w_in.packed must have shape (E, tiles, bytes) with E >= 1, got {tuple(w_in[0].shape)}"
        )
    check_biases(x, b_in, (number, inner), b_out, (number, outputs))
    check_inner(activation, (number, inner, w_in[3]), w_out[3])


# The networks, run one operator after the other.


Activation = ActivationKind | Callable[[Tensor], Tensor]
"""A kind of :func:`pymoe.ops.expert_activation`, or a function of rows (S, N) that returns rows (S, F)."""

Networks = Callable[[Tensor, Tensor], Tensor]
"""Takes rows (S, H), sorted by expert, and their offsets (E + 1,); returns rows (S, O), each computed from one row."""


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
    bias: Tensor | None = None,
) -> Tensor:
    """Send every token through the networks chosen for it, and sum their weighted outputs.

    Args:
        x: (T, H).
        experts: (T, K), as :func:`pymoe.ops.build_routing` takes them, with ``capacity`` and ``foreign_experts``.
        weights: (T, K).
        num_experts: E, the number of experts.
        networks: all E networks.
        capacity: the maximum number of slots of an expert, or None.
        foreign_experts: allow indices of E and above; these choices add nothing.
        operators: :mod:`pymoe.ops` or :mod:`pymoe.reference`, which check their arguments; or :mod:`pymoe.ops.raw` if
            the arguments have been checked and ``networks`` is one of pymoe's functions.
        routing: the routing of ``experts`` with ``capacity``, if it has been built.
        bias: (E, O), which ``combine`` adds to the rows that ``networks`` returns; or None (:func:`bias_of_product`).

    Returns:
        (T, O), the dtype of the rows that ``networks`` returns.
    """
    if routing is None:
        if operators is raw:
            index_checks.experts_in_range("build_routing", experts, num_experts, foreign_experts)
        routing = operators.build_routing(experts, num_experts, capacity=capacity, foreign_experts=foreign_experts)
    rows = networks(operators.dispatch(x, routing), routing.offsets)
    y: Tensor = operators.combine(rows, routing, weights, bias)
    return y


def bias_of_product(x: Tensor, b_out: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return (bias for the second product, bias for ``combine``): ``b_out`` for one of them, None for the other.

    Args:
        x: rows in the dtype and on the device of the products.
        b_out: (E, O), or None.
    """
    if b_out is None or not leaves_bias(x):
        return b_out, None
    return None, cast_operands(b_out)[0]


def grouped_networks(
    w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None, activation: Activation, *, whole: bool
) -> Networks:
    """Return a function that computes the networks of :func:`pymoe.nn.apply_experts`, for :func:`apply_networks`.

    Args:
        w_in: (E, N, H).
        w_out: (E, O, F).
        b_in: (E, N), or None.
        b_out: (E, O), or None.
        activation: the activation between the two products.
        whole: true if every choice has a row, since there is neither a capacity nor an expert on another rank.
    """

    def networks(rows: Tensor, offsets: Tensor) -> Tensor:
        weight, bias = w_out, b_out
        if b_in is not None and not callable(activation) and leaves_bias(rows):
            inner = raw.grouped_linear(rows, w_in, offsets, whole=whole)
            inner = raw.expert_activation(inner, activation, cast_operands(b_in)[0], offsets)
        else:
            inner = activate(raw.grouped_linear(rows, w_in, offsets, b_in, whole=whole), activation)
        if callable(activation):  # a user's function may return rows of any width and dtype
            inner, weight, bias = cast_operands(inner, w_out, b_out)  # type: ignore[assignment]
            check_grouped_linear(inner, weight, offsets, bias)
        return raw.grouped_linear(inner, weight, offsets, bias, whole=whole)

    return networks


def activate(rows: Tensor, activation: Activation) -> Tensor:
    """Apply an activation, given by name or as a function, to rows (S, N); return (S, F)."""
    return activation(rows) if callable(activation) else raw.expert_activation(rows, activation)


# Quantised weights.


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
    """Return the result of :func:`apply_experts` for quantised weights and checked arguments."""
    if callable(activation) or is_recorded(x, weights, b_in, b_out):

        def networks(rows: Tensor, offsets: Tensor) -> Tensor:
            inner = activate(ops.quantized_linear(rows, w_in, offsets, b_in), activation)
            return ops.quantized_linear(inner, w_out, offsets, b_out)

        number = w_in[0].shape[0]
        return apply_networks(x, experts, weights, number, networks, capacity=capacity, foreign_experts=foreign_experts)
    experts, weights, capacity = choice_for_kernels(x, experts, weights, w_in[0].shape[0], capacity, foreign_experts)
    number, *numbers = activation_options(activation)
    return _APPLY_QUANTIZED_EXPERTS(  # type: ignore[no-any-return]
        x.contiguous(),
        experts,
        weights,
        w_in[0].contiguous(),
        None if b_in is None else b_in.contiguous(),
        w_out[0].contiguous(),
        None if b_out is None else b_out.contiguous(),
        layout_of(w_in, w_out),
        number,
        capacity,
        foreign_experts,
        *numbers,
    )


def layout_of(w_in: QuantizedWeight, w_out: QuantizedWeight) -> list[int]:
    """Return the layout that native calls take: format and output size of each weight.

    If one of the weights is prefetched, the kind of prefetching follows.
    """
    layout = [number_of(w_in), w_in[2], number_of(w_out), w_out[2]]
    prefetch = max(QuantizedWeight(*w_in).prefetch, QuantizedWeight(*w_out).prefetch)
    return [*layout, prefetch] if prefetch else layout


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
