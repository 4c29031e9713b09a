"""The node of a mixture in the caller's graph: its backward pass asks the experts whose answers were used.

One node and not one for each backend, since autograd runs the nodes of one device one after another, and the requests
of a backward pass must all be under way at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pymoe.mixture.fan_out import ExpertRequest
from pymoe.mixture.rules import Rules
from pymoe.mixture.used import UsedAnswer
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.gradients import all_finite


class ForwardRecord(NamedTuple):
    """What the backward pass must know of the forward pass."""

    name: str
    rules: Rules
    used: tuple[UsedAnswer, ...]
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
        requests, asked = [], []
        for one in self.used:
            member = one.group.member
            if not (member.backend.trains or any(needed)):
                continue
            rows, device = len(one.tokens), inputs[0].device
            tensors = [one.rows_of(x) for x in inputs]
            tensors += [
                proto.make_empty(rows, device=device, requires_grad=False) if grad is None else one.rows_of(grad)
                for grad, proto in zip(grads, self.output_protos, strict=True)
            ]
            requests.append(
                ExpertRequest(one.group, member.backward, [tensor.detach() for tensor in tensors], one.tokens)
            )
            asked.append(one)
        asked_T = torch.zeros(self.rows, dtype=torch.int64, device="cpu")
        for request in requests:
            asked_T[request.tokens] += 1
        needed_T = asked_T.clamp(max=rules.backward_k_min)
        answers, _ = rules.answers_of(self.name, requests, needed_T, backward=True)
        found: list[Tensor | None] = [
            torch.zeros_like(x) if need else None for x, need in zip(inputs, needed, strict=True)
        ]
        for one, result in zip(asked, answers.results, strict=True):
            if result is not None:
                for gathered, rows_of_grad in zip(found, result, strict=True):
                    if gathered is not None:
                        one.put(gathered, rows_of_grad)
        return found


class ExpertsNode(torch.autograd.Function):
    """``dummy`` requires a gradient where no input does, so that the experts are trained by a model's first layer."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, record: ForwardRecord, outputs: tuple[Tensor, ...], *inputs: Tensor) -> Any:
        ctx.record = record
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return tuple([output.detach() for output in outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *ctx.record.gradients(ctx.saved_tensors, grads, needed)
