"""The best way to cut a row of costs into consecutive blocks."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

__all__ = ["balance_cost", "least_maximum"]


def balance_cost(costs: Sequence[float], partitions: int) -> list[int]:
    """Cut a row of costs into consecutive blocks, so that the greatest sum of a block is as small as can be.

    The slowest stage sets the pace of a pipeline: that is what is minimised, exactly. Among the ways to reach it, the
    one with the least sum of squares is taken (the most even one); among those again, the one with the most even
    numbers of layers. No block is empty. Sums are exact, also of floats.

    Args:
        costs: of every layer, in any unit; not negative.
        partitions: the number of blocks.

    Returns:
        The number of layers of every block.

    Raises:
        TypeError: ``partitions`` is no integer.
        ValueError: there are more blocks than layers, less than one, or a cost is negative or not finite.
    """
    check_partitions(partitions, len(costs))
    if any(not math.isfinite(cost) or cost < 0 for cost in costs):
        raise ValueError(f"balance_cost: costs must be finite and not negative, got {list(costs)}")
    sums = [0, *accumulate(_as_integers(costs))]
    return _most_even(sums, partitions, _least_maximum(sums, partitions))


def least_maximum(costs: Sequence[float], partitions: int) -> float:
    """The greatest sum of a block in the best way to cut ``costs``, as :func:`balance_cost` does."""
    check_partitions(partitions, len(costs))
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*[cost.denominator for cost in exact])
    return _least_maximum([0, *accumulate(int(cost * unit) for cost in exact)], partitions) / unit


def check_partitions(partitions: int, layers: int) -> None:
    """Raise what :func:`balance_cost` says about ``partitions``."""
    if not isinstance(partitions, int) or isinstance(partitions, bool):
        raise TypeError(f"partitions must be an integer, got {partitions!r}")
    if not 1 <= partitions <= layers:
        raise ValueError(f"partitions must be from 1 to the number of layers, {layers}, got {partitions}")


def _as_integers(costs: Sequence[float]) -> list[int]:
    """In a unit that divides all of them."""
    exact = [Fraction(cost if isinstance(cost, (int, float, Fraction)) else float(cost)) for cost in costs]
    unit = math.lcm(*[cost.denominator for cost in exact])
    return [int(cost * unit) for cost in exact]


def _least_maximum(sums: Sequence[int], partitions: int) -> int:
    """The greatest block of the best way, given sums[i] of the first i costs. Takes n p log n steps."""
    layers = len(sums) - 1
    best = list(sums)  # best[i]: for the first i costs in as many blocks as the loop has reached
    for blocks in range(2, partitions + 1):
        # Where the last block begins at j, best[j] grows with j and the last block shrinks: they cross at the optimum.
        further = list(best)
        for end in range(blocks, layers + 1):
            starts = range(blocks - 1, end)
            cross = bisect.bisect_left(starts, True, key=lambda j: best[j] >= sums[end] - sums[j])
            near = starts[max(cross - 1, 0) : cross + 1]
            further[end] = min(max(best[j], sums[end] - sums[j]) for j in near)
        best = further
    return best[layers]


def _most_even(sums: Sequence[int], partitions: int, limit: int) -> list[int]:
    """The sizes of blocks, none above ``limit``, whose sums of squares, of costs and then of layers, are least."""
    layers = len(sums) - 1
    reached: list[dict[int, tuple[int, int, int]]] = [{0: (0, 0, 0)}]  # by end: squares, squares of sizes, start
    for blocks in range(1, partitions + 1):
        before, now = reached[-1], {}
        for end in range(blocks, layers - (partitions - blocks) + 1):
            found = None
            for start in range(end - 1, blocks - 2, -1):
                cost = sums[end] - sums[start]
                if cost > limit:
                    break
                if start in before:
                    squares, sizes, _ = before[start]
                    way = squares + cost * cost, sizes + (end - start) ** 2, start
                    found = way if found is None else min(found, way)
            if found is not None:
                now[end] = found
        reached.append(now)
    ends = [layers]
    for ways in reached[:0:-1]:
        ends.append(ways[ends[-1]][2])
    return [end - start for start, end in pairwise(reversed(ends))]
