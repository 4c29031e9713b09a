"""expert_activation: the element-wise function between an expert's two linear layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pymoe._common.contracts import check_expert_activation, check_offsets
from pymoe._common.types import ActivationKind, ClampedSwiglu, is_gated
from pymoe.reference.fixed_steps import gelu, sigmoid, silu

GELU_TANH = (2.0 * math.sqrt(2.0 / math.pi), 2.0 * math.sqrt(2.0 / math.pi) * 0.044715, 40.0)
"""The factors of x and x^3 inside the sigmoid of gelu_tanh, and a magnitude of x from which the sigmoid is 0 or 1."""


def gate_and_up(h: Tensor, kind: ActivationKind) -> tuple[Tensor, Tensor]:
    """Return the columns (S, F) of gate and of up, for a gated kind."""
    if isinstance(kind, ClampedSwiglu) and kind.interleaved:
        return h[:, 0::2], h[:, 1::2]
    gate, up = h.chunk(2, dim=1)
    return gate, up


def bias_rows(bias: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """Return the bias of every row's expert, (rows, N) float32 or float64; zeros for rows without an expert."""
    numbers = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    experts = torch.searchsorted(offsets[1:].contiguous(), numbers, right=True)
    wide = bias.to(torch.promote_types(bias.dtype, torch.float32))
    return torch.cat((wide, wide.new_zeros(1, bias.shape[1])))[experts]


def clamped(gate: Tensor, up: Tensor, kind: ClampedSwiglu) -> tuple[Tensor, Tensor]:
    """Clamp gate and up to the limits of ``kind``, then add ``kind.up_offset`` to up; return both.

    The gradient is 0 outside of the limits.
    """
    gate = torch.where(gate > kind.limit, kind.limit, gate)
    up = torch.where(up < -kind.limit, -kind.limit, up)
    return gate, torch.where(up > kind.limit, kind.limit, up) + kind.up_offset


def expert_activation(
    h: Tensor, kind: ActivationKind, bias: Tensor | None = None, offsets: Tensor | None = None
) -> Tensor:
    """Apply the activation between the two linear layers of an expert.

    Gated kinds take ``h`` (S, 2F) = [gate | up], the others ``h`` (S, F):

    - ``"swiglu"``: silu(gate) * up (Shazeer, arXiv 2002.05202);
    - ``"geglu"``, ``"geglu_tanh"``: gelu(gate) * up, gelu_tanh(gate) * up (the same paper; Gemma has the second);
    - ``"gelu"``: the exact form h * Phi(h), Phi the normal distribution function (Hendrycks and Gimpel,
      arXiv 1606.08415);
    - ``"gelu_tanh"``: its approximation h * (1 + tanh(sqrt(2 / pi) * (h + 0.044715 h^3))) / 2 (the same paper);
    - ``"relu"``: max(h, 0);
    - ``"relu_squared"``: max(h, 0)^2 (Primer, arXiv 2109.08668; Nemotron-H);
    - a :class:`ClampedSwiglu`: g * sigmoid(alpha * g) * (u + up_offset) for g = min(gate, limit) and u = up within
      [-limit, limit]; with ``interleaved``, gate has the even columns of ``h`` and up the odd ones (GPT-OSS;
      DeepSeek-V4 and others have alpha 1 and no offset). A clamp has the gradient 0 outside of its limits, and 1 on
      them.

    With ``bias``, ``h[r] + bias[e]`` takes the place of ``h[r]``, for the expert e that owns row r. A row past
    ``offsets[-1]`` has no expert, and its bias is zero. Pass ``bias`` if ``h`` was computed without it.

    Forward and backward compute in float32 (float64 for float64) from ``h`` and ``bias``, and round once; the native
    operator saves nothing else for the backward, except ``offsets``. NaN stays NaN; a row of the result depends only on
    the same row of ``h`` and on its bias.

    Args:
        h: (S, 2F) for gated kinds, else (S, F); any floating dtype. With ``bias``, rows are sorted by expert.
        kind: see above.
        bias: (E, 2F) for gated kinds, else (E, F), the dtype of ``h``; or None.
        offsets: (E + 1,) int32, starting at 0, non-decreasing, at most S, as :func:`grouped_linear` takes them: given
            with ``bias``, else None.

    Returns:
        (S, F), the dtype of ``h``. Differentiable in ``h`` and ``bias``, any number of times. The gradient of a bias is
        the sum of the gradient of ``h`` over the rows of the expert.

    Raises:
        TypeError: a tensor does not have a dtype as above, ``kind`` is neither a string nor a ``ClampedSwiglu``, or a
            field of the latter has the wrong type.
        ValueError: ``kind`` is unknown, one of its fields is out of range, a shape or device does not fit, one of
            ``bias`` and ``offsets`` is missing, or ``offsets`` does not start at 0 or decreases.
        IndexError: ``offsets`` ends past S.

    Example:
        >>> gate, up = torch.randn(5, 32), torch.randn(5, 32)
        >>> result = pymoe.ops.expert_activation(torch.cat([gate, up], dim=1), "swiglu")
        >>> torch.allclose(result, torch.nn.functional.silu(gate) * up, atol=1e-6)
        True
    """
    check_expert_activation(h, kind, bias, offsets)
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    if bias is not None and offsets is not None:
        check_offsets(offsets.tolist(), h.shape[0], "expert_activation")
        wide = wide + bias_rows(bias, offsets, h.shape[0])
    if not is_gated(kind):
        return _activated(wide, kind).to(h.dtype)
    gate, up = gate_and_up(wide, kind)
    if isinstance(kind, ClampedSwiglu):
        gate, up = clamped(gate, up, kind)
        return (gate * sigmoid(gate * kind.alpha) * up).to(h.dtype)
    return (_activated(gate, kind) * up).to(h.dtype)


def _activated(x: Tensor, kind: ActivationKind) -> Tensor:
    """Return the activation of a float32 or float64 tensor; for gated kinds, the activation of the gate."""
    if kind == "swiglu":
        return silu(x)
    if kind in ("gelu", "geglu"):
        return gelu(x)
    if kind in ("gelu_tanh", "geglu_tanh"):
        linear, cubic, saturated = GELU_TANH
        inside = x.clamp(-saturated, saturated)
        return x * sigmoid(inside * (linear + cubic * (inside * inside)))
    positive = torch.where(x <= 0, 0.0, x)
    return positive * positive if kind == "relu_squared" else positive
