"""Finds the fused activation of pymoe that computes what an experts module of transformers does between its products.

If there is none, the module's own PyTorch code runs. ``torch.compile`` can trace the tests in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pymoe._common.types import ActivationKind, ClampedSwiglu
from pymoe.integrations.transformers import interface
from pymoe.nn.apply_experts import Activation
from pymoe.nn.plain_calls import are_called_plainly, is_of_its_source

_ACTIVATIONS = "transformers.activations"
_SILU = {("torch.nn.modules.activation", "SiLU"), (_ACTIVATIONS, "SiLUActivation")}
_GELU_TANH = {(_ACTIVATIONS, name) for name in ("GELUTanh", "NewGELUActivation", "FastGELUActivation")}


def _without_alpha(experts: Any, limit: float) -> ActivationKind | None:
    return ClampedSwiglu(limit) if _is_silu(experts.act_fn) else None


_OWN_GATES: dict[tuple[str, str], Callable[[Any], ActivationKind | None]] = {
    (f"transformers.models.{model}.modeling_{model}", name): kind_of
    for model, name, kind_of in (
        # BeamExperts itself computes silu(gate) * up in float32 and rounds once, as pymoe computes swiglu for every
        # model.
        ("beam", "BeamExperts", lambda experts: "swiglu" if _is_silu(experts.act_fn) else None),
        ("deepseek_v4", "DeepseekV4Experts", lambda experts: _without_alpha(experts, experts.limit)),
        ("glm5_next", "Glm5NextTextExperts", lambda experts: ClampedSwiglu(experts.swiglu_limit)),
        ("hy_v4", "HYV4Experts", lambda experts: ClampedSwiglu(experts.swiglu_limit)),
        ("gpt_oss", "GptOssExperts", lambda experts: ClampedSwiglu(experts.limit, experts.alpha, 1.0, True)),
        (
            "minimax_m3_vl",
            "MiniMaxM3VLExperts",
            lambda experts: ClampedSwiglu(experts.swiglu_limit, experts.swiglu_alpha, 1.0),
        ),
        (
            "openai_privacy_filter",
            "OpenAIPrivacyFilterExperts",
            lambda experts: ClampedSwiglu(experts.limit, experts.alpha, 1.0),
        ),
    )
}
"""Classes of experts with a gate of their own, each with a function that takes the experts and returns pymoe's
equivalent activation, or None if there is none."""

_CLAMPED_NETWORKS: dict[tuple[str, str], Callable[[Any], ActivationKind | None]] = {
    ("transformers.models.glm5_next.modeling_glm5_next", "Glm5NextTextMLP"): (
        lambda network: _without_alpha(network, network.swiglu_limit)
    ),
    ("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl", "MiniMaxM3VLDenseMLP"): (
        lambda network: ClampedSwiglu(network.swiglu_limit, network.swiglu_alpha, 1.0)
    ),
}
"""The same for dense networks that clamp as the experts of their models do."""


def activation_of(experts: nn.Module) -> Activation:
    """Return the activation that ``experts``, a module behind transformers' interface, applies between its products."""
    return fused_activation(experts) or interface.activation(experts)


def fused_activation(experts: nn.Module) -> ActivationKind | None:
    """Return the kind of :func:`pymoe.ops.expert_activation` that ``experts`` applies between its two products.

    Return None if pymoe has no fused activation that computes the same as the module.

    Args:
        experts: a module behind transformers' experts interface; its ``act_fn`` and gate determine the result.
    """
    act_fn: Any = getattr(experts, "act_fn", None)
    if _has_hooks(act_fn) or interface.has_replaced_gate(experts):
        return None
    if not interface.flags(experts).gated:
        return _without_gate(act_fn)
    if interface.has_default_gate(type(experts)):
        return _with_gate(act_fn)
    kind_of = _OWN_GATES.get(place(type(experts)))
    if kind_of is None or not is_of_its_source(type(experts), interface.GATE):
        return None
    return kind_of(experts)


def dense_activation(network: nn.Module) -> Activation | None:
    """Return the activation between the linear layers of a dense network that serves as shared experts.

    This is a kind of :func:`pymoe.ops.expert_activation` if a kind computes the same. Otherwise it is a function; but
    for a network without ``gate_proj``, and for one that clamps its gate and does not apply silu to it, it is None.
    """
    clamped = _CLAMPED_NETWORKS.get(place(type(network)))
    if clamped is not None:
        return clamped(network)
    act_fn: Any = getattr(network, "activation_fn" if hasattr(network, "activation_fn") else "act_fn")
    return gated_activation(act_fn) if hasattr(network, "gate_proj") else _without_gate(act_fn)


def followed_by_cast(activation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that casts the result of ``activation`` to ``dtype``.

    Args:
        activation: a model's own computation between two products, which may return another dtype. (pymoe's kinds keep
            the dtype of the rows.)
        dtype: the dtype of the rows that the second product takes.
    """
    return lambda rows: activation(rows).to(dtype)


def gated_activation(act_fn: Any) -> Activation:
    """Return the activation that computes ``act_fn(gate) * up`` for rows [gate | up].

    Return one of pymoe's fused kinds if a kind computes the same and ``act_fn`` has no hooks; otherwise return a
    function.
    """
    if not _has_hooks(act_fn) and (kind := _with_gate(act_fn)) is not None:
        return kind

    def gated(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return act_fn(gate) * up

    return gated


def place(cls: type) -> tuple[str, str]:
    """Return the module and qualified name of a class, by which it is recognised without being imported."""
    return (cls.__module__, cls.__qualname__)


def _has_hooks(act_fn: Any) -> bool:
    """Return whether calling ``act_fn`` runs more than the forward of its class."""
    return isinstance(act_fn, nn.Module) and not are_called_plainly((act_fn, type(act_fn)))


def _is_silu(act_fn: Any) -> bool:
    return act_fn is F.silu or place(type(act_fn)) in _SILU


def _with_gate(act_fn: Any) -> ActivationKind | None:
    """Return the kind of activation that equals ``act_fn(gate) * up``, or None if there is none."""
    if _is_silu(act_fn):
        return "swiglu"
    return {"gelu": "geglu", "gelu_tanh": "geglu_tanh"}.get(str(_without_gate(act_fn)))  # type: ignore[return-value]


def _without_gate(act_fn: Any) -> ActivationKind | None:
    """Return the kind of activation that equals ``act_fn``, or None if there is none."""
    # Compare the classes themselves, because a subclass may compute anything.
    if type(act_fn) is nn.ReLU:
        return "relu"
    if type(act_fn) is nn.GELU:
        return "gelu" if act_fn.approximate == "none" else "gelu_tanh"
    if place(type(act_fn)) in _GELU_TANH:
        return "gelu_tanh"
    return {"GELUActivation": "gelu", "ReLUSquaredActivation": "relu_squared"}.get(  # type: ignore[return-value]
        type(act_fn).__name__ if place(type(act_fn))[0] == _ACTIVATIONS else ""
    )
