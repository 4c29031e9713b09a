"""Clones of hot experts for one step, planned from that step's own counts.

The shadow experts of FasterMoE (He et al., PPoPP 2022) as a plan that every rank makes for itself: the counts were
all-gathered, and the plan is a pure function of them, integers only. The weights of a clone travel once, forward, and
its gradient comes back once, so a clone pays off from a number of rows that depends on the machine: ``worth``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pymoe.ep.placement import Shares, check_counts, contiguous, share_rows
from pymoe.reference import checks


def plan_clones(counts: Tensor, clones: int, *, worth: int = 1, owner: Sequence[int] | None = None) -> Shares:
    """Return who computes which rows when ranks with few rows take clones of the experts of ranks with many.

    Greedy: while the fullest rank can give at least ``worth`` rows of one expert to the emptiest rank that may take
    another clone, it gives as many as bring neither of them across the mean, of the expert of which that is the most.
    So the fullest rank never gets fuller. Ties go to the lower rank and the lower expert.

    Args:
        counts: (R, E) int32 or int64 on the CPU, rows of each source rank for each expert, none negative.
        clones: how many clones a rank may take, at least 0.
        worth: the fewest rows for which an expert is cloned, at least 1.
        owner: (E,), the rank that holds each expert; None: the shards of :func:`pymoe.ep.placement.contiguous`.

    Returns:
        The shares; ``hosts`` has the owner of each expert first, then the ranks of its clones, ascending.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument has the wrong shape, device or range.
    """
    check_counts("plan_clones", counts)
    checks.integer("plan_clones", "clones", clones, 0, None, "at least 0")
    checks.integer("plan_clones", "worth", worth, 1, None, "at least 1")
    ranks, experts = counts.shape
    owners = contiguous(experts, ranks).owner if owner is None else tuple(owner)
    if len(owners) != experts or not all(0 <= rank < ranks for rank in owners):
        raise ValueError(f"plan_clones: owner must have {experts} ranks in 0..{ranks - 1}, got {list(owners)}")
    return share_rows(counts.long(), *balance(counts.sum(0).tolist(), owners, ranks, clones, worth))


def balance(
    rows: Sequence[int], owners: Sequence[int], ranks: int, clones: int, worth: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the hosts of each expert, and how many of its rows each of them computes, as :func:`plan_clones` does.

    Args:
        rows: (E,), of each expert.
        owners: (E,), the rank that holds each.
        ranks: R.
        clones: how many a rank may take.
        worth: the fewest rows for which an expert is cloned.
    """
    held = _balanced(rows, owners, ranks, clones, worth)
    hosts = [sorted(at, key=lambda rank: (rank != owners[expert], rank)) for expert, at in enumerate(held)]
    return hosts, [[at[rank] for rank in its_hosts] for at, its_hosts in zip(held, hosts, strict=True)]


def _balanced(rows: Sequence[int], owners: Sequence[int], ranks: int, clones: int, worth: int) -> list[dict[int, int]]:
    """For every expert the rows of it that each of its hosts computes."""
    held = [{rank: number} for rank, number in zip(owners, rows, strict=True)]
    filled = [0] * ranks
    for rank, number in zip(owners, rows, strict=True):
        filled[rank] += number
    room = [clones] * ranks
    mean = -(-sum(rows) // ranks)
    while True:
        fullest = max(range(ranks), key=lambda rank: (filled[rank], -rank))
        free = [rank for rank in range(ranks) if room[rank] and rank != fullest]
        if not free:
            return held
        to = min(free, key=lambda rank: (filled[rank], rank))
        most = min(filled[fullest] - mean, mean - filled[to])
        candidates = [(min(at[fullest], most), -e) for e, at in enumerate(held) if fullest in at and to not in at]
        moved, expert = max(candidates, default=(0, 0))
        if moved < worth:
            return held
        held[-expert][fullest] -= moved
        held[-expert][to] = moved
        filled[fullest] -= moved
        filled[to] += moved
        room[to] -= 1
