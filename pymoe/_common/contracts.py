"""Contracts of the operators: what their arguments must be, for :mod:`pymoe.reference` and :mod:`pymoe.ops` alike.

``check_X`` raises the errors that the docstring of the operator X states, through :mod:`pymoe._common.checks`. Where
these checks would cost more than the operator, ``check_X`` first evaluates ``_X_fits``: one expression that is true
only if all checks would pass. The CPU kernels check the values of index tensors; for the reference, and for CUDA
tensors in debug mode, functions here do.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from pymoe._common import checks
from pymoe._common.forward_mode import in_forward_mode
from pymoe._common.types import (
    BLOCK,
    FLOATING,
    FORMATS,
    GATED,
    GROUP,
    KINDS,
    PACKED_ONLY,
    RUNS,
    SCORES,
    ActivationKind,
    ClampedSwiglu,
    QuantizedWeight,
    Routing,
    Score,
    WeightFormat,
    is_gated,
    packed_shape,
    up,
)

ROW_LIMIT = 2**31
"""Exclusive upper limit of S = T * K: rows are numbered in int32."""
QUANTIZED_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of rows that can be multiplied by quantised weights."""


def is_matrix(value: object) -> bool:
    """Return whether ``value`` is a tensor of two dimensions and one of the four floating dtypes."""
    return isinstance(value, Tensor) and value.dtype in FLOATING and value.dim() == 2


