"""The named results that operators pass to each other."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Score = Literal["softmax", "sigmoid"]
"""How a router's logits become scores."""


class ClampedSwiglu(NamedTuple):
    """A swiglu whose gate and up are clamped: g * sigmoid(alpha * g) * (u + up_offset) for clamped g and u.

    A kind of :func:`expert_activation`, which has the whole contract. GPT-OSS has ``ClampedSwiglu(7.0, alpha=1.702,
    up_offset=1.0, interleaved=True)``.
    """

    limit: float
    """The greatest gate, and the greatest size of up; above 0, ``math.inf`` for none."""
    alpha: float = 1.0
    """Factor of the gate inside the sigmoid."""
    up_offset: float = 0.0
    """Added to the clamped up."""
    interleaved: bool = False
    """Whether columns are [gate 0, up 0, gate 1, up 1, ...] in place of [gate | up]."""


ActivationKind = Literal["swiglu", "gelu", "relu", "geglu", "geglu_tanh", "gelu_tanh", "relu_squared"] | ClampedSwiglu
"""The activation between the two linear layers of an expert."""


class Gate(NamedTuple):
    """What :func:`gate_topk` decides for T tokens, E experts and K choices."""

    weights: Tensor
    """(T, K) float32 (float64 for float64 logits): the weight of each choice, best choice first."""
    experts: Tensor
    """(T, K) int32: the chosen experts, distinct within a token."""
    load: Tensor
    """(E,) int32: how many slots each expert was chosen for; sums to T * K."""


class Routing(NamedTuple):
    """Where every choice's row lies when rows are sorted by expert; made by :func:`build_routing`.

    One made by hand may have fewer or more than T * K rows, for a buffer with another order or with room to spare.
    """

    slot: Tensor
    """(T, K) int32: the row of each choice, stable in (token, choice) order within an expert; -1 where dropped."""
    token: Tensor
    """(S,) int32, S = T * K of :func:`build_routing`: the token of each row; -1 for the rows past ``offsets[-1]``."""
    offsets: Tensor
    """(E + 1,) int32: rows ``offsets[e]`` to ``offsets[e + 1]`` belong to expert e."""


class QuantizedWeight(NamedTuple):
    """The weights of E linear layers in few bits; made by :func:`quantize_weight`."""

    packed: Tensor
    """(E, ceil(N / 64), bytes) uint8: scales, minima and codes, in the order in which the kernels read them."""
    bits: int
    """8 or 4."""
    output_features: int
    """N."""
    input_features: int
    """H."""


class RouterLosses(NamedTuple):
    """The auxiliary losses of a router."""

    load_balancing: Tensor
    """Scalar: E * sum_e f_e * P_e, 1 in perfect balance (Switch Transformer)."""
    z: Tensor
    """Scalar: the mean over tokens of logsumexp(logits) squared (ST-MoE)."""
