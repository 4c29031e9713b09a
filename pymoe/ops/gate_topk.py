"""gate_topk: native router gate. Contract: :func:`pymoe.reference.gate_topk`; kernels: csrc/kernels/gate_topk.h.

The backward is one fused pass that recomputes the scores from the logits. Its own gradient, which is rarely needed (for
second-order optimisers and gradient penalties), is computed by torch operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe._common.contracts import check_gate_topk
from pymoe._common.types import Gate, GateBackwardOptions, Score, accumulate_dtype, gate_backward_options
from pymoe.ops.function_calls import call
from pymoe.ops.transforms import gradients_again
from pymoe.reference.gate_topk import gate_topk as reference
from pymoe.reference.scores import SUM_FLOOR

GATE_TOPK = torch.ops.pymoe.gate_topk.default
GATE_ROUTING = torch.ops.pymoe.gate_routing.default
"""The gate and :func:`pymoe.ops.build_routing` in one operator; on a GPU, the sort reuses the gate's counts."""
GATE_TOPK_BACKWARD = torch.ops.pymoe.gate_topk_backward.default


class GateTopk(torch.autograd.Function):
    @staticmethod
    def forward(
        logits: Tensor,
        bias: Tensor | None,
        k: int,
        score: Score,
        renormalize: bool,
        num_groups: int,
        topk_groups: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return GATE_TOPK(logits, bias, k, score, renormalize, num_groups, topk_groups, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, bias, *options = inputs
        _, experts, load = output
        ctx.mark_non_differentiable(experts, load)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, experts)
        ctx.options = gate_backward_options(bias, tuple(options))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 8
        logits, experts = ctx.saved_tensors
        return gate_backward(grad.contiguous(), logits, experts, ctx.options), *(None,) * 7


class GateTopkBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad: Tensor,
        logits: Tensor,
        experts: Tensor,
        score: Score,
        renormalize: bool,
        chosen_on_logits: bool,
        scale: float,
    ) -> Tensor:
        return GATE_TOPK_BACKWARD(grad, logits, experts, score, renormalize, chosen_on_logits, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, logits, experts, score, renormalize, _, scale = inputs
        ctx.save_for_backward(grad, logits, experts)
        ctx.options = (score, renormalize, scale)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad, logits, experts = ctx.saved_tensors

        def first(grad: Tensor, logits: Tensor) -> Tensor:
            return gradients_again(lambda values: _weights(values, experts, *ctx.options), (logits,), grad)[0]

        return *gradients_again(first, (grad, logits), cotangent), *(None,) * 5


def gate_backward(
    grad: Tensor, logits: Tensor, experts: Tensor, options: GateBackwardOptions, *, narrow: bool = False
) -> Tensor:
    """Return the gradient of a gate's logits (T, E), given the gradient of its weights.

    Args:
        grad: (T, K), the gradient of the weights, contiguous.
        logits: (T, E).
        experts: (T, K) int32, the experts that the gate has chosen.
        options: from :func:`~pymoe._common.types.gate_backward_options`.
        narrow: round the gradient of float32 logits to bfloat16; the result is then not differentiable.
    """
    if narrow:
        return GATE_TOPK_BACKWARD(grad, logits, experts, *options, True)  # type: ignore[no-any-return]
    return call(GateTopkBackward, grad, logits, experts, *options)  # type: ignore[no-any-return]


def _weights(logits: Tensor, experts: Tensor, score: Score, renormalize: bool, scale: float) -> Tensor:
    """Return the weights (T, K) of the chosen ``experts``, computed with torch operators instead of the kernel."""
    values = logits.to(accumulate_dtype(logits.dtype))
    scores = torch.softmax(values, dim=1) if score == "softmax" else torch.sigmoid(values)
    weights = scores.gather(1, experts.long())
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=SUM_FLOOR)
    return weights * scale


def gate_topk(
    logits: Tensor,
    k: int,
    *,
    score: Score = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    scale: float = 1.0,
) -> Gate:
    check_gate_topk(logits, k, score, renormalize, bias, num_groups, topk_groups, scale)
    if bias is not None:
        bias = bias.detach().to(accumulate_dtype(logits.dtype)).contiguous()
    groups = (num_groups or 0, topk_groups or 0)
    return Gate(*call(GateTopk, logits.contiguous(), bias, k, score, renormalize, *groups, float(scale)))


gate_topk.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::gate_topk")
def _(logits: Tensor, bias: Tensor | None, k: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, num_experts = logits.shape
    return (
        logits.new_empty((tokens, k), dtype=accumulate_dtype(logits.dtype)),
        logits.new_empty((tokens, k), dtype=torch.int32),
        logits.new_empty((num_experts,), dtype=torch.int32),
    )


@torch.library.register_fake("pymoe::gate_routing")
def _(logits: Tensor, bias: Tensor | None, k: int, *_: Any) -> tuple[Tensor, ...]:
    tokens, num_experts = logits.shape
    sizes = ((tokens, k), (num_experts,), (tokens, k), (tokens * k,), (num_experts + 1,))
    weights = logits.new_empty((tokens, k), dtype=accumulate_dtype(logits.dtype))
    return weights, *(logits.new_empty(size, dtype=torch.int32) for size in sizes)


@torch.library.register_fake("pymoe::gate_topk_backward")
def _(grad: Tensor, logits: Tensor, *options: Any) -> Tensor:
    narrow = len(options) > 5 and options[5]
    return logits.new_empty(logits.shape, dtype=torch.bfloat16 if narrow else None)
