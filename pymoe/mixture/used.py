"""Which answers a mixture's outputs are made of: those that came, for rows that have enough of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pymoe.mixture.choice import Choice, Group
from pymoe.mixture.fan_out import Answers
from pymoe.runtime.batch_tensor_proto import BatchTensorProto


class UsedAnswer(NamedTuple):
    """A group whose answer is used: for its rows ``begin + kept``, of the mixture's rows ``tokens``."""

    group: Group
    kept: Tensor | None
    """Which of the group's rows; None: all."""
    tokens: Tensor

    def rows_of(self, gathered: Tensor) -> Tensor:
        own = gathered[self.group.begin : self.group.end]
        return own if self.kept is None else own[self.kept.to(own.device)]

    def put(self, gathered: Tensor, rows: Tensor) -> None:
        own = gathered[self.group.begin : self.group.end]
        if self.kept is None:
            own.copy_(rows)
        else:
            own[self.kept.to(own.device)] = rows.to(own.dtype)


def use_answers(
    choice: Choice, answers: Answers, few_T: Tensor, output_protos: Sequence[BatchTensorProto], device: torch.device
) -> tuple[tuple[UsedAnswer, ...], tuple[Tensor, ...], Tensor]:
    """The answers that are used, the gathered rows of their outputs, and which choices have one (T, K)."""
    slots = len(choice.routing.token)
    some_fall_back = bool(few_T.any())
    outputs = tuple(proto.make_empty(slots, device=device, requires_grad=False) for proto in output_protos)
    there = torch.zeros(slots, dtype=torch.bool, device="cpu")
    used = []
    for group, result in zip(choice.groups, answers.results, strict=True):
        if result is None:
            continue
        kept, tokens = None, group.tokens
        if some_fall_back:
            kept = (~few_T[tokens]).nonzero().flatten()
            tokens = tokens[kept]
        one = UsedAnswer(group, kept, tokens)
        if len(tokens):
            used.append(one)
        there[group.begin : group.end] = ~few_T[group.tokens]
        for gathered, rows in zip(outputs, result, strict=True):
            one.put(gathered, rows if kept is None else rows[kept.to(rows.device)])
    came_TK = there.to(device)[choice.routing.slot.long()]
    return tuple(used), outputs, came_TK
