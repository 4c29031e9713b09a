"""The all-to-all of rows: how many rows each rank sends to each other, and the exchange itself, chunk by chunk.

A :class:`RowPlan` follows from the counts that all ranks have exchanged. An :class:`AllToAll` has two ends. On the rank
of the tokens all rows are in one tensor, sorted by chunk and destination; on the rank of the experts every chunk is a
separate tensor. So a dispatch starts all chunks and waits for each by itself, and a combine starts each chunk by itself
and waits for all. Each is the gradient of the other, so backward passes overlap with computation as forward passes do,
and can be differentiated again.

Autograd connects the start of an exchange with the wait for it by handles, tensors without elements: rows that are
still under way are not values that it may read.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pymoe._common.types import Routing
from pymoe.ep.agreement import ExchangedCounts
from pymoe.ep.failures import Exchange, GroupError, report_failed_backward
from pymoe.ep.sharding import ExpertSharding

_HUGE_PAGE = 2 << 20


class RowCounts(NamedTuple):
    """The number of rows that travel between this rank and each other."""

    sharding: ExpertSharding
    sent: list[list[int]]
    """(chunks, R): the number of rows that this rank sends to each rank."""
    received: list[list[int]]
    """(chunks, R): the number of rows that it receives from each rank."""


class WeightSends(NamedTuple):
    """The experts whose weights are sent in a call, to the ranks that take clones of them."""

    experts: list[list[int]]
    """(R,): the experts of this rank that each rank clones."""
    counts: RowCounts
    """One chunk: the number of experts that this rank sends to each rank, and receives from each."""


class RowPlan:
    """The rows of one call of a layer, one for each choice: lists on the host, made from the counts of all ranks.

    Args:
        sharding: the layer's sharding.
        exchanged: the counts of all ranks.
        top_k: K, the number of choices.
        capacity_factor: the layer's capacity factor, or None.

    Raises:
        GroupError: a rank would receive too many rows.
    """

    weight_sends: WeightSends | None = None
    """The weights of clones; None if there are no clones in this call."""

    def __init__(
        self, sharding: ExpertSharding, exchanged: ExchangedCounts, top_k: int, capacity_factor: float | None
    ) -> None:
        self.sharding = sharding
        self.loads, self.tokens, self.exchanged_rows = exchanged
        self.kept = self.loads
        """(R, E): the rows that each rank sends to each expert."""
        if capacity_factor is not None:
            self.kept = _within_capacity(sharding, self.loads, self.tokens, top_k, capacity_factor)
        self.at_owners = self._rows_at_owners()
        """(R, E): the rows in ``kept`` that the owners of the experts compute; without clones, all of them."""
        if sharding.max_recv_rows is not None:
            self._check_received(sharding.max_recv_rows)
        self.counts = RowCounts(sharding, [], [])
        own = self.at_owners[sharding.rank]
        for chunk, by_rank in enumerate(sharding.chunk_experts):
            self.counts.sent.append([sum(map(own.__getitem__, experts)) for experts in by_rank])
            self.counts.received.append(list(map(sum, self.rows_by_expert(chunk))))

    @property
    def dropped(self) -> int:
        """Return the number of this rank's slots past the capacity of their experts."""
        rank = self.sharding.rank
        return sum(self.loads[rank]) - sum(self.kept[rank])

    def group_load(self) -> list[int]:
        """Return, for each expert, the number of slots of all ranks for which it was chosen."""
        return list(map(sum, zip(*self.loads, strict=True)))

    def rows_of_ranks(self) -> list[int]:
        """Return the number of rows that each rank computes."""
        of_experts = list(map(sum, zip(*self.at_owners, strict=True)))
        return [sum(map(of_experts.__getitem__, experts)) for experts in self.sharding.experts_of_ranks]

    def rows_by_expert(self, chunk: int) -> list[list[int]]:
        """Return the rows of a chunk that this rank receives from every rank for each of the chunk's experts here."""
        experts = self.sharding.chunk_experts[chunk][self.sharding.rank]
        return [list(map(rows.__getitem__, experts)) for rows in self.at_owners]

    def expert_of_rows(self, chunk: int, device: torch.device) -> tuple[Tensor, int]:
        """Return the expert of each received row of a chunk, (n, 1) int32 within the chunk, and their number.

        Rows come rank by rank, and the rows of each rank are sorted by expert.
        """
        rows = torch.tensor(self.rows_by_expert(chunk), dtype=torch.int64)
        experts = rows.shape[1]
        indices = torch.arange(experts, dtype=torch.int32).repeat(self.sharding.ranks)
        total = sum(self.counts.received[chunk])
        rows, indices = rows.reshape(-1).to(device), indices.to(device)
        return indices.repeat_interleave(rows, output_size=total)[:, None], experts

    def without_dropped(self, routing: Routing, experts_TK: Tensor) -> Routing:
        """Return a routing that keeps, for each expert, the first rows up to the number that this rank may send.

        ``build_routing`` has one capacity for all experts; if a group shares the capacity, each rank has its own limit
        for each expert.

        Args:
            routing: the routing of all choices.
            experts_TK: (T, K) int32, the choices that it was built from, in the order in which rows are sent.
        """
        own = self.kept[self.sharding.rank]
        limit_E = torch.tensor([own[e] for e in self.sharding.send_order], dtype=torch.int32).to(experts_TK.device)
        chosen = experts_TK.long()
        place_TK = routing.slot - routing.offsets[chosen]
        offsets = torch.cat([limit_E.new_zeros(1), limit_E.cumsum(0, dtype=torch.int32)])
        slot_TK = torch.where(place_TK < limit_E[chosen], offsets[chosen] + place_TK, -1)
        token_TK = torch.arange(chosen.shape[0], dtype=torch.int32, device=chosen.device)[:, None].expand_as(chosen)
        # Dropped choices write to an additional row, which is left out.
        rows = slot_TK.numel()
        token = routing.token.new_full((rows + 1,), -1)
        token[torch.where(slot_TK < 0, rows, slot_TK).reshape(-1).long()] = token_TK.reshape(-1)
        return Routing(slot_TK, token[:rows], offsets)

    def _rows_at_owners(self) -> list[list[int]]:
        return self.kept

    def _check_received(self, limit: int) -> None:
        sharding = self.sharding
        rows = self.rows_of_ranks()
        full = tuple(rank for rank, count in enumerate(rows) if count > limit)
        if full:
            seen = ", ".join(f"rank {rank} would receive {rows[rank]}" for rank in full)
            raise GroupError(
                f"MoE {sharding.title}: a rank must receive at most room = {limit} rows in a call, got {seen}",
                sharding.layer,
                full,
            )


