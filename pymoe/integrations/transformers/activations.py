"""Which fused activation of pymoe equals what an experts module of transformers computes between its two products.

What is not recognised runs on the module's own PyTorch code. The tests are such that ``torch.compile`` can trace them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from pymoe.integrations.transformers import interface
from pymoe.reference.types import ActivationKind

_SILU = {("torch.nn.modules.activation", "SiLU"), ("transformers.activations", "SiLUActivation")}
_OWN_GATES: dict[tuple[str, str], ActivationKind] = {
    # silu(gate) * up in float32, rounded once, which is how pymoe computes it for every model.
    ("transformers.models.beam.modeling_beam", "BeamExperts"): "swiglu",
}
"""Classes with a gate of their own that, with SiLU as ``act_fn``, is one of pymoe's activations."""


Activation = ActivationKind | Callable[[Tensor], Tensor]
"""A kind of :func:`pymoe.ops.expert_activation`, or a function from (S, N) to (S, F)."""


def activation_of(experts: nn.Module) -> Activation:
    """Return what ``experts``, behind transformers' interface, compute between their two products."""
    return fused_activation(experts) or interface.activation(experts)


def fused_activation(experts: nn.Module) -> ActivationKind | None:
    """Return the kind of :func:`pymoe.ops.expert_activation` that ``experts`` apply, or None if there is none.

    Args:
        experts: a module behind transformers' experts interface, whose ``act_fn`` and gate decide.
    """
    act_fn: Any = getattr(experts, "act_fn", None)
    if not interface.flags(experts).gated:
        return _without_gate(act_fn)
    if not _is_silu(act_fn):
        return None
    return "swiglu" if interface.has_default_gate(type(experts)) else _OWN_GATES.get(place(type(experts)))


def gated_activation(act_fn: Any) -> Activation:
    """Return ``act_fn(gate) * up`` as a function of rows [gate | up], fused where pymoe has it."""
    if _is_silu(act_fn):
        return "swiglu"

    def gated(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return act_fn(gate) * up

    return gated


def place(cls: type) -> tuple[str, str]:
    """Return the module and the name of a class, by which it is recognised without being imported."""
    return (cls.__module__, cls.__qualname__)


def _is_silu(act_fn: Any) -> bool:
    return act_fn is F.silu or place(type(act_fn)) in _SILU


def _without_gate(act_fn: Any) -> ActivationKind | None:
    if isinstance(act_fn, nn.ReLU):
        return "relu"
    if isinstance(act_fn, nn.GELU) and act_fn.approximate == "none":
        return "gelu"
    return "gelu" if place(type(act_fn)) == ("transformers.activations", "GELUActivation") else None
