"""The graph's node for all that a mixture asks: its answers are there already, its backward pass are requests.

One node and not one for each backend, since autograd runs the nodes of one device one after another, and the requests
of a backward pass must all be under way at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.gradients import all_finite
from pymoe.runtime.mixture.choice import Group
from pymoe.runtime.mixture.errors import TooFewAnswersError
from pymoe.runtime.mixture.fan_out import Answers, Call, ask


class Rules(NamedTuple):
    """What a mixture asks for, in both passes."""

    k_min: int
    backward_k_min: int
    forward_timeout: float | None
    timeout_after_k_min: float | None
    backward_timeout: float | None
    detect_anomalies: bool
    raises: bool
    """Whether too few answers are an error."""

    def acceptable(self, answer: Sequence[Any]) -> bool:
        return not self.detect_anomalies or all_finite([one for one in answer if isinstance(one, Tensor)])

    def ask(
        self, mixture: str, calls: Sequence[Call], needed_T: Tensor, *, backward: bool = False
    ) -> tuple[Answers, Tensor]:
        """What comes of ``calls``, and which rows have fewer answers than they need; raises where that is an error."""
        timeout = self.backward_timeout if backward else self.forward_timeout
        answers = ask(
            calls, needed_T, timeout=timeout, timeout_after=self.timeout_after_k_min, acceptable=self.acceptable
        )
        few_T = answers.came < needed_T
        if self.raises and bool(few_T.any()):
            what, k_min = ("gradients", self.backward_k_min) if backward else ("answers", self.k_min)
            raise TooFewAnswersError(mixture, what, k_min, few_T, answers.failures)
        return answers, few_T


class Answered(NamedTuple):
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


class Asked(NamedTuple):
    """What the backward pass must know of the forward pass."""

    name: str
    rules: Rules
    answered: tuple[Answered, ...]
    rows: int
    output_protos: tuple[BatchTensorProto, ...]

    def gradients(
        self, inputs: Sequence[Tensor], grads: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Of the gathered ``inputs``, zero where none came, for those that are ``needed``."""
        rules = self.rules
        there = [grad.detach() for grad in grads if grad is not None]
        if rules.detect_anomalies and not all_finite(there):
            raise ValueError(f"{self.name}: a gradient that reaches the mixture holds NaN or infinity")
        calls, answered = [], []
        for one in self.answered:
            member = one.group.member
            if not (member.backend.trains or any(needed)):
                continue
            rows, device = len(one.tokens), inputs[0].device
            tensors = [one.rows_of(x) for x in inputs]
            tensors += [
                proto.make_empty(rows, device=device, requires_grad=False) if grad is None else one.rows_of(grad)
                for grad, proto in zip(grads, self.output_protos, strict=True)
            ]
            calls.append(Call(one.group, member.backward, [tensor.detach() for tensor in tensors], one.tokens))
            answered.append(one)
        asked_T = torch.zeros(self.rows, dtype=torch.int64, device="cpu")
        for call in calls:
            asked_T[call.tokens] += 1
        needed_T = asked_T.clamp(max=rules.backward_k_min)
        answers, _ = rules.ask(self.name, calls, needed_T, backward=True)
        found: list[Tensor | None] = [
            torch.zeros_like(x) if need else None for x, need in zip(inputs, needed, strict=True)
        ]
        for one, result in zip(answered, answers.results, strict=True):
            if result is not None:
                for gathered, rows_of_grad in zip(found, result, strict=True):
                    if gathered is not None:
                        one.put(gathered, rows_of_grad)
        return found


class AskedNode(torch.autograd.Function):
    """``dummy`` requires a gradient where no input does, so that the experts are trained by a model's first layer."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, asked: Asked, outputs: tuple[Tensor, ...], *inputs: Tensor) -> Any:
        ctx.asked = asked
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return tuple([output.detach() for output in outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *ctx.asked.gradients(ctx.saved_tensors, grads, needed)
