"""Rows: which rank computes each row if the experts are spread in a given way, and which rows travel between ranks.

A row that stays on its rank does not travel. With deduplication, a token that chose several experts of a rank travels
to that rank once, and their weighted sum comes back once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import comb

import torch
from torch import Tensor

from pymoe.ep.clones import plan_clones
from pymoe.ep.placement import Shares, contiguous, place, share_evenly
from pymoe.ep.simulate.block import Block
from pymoe.ep.simulate.loads import Load, source_ranks


def _contiguous(past: Tensor, counts: Tensor, min_rows_to_clone: int) -> Shares:
    return share_evenly(counts, contiguous(counts.shape[1], counts.shape[0]))


def _placed(past: Tensor, counts: Tensor, min_rows_to_clone: int) -> Shares:
    return share_evenly(counts, place(past, counts.shape[0]))


def _cloned(past: Tensor, counts: Tensor, min_rows_to_clone: int, clones: int) -> Shares:
    return plan_clones(counts, clones, min_rows_to_clone=min_rows_to_clone)


SPREADS: dict[str, Callable[[Tensor, Tensor, int], Shares]] = {
    "contiguous": _contiguous,
    "placed": _placed,
    "1-clone": partial(_cloned, clones=1),
    "2-clones": partial(_cloned, clones=2),
}
"""Ways to spread experts over ranks: contiguous shards; experts placed by the previous step's load; contiguous shards
with at most one or at most two clones on each rank.

Each value is a function that takes the load of the previous step, (E,), the counts of this step, (R, E), and the
smallest number of rows that are moved to a clone. It returns the shares of the ranks.
"""


@dataclass(frozen=True)
class Spread:
    """One layer and step of a load, and the rank that computes each row."""

    choices: Tensor
    """(N, K) int64: the experts of each token."""
    source: Tensor
    """(N,) int64: the rank of each token."""
    destinations: Tensor
    """(N, K) int64: the rank to which each choice's row goes."""
    shares: Shares
    scale: float
    """Number of rows of the simulation that each drawn or recorded row represents."""

    @property
    def ranks(self) -> int:
        """Return R, the number of ranks."""
        return self.shares.rows.shape[0]

    @property
    def clones(self) -> int:
        """Return the number of clones that are sent in this step: the hosts of all experts, not counting owners."""
        return sum(len(hosts) - 1 for hosts in self.shares.hosts)

    @property
    def held(self) -> list[list[int]]:
        """Return (R,): the experts that each rank computes, in ascending order."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for expert, hosts in enumerate(self.shares.hosts):
            for rank in hosts:
                held[rank].append(expert)
        return held

    def pairs(self, deduplicate: bool = False, chunks: int = 1) -> Tensor:
        """Return (chunks, R, R) float64: the number of rows from each rank to each rank, itself included, per chunk."""
        chunk_NK = self.chunk_of_choices(chunks)
        found = [
            pairs_of(self.destinations, self.source, self.ranks, deduplicate, chunk_NK == chunk)
            for chunk in range(chunks)
        ]
        return torch.stack(found).double() * self.scale

    def chunk_of_choices(self, chunks: int) -> Tensor:
        """Return (N, K) int64, the chunk in which each choice travels. Chunks divide the experts of each rank evenly.

        Chunk c of a rank's n experts starts at index ``c * n // chunks``.
        """
        chunk = torch.zeros(self.ranks, len(self.shares.hosts), dtype=torch.int64)
        for rank, experts in enumerate(self.held):
            for part in range(chunks):
                chunk[rank, experts[part * len(experts) // chunks : (part + 1) * len(experts) // chunks]] = part
        return chunk[self.destinations, self.choices]


def spreads(name: str, load: Load, ranks: int, tokens: float, min_rows_to_clone: int) -> Iterator[Spread]:
    """Yield a :class:`Spread` for every layer and step of ``load``, scaled to ``tokens`` per rank.

    ``name`` is a key of :data:`SPREADS`. ``min_rows_to_clone`` is the smallest number of rows that are moved to a
    clone, before scaling.
    """
    source = source_ranks(load.tokens, ranks)
    for before, now in load.with_past():
        counts = counts_of(now, source, ranks, load.experts)
        shares = SPREADS[name](counts_of(before, source, ranks, load.experts).sum(0), counts, min_rows_to_clone)
        yield Spread(now, source, destinations_of(now, source, shares), shares, tokens * ranks / load.tokens)


@dataclass(frozen=True)
class Balance:
    """The work of the ranks under one way to spread the experts: means over the layers and steps of a load, except
    ``worst``.
    """

    name: str
    imbalance: float
    """Rows of the fullest rank divided by the mean over ranks."""
    worst: float
    """Largest imbalance among the layers and steps."""
    rows: float
    """Rows that the fullest rank computes per layer and step."""
    experts: float
    """Largest number of experts that a rank computes, including clones."""
    clones: float
    """Clones that travel per layer and step, on all ranks together."""


def balance(name: str, found: list[Spread]) -> Balance:
    """Return the balance of the layers and steps ``found``, which are spread in the way called ``name``."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    filled = [spread.pairs().sum((0, 1)) for spread in found]
    imbalances = [float(rows.max() / rows.mean()) for rows in filled]
    return Balance(
        name,
        imbalance=mean(imbalances),
        worst=max(imbalances),
        rows=mean([float(rows.max()) for rows in filled]),
        experts=mean([max(map(len, spread.held)) for spread in found]),
        clones=mean([spread.clones for spread in found]),
    )


