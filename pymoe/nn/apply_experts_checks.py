"""Arguments of apply_experts, with plain and with quantised weights: checks, and conversion for the native calls."""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common import checks
from pymoe._common.contracts import QUANTIZED_FLOATING, ROW_LIMIT, check_kind, check_quantized
from pymoe._common.dtypes import accumulate_dtype
from pymoe._common.types import QuantizedWeight, is_gated
from pymoe.ops import index_checks

NAME = "apply_experts"


def check_choice(x: Tensor, experts: Tensor, weights: Tensor) -> None:
    """Raise unless tokens, their chosen experts and the weights of the choices fit each other."""
    checks.floating(NAME, "x", x)
    checks.rank(NAME, "x", x, "(T, H)")
    checks.dtype(NAME, "experts", experts, torch.int32, torch.int64)
    checks.rank(NAME, "experts", experts, "(T, K)")
    checks.size(NAME, "experts", experts, 0, x.shape[0], "T of x")
    checks.same_device(NAME, "experts", experts, "x", x)
    checks.floating(NAME, "weights", weights)
    if weights.dtype == torch.float64 != x.dtype:
        raise TypeError(f"{NAME}: weights must not have dtype float64 for x of {x.dtype}, whose sums are float32")
    if weights.shape != experts.shape:
        raise ValueError(
            f"{NAME}: weights must have the shape of experts ({tuple(experts.shape)}), got {tuple(weights.shape)}"
        )
    checks.same_device(NAME, "weights", weights, "x", x)


def choice_for_kernels(
    x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, capacity: int | None, foreign_experts: bool
) -> tuple[Tensor, Tensor, int | None]:
    """Return experts, weights and capacity as the native calls take them; in debug mode check every expert."""
    if not experts.is_cpu:  # on the CPU the kernel checks them
        index_checks.experts_in_range(NAME, experts, num_experts, foreign_experts)
    wide = accumulate_dtype(x.dtype)
    if weights.dtype != wide:  # usually they are equal, and comparing costs less than a cast that changes nothing
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
    """Raise unless the options are of their kinds."""
    if not callable(activation):
        check_kind(NAME, "activation", activation)
    if capacity is not None:
        checks.integer(NAME, "capacity", capacity, 0, None, "None or at least 0")
    checks.flag(NAME, "foreign_experts", foreign_experts)


def check_inner(activation: object, shape_in: tuple[int, ...], ffn_size: int) -> None:
    """Raise unless the activation turns the outputs of ``w_in``, whose shape (E, N, H) is given, into F features."""
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
