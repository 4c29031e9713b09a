"""The autograd node of a mixture: its forward assembles outputs from the experts' answers, and its backward requests
gradients from the experts whose answers were used.

There is one node for all backends, because autograd runs the nodes of one device one after another, while the requests
of a backward pass must all be pending at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pymoe.mixture.fan_out import Answers, ExpertRequest, ask
from pymoe.mixture.options import Rules
from pymoe.mixture.routing import Choice, Group
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.gradients import all_finite


class UsedAnswer(NamedTuple):
    """A group of rows whose answer is used in the outputs, for all or some of the rows."""

    group: Group
    kept: Tensor | None
    """Indices of the group's rows that are used; None: all rows."""
    tokens: Tensor
    """Indices of the same rows in the mixture's input."""

    def rows_of(self, gathered: Tensor) -> Tensor:
        """Return the rows of ``gathered`` (S, ...) that this answer covers."""
        own = gathered[self.group.begin : self.group.end]
        return own if self.kept is None else own[self.kept.to(own.device)]

    def put(self, gathered: Tensor, rows: Tensor) -> None:
        """Write ``rows`` to the rows of ``gathered`` (S, ...) that this answer covers."""
        own = gathered[self.group.begin : self.group.end]
        if self.kept is None:
            own.copy_(rows)
        else:
            own[self.kept.to(own.device)] = rows.to(own.dtype)


def use_answers(
    choice: Choice, answers: Answers, few_T: Tensor, output_protos: Sequence[BatchTensorProto], device: torch.device
) -> tuple[tuple[UsedAnswer, ...], tuple[Tensor, ...], Tensor]:
    """Assemble the outputs from the ``answers``. Rows with too few answers, which ``few_T`` marks, use none of theirs.

    Returns:
        The answers that are used; the outputs, each (S, ...), with zeros for missing answers; and a (T, K) mask of
        the choices whose answers are used.
    """
    slots = len(choice.routing.token)
    any_few = bool(few_T.any())
    outputs = tuple(proto.make_empty(slots, device=device, requires_grad=False) for proto in output_protos)
    there = torch.zeros(slots, dtype=torch.bool, device="cpu")
    used = []
    for group, result in zip(choice.groups, answers.results, strict=True):
        if result is None:
            continue
        kept, tokens = None, group.tokens
        if any_few:
            kept = (~few_T[tokens]).nonzero().flatten()
            tokens = tokens[kept]
        answer = UsedAnswer(group, kept, tokens)
        if len(tokens):
            used.append(answer)
        there[group.begin : group.end] = ~few_T[group.tokens]
        for gathered, rows in zip(outputs, result, strict=True):
            answer.put(gathered, rows if kept is None else rows[kept.to(rows.device)])
    came_TK = there.to(device)[choice.routing.slot.long()]
    return tuple(used), outputs, came_TK


class ForwardRecord(NamedTuple):
    """The part of a mixture's forward pass that its backward pass needs."""

    name: str
    rules: Rules
    used: tuple[UsedAnswer, ...]
    rows: int
    output_protos: tuple[BatchTensorProto, ...]

    def gradients(
        self, inputs: Sequence[Tensor], grads: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Send backward requests to the experts whose answers were used, and return the gradients of ``inputs``.

        Backends that train update their experts. If no input needs a gradient, only these backends get requests. The
        result has one entry for each of the gathered ``inputs``: None if it is not ``needed``; otherwise its gradient,
        with zeros in rows without an answer.

        Raises:
            ValueError: a gradient in ``grads`` contains NaN or infinity, with ``detect_anomalies``.
            TooFewAnswersError: a row got too few gradients, and ``rules.raises`` is true.
        """
        there = [grad.detach() for grad in grads if grad is not None]
        if self.rules.detect_anomalies and not all_finite(there):
            raise ValueError(f"{self.name}: a gradient that reaches the mixture holds NaN or infinity")
        asked = [one for one in self.used if one.group.member.backend.trains or any(needed)]
        requests = [
            ExpertRequest(one.group, one.group.member.backward, self._tensors(one, inputs, grads), one.tokens)
            for one in asked
        ]
        asked_T = torch.zeros(self.rows, dtype=torch.int64, device="cpu")
        for request in requests:
            asked_T[request.tokens] += 1
        needed_T = asked_T.clamp(max=self.rules.backward_k_min)
        answers, _ = ask(self.name, self.rules, requests, needed_T, backward=True)
        found: list[Tensor | None] = [
            torch.zeros_like(x) if need else None for x, need in zip(inputs, needed, strict=True)
        ]
        for one, result in zip(asked, answers.results, strict=True):
            if result is not None:
                for gathered, rows in zip(found, result, strict=True):
                    if gathered is not None:
                        one.put(gathered, rows)
        return found

    def _tensors(self, one: UsedAnswer, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the tensors of a backward request: the rows of the inputs, then the rows of the outputs' gradients."""
        rows, device = len(one.tokens), inputs[0].device
        tensors = [one.rows_of(x) for x in inputs] + [
            proto.make_empty(rows, device=device, requires_grad=False) if grad is None else one.rows_of(grad)
            for grad, proto in zip(grads, self.output_protos, strict=True)
        ]
        return [tensor.detach() for tensor in tensors]
