"""Clones of hot experts for one call (the shadow experts of FasterMoE, He et al., PPoPP 2022).

Every rank computes the same plan without communication, because the plan is a pure function, in integers, of the counts
that were exchanged. Rows for clones travel in an additional last chunk. The weights of a clone are sent once to the
rank that computes with it, while that rank computes with its own experts; the clone's gradient is sent back once. So a
clone saves time only if enough rows are moved to it, at least ``min_rows_to_clone``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pymoe._common import checks
from pymoe._common.types import Routing
from pymoe.ep.exchange import AllToAll, ExchangedCounts, RowCounts, RowPlan, WeightSends, start_combine, start_dispatch
from pymoe.ep.placement import Shares, check_counts, contiguous, divide_rows, share_rows
from pymoe.ep.sharding import ExpertSharding


def fewest_rows_that_pay(parameters: int, hidden_size: int) -> int:
    """Return the smallest number of rows for which cloning an expert sends no more elements than sending the rows.

    This is ceil(P / (2 H)): a clone costs P parameters and P gradients; a row costs four times H elements, to the
    expert and back, in the forward and in the backward pass.
    """
    return max(1, -(-parameters // (2 * hidden_size)))


def plan_clones(
    counts: Tensor, clones: int, *, min_rows_to_clone: int = 1, owner: Sequence[int] | None = None
) -> Shares:
    """Return each expert's hosts, with their shares of its rows, after ranks with few rows have cloned experts.

    The algorithm is greedy. In each step, the emptiest rank that may take another clone clones an expert of the fullest
    rank: the expert of which most rows can be moved without taking either rank across the mean number of rows. The
    algorithm stops when fewer than ``min_rows_to_clone`` rows can be moved, or no other rank may take a clone. So the
    fullest rank never gets fuller. Ties go to the lower rank and the lower expert.

    Args:
        counts: (R, E) int32 or int64 on the CPU, rows of each source rank for each expert, none negative.
        clones: the maximum number of clones on a rank, at least 0.
        min_rows_to_clone: the smallest number of rows that are moved to a clone, at least 1.
        owner: (E,), the rank that holds each expert; None: the shards of :func:`pymoe.ep.placement.contiguous`.

    Returns:
        The shares; ``hosts`` has the owner of each expert first, then the ranks of its clones, ascending.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument has the wrong shape, device or range.
    """
    check_counts("plan_clones", counts)
    checks.integer("plan_clones", "clones", clones, 0, None, "at least 0")
    checks.integer("plan_clones", "min_rows_to_clone", min_rows_to_clone, 1, None, "at least 1")
    ranks, experts = counts.shape
    owners = contiguous(experts, ranks).owner if owner is None else tuple(owner)
    if len(owners) != experts or not all(0 <= rank < ranks for rank in owners):
        raise ValueError(f"plan_clones: owner must have {experts} ranks in 0..{ranks - 1}, got {list(owners)}")
    return share_rows(
        counts.long(), *_hosts_and_quotas(counts.sum(0).tolist(), owners, ranks, clones, min_rows_to_clone)
    )


def _hosts_and_quotas(
    rows: Sequence[int], owners: Sequence[int], ranks: int, clones: int, min_rows_to_clone: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the hosts of each expert, and the number of its rows that each host computes.

    Args:
        rows: (E,), the rows of each expert.
        owners: (E,), the rank that holds each expert.
        ranks: R, the number of ranks.
        clones: as for :func:`plan_clones`.
        min_rows_to_clone: as for :func:`plan_clones`.
    """
    held = [{rank: number} for rank, number in zip(owners, rows, strict=True)]  # for each expert, rows by host
    filled = [0] * ranks
    for rank, number in zip(owners, rows, strict=True):
        filled[rank] += number
    clones_left = [clones] * ranks
    mean = -(-sum(rows) // ranks)
    while True:
        fullest = max(range(ranks), key=filled.__getitem__)  # ties: max and min return the lowest rank
        free = [rank for rank in range(ranks) if clones_left[rank] and rank != fullest]
        if not free:
            break
        to = min(free, key=filled.__getitem__)
        most = min(filled[fullest] - mean, mean - filled[to])
        candidates = [(min(at[fullest], most), -e) for e, at in enumerate(held) if fullest in at and to not in at]
        moved, expert = max(candidates, default=(0, 0))
        if moved < min_rows_to_clone:
            break
        held[-expert][fullest] -= moved
        held[-expert][to] = moved
        filled[fullest] -= moved
        filled[to] += moved
        clones_left[to] -= 1
    hosts = [sorted(at, key=lambda rank: (rank != owners[expert], rank)) for expert, at in enumerate(held)]
    return hosts, [[at[rank] for rank in its_hosts] for at, its_hosts in zip(held, hosts, strict=True)]


class RowPlanWithClones(RowPlan):
    """Plans the rows of a call like :class:`RowPlan`, with the clones that :func:`plan_clones` finds."""

    def __init__(
        self, sharding: ExpertSharding, exchanged: ExchangedCounts, top_k: int, capacity_factor: float | None
    ) -> None:
        super().__init__(sharding, exchanged, top_k, capacity_factor)
        if any(self._clones):
            rank = sharding.rank
            own = self._rows[rank]
            self.counts.sent.append([sum(own[e][place] for e, place in clones) for clones in self._clones])
            self.rows_by_expert.append([[rows[e][place] for e, place in self._clones[rank]] for rows in self._rows])
            self.counts.received.append(list(map(sum, self.rows_by_expert[-1])))
            self.weight_sends = self._weight_sends()

    def rows_of_ranks(self) -> list[int]:
        """Return the number of rows that each rank computes with its own experts and with clones."""
        of_clones = [sum(rows[e][place] for rows in self._rows for e, place in clones) for clones in self._clones]
        return [own + more for own, more in zip(super().rows_of_ranks(), of_clones, strict=True)]

    def in_send_order(self, routing: Routing) -> Routing:
        """Return a routing in which the rows for clones come after all other rows, sorted by destination rank.

        ``offsets`` stay as they were. Without clones in this call, return ``routing``.

        Of the rows for an expert, the first go to its owner, the others to the ranks with its clones.

        Args:
            routing: the routing of the choices that this rank sends, in the order of ``sharding.send_order``.
        """
        if self.weight_sends is None:
            return routing
        order = self.sharding.send_order
        own = self._rows[self.sharding.rank]
        starts, start = {}, 0
        for expert in order:
            for place, rows in enumerate(own[expert]):
                starts[expert, place] = start
                start += rows
        pieces = [(e, 0) for e in order] + [piece for clones in self._clones for piece in clones]
        lengths = [own[e][place] for e, place in pieces]
        device = routing.slot.device
        shift = torch.tensor([starts[piece] for piece in pieces]) - torch.tensor([0, *lengths[:-1]]).cumsum(0)
        moved = torch.stack([shift, torch.tensor(lengths)]).to(device)
        places = torch.arange(start, device=device)
        came_from = moved[0].repeat_interleave(moved[1], output_size=start) + places
        token = routing.token.clone()
        token[:start] = routing.token[came_from]
        new_place = torch.empty_like(places, dtype=torch.int32)
        new_place[came_from] = places.int()
        slot = routing.slot
        if start:
            slot = torch.where(slot < 0, slot, new_place[slot.clamp(min=0).long()])
        return Routing(slot, token, routing.offsets)

    def _rows_at_owners(self) -> list[list[int]]:
        sharding = self.sharding
        total = [sum(column) for column in zip(*self.kept, strict=True)]
        hosts, quotas = _hosts_and_quotas(
            total,
            sharding.owner,
            sharding.ranks,
            clones=sharding.clones,
            min_rows_to_clone=sharding.min_rows_to_clone,
        )
        self._rows = divide_rows(self.kept, hosts, quotas)  # (R, E, P), like Shares.rows
        # The clones on each rank, in the order in which their weights arrive. A clone is a pair: the expert, and the
        # index of the rank among the expert's hosts.
        self._clones: list[list[tuple[int, int]]] = [[] for _ in range(sharding.ranks)]
        for expert in sharding.order or range(sharding.num_experts):
            for place, rank in enumerate(hosts[expert][1:], 1):
                self._clones[rank].append((expert, place))
        return [[rows[0] for rows in of_rank] for of_rank in self._rows]

    def _weight_sends(self) -> WeightSends:
        sharding = self.sharding
        own = set(sharding.own_experts)
        experts = [[e for e, _ in clones if e in own] for clones in self._clones]
        received = [0] * sharding.ranks
        for expert, _ in self._clones[sharding.rank]:
            received[sharding.owner[expert]] += 1
        return WeightSends(experts, RowCounts(sharding, [[len(sent) for sent in experts]], [received]))


class WeightBroadcast:
    """The exchange of the weights of a call's clones: one row per expert, with all of its parameters.

    It starts before a rank computes with its own experts and ends when the clones are needed. In the backward
    pass, the exchange of the clones' gradients also overlaps with computation.

    Args:
        sends: the experts whose weights travel.
        own: ``w_in``, ``w_out``, ``b_in`` and ``b_out``, stacked along this rank's experts; None for missing biases.
        dtype: the dtype of the call's rows, in which the weights are sent. Autocast would cast them to it anyway.
    """

    def __init__(self, sends: WeightSends, own: Sequence[Tensor | None], dtype: torch.dtype) -> None:
        self._shapes = [None if one is None else one.shape[1:] for one in own]
        place = {expert: place for place, expert in enumerate(sends.counts.sharding.own_experts)}
        sent = [[place[expert] for expert in experts] for experts in sends.experts]
        rows: Tensor = _Pack.apply(sent, dtype, *(one for one in own if one is not None))
        self._exchange = AllToAll(sends.counts, rows.shape[0], rows)
        (self._handle,) = start_dispatch(rows, self._exchange)

    def wait_with_rows(self, handle: Tensor, exchange: AllToAll, chunk: int) -> tuple[Tensor, list[Tensor | None]]:
        """Wait for the rows of this rank's clones and for the clones' weights.

        Args:
            handle: the handle of the rows.
            exchange: the exchange of the rows.
            chunk: the chunk in which the rows arrive.

        Returns:
            The rows (n, H), sorted by source rank, and the four parameters, stacked along the clones.
        """
        rows, weights = _WaitRowsAndWeights.apply(handle, self._handle, exchange, chunk, self._exchange)
        sizes = [shape.numel() for shape in self._shapes if shape is not None]
        parts = iter(weights.split(sizes, dim=1))
        # Copy each parameter, so that it is contiguous like a layer's: strides influence the rounding of products.
        return rows, [None if shape is None else next(parts).reshape(-1, *shape).contiguous() for shape in self._shapes]


class _Pack(torch.autograd.Function):
    """Copies the experts to send into rows, sorted by destination; each row has all parameters of an expert."""

    @staticmethod
    def forward(ctx: Any, sent: list[list[int]], dtype: torch.dtype, *own: Tensor) -> Tensor:
        ctx.sent, ctx.own = sent, [(one.shape, one.dtype) for one in own]
        index = torch.tensor([place for places in sent for place in places], device=own[0].device).long()
        return torch.cat([one.index_select(0, index).flatten(1).to(dtype) for one in own], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        recorded = torch.is_grad_enabled()
        if not any(ctx.sent) and not recorded:
            return None, None, *(None for _ in ctx.own)
        sizes = [shape[1:].numel() for shape, _ in ctx.own]
        gradients: list[Tensor | None] = []
        parts = zip(ctx.own, grad.split(sizes, dim=1), ctx.needs_input_grad[2:], strict=True)
        for (shape, dtype), part, is_needed in parts:
            if not is_needed:
                gradients.append(None)
                continue
            total = torch.zeros(shape, dtype=dtype, device=grad.device)
            # One index_add for each rank: the indices in it are distinct, since a rank clones an expert at most once.
            # So the order of the sum is the order of ranks.
            for experts, rows in zip(ctx.sent, part.split([len(experts) for experts in ctx.sent]), strict=True):
                if experts:
                    index = torch.tensor(experts, device=grad.device)
                    rows = rows.to(dtype).reshape(-1, *shape[1:])
                    total = total.index_add(0, index, rows) if recorded else total.index_add_(0, index, rows)
            gradients.append(total)
        return None, None, *gradients


class _WaitRowsAndWeights(torch.autograd.Function):
    """Waits for the clones' rows and weights in one autograd node.

    With one node, every rank that takes part in the exchange of the rows' gradients also takes part in that of the
    weights' gradients, even if it has no clone.
    """

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, weights_handle: Tensor, exchange: AllToAll, chunk: int, weights_exchange: AllToAll
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.chunk, ctx.weights_exchange = exchange, chunk, weights_exchange
        return exchange.wait(chunk), weights_exchange.wait(0)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        need_rows, need_weights = ctx.needs_input_grad[:2]
        rows = start_combine(grad_rows, ctx.exchange.gradients, ctx.chunk) if need_rows else None
        weights = start_combine(grad_weights, ctx.weights_exchange.gradients, 0) if need_weights else None
        return rows, weights, None, None, None
