"""Types that operators share: dtypes and the casts of ``torch.autocast``, named results, kinds of activations, and the
layout of packed weights.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Computed once at import, because torch.compile cannot trace is_autocast_available before torch 2.13.
_DEVICES = frozenset(
    device for device in ("cpu", "cuda", "xpu", "hpu", "mps", "mtia", "maia") if torch.amp.is_autocast_available(device)
)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scores and sums of ``dtype`` are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_enabled(device_type: str) -> bool:
    """Return whether ``torch.autocast`` is on for this type of device; False for types without it, like ``"meta"``."""
    return device_type in _DEVICES and torch.is_autocast_enabled(device_type)


def cast_operands(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast operands as ``F.linear`` does inside ``torch.autocast``.

    While autocast is on for the device of the first operand (the CPU if it is not a tensor), every floating tensor
    except float64 is cast to the autocast dtype, differentiably. All other operands are returned unchanged.
    """
    device = operands[0].device.type if isinstance(operands[0], Tensor) else "cpu"
    if not autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        operand.to(dtype)
        if isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype != torch.float64
        else operand
        for operand in operands
    )


Score = Literal["softmax", "sigmoid"]
"""Function that turns a router's logits into scores."""
SCORES = ("softmax", "sigmoid")

GateOptions = tuple[int, Score, bool, int, int, float]
"""Checked options of :func:`gate_topk`: k, score, renormalize, num_groups, topk_groups (both 0 for None), scale."""

GateBackwardOptions = tuple[Score, bool, bool, float]
"""Options of the backward of :func:`gate_topk`: score, renormalize, whether logits alone made the choice, scale."""


def gate_backward_options(bias: Tensor | None, options: GateOptions) -> GateBackwardOptions:
    """Return the options for the backward of a :func:`gate_topk` call that was made with ``bias`` and ``options``."""
    _, score, renormalize, num_groups, _, scale = options
    return score, renormalize, bias is None and num_groups == 0, scale


class ClampedSwiglu(NamedTuple):
    """A swiglu whose gate and up are clamped: g * sigmoid(alpha * g) * (u + up_offset) for clamped g and u.

    It is a kind of :func:`expert_activation`, which states its contract. GPT-OSS uses ``ClampedSwiglu(7.0, alpha=1.702,
    up_offset=1.0, interleaved=True)``.
    """

    limit: float
    """Upper limit of the gate and of the magnitude of up. Positive; ``math.inf`` means no limit."""
    alpha: float = 1.0
    """Factor of the gate inside the sigmoid."""
    up_offset: float = 0.0
    """Offset that is added to the clamped up."""
    interleaved: bool = False
    """Layout of the columns: [gate 0, up 0, gate 1, up 1, ...] if true, else [gate | up]."""


ActivationKind = Literal["swiglu", "gelu", "relu", "geglu", "geglu_tanh", "gelu_tanh", "relu_squared"] | ClampedSwiglu
"""The activation between the two linear layers of an expert."""


KINDS = ("swiglu", "gelu", "relu", "geglu", "geglu_tanh", "gelu_tanh", "relu_squared")
GATED = ("swiglu", "geglu", "geglu_tanh")
"""Named kinds that turn 2F columns, gate and up, into F columns."""


def is_gated(kind: object) -> bool:
    """Return whether ``kind`` is gated: such an activation turns 2F columns, gate and up, into F columns."""
    return isinstance(kind, ClampedSwiglu) or kind in GATED


ActivationOptions = tuple[int, float, float, float, bool]
"""Arguments of the native operators: the kind's number, then limit, alpha, up_offset and interleaved of a
:class:`ClampedSwiglu`.
"""


def activation_options(kind: ActivationKind) -> ActivationOptions:
    """Return the arguments for ``kind`` that the native operators take. ``kind`` must be valid, and is not checked."""
    if isinstance(kind, ClampedSwiglu):
        return (len(KINDS), float(kind.limit), float(kind.alpha), float(kind.up_offset), kind.interleaved)
    return (KINDS.index(kind), 0.0, 1.0, 0.0, False)


def kind_of_options(number: int, *options: Any) -> ActivationKind:
    """Return the kind for the given :data:`ActivationOptions`."""
    return ClampedSwiglu(*options) if number == len(KINDS) else KINDS[number]  # type: ignore[return-value]


class Gate(NamedTuple):
    """The result of :func:`gate_topk` for T tokens, E experts and K choices per token."""

    weights: Tensor
    """(T, K) float32 (float64 for float64 logits): the weight of each choice, best choice first."""
    experts: Tensor
    """(T, K) int32: the chosen experts, distinct within a token."""
    load: Tensor
    """(E,) int32: the number of choices that fell on each expert; the sum is T * K."""


class Routing(NamedTuple):
    """The row of every choice, when the rows are sorted by expert; made by :func:`build_routing`.

    A Routing that you make by hand may have fewer or more than T * K rows, for a buffer with another order or with
    spare rows.
    """

    slot: Tensor
    """(T, K) int32: the row of each choice, stable in (token, choice) order within an expert; -1 where dropped."""
    token: Tensor
    """(S,) int32, S = T * K from :func:`build_routing`: the token of each row; -1 for rows past ``offsets[-1]``."""
    offsets: Tensor
    """(E + 1,) int32: rows ``offsets[e]`` to ``offsets[e + 1]`` belong to expert e."""


