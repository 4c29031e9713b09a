"""Which fused activation of pymoe equals what an experts module of transformers computes between its two products.

What is not recognised runs on the module's own PyTorch code. The tests are such that ``torch.compile`` can trace them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional as F

from pymoe.integrations.transformers import interface
from pymoe.reference.types import ActivationKind

_SILU = {("torch.nn.modules.activation", "SiLU"), ("transformers.activations", "SiLUActivation")}
_OWN_GATES: dict[tuple[str, str], ActivationKind] = {
    # silu(gate) * up in float32, rounded once, which is how pymoe computes it for every model.
    ("transformers.models.beam.modeling_beam", "BeamExperts"): "swiglu",
}
"""Classes with a gate of their own that, with SiLU as ``act_fn``, is one of pymoe's activations."""


def fused_activation(experts: nn.Module) -> ActivationKind | None:
    """Return the kind of :func:`pymoe.ops.expert_activation` that ``experts`` apply, or None if there is none.

    Args:
        experts: a module behind transformers' experts interface, whose ``act_fn`` and gate decide.
    """
    act_fn: Any = getattr(experts, "act_fn", None)
    if not interface.flags(experts).gated:
        return _without_gate(act_fn)
    if not (act_fn is F.silu or _place(type(act_fn)) in _SILU):
        return None
    return "swiglu" if interface.has_default_gate(type(experts)) else _OWN_GATES.get(_place(type(experts)))


def _without_gate(act_fn: Any) -> ActivationKind | None:
    if isinstance(act_fn, nn.ReLU):
        return "relu"
    if isinstance(act_fn, nn.GELU) and act_fn.approximate == "none":
        return "gelu"
    return "gelu" if _place(type(act_fn)) == ("transformers.activations", "GELUActivation") else None


def _place(cls: type) -> tuple[str, str]:
    return (cls.__module__, cls.__qualname__)
