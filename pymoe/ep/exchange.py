"""Rows on the way between ranks: departures and arrivals, so that work can be done while they travel.

Rows are at home in one tensor, sorted by the rank that they go to, chunk after chunk; away, every chunk is a tensor of
its own. A crossing has two ends: away-bound ``depart`` starts all chunks and ``arrive`` waits for one of them;
home-bound ``send_back`` starts a chunk and ``collect`` waits for all of them. The gradient of either way is the other
way, so backward passes overlap as forward passes do, and can be differentiated again.

Autograd connects the two ends by tokens, tensors without elements: rows under way are no values that it may look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pymoe.ep.agreement import lost_rank
from pymoe.ep.memory import empty_rows
from pymoe.ep.plan import Plan, RowCounts
from pymoe.ops.function_calls import call


class Crossing:
    """One way of the rows of a call, and on demand the way back of their gradients.

    Args:
        plan: of the call: how many rows each rank sends to each.
        total: S, rows of the tensor at home; those past what is sent are zero when it comes home.
        like: a tensor whose width, dtype and device the rows have.
        last_first: start the last chunk first: a backward pass needs it first.
    """

    def __init__(self, plan: Plan | RowCounts, total: int, like: Tensor, *, last_first: bool = False) -> None:
        self.plan: Any = plan
        self.total, self.last_first = total, last_first
        self.width, self.dtype, self.device = like.shape[1], like.dtype, like.device
        self._arrangement = plan.arrangement
        self._under_way: dict[int, tuple[Any, Tensor, Tensor]] = {}  # by chunk: work, what comes, what goes
        self._home: Tensor | None = None
        self._gradients: Crossing | None = None

    @property
    def gradients(self) -> Crossing:
        """The crossing of the gradients, in the other direction."""
        if self._gradients is None:
            like = torch.empty(0, self.width, dtype=self.dtype, device=self.device)
            self._gradients = Crossing(self.plan, self.total, like, last_first=not self.last_first)
        return self._gradients

    @property
    def chunks(self) -> int:
        """How many."""
        return len(self.plan.sent)

    def token(self) -> Tensor:
        """Return what stands for rows under way."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def depart(self, rows_SH: Tensor) -> None:
        """Start all chunks from home."""
        parts = self._parts(rows_SH.contiguous())
        for chunk in sorted(range(self.chunks), reverse=self.last_first):
            rows, received = parts[chunk], self.plan.received[chunk]
            out = empty_rows(sum(received), self.width, self.dtype, self.device)
            self._start(chunk, out, rows, received, self.plan.sent[chunk])

    def arrive(self, chunk: int) -> Tensor:
        """Wait for a chunk that comes from home."""
        return self._finish(chunk)

    def send_back(self, chunk: int, rows: Tensor) -> None:
        """Start a chunk towards home."""
        if self._home is None:
            self._home = empty_rows(self.total, self.width, self.dtype, self.device)
            self._home[sum(map(sum, self.plan.sent)) :].zero_()
        out = self._parts(self._home)[chunk]
        self._start(chunk, out, rows.contiguous(), self.plan.sent[chunk], self.plan.received[chunk])

    def collect(self) -> Tensor:
        """Wait for all chunks to come home."""
        for chunk in range(self.chunks):
            self._finish(chunk)
        home, self._home = self._home, None
        assert home is not None
        return home

    def _parts(self, home_SH: Tensor) -> Sequence[Tensor]:
        sizes = [sum(sent) for sent in self.plan.sent]
        return home_SH[: sum(sizes)].split(sizes)

    def _start(self, chunk: int, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> None:
        if chunk in self._under_way:
            # Of a backward pass for other gradients, which did not wait for it. It writes to the same memory.
            self._finish(chunk)
        try:
            group = self._arrangement.group
            work = dist.all_to_all_single(out, rows, received, sent, group=group, async_op=True)
        except RuntimeError as lost:
            raise lost_rank(self._arrangement, "rows", lost) from lost
        self._under_way[chunk] = work, out, rows

    def _finish(self, chunk: int) -> Tensor:
        work, out, _ = self._under_way.pop(chunk)
        try:
            work.wait()
        except RuntimeError as lost:
            raise lost_rank(self._arrangement, "rows", lost) from lost
        return out


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(rows_SH: Tensor, crossing: Crossing) -> tuple[Tensor, ...]:
        crossing.depart(rows_SH)
        return tuple(crossing.token() for _ in range(crossing.chunks))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.crossing = inputs[1]

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return call(_Collect, ctx.crossing.gradients, *tokens), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(token: Tensor, crossing: Crossing, chunk: int) -> Tensor:
        return crossing.arrive(chunk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.crossing, ctx.chunk = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return call(_SendBack, grad, ctx.crossing.gradients, ctx.chunk), None, None


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, crossing: Crossing, chunk: int) -> Tensor:
        crossing.send_back(chunk, rows)
        return crossing.token()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.crossing, ctx.chunk = inputs

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return call(_Arrive, token, ctx.crossing.gradients, ctx.chunk), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(crossing: Crossing, *tokens: Tensor) -> Tensor:
        return crossing.collect()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.crossing = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad_SH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *call(_Depart, grad_SH, ctx.crossing.gradients)


def depart(rows_SH: Tensor, crossing: Crossing) -> tuple[Tensor, ...]:
    """Start all chunks from home; return a token for each."""
    tokens: tuple[Tensor, ...] = call(_Depart, rows_SH, crossing)
    return tokens


def arrive(token: Tensor, crossing: Crossing, chunk: int) -> Tensor:
    """Wait for a chunk that comes from home; return its rows (n, H), rank by rank."""
    rows: Tensor = call(_Arrive, token, crossing, chunk)
    return rows


def send_back(rows: Tensor, crossing: Crossing, chunk: int) -> Tensor:
    """Start a chunk towards home; return a token."""
    token: Tensor = call(_SendBack, rows, crossing, chunk)
    return token


def collect(tokens: Sequence[Tensor], crossing: Crossing) -> Tensor:
    """Wait for all chunks to come home; return them as (S, H)."""
    rows_SH: Tensor = call(_Collect, crossing, *tokens)
    return rows_SH