def expected_rows(block: Block, ranks: int, deduplicate: bool) -> float:
    """Return the expected number of rows that a token sends to other ranks, for a uniform router and contiguous shards.

    The result is the mean over the ranks on which the token may be. Without ``deduplicate``, each choice is a row, so
    the result is K (1 - 1 / R) for any shards, since the shares of the ranks sum to 1. With ``deduplicate``, there is
    at most one row per rank, so the result is the sum over the other ranks of 1 - C(E - n, K) / C(E, K), where n is the
    number of experts of a rank. A term is the probability that at least one of the rank's experts is among the K chosen
    experts, since all C(E, K) sets are equally likely.

    Args:
        block: gives E and K; its groups are ignored.
        ranks: R, the number of ranks.
        deduplicate: whether a token travels at most once to a rank.
    """
    if not deduplicate:
        return block.choices * (1 - 1 / ranks)
    held = map(len, contiguous(block.experts, ranks).held)
    everything = comb(block.experts, block.choices)
    reached = [1 - comb(block.experts - number, block.choices) / everything for number in held]
    return sum(reached) * (1 - 1 / ranks)


def expected_imbalance(block: Block, ranks: int, tokens: float) -> float:
    """Return the approximate ratio of the fullest rank's rows to the mean over ranks, for a uniform router.

    The ratio exceeds 1 only by chance. The result is 1 + sqrt(2 ln R) sqrt((R - 1) (1 - K / E) / (T R K)), for T tokens
    per rank and E divisible by R. The second root is the relative standard deviation of a rank's load. The loads of the
    R ranks are nearly normal, and the expected maximum of R normal values is about sqrt(2 ln R) standard deviations
    above their mean.
    """
    if ranks == 1:
        return 1.0
    deviation = (ranks - 1) * (1 - block.choices / block.experts) / (tokens * ranks * block.choices)
    return float(1 + (2 * torch.log(torch.tensor(float(ranks))) * deviation) ** 0.5)


def counts_of(choices: Tensor, source: Tensor, ranks: int, experts: int) -> Tensor:
    """Return (R, E) int64: the number of rows of each source rank for each expert, like an all-gather of the loads."""
    cell = source[:, None] * experts + choices
    return torch.bincount(cell.flatten(), minlength=ranks * experts).view(ranks, experts)


def destinations_of(choices: Tensor, source: Tensor, shares: Shares) -> Tensor:
    """Return (N, K) int64: the rank to which each choice's row goes.

    The rows of a source rank for an expert go to the expert's hosts in the order of ``shares.hosts``, to each as many
    as ``shares.rows`` says.
    """
    most = shares.rows.shape[2]
    hosts = torch.tensor([[*its_hosts, *its_hosts[:1] * (most - len(its_hosts))] for its_hosts in shares.hosts])
    if most == 1:
        return hosts[choices, 0]
    experts = shares.rows.shape[1]
    cell = (source[:, None] * experts + choices).flatten()
    order = cell.argsort(stable=True)
    sizes = torch.bincount(cell, minlength=shares.rows.shape[0] * experts)
    first = sizes.cumsum(0) - sizes
    number = torch.empty_like(cell)
    number[order] = torch.arange(len(cell)) - first[cell[order]]  # index among the rows of its source and expert
    ends = shares.rows.cumsum(2).view(-1, most)
    place = (number[:, None] >= ends[cell]).sum(1)
    return hosts[choices.flatten(), place].view_as(choices)


def pairs_of(
    destinations: Tensor, source: Tensor, ranks: int, deduplicate: bool, chosen: Tensor | None = None
) -> Tensor:
    """Return (R, R) int64: the number of rows from each source rank (first dimension) to each rank, itself included.

    Args:
        destinations: (N, K) int64, the rank to which each choice's row goes.
        source: (N,) int64, the rank of each token.
        ranks: R, the number of ranks.
        deduplicate: count a token once for each rank to which it goes.
        chosen: (N, K) bool, true for the choices to count; None counts all.
    """
    cell = source[:, None] * ranks + destinations
    left_out = ranks * ranks
    if chosen is not None:
        cell = cell.masked_fill(~chosen, left_out)
    if deduplicate:
        cell = cell.sort(dim=1).values
        cell[:, 1:] = cell[:, 1:].masked_fill(cell[:, 1:] == cell[:, :-1], left_out)
    return torch.bincount(cell.flatten(), minlength=left_out + 1)[:left_out].view(ranks, ranks)


def travelling(pairs: Tensor) -> float:
    """Return the number of rows in ``pairs`` that leave their rank."""
    return float(pairs.sum() - pairs.diagonal().sum())
