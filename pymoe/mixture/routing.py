"""Chooses the backends of each row by the gate's logits, and sums the backends' answers into one output per row.

T rows, L backends, K choices per row, S = T * K gathered rows. A backend whose logit is minus infinity is not chosen,
so a row may have fewer than K backends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pymoe._common.types import FLOATING, Gate, Routing
from pymoe.mixture.members import Member
from pymoe.ops import build_routing, combine, dispatch, gate_topk


class SlotGate(nn.Linear):
    """The default gate: a linear layer from a flattened row to one logit per slot.

    It computes in float32 at least, outside of autocast: half precision would change which experts are chosen.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return (T, slots) logits of ``x``, (T, ...) with ``in_features`` elements per row."""
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            # Copy the weight, because add_backend writes to a slot's weights in place, possibly between a forward and
            # its backward pass, which needs the old values.
            weight, bias = self.weight.to(dtype, copy=True), self.bias.to(dtype)
            return F.linear(x.to(dtype).reshape(len(x), self.in_features), weight, bias)

    @torch.no_grad()
    def reset_slot(self, slot: int) -> None:
        """Initialise the weights and the bias of one slot as ``nn.Linear`` does."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight[slot], -bound, bound)
        nn.init.uniform_(self.bias[slot : slot + 1], -bound, bound)


class Group(NamedTuple):
    """The gathered rows ``begin`` to ``end`` (exclusive), copies of the input's rows ``tokens``, for ``member``."""

    member: Member
    begin: int
    end: int
    tokens: Tensor
    """(end - begin,) int64, on the CPU."""


class Choice(NamedTuple):
    """The result of :func:`choose`."""

    logits_TL: Tensor
    """Logits of the members from which rows could choose; differentiable."""
    chosen_TK: Tensor
    """Logits of the chosen members, best first; differentiable."""
    routing: Routing
    """Routing from rows to gathered rows. Choices with a logit of minus infinity follow all groups and are not sent."""
    load: Tensor
    """(L,) int32: the number of rows that are sent to each member."""
    groups: tuple[Group, ...]
    """One group for each member that gets at least one row."""


def choose(logits: Tensor, members: Sequence[Member], k: int) -> Choice:
    """Choose, for every row, the ``k`` members with the largest logits, or all ``members`` if there are fewer.

    ``logits`` are (T, slots), float32 or float64; ``members`` are in the order of slots, at least one. A row is not
    sent to a member whose logit is minus infinity.
    """
    if len(members) == logits.shape[1]:
        logits_TL = logits
    else:
        logits_TL = logits.index_select(1, torch.tensor([member.slot for member in members], device=logits.device))
    gate: Gate = gate_topk(logits_TL.detach(), min(k, len(members)))
    chosen_TK = logits_TL.gather(1, gate.experts.long())
    nobody = len(members)
    routing: Routing = build_routing(gate.experts.where(chosen_TK.detach() != -math.inf, nobody), nobody + 1)
    bounds: list[int] = routing.offsets.tolist()
    tokens = routing.token.cpu().long()
    groups = tuple(
        Group(member, begin, end, tokens[begin:end])
        for member, begin, end in zip(members, bounds, bounds[1:], strict=False)
        if begin < end
    )
    return Choice(logits_TL, chosen_TK, routing, routing.offsets.diff()[:nobody], groups)


def gather_rows(x: Tensor, routing: Routing) -> Tensor:
    """Return (S, ...): each row of ``x`` (T, ...) once for each of its choices, sorted by member; differentiable."""
    if x.dtype in FLOATING and x.numel():
        flat: Tensor = dispatch(x.reshape(len(x), math.prod(x.shape[1:])), routing)
        return flat.reshape(len(flat), *x.shape[1:])
    return x.index_select(0, routing.token)


def weigh(chosen_TK: Tensor, came_TK: Tensor) -> Tensor:
    """Return (T, K) weights: the softmax over those of a row's choices that have an answer, and 0 for the others.

    ``came_TK`` is the mask of the choices that have an answer.

    A row without any answer gets equal weights for its K missing answers, which are zeros, and its logits get no
    gradient.
    """
    missing_TK = ~came_TK  # no shortcut if none is missing: gradient checkpointing needs the same graph every time
    nothing_T1 = missing_TK.all(1, keepdim=True)
    seen = chosen_TK.masked_fill(missing_TK, -math.inf).masked_fill(nothing_T1, 0.0)
    return seen.softmax(1)


def mix(y: Tensor, routing: Routing, weights_TK: Tensor) -> Tensor:
    """Return (T, ...): each row's weighted sum of its answers ``y`` (S, ...); differentiable in ``y`` and the weights.

    Missing answers are zeros. Sums run in the order of a row's choices.
    """
    rows, choices = routing.slot.shape
    if not y.numel():
        return y.reshape(rows, choices, *y.shape[1:]).sum(1)
    weights_TK = weights_TK.to(torch.float64 if y.dtype == torch.float64 else torch.float32)
    flat: Tensor = combine(y.reshape(len(y), math.prod(y.shape[1:])), routing, weights_TK)
    return flat.reshape(rows, *y.shape[1:])
