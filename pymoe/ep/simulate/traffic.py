"""Rows on the wire: expected for a uniform router, and counted from choices.

A row that stays on its rank does not travel. With deduplication, a token that chose several experts of one rank travels
there once, and their weighted sum comes back once.
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

from pymoe.ep.placement import Shares, contiguous
from pymoe.ep.simulate.block import Block

EXCHANGES = 4
"""Number of exchanges of rows per layer and step: dispatch and combine, forward and backward."""


def expected_rows(block: Block, ranks: int, deduplicate: bool) -> float:
    """Return the rows that a token of a uniform router sends to other ranks, the mean over the token's possible ranks.

    Each choice is its own row: K (1 - 1 / R), whatever the shards, since the shares of the ranks sum to 1. One row per
    rank: the sum over the other ranks of 1 - C(E - n, K) / C(E, K), where n is the number of experts of a
    rank. This is the probability that one of them is among the K chosen, since all C(E, K) sets are equally likely.

    Args:
        block: E and K; its groups are ignored.
        ranks: R.
        deduplicate: whether a token travels once to a rank.
    """
    if not deduplicate:
        return block.choices * (1 - 1 / ranks)
    held = map(len, contiguous(block.experts, ranks).held)
    everything = comb(block.experts, block.choices)
    reached = [1 - comb(block.experts - number, block.choices) / everything for number in held]
    return sum(reached) * (1 - 1 / ranks)


def expected_imbalance(block: Block, ranks: int, tokens: float) -> float:
    """Return the approximate ratio of the fullest rank to the mean under a uniform router, by chance alone.

    1 + sqrt(2 ln R) sqrt((R - 1) (1 - K / E) / (T R K)): R nearly normal loads, whose relative deviation is the second
    root; the largest of R such loads is about the first root away. For E that R divides and T tokens per rank.
    """
    if ranks == 1:
        return 1.0
    deviation = (ranks - 1) * (1 - block.choices / block.experts) / (tokens * ranks * block.choices)
    return float(1 + (2 * torch.log(torch.tensor(float(ranks))) * deviation) ** 0.5)


def counts_of(choices: Tensor, source: Tensor, ranks: int, experts: int) -> Tensor:
    """Return (R, E) int64: the rows of each source rank for each expert, as an all-gather of the loads returns them.

    Args:
        choices: (N, K) int64, the experts of each token.
        source: (N,) int64, the rank of each token.
        ranks: R.
        experts: E.
    """
    cell = source[:, None] * experts + choices
    return torch.bincount(cell.flatten(), minlength=ranks * experts).view(ranks, experts)


def destinations_of(choices: Tensor, source: Tensor, shares: Shares) -> Tensor:
    """Return (N, K) int64: the rank to which each choice's row goes.

    Args:
        choices: (N, K) int64, the experts of each token.
        source: (N,) int64, the rank of each token.
        shares: the shares of the rows of ``choices``; a source's rows for an expert fill its hosts in their order.
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
    number[order] = torch.arange(len(cell)) - first[cell[order]]  # among the rows of its source and expert
    ends = shares.rows.cumsum(2).view(-1, most)
    place = (number[:, None] >= ends[cell]).sum(1)
    return hosts[choices.flatten(), place].view_as(choices)


def pairs_of(
    destinations: Tensor, source: Tensor, ranks: int, deduplicate: bool, chosen: Tensor | None = None
) -> Tensor:
    """Return (R, R) int64: the rows that each source rank (first dimension) sends to each rank, itself included.

    Args:
        destinations: (N, K) int64, the rank of each choice's row.
        source: (N,) int64, the rank of each token.
        ranks: R.
        deduplicate: count a token once for each rank that it goes to.
        chosen: (N, K) bool, the rows that are counted; None: all.
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
    """Return the rows of ``pairs`` that leave their rank."""
    return float(pairs.sum() - pairs.diagonal().sum())
