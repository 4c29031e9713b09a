"""expert_activation: native activations of experts, with a fused forward and backward.

Contract: :func:`pymoe.reference.expert_activation`; kernel: csrc/kernels/expert_activation.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe._common.contracts import check_expert_activation
from pymoe._common.types import ActivationKind, ClampedSwiglu, activation_options, is_gated, kind_of_options
from pymoe.ops import index_checks
from pymoe.ops.function_calls import call
from pymoe.ops.grouped_linear import BiasGrad, rows_of_bias
from pymoe.ops.transforms import gradients_again
from pymoe.reference.expert_activation import clamped, gate_and_up
from pymoe.reference.expert_activation import expert_activation as reference

_EXPERT_ACTIVATION = torch.ops.pymoe.expert_activation.default
EXPERT_ACTIVATION_BACKWARD = torch.ops.pymoe.expert_activation_backward.default

_TORCH: dict[object, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "gelu": F.gelu,
    "geglu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def _activated(h: Tensor, kind: ActivationKind, bias: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    """Return the activation ``kind`` of ``h``, computed with torch operators, which can be differentiated again."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    if bias is not None and offsets is not None:
        wide = wide + rows_of_bias(bias, offsets, h.shape[0]).to(wide.dtype)
    if not is_gated(kind):
        return _TORCH[kind](wide).to(h.dtype)
    gate, up = gate_and_up(wide, kind)
    if isinstance(kind, ClampedSwiglu):
        gate, up = clamped(gate, up, kind)
        return (gate * torch.sigmoid(gate * kind.alpha) * up).to(h.dtype)
    return (_TORCH[kind](gate) * up).to(h.dtype)


class ExpertActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        h: Tensor,
        bias: Tensor | None,
        offsets: Tensor | None,
        kind: int,
        limit: float,
        alpha: float,
        up_offset: float,
        interleaved: bool,
    ) -> Tensor:
        # Do not declare *arguments here: without gradients, torch.compile would pass the context as well.
        return _EXPERT_ACTIVATION(h, kind, limit, alpha, up_offset, interleaved, bias, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        h, bias, offsets, *ctx.options = inputs
        ctx.save_for_backward(h, bias, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        h, bias, offsets = ctx.saved_tensors
        needs_h, needs_bias = ctx.needs_input_grad[:2]
        dh = activation_backward(grad, h, *ctx.options, bias, offsets)
        return (
            dh if needs_h else None,
            call(BiasGrad, dh, offsets, None) if needs_bias else None,
            *(None,) * (1 + len(ctx.options)),
        )


def activation_backward(grad: Tensor, h: Tensor, *arguments: Any) -> Tensor:
    """Return the gradient of ``h``, given the gradient ``grad`` of the result.

    In grad mode, torch operators compute the gradient, and it is differentiable; otherwise the kernel computes it.

    Args:
        grad: (S, F).
        h: (S, 2F) for gated kinds, else (S, F).
        arguments: the five elements of :data:`ActivationOptions`, optionally followed by the bias and the offsets,
            which may both be None.
    """
    if torch.is_grad_enabled():
        kind, (bias, offsets) = kind_of_options(*arguments[:5]), arguments[5:] or (None, None)
        if bias is None:
            return gradients_again(lambda values: _activated(values, kind), (h,), grad)[0]
        return gradients_again(lambda values, its: _activated(values, kind, its, offsets), (h, bias), grad)[0]
    return EXPERT_ACTIVATION_BACKWARD(grad.contiguous(), h, *arguments)  # type: ignore[no-any-return]


def expert_activation(
    h: Tensor, kind: ActivationKind, bias: Tensor | None = None, offsets: Tensor | None = None
) -> Tensor:
    check_expert_activation(h, kind, bias, offsets)
    if offsets is not None:
        index_checks.offsets_in_range("expert_activation", offsets, h.shape[0])
    return raw(h, kind, bias, offsets)


expert_activation.__doc__ = reference.__doc__


def raw(h: Tensor, kind: ActivationKind, bias: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    """Return the result of :func:`expert_activation`, without checks of the arguments."""
    if bias is not None and offsets is not None:
        bias, offsets = bias.contiguous(), offsets.contiguous()
    return call(ExpertActivation, h.contiguous(), bias, offsets, *activation_options(kind))  # type: ignore[no-any-return]


@torch.library.register_fake("pymoe::expert_activation")
def _(h: Tensor, *options: Any) -> Tensor:
    return h.new_empty((h.shape[0], h.shape[1] // 2 if is_gated(kind_of_options(*options[:5])) else h.shape[1]))


@torch.library.register_fake("pymoe::expert_activation_backward")
def _(grad: Tensor, h: Tensor, *options: Any) -> Tensor:
    return h.new_empty(h.shape)