def capacity(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """Return the number of slots that an expert takes, as :class:`pymoe.nn.MoE` computes it."""
    return max(1, math.ceil(min(factor, num_experts) * (tokens * top_k) / num_experts))


def _within_capacity(
    sharding: ExpertSharding, loads: list[list[int]], tokens: list[int], top_k: int, factor: float
) -> list[list[int]]:
    """Return (R, E): the part of the loads that fits the experts' capacity."""
    experts = sharding.num_experts
    if sharding.scope == "rank":  # each rank limits its own rows
        limits = [capacity(factor, count, top_k, experts) for count in tokens]
        return [[min(n, limit) for n in load] for load, limit in zip(loads, limits, strict=True)]
    # An expert takes rows in the order of ranks, until its capacity is reached.
    left = [capacity(factor, sum(tokens), top_k, experts)] * experts
    kept = []
    for load in loads:
        kept.append([min(n, limit) for n, limit in zip(load, left, strict=True)])
        left = [limit - n for n, limit in zip(kept[-1], left, strict=True)]
    return kept


class AllToAll:
    """One dispatch or combine of a call's rows; :attr:`gradients` is the exchange of their gradients.

    Args:
        counts: the rows that this rank sends and receives.
        total: S, the rows of the tensor at the rank of the tokens; a combine fills those past the counts with zeros.
        like: a tensor with the width, dtype and device of the rows.
        last_first: start the last chunk first, since a backward pass needs it first.
    """

    def __init__(self, counts: RowCounts, total: int, like: Tensor, *, last_first: bool = False) -> None:
        self.counts, self.total, self.last_first = counts, total, last_first
        self.chunks = len(counts.sent)
        self.width, self.dtype, self.device = like.shape[1], like.dtype, like.device
        self._under_way: dict[int, tuple[Exchange, Tensor, Tensor]] = {}  # by chunk: with output and input
        self._combined: Tensor | None = None
        self._gradients: AllToAll | None = None

    @property
    def gradients(self) -> AllToAll:
        """Return the exchange of the gradients, in the other direction."""
        if self._gradients is None:
            like = torch.empty(0, self.width, dtype=self.dtype, device=self.device)
            self._gradients = AllToAll(self.counts, self.total, like, last_first=not self.last_first)
        return self._gradients

    def start_dispatch(self, rows_SH: Tensor) -> tuple[Tensor, ...]:
        """Start all chunks towards the ranks of the experts; return a handle for each."""
        parts, handles = self._parts(rows_SH.contiguous()), []
        for chunk in sorted(range(self.chunks), reverse=self.last_first):
            received = self.counts.received[chunk]
            out = empty_rows(sum(received), self.width, self.dtype, self.device)
            self._start(chunk, out, parts[chunk], received, self.counts.sent[chunk])
            handles.append(rows_SH.new_empty(0))
        return tuple(handles)

    def start_combine(self, rows: Tensor, chunk: int) -> Tensor:
        """Start a chunk towards the ranks of the tokens; return a handle."""
        if self._combined is None:
            self._combined = empty_rows(self.total, self.width, self.dtype, self.device)
            self._combined[sum(map(sum, self.counts.sent)) :].zero_()
        out = self._parts(self._combined)[chunk]
        self._start(chunk, out, rows.contiguous(), self.counts.sent[chunk], self.counts.received[chunk])
        return rows.new_empty(0)

    def wait(self, chunk: int) -> Tensor:
        """Wait for a chunk; return its rows."""
        exchange, out, _ = self._under_way.pop(chunk)
        exchange.wait()
        return out

    def wait_combine(self) -> Tensor:
        """Wait for all chunks of a combine; return their rows in one tensor."""
        for chunk in range(self.chunks):
            self.wait(chunk)
        combined, self._combined = self._combined, None
        assert combined is not None
        return combined

    def _parts(self, rows_SH: Tensor) -> Sequence[Tensor]:
        sizes = list(map(sum, self.counts.sent))
        return rows_SH[: sum(sizes)].split(sizes)

    def _start(self, chunk: int, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> None:
        if chunk in self._under_way:
            # Another backward pass has started this exchange and did not wait for it; it writes to the same memory.
            self.wait(chunk)
        sharding = self.counts.sharding
        start = partial(dist.all_to_all_single, out, rows, received, sent, group=sharding.group, async_op=True)
        self._under_way[chunk] = Exchange(sharding, "rows", start), out, rows


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SH: Tensor, exchange: AllToAll) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.start_dispatch(rows_SH)

    @staticmethod
    def backward(ctx: Any, *handles: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return wait_combine(handles, ctx.exchange.gradients), None


class _WaitDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, exchange: AllToAll, chunk: int) -> Tensor:
        ctx.exchange, ctx.chunk = exchange, chunk
        return exchange.wait(chunk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return start_combine(grad, ctx.exchange.gradients, ctx.chunk), None, None


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AllToAll, chunk: int) -> Tensor:
        ctx.exchange, ctx.chunk = exchange, chunk
        return exchange.start_combine(rows, chunk)

    @staticmethod
    def backward(ctx: Any, handle: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return wait_dispatch(handle, ctx.exchange.gradients, ctx.chunk), None, None


class _WaitCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AllToAll, *handles: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait_combine()

    @staticmethod
    def backward(ctx: Any, grad_SH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        report_failed_backward(ctx.exchange.counts.sharding)  # the backward pass of a layer begins here
        return None, *start_dispatch(grad_SH, ctx.exchange.gradients)


def start_dispatch(rows_SH: Tensor, exchange: AllToAll) -> tuple[Tensor, ...]:
    """Start all chunks towards the ranks of the experts; return a handle for each."""
    handles: tuple[Tensor, ...] = _StartDispatch.apply(rows_SH, exchange)
    return handles


def wait_dispatch(handle: Tensor, exchange: AllToAll, chunk: int) -> Tensor:
    """Wait for a chunk at the rank of its experts; return its rows (n, H), rank by rank."""
    rows: Tensor = _WaitDispatch.apply(handle, exchange, chunk)
    return rows


def start_combine(rows: Tensor, exchange: AllToAll, chunk: int) -> Tensor:
    """Start a chunk towards the ranks of the tokens; return a handle."""
    handle: Tensor = _StartCombine.apply(rows, exchange, chunk)
    return handle


def wait_combine(handles: Sequence[Tensor], exchange: AllToAll) -> Tensor:
    """Wait for all chunks at the rank of their tokens; return their rows as (S, H)."""
    rows_SH: Tensor = _WaitCombine.apply(exchange, *handles)
    return rows_SH


def empty_rows(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised rows (count, width), large ones on the CPU in pages of 2 MiB, as operators allocate theirs.

    Fresh memory costs a page fault per 4 KiB at the first write, which takes longer than the copy itself. If the system
    has no large pages, the request for them has no effect.

    Args:
        count: number of rows.
        width: of a row, in elements.
        dtype: of an element.
        device: of the rows.
    """
    rows = torch.empty(count, width, dtype=dtype, device=device)
    advise = _madvise()
    if advise is not None and rows.is_cpu and rows.nbytes >= 2 * _HUGE_PAGE:
        begin = -(-rows.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (rows.data_ptr() + rows.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return rows


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system's ``madvise``, if it knows of huge pages."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise  # type: ignore[no-any-return]
