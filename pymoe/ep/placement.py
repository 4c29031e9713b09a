"""Expert placement: contiguous shards, or a placement by measured load with replicas of hot experts.

These are pure functions of counts, so every rank that has the counts computes the same plan without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pymoe._common import checks
from pymoe.ep.sharding import shard_ranges


class Placement(NamedTuple):
    """The ranks that hold each expert."""

    hosts: tuple[tuple[int, ...], ...]
    """(E,): the distinct ranks of an expert, at least one; the first is its owner, the others hold replicas."""
    ranks: int
    """R, the number of ranks."""

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Return (R,): the experts that each rank holds, in ascending order."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for expert, hosts in enumerate(self.hosts):
            for rank in hosts:
                held[rank].append(expert)
        return tuple(map(tuple, held))

    @property
    def owner(self) -> tuple[int, ...]:
        """Return (E,): the owner of each expert, its first host."""
        return tuple(hosts[0] for hosts in self.hosts)


class Shares(NamedTuple):
    """The division of the rows of each expert among its hosts."""

    hosts: tuple[tuple[int, ...], ...]
    """(E,): the ranks that compute rows of an expert, its owner first."""
    rows: Tensor
    """(R, E, P) int64, P being the largest number of hosts: the rows of a source rank for an expert that its p-th host
    computes. A source's rows go to the hosts in this order: its first ``rows[s, e, 0]`` to ``hosts[e][0]``."""

    def destinations(self) -> Tensor:
        """Return (R, R) int64: the number of rows from each source (first dimension) to each rank, itself included."""
        ranks, _, most = self.rows.shape
        sent = torch.zeros(ranks, ranks, dtype=torch.int64)
        for place in range(most):
            host = torch.tensor([hosts[place] if place < len(hosts) else 0 for hosts in self.hosts])
            sent.index_add_(1, host, self.rows[:, :, place])  # 0 rows if an expert has no such host
        return sent


def contiguous(experts: int, ranks: int) -> Placement:
    """Return the placement in contiguous shards, as :func:`torch.chunk` and DTensor's ``Shard(0)`` divide experts.

    Rank r holds up to ceil(E / R) experts, starting with expert r * ceil(E / R): 6 experts on 4 ranks give 2, 2, 2
    and 0.

    Args:
        experts: E, at least 1.
        ranks: R, at least 1.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is below 1.
    """
    _check_size("contiguous", "experts", experts)
    _check_size("contiguous", "ranks", ranks)
    owners = (rank for rank, held in enumerate(shard_ranges(experts, ranks)) for _ in held)
    return Placement(tuple((rank,) for rank in owners), ranks)


