"""build_routing: computes the row of every choice when rows are sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common.contracts import ROW_LIMIT, check_build_routing, check_experts
from pymoe._common.types import Routing


def build_routing(
    experts: Tensor, num_experts: int, *, capacity: int | None = None, foreign_experts: bool = False
) -> Routing:
    """Sort the choices of all tokens by expert, stable in (token, choice) order.

    Expert e owns the rows ``offsets[e]`` to ``offsets[e + 1]``. Within an expert, rows keep the order of (token,
    choice). The first ``capacity`` rows of an expert are kept and later ones are dropped, as in Switch Transformer
    (arXiv 2101.03961), but without padding: the rows in use are contiguous. A token may name an expert more than once.

    Args:
        experts: (T, K) int32 or int64, values in 0..E-1, with T * K < 2^31; from :func:`gate_topk`.
        num_experts: E, at least 1 and below 2^31.
        capacity: the maximum number of rows of an expert; ``None`` drops nothing, 0 drops everything.
        foreign_experts: accept values of E and above for experts that are elsewhere (on other ranks of expert
            parallelism): their choices are dropped, and count for no expert.

    Returns:
        ``Routing(slot, token, offsets)``, all int32, not differentiable: ``slot`` (T, K), the row of each choice or
        -1 where dropped; ``token`` (S,) with S = T * K, the token of each row, -1 for the rows past ``offsets[-1]``;
        ``offsets`` (E + 1,).

    Raises:
        TypeError: ``experts`` is not a tensor of int32 or int64, ``num_experts`` or ``capacity`` is not an int, or
            ``foreign_experts`` is not a bool.
        ValueError: ``experts`` is not (T, K) or too large, or ``num_experts`` or ``capacity`` is out of range.
        IndexError: an expert index lies outside 0..E-1 (with ``foreign_experts``: is negative).

    Example:
        >>> experts = torch.tensor([[2, 0], [0, 1]], dtype=torch.int32)  # 2 tokens, 2 choices each, of 3 experts
        >>> routing = pymoe.ops.build_routing(experts, 3)
        >>> routing.token, routing.offsets  # rows 0 and 1 belong to expert 0
        (tensor([0, 1, 1, 0], dtype=torch.int32), tensor([0, 2, 3, 4], dtype=torch.int32))
    """
    check_build_routing(experts, num_experts, capacity, foreign_experts)
    check_experts("build_routing", experts, num_experts, foreign_experts)
    if capacity is not None:
        # A capacity of ROW_LIMIT drops nothing. A larger int might not fit into an int64 tensor.
        capacity = min(capacity, ROW_LIMIT)
    tokens, choices = experts.shape
    rows = tokens * choices
    expert_S = experts.reshape(-1).long()

    all_experts = num_experts
    # Count all foreign experts as one additional expert. Its choices are dropped below.
    if foreign_experts:
        expert_S = expert_S.clamp(max=num_experts)
        all_experts = num_experts + 1

    # ``order`` has the index of the choice for each row, before any choice is dropped.
    order = torch.argsort(expert_S, stable=True)
    load = torch.bincount(expert_S, minlength=all_experts)
    start = load.cumsum(0) - load
    # ``place`` has, for each choice, the number of earlier choices of the same expert.
    place = torch.empty_like(order)
    place[order] = torch.arange(rows, device=experts.device) - start[expert_S[order]]

    kept_load = load if capacity is None else load.clamp(max=capacity)
    offsets = torch.cat([kept_load.new_zeros(1), kept_load.cumsum(0)])
    slot_S = offsets[expert_S] + place
    if foreign_experts:
        slot_S = torch.where(expert_S < num_experts, slot_S, -1)
    if capacity is not None:
        slot_S = torch.where(place < capacity, slot_S, -1)
    token = torch.full((rows,), -1, dtype=torch.int32, device=experts.device)
    kept = slot_S >= 0
    token_of_choice = torch.arange(rows, device=experts.device) // max(choices, 1)
    token[slot_S[kept]] = token_of_choice[kept].int()
    return Routing(slot_S.reshape(tokens, choices).int(), token, offsets[: num_experts + 1].int())
