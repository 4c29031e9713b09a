"""gate_topk: scores, choice of experts, weights and load, in one operator."""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common.contracts import check_gate_topk
from pymoe._common.types import Gate, Score, accumulate_dtype
from pymoe.reference.fixed_steps import divided_rows, sigmoid, softmax
from pymoe.reference.scores import SUM_FLOOR, order_key, scores_in_fixed_steps, sum_in_lanes


def _within_best_groups(choice: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """Return a (T, E) mask of the experts in the ``topk_groups`` best groups of each token."""
    tokens, num_experts = choice.shape
    grouped = choice.view(tokens, num_groups, num_experts // num_groups)
    best_two = order_key(grouped).sort(dim=2, descending=True, stable=True).indices[:, :, :2]
    group_score = grouped.gather(2, best_two).sum(dim=2)
    best_groups = order_key(group_score).sort(dim=1, descending=True, stable=True).indices[:, :topk_groups]
    remains = torch.zeros_like(group_score, dtype=torch.bool).scatter(1, best_groups, True)
    return remains.repeat_interleave(num_experts // num_groups, dim=1)


@torch.no_grad()
def _choose(
    logits: Tensor, k: int, score: Score, bias: Tensor | None, num_groups: int | None, topk_groups: int | None
) -> Tensor:
    """Return the chosen experts of each token, (T, k) int64, best first; the arguments are those of ``gate_topk``."""
    if bias is None and num_groups is None:
        key = order_key(logits)
    else:
        choice = scores_in_fixed_steps(logits, score)
        if bias is not None:
            choice = choice + bias.to(choice.dtype)
        key = order_key(choice)
        if num_groups is not None and topk_groups is not None:
            remains = _within_best_groups(choice, num_groups, topk_groups)
            key = torch.where(remains, key, torch.iinfo(key.dtype).min)
    return key.sort(dim=1, descending=True, stable=True).indices[:, :k]


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
    """Choose ``k`` experts for every token and weight them by their scores.

    Scores are ``softmax(logits)`` over all experts (Switch Transformer, arXiv 2101.03961) or ``sigmoid(logits)``
    (DeepSeek-V3, arXiv 2412.19437), computed in float32 (float64 for float64 logits).

    **The choice.** Experts are chosen by ``score(logits) + bias``, best first. Without bias and groups the logits give
    the same order, and the choice is made on the logits themselves. With ``num_groups``, the experts form that many
    groups of consecutive experts; a group's score is the sum of its two best choice scores (or its only one if it has
    one expert); experts outside the ``topk_groups`` best groups are never chosen (DeepSeek-V3).
    The order is total. Ties between experts, and between groups, go to the lower index; -0 ties with +0; every NaN
    comes before all numbers and ties with every other NaN. So the experts of a token are distinct for any logits.

    **The weights** are the scores of the chosen experts; the bias never enters them (auxiliary-loss-free balancing,
    arXiv 2408.15664). ``renormalize`` divides them by their sum, floored at 1e-20; ``scale`` multiplies last. A NaN
    or an infinity in the logits of a token makes no other token's weights NaN.

    ``experts`` and ``load`` are exact: native operators return the same bits, on every device and for any number of
    threads, also with bias and groups, because the choice scores are computed by one fixed sequence of roundings
    (:mod:`pymoe.reference.scores`). ``weights`` agree within a few ulp.

    Args:
        logits: (T, E), any floating dtype.
        k: experts per token, in 1..E.
        score: ``"softmax"`` or ``"sigmoid"``.
        renormalize: divide the weights of a token by their sum.
        bias: (E,) floating, added to the scores for the choice only; no gradient flows into it.
        num_groups: number of equal groups; divides E. Given together with ``topk_groups``.
        topk_groups: number of best groups to choose from; ``topk_groups * (E / num_groups) >= k``.
        scale: factor of the weights.

    Returns:
        Gate of ``weights`` (T, k) float32 (float64 for float64 logits), ``experts`` (T, k) int32 and ``load`` (E,)
        int32, the number of choices of each expert. ``weights`` is differentiable in ``logits`` through the
        scores of the chosen experts (for softmax, through all logits of the token); the choice is constant.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a rank, size, device, range or name does not fit, or only one of the two group arguments is given.

    Example:
        >>> gate = pymoe.ops.gate_topk(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 3.0]]), k=2)
        >>> gate.experts.tolist(), gate.load.tolist()
        ([[1, 2], [0, 2]], [1, 1, 2])
    """
    check_gate_topk(logits, k, score, renormalize, bias, num_groups, topk_groups, scale)
    values = logits.to(accumulate_dtype(logits.dtype))
    experts = _choose(values.detach(), k, score, bias, num_groups, topk_groups)
    weights = weights_of(values, experts, score, renormalize, scale)
    load = torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device)
    load.index_add_(0, experts.flatten(), torch.ones(experts.numel(), dtype=torch.int32, device=logits.device))
    return Gate(weights, experts.to(torch.int32), load)


def weights_of(logits: Tensor, experts: Tensor, score: Score, renormalize: bool, scale: float) -> Tensor:
    """Return the (T, k) weights of the chosen ``experts``, (T, k) int64; differentiable in ``logits``."""
    scores = softmax(logits) if score == "softmax" else sigmoid(logits)
    weights = scores.gather(1, experts)
    if renormalize:
        weights = divided_rows(weights, sum_in_lanes(weights).clamp(min=SUM_FLOOR))
    return weights * scale