def place(load: Tensor, ranks: int, *, replicas: int = 0) -> Placement:
    """Return a placement that balances ``load`` over the ranks.

    This is the global policy of EPLB (https://github.com/deepseek-ai/EPLB). ``replicas`` * R times, the expert with the
    most rows per copy gets one more copy; then the copies, heaviest first, each go to the emptiest rank with free room.
    Unlike in EPLB, no rank holds two copies of an expert, because the second would not relieve the rank: a copy for
    which no other rank has room is left out. A rank holds at most ceil(E / R) + ``replicas`` copies; without replicas,
    it holds as many experts as under :func:`contiguous`, as :func:`pymoe.ep.redistribute` requires.

    The fullest rank never has more of ``load`` than under :func:`contiguous`. If the contiguous placement is equally
    good (or better), it is returned, so that nothing moves. Ties go to the lower expert and the lower rank.

    Args:
        load: (E,) int32 or int64 on the CPU, the number of rows of each expert in the past, none negative.
        ranks: R, at least 1.
        replicas: the number of copies that a rank can hold beyond its experts; with 0, experts are only moved.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument has the wrong shape, device or range.
    """
    rows = _checked_load("place", load)
    _check_size("place", "ranks", ranks)
    checks.integer("place", "replicas", replicas, 0, None, "at least 0")
    experts = len(rows)
    copies = _copies(rows, ranks, replicas * ranks)
    plain = contiguous(experts, ranks)
    free_places = [-(-experts // ranks) + replicas] * ranks if replicas else list(map(len, plain.held))
    filled = [0.0] * ranks
    hosts: list[list[int]] = [[] for _ in rows]
    pieces = sorted(
        (-rows[expert] / copies[expert], expert) for expert in range(experts) for _ in range(copies[expert])
    )
    for weight, expert in pieces:
        free = [rank for rank in range(ranks) if free_places[rank] and rank not in hosts[expert]]
        if free:
            rank = min(free, key=lambda rank: (filled[rank], rank))
            hosts[expert].append(rank)
            filled[rank] -= weight
            free_places[rank] -= 1
    placed = Placement(tuple(tuple(sorted(found)) for found in hosts), ranks)
    return placed if max(rows_of_ranks(load, placed)) < max(rows_of_ranks(load, plain)) else plain


def rows_of_ranks(load: Tensor, placement: Placement) -> list[int]:
    """Return the number of rows that each rank computes if an expert's rows are divided evenly among its hosts.

    Of n rows on P hosts the first n mod P hosts take ceil(n / P), the others floor(n / P).

    Args:
        load: (E,) int32 or int64 on the CPU, rows of each expert, none negative.
        placement: a placement of E experts.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument has the wrong shape, device or range.
    """
    rows = _checked_load("rows_of_ranks", load)
    _check_experts("rows_of_ranks", len(rows), placement)
    filled = [0] * placement.ranks
    for hosts, quotas in zip(placement.hosts, _even_quotas(rows, placement), strict=True):
        for rank, quota in zip(hosts, quotas, strict=True):
            filled[rank] += quota
    return filled


def share_evenly(counts: Tensor, placement: Placement) -> Shares:
    """Return the shares in which the rows of each expert are divided evenly among its hosts.

    Args:
        counts: (R, E) int32 or int64 on the CPU, rows of each source rank for each expert, none negative.
        placement: a placement of E experts on R ranks.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument has the wrong shape, device or range.
    """
    check_counts("share_evenly", counts)
    _check_experts("share_evenly", counts.shape[1], placement)
    checks.size("share_evenly", "counts", counts, 0, placement.ranks, "the ranks of placement")
    return share_rows(counts, placement.hosts, _even_quotas(counts.sum(0).tolist(), placement))


def share_rows(counts: Tensor, hosts: Sequence[Sequence[int]], quotas: Sequence[Sequence[int]]) -> Shares:
    """Return shares in which every host gets its quota of rows, with as few rows sent as possible.

    A source that is a host of an expert keeps its own rows, up to its quota. The rows of the other sources, in the
    order of sources, then fill the remaining quotas, in the order of hosts.

    Args:
        counts: (R, E) int64 on the CPU, rows of each source rank for each expert.
        hosts: (E,), the ranks that compute each expert.
        quotas: for every expert, the number of rows of each host; their sum is the number of rows of the expert.
    """
    rows = torch.zeros(*counts.shape, max(map(len, hosts)), dtype=torch.int64)
    rows[:, :, 0] = counts
    for expert, (its_hosts, its_quotas) in enumerate(zip(hosts, quotas, strict=True)):
        if len(its_hosts) > 1:
            given = _fill(counts[:, expert].tolist(), its_hosts, its_quotas, rows.shape[2])
            rows[:, expert] = torch.tensor(given)
    return Shares(tuple(map(tuple, hosts)), rows)


def divide_rows(
    counts: Sequence[Sequence[int]], hosts: Sequence[Sequence[int]], quotas: Sequence[Sequence[int]]
) -> list[list[list[int]]]:
    """Do what :func:`share_rows` does, with nested lists: return ``Shares.rows`` (R, E, P) for ``counts`` (R, E)."""
    most = max(map(len, hosts))
    rows = [[[number, *[0] * (most - 1)] for number in of_source] for of_source in counts]
    for expert, (its_hosts, its_quotas) in enumerate(zip(hosts, quotas, strict=True)):
        if len(its_hosts) > 1:
            given = _fill([of_source[expert] for of_source in counts], its_hosts, its_quotas, most)
            for of_source, own in zip(rows, given, strict=True):
                of_source[expert] = own
    return rows


def check_counts(name: str, counts: Tensor) -> None:
    """Raise unless ``counts`` are the gathered loads of ranks: (R, E) integers on the CPU, none negative."""
    checks.dtype(name, "counts", counts, torch.int32, torch.int64)
    checks.rank(name, "counts", counts, "(R, E)")
    if counts.numel() == 0:
        raise ValueError(f"{name}: counts must have R >= 1 and E >= 1, got {tuple(counts.shape)}")
    _check_values(name, "counts", counts)


def _copies(rows: list[int], ranks: int, extra: int) -> list[int]:
    """Return the number of copies of each expert.

    From one copy each, up to ``extra`` copies are added, one at a time, to the expert with the most rows per copy. No
    expert gets more than ``ranks`` copies.
    """
    copies = [1] * len(rows)
    for _ in range(extra):
        split = [expert for expert, number in enumerate(copies) if number < ranks]  # at most one copy on each rank
        if not split:
            break
        copies[max(split, key=lambda expert: (rows[expert] / copies[expert], -expert))] += 1
    return copies


def _even_quotas(rows: list[int], placement: Placement) -> list[list[int]]:
    quotas = []
    for number, hosts in zip(rows, placement.hosts, strict=True):
        each, more = divmod(number, len(hosts))
        quotas.append([each + (place < more) for place in range(len(hosts))])
    return quotas


def _fill(sources: list[int], hosts: Sequence[int], quotas: Sequence[int], width: int) -> list[list[int]]:
    """Return, for every source, the number of its rows for each host, as a list padded with zeros to ``width``."""
    left, open_quotas = list(sources), list(quotas)
    given = [[0] * width for _ in sources]

    def give(source: int, place: int) -> None:
        rows = min(left[source], open_quotas[place])
        given[source][place] += rows
        left[source] -= rows
        open_quotas[place] -= rows

    for place, rank in enumerate(hosts):
        give(rank, place)
    place = 0  # index of the host whose quota is filled next; the hosts before it have no open quota
    for source in range(len(sources)):
        while left[source]:
            give(source, place)
            place += not open_quotas[place]
    return given


def _checked_load(name: str, load: Tensor) -> list[int]:
    checks.dtype(name, "load", load, torch.int32, torch.int64)
    checks.rank(name, "load", load, "(E,)")
    if load.numel() == 0:
        raise ValueError(f"{name}: load must have E >= 1, got {tuple(load.shape)}")
    _check_values(name, "load", load)
    rows: list[int] = load.tolist()
    return rows


def _check_values(name: str, argument: str, value: Tensor) -> None:
    if value.device.type != "cpu":
        raise ValueError(f"{name}: {argument} must be on the CPU, got {value.device}")
    if int(value.min()) < 0:
        raise ValueError(f"{name}: {argument} must not be negative, got {int(value.min())}")


def _check_size(name: str, argument: str, value: int) -> None:
    checks.integer(name, argument, value, 1, None, "at least 1")


def _check_experts(name: str, experts: int, placement: Placement) -> None:
    if len(placement.hosts) != experts:
        raise ValueError(f"{name}: placement must hold {experts} experts, got {len(placement.hosts)}")