WeightFormat = Literal["int", "mxfp", "fp", "affine", "symmetric"]
"""Kinds of quantised weights: integers in pymoe's own grids ("int"), floating-point codes of the OCP Microscaling
formats ("mxfp") or of FP8 ("fp"), and integers with another program's scales, with offsets ("affine") or without
("symmetric")."""


Prefetch = Literal[0, 1, 2]
"""Weights to read in advance: none (0), those of the chosen experts that are not in memory (1), or all of the chosen
experts (2)."""


class QuantizedWeight(NamedTuple):
    """The quantised weights of E linear layers; made by :func:`quantize_weight` or :func:`pack_weight`."""

    packed: Tensor
    """(E, ceil(N / 64), bytes) uint8: scales, minima and codes, in the order in which the kernels read them."""
    bits: int
    """Bits of a code: 8, 4 or 2."""
    output_features: int
    """N, the number of outputs."""
    input_features: int
    """H, the number of inputs."""
    format: WeightFormat = "int"
    """Kind of the codes and scales: see :func:`quantize_weight` and :func:`pack_weight`."""
    prefetch: Prefetch = 0
    """The weights that :func:`pymoe.nn.apply_experts` asks the system to read in advance: see
    :func:`pymoe.nn.prefetch_experts`."""


FORMATS = {
    ("int", 8): 8,
    ("int", 4): 4,
    ("mxfp", 4): 14,
    ("fp", 8): 18,
    ("affine", 8): 28,
    ("affine", 4): 24,
    ("affine", 2): 22,
    ("symmetric", 8): 38,
}
"""Numbers that identify the formats in kernels and state dicts: the bits, plus 10 for floating-point codes, 20 for
"affine", 30 for "symmetric"."""
PACKED_ONLY = ("affine", "symmetric")
"""Formats to which pymoe rounds no weights: they represent weights that another program has rounded."""


def number_of(weight: QuantizedWeight) -> int:
    """Return the number that identifies the format of ``weight`` in :data:`FORMATS`.

    Raises:
        ValueError: there is no such format. ``check_quantized`` refuses such a weight when a caller passes it, but a
            layer's attributes are not checked until they reach this function.
    """
    weight = QuantizedWeight(*weight)
    try:
        return FORMATS[weight.format, weight.bits]
    except (KeyError, TypeError):  # FORMATS has no such format, or a field has an unhashable value such as a list
        known = ", ".join(f"{kind!r} in {bits} bits" for kind, bits in FORMATS)
        got = f"{weight.format!r} in {weight.bits} bits"
        raise ValueError(f"expected a quantised weight of format {known}, got {got}") from None


TILE = 64
"""Number of outputs of a tile."""
GROUP = 32
"""Number of inputs that share a scale in int4 and mxfp4, and a minimum in int4; inputs are padded to a multiple."""
BLOCK = 128
"""Number of inputs that share a scale in FP8; in files of checkpoints, as many outputs share it, too."""
RUNS = {18: (BLOCK, 1), 24: (BLOCK, 2), 28: (GROUP, 2), 22: (GROUP // 2, 2), 38: (GROUP // 2, 1)}
"""Formats, by number, with tiles that consist of runs of inputs. The values are the number of inputs in a run, and the
number of float32 values for each output before the codes of a run: a scale, and for "affine" an offset."""
SUPER = 8
"""Number of groups in a super-block of int4; they share the factors of their scales and minima."""
SUPER_BYTES = TILE * (2 + 2 + 12)
"""Number of bytes before the codes of a super-block in a tile."""


def up(value: int, multiple: int) -> int:
    """Return ``value`` rounded up to a multiple of ``multiple``."""
    return (value + multiple - 1) // multiple * multiple


def bytes_of_tile(number: int, input_features: int) -> int:
    """Return the size in bytes of a tile, which has :data:`TILE` outputs. ``number`` identifies the format, as in
    :data:`FORMATS`.
    """
    inputs = up(input_features, GROUP)
    if number in RUNS:
        size, heads = RUNS[number]
        return TILE * (up(inputs, size) // size * heads * 4 + inputs * (number % 10) // 8)
    if number == 8:
        return TILE * (4 + inputs)
    if number == 4:
        return TILE * (1 + inputs // 2) + up(inputs, SUPER * GROUP) // (SUPER * GROUP) * SUPER_BYTES
    return TILE * (inputs // GROUP + inputs // 2)


def packed_shape(number: int, output_features: int, input_features: int, experts: int) -> tuple[int, int, int]:
    """Return the shape of a packed weight. ``number`` identifies its format, as in :data:`FORMATS`."""
    return experts, up(output_features, TILE) // TILE, bytes_of_tile(number, input_features)


class RouterLosses(NamedTuple):
    """The auxiliary losses of a router."""

    load_balancing: Tensor
    """Scalar: E * sum_e f_e * P_e, 1 in perfect balance (Switch Transformer)."""
    z: Tensor
    """Scalar: the mean over tokens of logsumexp(logits) squared (ST-MoE)."""
