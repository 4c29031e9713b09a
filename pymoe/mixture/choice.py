"""Which backends each row asks, and the rows of each backend side by side.

T rows, L backends, K choices a row. A choice whose logit is minus infinity is not made: its row asks fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pymoe.mixture.slots import Member
from pymoe.ops import build_routing, combine, dispatch, gate_topk
from pymoe.reference.checks import FLOATING
from pymoe.reference.types import Gate, Routing


class Group(NamedTuple):
    """The rows ``begin`` to ``end`` of what was gathered belong to ``member``; they came from the rows ``tokens``."""

    member: Member
    begin: int
    end: int
    tokens: Tensor  # on the CPU


class Choice(NamedTuple):
    """What :func:`choose` decides."""

    logits_TL: Tensor
    """Of the backends that there are; differentiable."""
    chosen_TK: Tensor
    """Logits of the chosen ones, best first; differentiable."""
    asked_T: Tensor
    """How many backends each row asks, on the CPU."""
    routing: Routing
    """From rows to gathered rows. What is not asked lies behind all groups."""
    load: Tensor
    """(L,) int32: how many rows chose each backend."""
    groups: tuple[Group, ...]
    """Of the backends that some row asks."""


def choose(logits: Tensor, members: Sequence[Member], k: int) -> Choice:
    """The ``k`` best of the backends for every row (all of them if there are fewer).

    Args:
        logits: (T, slots), float32 or float64.
        members: at least one, in the order of their slots.
        k: choices of a row.
    """
    if len(members) == logits.shape[1]:
        logits_TL = logits
    else:
        logits_TL = logits.index_select(1, torch.tensor([member.slot for member in members], device=logits.device))
    gate: Gate = gate_topk(logits_TL.detach(), min(k, len(members)))
    chosen_TK = logits_TL.gather(1, gate.experts.long())
    asked_TK = chosen_TK.detach() != -math.inf
    nobody = len(members)
    routing: Routing = build_routing(gate.experts.where(asked_TK, nobody), nobody + 1)
    bounds: list[int] = routing.offsets.tolist()
    tokens = routing.token.cpu().long()
    groups = tuple(
        Group(member, begin, end, tokens[begin:end])
        for member, begin, end in zip(members, bounds, bounds[1:], strict=False)
        if begin < end
    )
    return Choice(logits_TL, chosen_TK, asked_TK.sum(1).cpu(), routing, gate.load, groups)


def gather_rows(x: Tensor, routing: Routing) -> Tensor:
    """(T, ...) to (S, ...): each row once for each of its choices, those of a backend together; differentiable."""
    if x.dtype in FLOATING and x.numel():
        flat: Tensor = dispatch(x.reshape(len(x), math.prod(x.shape[1:])), routing)
        return flat.reshape(len(flat), *x.shape[1:])
    return x.index_select(0, routing.token)


def weigh(chosen_TK: Tensor, came_TK: Tensor) -> Tensor:
    """(T, K) weights: softmax over those choices of a row whose answers came (a mask), 0 for the others.

    Rows without any answer have equal weights, all of nothing, and send no gradient.
    """
    missing_TK = ~came_TK  # no shorter way where none is: gradient checkpointing needs the same graph every time
    nothing_T1 = missing_TK.all(1, keepdim=True)
    seen = chosen_TK.masked_fill(missing_TK, -math.inf).masked_fill(nothing_T1, 0.0)
    return seen.softmax(1)


def mix(y: Tensor, routing: Routing, weights_TK: Tensor) -> Tensor:
    """(S, ...) answers to (T, ...): each row's weighted sum, in the order of its choices; differentiable in both.

    Answers that did not come are zeros.
    """
    rows, choices = routing.slot.shape
    if not y.numel():
        return y.reshape(rows, choices, *y.shape[1:]).sum(1)
    weights_TK = weights_TK.to(torch.float64 if y.dtype == torch.float64 else torch.float32)
    flat: Tensor = combine(y.reshape(len(y), math.prod(y.shape[1:])), routing, weights_TK)
    return flat.reshape(rows, *y.shape[1:])
