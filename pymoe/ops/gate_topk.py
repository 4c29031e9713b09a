"""gate_topk: native router gate. Contract: :func:`pymoe.reference.gate_topk`; kernels: csrc/kernels/gate_topk.h.

The backward is one fused pass that recomputes the scores from the logits. Its own gradient is rarely needed
(second-order optimisers, gradient penalties) and computed by torch operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe.reference.gate_topk import check
from pymoe.reference.gate_topk import gate_topk as reference
from pymoe.reference.scores import SUM_FLOOR, accumulate_dtype
from pymoe.reference.types import Gate, Score


class _GateTopk(torch.autograd.Function):
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
        return torch.ops.pymoe.gate_topk(logits, bias, k, score, renormalize, num_groups, topk_groups, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, bias, _, score, renormalize, num_groups, _, scale = inputs
        _, experts, load = output
        ctx.mark_non_differentiable(experts, load)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, experts)
        ctx.options = (score, renormalize, bias is None and num_groups == 0, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 8
        logits, experts = ctx.saved_tensors
        return _GateTopkBackward.apply(grad.contiguous(), logits, experts, *ctx.options), *(None,) * 7


class _GateTopkBackward(torch.autograd.Function):
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
        return torch.ops.pymoe.gate_topk_backward(grad, logits, experts, score, renormalize, chosen_on_logits, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, logits, experts, score, renormalize, _, scale = inputs
        ctx.save_for_backward(grad, logits, experts)
        ctx.options = (score, renormalize, scale)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad, logits, experts = ctx.saved_tensors
        return *_second_gradients(cotangent, grad, logits, experts, *ctx.options), *(None,) * 5


def _second_gradients(
    cotangent: Tensor, grad: Tensor, logits: Tensor, experts: Tensor, score: Score, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``<cotangent, J(logits)^T grad>`` for ``grad`` and ``logits``, J the weights' Jacobian.

    For one token, with p = cotangent, and s, p_c the scores and cotangents of the chosen: ``J p`` is the gradient for
    ``grad``, and the gradient of ``<grad, J p>`` that for ``logits``. All of it is differentiable again.
    """
    dtype = accumulate_dtype(logits.dtype)
    l_TE, p_TE, index = logits.to(dtype), cotangent.to(dtype), experts.long()
    g_TK = grad * scale
    if score == "softmax":
        s_TE = torch.softmax(l_TE, dim=1)
        mean = (s_TE * p_TE).sum(dim=1, keepdim=True)
        v_TE = p_TE - mean  # ds = s v
    else:
        s_TE = torch.sigmoid(l_TE)
        v_TE = p_TE * (1 - s_TE)
    s_TK, v_TK = s_TE.gather(1, index), v_TE.gather(1, index)
    ds_TK = s_TK * v_TK
    # Through w = s / S: dw = (ds - w sum ds) / S, and the second argument's gradient h of <g, dw> for s and ds.
    if renormalize:
        total = s_TK.sum(dim=1, keepdim=True)
        counts = (total >= SUM_FLOOR).to(dtype)  # where the sum is floored it is a constant
        divisor = total.clamp(min=SUM_FLOOR)
        w_TK = s_TK / divisor
        dsum = ds_TK.sum(dim=1, keepdim=True) * counts
        dw_TK = (ds_TK - w_TK * dsum) / divisor
        inner = (g_TK * w_TK).sum(dim=1, keepdim=True) * counts
        h_ds = (g_TK - inner) / divisor
        through_divisor = -((g_TK * dw_TK).sum(dim=1, keepdim=True) - inner * dsum / divisor) / divisor * counts
        h_s = through_divisor - g_TK * dsum / divisor / divisor
    else:
        dw_TK, h_ds, h_s = ds_TK, g_TK, torch.zeros_like(g_TK)
    d_grad = dw_TK * scale
    # <g, dw> depends on the logits through s and through ds = s v.
    h_s = torch.zeros_like(s_TE).scatter(1, index, h_s + h_ds * v_TK)
    h_v = torch.zeros_like(s_TE).scatter(1, index, h_ds * s_TK)
    if score == "softmax":
        h_mean = -h_v.sum(dim=1, keepdim=True)
        h_s = h_s + h_mean * p_TE
        d_logits = s_TE * (h_s - (s_TE * h_s).sum(dim=1, keepdim=True))
    else:
        d_logits = (h_s - h_v * p_TE) * s_TE * (1 - s_TE)
    return d_grad.to(grad.dtype), d_logits.to(logits.dtype)


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
    check(logits, k, score, renormalize, bias, num_groups, topk_groups, scale)
    if bias is not None:
        bias = bias.detach().to(accumulate_dtype(logits.dtype)).contiguous()
    groups = (num_groups or 0, topk_groups or 0)
    return Gate(*_GateTopk.apply(logits.contiguous(), bias, k, score, renormalize, *groups, float(scale)))


gate_topk.__doc__ = reference.__doc__


@torch.library.register_fake("pymoe::gate_topk")
def _(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: Score,
    renormalize: bool,
    num_groups: int,
    topk_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, num_experts = logits.shape
    return (
        logits.new_empty((tokens, k), dtype=accumulate_dtype(logits.dtype)),
        logits.new_empty((tokens, k), dtype=torch.int32),
        logits.new_empty((num_experts,), dtype=torch.int32),
    )


@torch.library.register_fake("pymoe::gate_topk_backward")
def _(
    grad: Tensor,
    logits: Tensor,
    experts: Tensor,
    score: Score,
    renormalize: bool,
    chosen_on_logits: bool,
    scale: float,
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
