"""The weights of clones on the way: once to the ranks that compute with them, and their gradients once back.

One exchange, of a row an expert that holds all its parameters. It begins before a rank computes with its own experts
and ends when the rows for the clones are needed; so does that of the gradients in a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pymoe.ep.exchange import Crossing, depart, send_back
from pymoe.ep.plan import Loan
from pymoe.ops.function_calls import call


class Lent:
    """The weights of a call's clones, under way.

    Args:
        loan: which experts travel.
        own: ``w_in``, ``w_out``, ``b_in`` and ``b_out`` of this rank's experts, stacked along them, or None.
        dtype: in which they travel: that of the rows, to which autocast would cast them.
    """

    def __init__(self, loan: Loan, own: Sequence[Tensor | None], dtype: torch.dtype) -> None:
        self._shapes = [None if one is None else one.shape[1:] for one in own]
        place = {expert: place for place, expert in enumerate(loan.rows.arrangement.own)}
        lent = [[place[expert] for expert in experts] for experts in loan.lent]
        rows: Tensor = call(_Pack, lent, dtype, *(one for one in own if one is not None))
        self._crossing = Crossing(loan.rows, rows.shape[0], rows)
        (self._token,) = depart(rows, self._crossing)

    def arrive(self, token: Tensor, crossing: Crossing, chunk: int) -> tuple[Tensor, list[Tensor | None]]:
        """Wait for the rows of the clones and for their weights.

        Args:
            token: of the rows.
            crossing: by which they come.
            chunk: in which they do.

        Returns:
            The rows (n, H), rank by rank, and the four parameters, stacked along the clones.
        """
        rows, weights = call(_ArriveWithWeights, token, self._token, crossing, chunk, self._crossing)
        sizes = [shape.numel() for shape in self._shapes if shape is not None]
        parts = iter(weights.split(sizes, dim=1))
        # Each is copied: kernels read the weights of an expert behind those of the one before.
        return rows, [None if shape is None else next(parts).reshape(-1, *shape).contiguous() for shape in self._shapes]


class _Pack(torch.autograd.Function):
    """Experts that are lent, by rank, to rows of all their parameters."""

    @staticmethod
    def forward(lent: list[list[int]], dtype: torch.dtype, *own: Tensor) -> Tensor:
        index = torch.tensor([place for places in lent for place in places], device=own[0].device).long()
        return torch.cat([one.index_select(0, index).flatten(1).to(dtype) for one in own], dim=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.lent, _, *own = inputs
        ctx.own = [(one.shape, one.dtype) for one in own]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        recorded = torch.is_grad_enabled()
        if not any(ctx.lent) and not recorded:
            return None, None, *(None for _ in ctx.own)
        sizes = [shape[1:].numel() for shape, _ in ctx.own]
        found: list[Tensor | None] = []
        parts = zip(ctx.own, grad.split(sizes, dim=1), ctx.needs_input_grad[2:], strict=True)
        for (shape, dtype), part, is_needed in parts:
            if not is_needed:
                found.append(None)
                continue
            total = torch.zeros(shape, dtype=dtype, device=grad.device)
            # A rank takes an expert once, so the sums run in the order of ranks, whatever adds within a call.
            for experts, rows in zip(ctx.lent, part.split([len(experts) for experts in ctx.lent]), strict=True):
                if experts:
                    index = torch.tensor(experts, device=grad.device)
                    rows = rows.to(dtype).reshape(-1, *shape[1:])
                    total = total.index_add(0, index, rows) if recorded else total.index_add_(0, index, rows)
            found.append(total)
        return None, None, *found


class _ArriveWithWeights(torch.autograd.Function):
    """Rows and weights arrive in one node, so that every backward pass that sends gradients of the rows sends those of
    the weights, too, on all ranks: also on those that have no clone.
    """

    @staticmethod
    def forward(
        token: Tensor, weights_token: Tensor, crossing: Crossing, chunk: int, weights: Crossing
    ) -> tuple[Tensor, Tensor]:
        return crossing.arrive(chunk), weights.arrive(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, _, ctx.crossing, ctx.chunk, ctx.weights = inputs

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        need_rows, need_weights = ctx.needs_input_grad[:2]
        rows = send_back(grad_rows, ctx.crossing.gradients, ctx.chunk) if need_rows else None
        weights = send_back(grad_weights, ctx.weights.gradients, 0) if need_weights else None
        return rows, weights, None, None, None
