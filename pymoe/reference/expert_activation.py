"""expert_activation: the element-wise middle of an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe.reference import checks
from pymoe.reference.fixed_steps import gelu, silu
from pymoe.reference.types import ActivationKind

KINDS = ("swiglu", "gelu", "relu")

GATED = frozenset({"swiglu"})
"""The kinds that take two rows of F, gate and up, for one."""


def check(h: Tensor, kind: str) -> None:
    """Raise if the arguments of :func:`expert_activation` break its contract."""
    name = "expert_activation"
    checks.floating(name, "h", h)
    checks.choice(name, "kind", kind, KINDS)
    checks.rank(name, "h", h, "(S, 2F)" if kind in GATED else "(S, F)")
    if kind in GATED and h.shape[1] % 2:
        raise ValueError(f"{name}: h must have shape (S, 2F) with an even second size, got {tuple(h.shape)}")


def expert_activation(h: Tensor, kind: ActivationKind) -> Tensor:
    """Apply the activation between the two linear layers of an expert.

    ``"swiglu"``: ``h`` is (S, 2F) = [gate | up] and the result silu(gate) * up (Shazeer, arXiv 2002.05202).
    ``"gelu"``: the exact form h * Phi(h), Phi the normal distribution function (Hendrycks and Gimpel,
    arXiv 1606.08415). ``"relu"``: max(h, 0).

    Computed in float32 (float64 for float64) from ``h`` and rounded once, forward and backward alike; the backward
    recomputes from ``h`` and saves nothing else. NaN stays NaN; a row's values never reach another row.

    Args:
        h: (S, 2F) for "swiglu", else (S, F); any floating dtype.
        kind: "swiglu", "gelu" or "relu".

    Returns:
        (S, F), the dtype of ``h``. Differentiable in ``h``, any number of times.

    Raises:
        TypeError: ``h`` is not a floating tensor or ``kind`` not a string.
        ValueError: ``kind`` is unknown, or the shape of ``h`` does not fit it.
    """
    check(h, kind)
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    if kind == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        return (silu(gate) * up).to(h.dtype)
    if kind == "gelu":
        return gelu(wide).to(h.dtype)
    return torch.where(wide <= 0, 0.0, wide).to(h.dtype)