def is_like(value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ``value`` is a tensor with this shape and dtype, on ``device``."""
    return isinstance(value, Tensor) and value.shape == shape and value.dtype == dtype and value.device == device


def is_index(value: object, dims: int, device: torch.device) -> bool:
    """Return whether ``value`` is an int32 tensor with ``dims`` dimensions on ``device``."""
    return isinstance(value, Tensor) and value.dtype == torch.int32 and value.dim() == dims and value.device == device


def is_routing(value: object, device: torch.device) -> bool:
    """Return whether :func:`pymoe._common.checks.routing` raises no error for ``value`` and rows on ``device``."""
    if not (isinstance(value, tuple) and len(value) == 3):
        return False
    slot, token, offsets = value
    return (
        isinstance(slot, Tensor)
        and isinstance(token, Tensor)
        and isinstance(offsets, Tensor)
        and slot.dtype == token.dtype == offsets.dtype == torch.int32
        and slot.dim() == 2
        and token.dim() == offsets.dim() == 1
        and slot.device == token.device == offsets.device == device
        and offsets.shape[0] >= 2
    )


def check_gather_batch(tensors: Sequence[Tensor]) -> None:
    """Raise if the argument of :func:`gather_batch` breaks its contract."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"gather_batch: tensors must be a list or tuple of tensors, got {type(tensors).__name__}")
    if len(tensors) == 0:
        raise ValueError("gather_batch: tensors must hold at least one tensor, got none")
    first = tensors[0]
    checks.tensor("gather_batch", "tensors[0]", first)
    dims, dtype, device, trailing = first.dim(), first.dtype, first.device, first.shape[1:]
    if dims == 0:
        _refuse_tensor("tensors[0]", first, first)
    for position, tensor in enumerate(tensors):
        # One cheap test covers valid tensors; names and messages are made only for invalid ones.
        if not (
            isinstance(tensor, Tensor)
            and tensor.dtype == dtype
            and tensor.dim() == dims
            and (dims == 1 or tensor.shape[1:] == trailing)
            and tensor.device == device
        ):
            _refuse_tensor(f"tensors[{position}]", tensor, first)


def _refuse_tensor(name: str, tensor: Tensor, first: Tensor) -> None:
    checks.tensor("gather_batch", name, tensor)
    if tensor.dim() == 0:
        raise ValueError(f"gather_batch: {name} must have at least one dimension, got ()")
    if tensor.dtype != first.dtype:
        raise TypeError(f"gather_batch: {name} must have the dtype of tensors[0] ({first.dtype}), got {tensor.dtype}")
    if tensor.shape[1:] != first.shape[1:]:
        raise ValueError(
            f"gather_batch: {name} must agree with tensors[0] ({tuple(first.shape)}) past dimension 0, "
            f"got {tuple(tensor.shape)}"
        )
    checks.same_device("gather_batch", name, tensor, "tensors[0]", first)


def check_split_batch(batch: Tensor, sizes: Sequence[int]) -> None:
    """Raise if the arguments of :func:`split_batch` break its contract."""
    checks.tensor("split_batch", "batch", batch)
    if batch.dim() == 0:
        raise ValueError("split_batch: batch must have at least one dimension, got ()")
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError(f"split_batch: sizes must be a list or tuple of ints, got {type(sizes).__name__}")
    for position, size in enumerate(sizes):
        checks.integer("split_batch", f"sizes[{position}]", size, 0, None, "at least 0")
    if sum(sizes) != batch.shape[0]:
        raise ValueError(f"split_batch: sizes must sum to {batch.shape[0]} (dimension 0 of batch), got {sum(sizes)}")


def check_gate_topk(
    logits: Tensor,
    k: int,
    score: Score,
    renormalize: bool,
    bias: Tensor | None,
    num_groups: int | None,
    topk_groups: int | None,
    scale: float,
) -> None:
    """Raise if the arguments of :func:`gate_topk` break its contract."""
    if num_groups is topk_groups is None and _gate_topk_fits(logits, k, score, renormalize, bias, scale):
        return
    name = "gate_topk"
    checks.floating(name, "logits", logits)
    checks.rank(name, "logits", logits, "(T, E)")
    num_experts = logits.shape[1]
    checks.integer(name, "k", k, 1, num_experts, f"in 1..E (E = {num_experts})")
    # Skipped while tracing, because the comparison would become a guard on the size. The native operator checks this
    # again when it runs.
    if not torch.compiler.is_compiling() and logits.shape[0] * k >= 2**31:
        raise ValueError(f"{name}: T * k must be below 2**31, got {logits.shape[0]} * {k}")
    checks.choice(name, "score", score, SCORES)
    if not isinstance(renormalize, bool):
        raise TypeError(f"{name}: renormalize must be a bool, got {type(renormalize).__name__}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}: scale must be a float, got {type(scale).__name__}")
    # The comparison also works for an int that is too large for a float.
    if not -sys.float_info.max <= scale <= sys.float_info.max:
        raise ValueError(f"{name}: scale must be finite, got {scale}")
    if bias is not None:
        checks.floating(name, "bias", bias)
        checks.rank(name, "bias", bias, "(E,)")
        checks.size(name, "bias", bias, 0, num_experts, "E of logits")
        checks.same_device(name, "bias", bias, "logits", logits)
    if (num_groups is None) != (topk_groups is None):
        raise ValueError(
            f"{name}: num_groups and topk_groups must be given together, got num_groups={num_groups} and "
            f"topk_groups={topk_groups}"
        )
    if num_groups is not None and topk_groups is not None:
        checks.integer(name, "num_groups", num_groups, 1, num_experts, f"in 1..E (E = {num_experts})")
        if num_experts % num_groups != 0:
            raise ValueError(f"{name}: num_groups must divide E (E = {num_experts}), got {num_groups}")
        checks.integer(name, "topk_groups", topk_groups, 1, num_groups, "in 1..num_groups")
        available = topk_groups * (num_experts // num_groups)
        if available < k:
            raise ValueError(f"{name}: topk_groups must leave at least k = {k} experts to choose from, got {available}")


def _gate_topk_fits(logits: Tensor, k: int, score: Score, renormalize: bool, bias: Tensor | None, scale: float) -> bool:
    """Return whether the arguments, without groups, satisfy the contract."""
    return (
        is_matrix(logits)
        and type(k) is int
        and 1 <= k <= logits.shape[1]
        and (torch.compiler.is_compiling() or logits.shape[0] * k < 2**31)
        and type(score) is str
        and score in SCORES
        and type(renormalize) is bool
        and type(scale) is float
        and -sys.float_info.max <= scale <= sys.float_info.max
        and (
            bias is None
            or (
                isinstance(bias, Tensor)
                and bias.dtype in FLOATING
                and bias.dim() == 1
                and bias.shape[0] == logits.shape[1]
                and bias.device == logits.device
            )
        )
    )


def check_build_routing(experts: Tensor, num_experts: int, capacity: int | None, foreign_experts: bool) -> None:
    """Raise if the arguments of :func:`build_routing` break its contract, except for the range of the indices."""
    if _build_routing_fits(experts, num_experts, capacity, foreign_experts):
        return
    checks.dtype("build_routing", "experts", experts, torch.int32, torch.int64)
    checks.rank("build_routing", "experts", experts, "(T, K)")
    checks.integer("build_routing", "num_experts", num_experts, 1, ROW_LIMIT - 1, "in 1..2^31 - 1")
    if capacity is not None:
        checks.integer("build_routing", "capacity", capacity, 0, None, "None or at least 0")
    checks.flag("build_routing", "foreign_experts", foreign_experts)
    # Skipped while tracing, because the comparison would become a guard on the size. The native operator checks this
    # again when it runs.
    if not torch.compiler.is_compiling() and experts.shape[0] * experts.shape[1] >= ROW_LIMIT:
        raise ValueError(f"build_routing: experts must hold fewer than 2^31 choices, got {tuple(experts.shape)}")


def _build_routing_fits(experts: Tensor, num_experts: int, capacity: int | None, foreign_experts: bool) -> bool:
    return (
        isinstance(experts, Tensor)
        and experts.dtype in (torch.int32, torch.int64)
        and experts.dim() == 2
        and type(num_experts) is int
        and 1 <= num_experts < ROW_LIMIT
        and (capacity is None or (type(capacity) is int and capacity >= 0))
        and type(foreign_experts) is bool
        and (torch.compiler.is_compiling() or experts.numel() < ROW_LIMIT)
    )


def check_experts(operator: str, experts: Tensor, num_experts: int, foreign_experts: bool) -> None:
    """Raise IndexError unless all indices in ``experts`` are in [0, E) or, with ``foreign_experts``, at least 0."""
    if foreign_experts:
        experts = experts.clamp(max=num_experts - 1)
    checks.in_range(operator, "experts", experts, 0, num_experts, "E")


def check_dispatch(x: Tensor, routing: Routing) -> None:
    """Raise if the arguments of :func:`dispatch`, except ``out``, break its contract; slots are not checked."""
    if _dispatch_fits(x, routing):
        return
    checks.floating("dispatch", "x", x)
    checks.rank("dispatch", "x", x, "(T, H)")
    checks.routing("dispatch", routing, "x", x)
    checks.size("dispatch", "routing.slot", routing[0], 0, x.shape[0], "T of x")


def _dispatch_fits(x: Tensor, routing: Routing) -> bool:
    return is_matrix(x) and is_routing(routing, x.device) and routing[0].shape[0] == x.shape[0]


def check_dispatch_out(x: Tensor, routing: Routing, out: Tensor) -> None:
    """Raise if ``out`` is not a buffer that :func:`dispatch` may fill."""
    checks.dtype("dispatch", "out", out, x.dtype)
    checks.rank("dispatch", "out", out, "(S, H)")
    checks.size("dispatch", "out", out, 0, routing[1].shape[0], "S of routing.token")
    checks.size("dispatch", "out", out, 1, x.shape[1], "H of x")
    checks.same_device("dispatch", "out", out, "x", x)
    if not out.is_contiguous():
        raise ValueError(f"dispatch: out must be contiguous, got strides {out.stride()} for {tuple(out.shape)}")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        name = "x" if x.requires_grad else "out"
        raise ValueError(
            f"dispatch: out= has no gradient, but {name} requires one; call it without out=, or under torch.no_grad()"
        )
    if not torch.compiler.is_compiling() and _may_overlap(x, out):
        raise ValueError("dispatch: out must not overlap x in memory")


def _may_overlap(x: Tensor, out: Tensor) -> bool:
    """Return whether the memory ranges of the two tensors, from first to last element, overlap."""
    if x.numel() == 0 or out.numel() == 0:
        return False
    if x.is_meta or any(isinstance(one, FakeTensor) for one in (x, out)):  # meta and fake tensors have no memory
        return False
    x_begin, out_begin = x.data_ptr(), out.data_ptr()
    x_reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    x_end = x_begin + (x_reach + 1) * x.element_size()
    return x_begin < out_begin + out.numel() * out.element_size() and out_begin < x_end


def check_combine(y: Tensor, routing: Routing, weights: Tensor | None, bias: Tensor | None = None) -> None:
    """Raise if the arguments of :func:`combine` break its contract, except for the values of indices."""
    if bias is None and _combine_fits(y, routing, weights):
        return
    checks.floating("combine", "y", y)
    checks.rank("combine", "y", y, "(S, H)")
    checks.routing("combine", routing, "y", y)
    slot, token, offsets = routing
    checks.size("combine", "y", y, 0, token.shape[0], "S of routing.token")
    if weights is not None:
        checks.floating("combine", "weights", weights)
        if weights.dtype == torch.float64 and y.dtype != torch.float64:
            raise TypeError(f"combine: weights must not have dtype float64 for y of {y.dtype}, whose sums are float32")
        checks.rank("combine", "weights", weights, "(T, K)")
        checks.size("combine", "weights", weights, 0, slot.shape[0], "T of routing.slot")
        checks.size("combine", "weights", weights, 1, slot.shape[1], "K of routing.slot")
        checks.same_device("combine", "weights", weights, "y", y)
    if bias is not None:
        meanings = "E of routing.offsets", "H of y"
        check_bias("combine", y, bias, offsets.shape[0] - 1, meanings[0], y.shape[1], meanings[1], "y")


def _combine_fits(y: Tensor, routing: Routing, weights: Tensor | None) -> bool:
    if not (is_matrix(y) and is_routing(routing, y.device) and routing[1].shape[0] == y.shape[0]):
        return False
    return weights is None or (
        is_matrix(weights)
        and weights.shape == routing[0].shape
        and weights.device == y.device
        and (weights.dtype != torch.float64 or y.dtype == torch.float64)
    )


def check_grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, *, order: Tensor | None = None
) -> None:
    """Raise if the arguments of :func:`grouped_linear` break its contract, except for the values of indices."""
    if order is None and _grouped_linear_fits(x, weight, offsets, bias):
        return
    name = "grouped_linear"
    checks.floating(name, "x", x)
    checks.rank(name, "x", x, "(S, H)")
    checks.dtype(name, "weight", weight, x.dtype)
    checks.rank(name, "weight", weight, "(E, N, H)")
    checks.size(name, "weight", weight, 2, x.shape[1], "H of x")
    checks.same_device(name, "weight", weight, "x", x)
    _check_bounds(name, x, offsets, weight.shape[0], "weight")
    if bias is not None:
        check_bias(name, x, bias, weight.shape[0], "E of weight", weight.shape[1], "N of weight")
    if order is not None:
        checks.dtype(name, "order", order, torch.int32)
        checks.rank(name, "order", order, "(S,)")
        checks.size(name, "order", order, 0, x.shape[0], "S of x")
        checks.same_device(name, "order", order, "x", x)


def _grouped_linear_fits(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> bool:
    """Return whether the arguments, without an order, satisfy the contract."""
    if not (is_matrix(x) and isinstance(weight, Tensor) and weight.dim() == 3):
        return False
    dtype, device = x.dtype, x.device
    experts, outputs, inputs = weight.shape
    return (
        weight.dtype == dtype
        and weight.device == device
        and x.shape[1] == inputs
        and is_index(offsets, 1, device)
        and offsets.shape[0] == experts + 1
        and (bias is None or is_like(bias, (experts, outputs), dtype, device))
    )


def _check_bounds(operator: str, x: Tensor, offsets: Tensor, experts: int, weight: str) -> None:
    """Raise unless ``offsets`` is (E + 1,) int32 on the device of ``x``.

    Args:
        operator: the name of the operator, for messages.
        x: the rows.
        offsets: the tensor to check.
        experts: E, the number of experts.
        weight: the name of the argument that has E experts, for messages.
    """
    checks.dtype(operator, "offsets", offsets, torch.int32)
    checks.rank(operator, "offsets", offsets, "(E + 1,)")
    checks.size(operator, "offsets", offsets, 0, experts + 1, f"E + 1 of {weight}")
    checks.same_device(operator, "offsets", offsets, "x", x)


def check_bias(
    operator: str,
    x: Tensor,
    bias: Tensor,
    experts: int,
    meaning: str,
    outputs: int,
    meaning_of_outputs: str,
    argument: str = "x",
) -> None:
    """Raise unless ``bias`` is (E, N), with the dtype and device of ``x``.

    Args:
        operator: the name of the operator, for messages.
        x: the rows to which the bias is added.
        bias: the tensor to check.
        experts: E, the number of experts.
        meaning: where E comes from, for messages.
        outputs: N, the number of outputs.
        meaning_of_outputs: where N comes from, for messages.
        argument: the name of ``x`` in messages.
    """
    checks.dtype(operator, "bias", bias, x.dtype)
    checks.rank(operator, "bias", bias, "(E, N)")
    checks.size(operator, "bias", bias, 0, experts, meaning)
    checks.size(operator, "bias", bias, 1, outputs, meaning_of_outputs)
    checks.same_device(operator, "bias", bias, argument, x)


def check_offsets(bounds: list[int], rows: int, operator: str = "grouped_linear", argument: str = "offsets") -> None:
    """Raise unless ``bounds``, the values of ``offsets``, start at 0, never decrease, and end at ``rows`` or below.

    The native CPU kernels perform this check themselves.
    """
    if bounds[0] != 0:
        raise ValueError(f"{operator}: {argument} must start at 0, got {bounds[0]}")
    for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if end < begin:
            raise ValueError(f"{operator}: {argument} must not decrease, got {end} after {begin} at index {expert + 1}")
    if bounds[-1] > rows:
        raise IndexError(f"{operator}: {argument} must lie in [0, S] (S = {rows}), got {bounds[-1]}")


def check_order(places: list[int], rows: int, operator: str = "grouped_linear") -> None:
    """Raise unless ``places`` are indices of distinct rows.

    The native CPU kernels perform this check themselves.

    Args:
        places: the first ``offsets[-1]`` values of ``order``, which are the values in use.
        rows: S, the number of rows.
        operator: the name of the operator, for the message.
    """
    seen = set()
    for at, row in enumerate(places):
        if not 0 <= row < rows:
            raise IndexError(f"{operator}: order must lie in [0, S) (S = {rows}), got {row} at [{at}]")
        if row in seen:
            raise ValueError(f"{operator}: order must not name a row twice, got {row} at [{at}] again")
        seen.add(row)


def check_kind(name: str, argument: str, kind: object) -> None:
    """Raise unless ``kind`` is in :data:`KINDS`, or a :class:`ClampedSwiglu` with valid fields."""
    if not isinstance(kind, ClampedSwiglu):
        if not isinstance(kind, str):
            raise TypeError(f"{name}: {argument} must be a string or a ClampedSwiglu, got {type(kind).__name__}")
        if kind not in KINDS:
            checks.choice(name, argument, kind, KINDS)
        return
    for field, value in zip(("limit", "alpha", "up_offset"), kind, strict=False):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: {argument}.{field} must be a float, got {type(value).__name__}")
        if not math.isfinite(value) and (field != "limit" or math.isnan(value)):
            raise ValueError(f"{name}: {argument}.{field} must be finite, got {value}")
    if kind.limit <= 0:
        raise ValueError(f"{name}: {argument}.limit must be greater than 0, got {kind.limit}")
    checks.flag(name, f"{argument}.interleaved", kind.interleaved)


def check_expert_activation(
    h: Tensor, kind: ActivationKind, bias: Tensor | None = None, offsets: Tensor | None = None
) -> None:
    """Raise if the arguments of :func:`expert_activation` break its contract, except for the values of indices."""
    if bias is offsets is None and _expert_activation_fits(h, kind):
        return
    name = "expert_activation"
    checks.floating(name, "h", h)
    check_kind(name, "kind", kind)
    gated = is_gated(kind)
    checks.rank(name, "h", h, "(S, 2F)" if gated else "(S, F)")
    if gated and h.shape[1] % 2:
        raise ValueError(f"{name}: h must have shape (S, 2F) with an even second size, got {tuple(h.shape)}")
    if (bias is None) != (offsets is None):
        given, missing = ("bias", "offsets") if offsets is None else ("offsets", "bias")
        raise ValueError(f"{name}: bias and offsets must be given together, got {given} without {missing}")
    if bias is not None and offsets is not None:
        checks.dtype(name, "offsets", offsets, torch.int32)
        checks.rank(name, "offsets", offsets, "(E + 1,)")
        checks.same_device(name, "offsets", offsets, "h", h)
        if offsets.shape[0] == 0:
            raise ValueError(f"{name}: offsets must have shape (E + 1,), got (0,)")
        check_bias(name, h, bias, offsets.shape[0] - 1, "E of offsets", h.shape[1], "the second size of h", "h")


def _expert_activation_fits(h: Tensor, kind: ActivationKind) -> bool:
    """Return whether the arguments satisfy the contract; False for every :class:`ClampedSwiglu`."""
    return type(kind) is str and kind in KINDS and is_matrix(h) and (kind not in GATED or h.shape[1] % 2 == 0)


def check_quantize_weight(weight: Tensor, bits: int, format: WeightFormat) -> None:
    """Raise if the arguments of :func:`quantize_weight` break its contract, except for the values of ``weight``."""
    checks.floating("quantize_weight", "weight", weight)
    checks.rank("quantize_weight", "weight", weight, "(E, N, H)")
    check_format("quantize_weight", bits, format)
    if not weight.is_meta:
        check_rounded("quantize_weight", format)


def check_format(operator: str, bits: object, format: object, of: str = "") -> None:
    """Raise unless the pair of ``format`` and ``bits`` is in :data:`FORMATS`; messages prefix both argument names with
    ``of``.
    """
    if type(format) is str and type(bits) is int and (format, bits) in FORMATS:
        return
    known = {name: [bits for one, bits in FORMATS if one == name] for name, _ in FORMATS}
    if not isinstance(format, str):
        raise TypeError(f"{operator}: {of}format must be a str, got {type(format).__name__}")
    if format not in known:
        *first, last = map(repr, known)
        raise ValueError(f"{operator}: {of}format must be {', '.join(first)} or {last}, got {format!r}")
    *some, last = map(str, known[format])
    fitting = (", ".join(some) + " or " if some else "") + last + ("" if format == "int" else f" for format {format!r}")
    checks.integer(operator, f"{of}bits", bits, 4, 8, fitting)
    if bits not in known[format]:
        raise ValueError(f"{operator}: {of}bits must be {fitting}, got {bits}")


def check_rounded(operator: str, format: str) -> None:
    """Raise ValueError if ``format`` is a format to which :func:`quantize_weight` cannot round weights."""
    if format in PACKED_ONLY:
        raise ValueError(
            f"{operator}: format must be one to which weights are rounded, got {format!r}, which only holds weights "
            f"that another program has rounded; see pymoe.ops.pack_weight"
        )


def check_quantized(operator: str, argument: str, weight: QuantizedWeight) -> None:
    """Raise unless ``weight`` is a :class:`QuantizedWeight` (or a tuple of its first fields) whose fields agree."""
    if not (isinstance(weight, tuple) and len(weight) in (4, 5, 6)):
        raise TypeError(f"{operator}: {argument} must be a QuantizedWeight, got {type(weight).__name__}")
    packed, bits, output_features, input_features, format, prefetch = QuantizedWeight(*weight)
    check_format(operator, bits, format, f"{argument}.")
    checks.integer(operator, f"{argument}.prefetch", prefetch, 0, 2, "0, 1 or 2")
    checks.integer(operator, f"{argument}.output_features", output_features, 0, None, "at least 0")
    checks.integer(operator, f"{argument}.input_features", input_features, 0, None, "at least 0")
    checks.dtype(operator, f"{argument}.packed", packed, torch.uint8)
    checks.rank(operator, f"{argument}.packed", packed, "(E, tiles, bytes)")
    _, tiles, size = packed_shape(FORMATS[format, bits], output_features, input_features, 0)
    checks.size(operator, f"{argument}.packed", packed, 1, tiles, f"tiles of {argument}.output_features")
    checks.size(operator, f"{argument}.packed", packed, 2, size, f"bytes of {argument}.input_features")


def check_pack_weight(codes: Tensor, scales: Tensor, offsets: Tensor | None, bits: int) -> None:
    """Raise if the arguments of :func:`pack_weight` break its contract, except for the values of ``codes``."""
    if offsets is not None:
        _check_pack_affine(codes, scales, offsets, bits)
        return
    checks.integer("pack_weight", "bits", bits, 8, 8, "8 without offsets, as codes then say their format")
    checks.dtype("pack_weight", "codes", codes, torch.uint8, torch.float8_e4m3fn, torch.int8)
    if codes.dtype == torch.uint8:
        checks.rank("pack_weight", "codes", codes, "(E, N, H / 32, 16)")
        checks.size("pack_weight", "codes", codes, 3, GROUP // 2, "bytes of 32 codes")
        checks.dtype("pack_weight", "scales", scales, torch.uint8)
        checks.rank("pack_weight", "scales", scales, "(E, N, H / 32)")
        for dim, of in enumerate(("E", "N", "H / 32")):
            checks.size("pack_weight", "scales", scales, dim, codes.shape[dim], f"{of} of codes")
    elif codes.dtype == torch.int8:
        checks.rank("pack_weight", "codes", codes, "(E, N, H)")
        _check_ends(codes, FORMATS["symmetric", 8], scales=scales)
    else:
        checks.rank("pack_weight", "codes", codes, "(E, N, H)")
        experts, outputs, inputs = codes.shape
        checks.dtype("pack_weight", "scales", scales, torch.float32)
        checks.rank("pack_weight", "scales", scales, "(E, N / 128, H / 128)")
        checks.size("pack_weight", "scales", scales, 0, experts, "E of codes")
        blocks = up(outputs, BLOCK) // BLOCK
        if scales.shape[1] not in (blocks, outputs):
            raise ValueError(
                f"pack_weight: scales must have size {blocks} (blocks of N of codes) or {outputs} (N of codes) in "
                f"dimension 1, got {scales.shape[1]}"
            )
        checks.size("pack_weight", "scales", scales, 2, up(inputs, BLOCK) // BLOCK, "blocks of H of codes")
    checks.same_device("pack_weight", "scales", scales, "codes", codes)


def _check_pack_affine(codes: Tensor, scales: Tensor, offsets: Tensor, bits: int) -> None:
    check_format("pack_weight", bits, "affine")
    checks.dtype("pack_weight", "codes", codes, torch.uint8)
    checks.rank("pack_weight", "codes", codes, "(E, N, H)")
    _check_ends(codes, FORMATS["affine", bits], scales=scales, offsets=offsets)


def _check_ends(codes: Tensor, number: int, **named: Tensor) -> None:
    """Raise unless each of the ``named`` tensors is float32 and has a value for each output and run of inputs of
    ``codes``.

    ``number`` identifies the format, which must be one of :data:`RUNS`; a run is the inputs that share a scale.
    """
    size, _ = RUNS[number]
    experts, outputs, inputs = codes.shape
    for name, ends in named.items():
        checks.dtype("pack_weight", name, ends, torch.float32)
        checks.rank("pack_weight", name, ends, f"(E, N, H / {size})")
        checks.size("pack_weight", name, ends, 0, experts, "E of codes")
        checks.size("pack_weight", name, ends, 1, outputs, "N of codes")
        checks.size("pack_weight", name, ends, 2, up(inputs, size) // size, f"groups of {size} of H of codes")
        checks.same_device("pack_weight", name, ends, "codes", codes)


def check_quantized_linear(x: Tensor, weight: QuantizedWeight, offsets: Tensor | None, bias: Tensor | None) -> None:
    """Raise if the arguments of :func:`quantized_linear` break its contract, except for the values of ``offsets``."""
    name = "quantized_linear"
    checks.dtype(name, "x", x, *QUANTIZED_FLOATING)
    if offsets is not None:
        checks.rank(name, "x", x, "(S, H)")
    elif not x.dim():
        raise ValueError(f"{name}: x must have shape (..., H), got {tuple(x.shape)}")
    check_quantized(name, "weight", weight)
    packed, _, outputs, inputs = weight[:4]
    checks.size(name, "x", x, x.dim() - 1, inputs, "weight.input_features")
    checks.same_device(name, "weight.packed", packed, "x", x)
    if offsets is not None:
        _check_bounds(name, x, offsets, packed.shape[0], "weight.packed")
    elif packed.shape[0] != 1:
        raise ValueError(
            f"{name}: offsets must be a tensor unless E of weight.packed is 1, got None for {packed.shape[0]}"
        )
    if bias is not None:
        check_bias(name, x, bias, packed.shape[0], "E of weight.packed", outputs, "weight.output_features")
    if is_compiling():
        if in_forward_mode():
            _NoTangents.jvp(None)
    elif forward_ad._current_level >= 0:
        _NoTangents.apply(x, bias)


class _NoTangents(torch.autograd.Function):
    """An operation that computes nothing and raises if one of its inputs has a tangent.

    Unlike a test of the tensor, this also works inside ``vmap``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing; the transforms of torch.func require this method."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError(
            "quantized_linear: quantised weights have no forward-mode derivative (jvp, jacfwd, hessian, forward_ad); "
            "dequantize them with pymoe.ops.dequantize_weight to differentiate"
        )


refuse_tangents = _NoTangents.jvp
"""A ``jvp`` for an ``autograd.Function``: raises the error of :func:`quantized_linear` in forward mode."""


def refuse_second_gradient(*_: object) -> NoReturn:
    """Raise the error for a backward pass through the gradient of :func:`quantized_linear`."""
    raise NotImplementedError(
        "quantized_linear: quantised weights have no second derivative (a backward pass through gradients that were "
        "computed with create_graph=True); dequantize them with pymoe.ops.dequantize_weight to differentiate again"
    )


def check_logits(name: str, logits: Tensor) -> None:
    """Raise if ``logits`` is not (T, E) floating with E >= 1."""
    checks.floating(name, "logits", logits)
    checks.rank(name, "logits", logits, "(T, E)")
    if logits.shape[1] < 1:
        raise ValueError(f"{name}: logits must have shape (T, E) with E >= 1, got {tuple(logits.shape)}")


def check_router_losses(name: str, logits: Tensor, load: Tensor, score: Score) -> None:
    """Raise if the arguments of the operator ``name`` break its contract."""
    if _router_losses_fits(logits, load, score):
        return
    check_logits(name, logits)
    checks.dtype(name, "load", load, torch.int32, torch.int64)
    checks.rank(name, "load", load, "(E,)")
    checks.size(name, "load", load, 0, logits.shape[1], "E of logits")
    checks.same_device(name, "load", load, "logits", logits)
    checks.choice(name, "score", score, SCORES)


def _router_losses_fits(logits: Tensor, load: Tensor, score: Score) -> bool:
    return (
        is_matrix(logits)
        and isinstance(load, Tensor)
        and load.dtype in (torch.int32, torch.int64)
        and load.dim() == 1
        and load.shape[0] == logits.shape[1] > 0
        and load.device == logits.device
        and type(score) is str
        and score in SCORES
    )
