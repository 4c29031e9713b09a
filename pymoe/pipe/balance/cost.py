"""The best way to cut a row of costs into consecutive blocks."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from itertools import accumulate


def balance_cost(costs: Sequence[float], partitions: int) -> list[int]:
    """Cut a row of costs into consecutive blocks, so that the greatest sum of a block is as small as can be.

    The slowest stage sets the pace of a pipeline: that is what is minimised, exactly. Of several ways to reach it the
    one with the least sum of squared costs is taken (the most even one); of several of these the one with the most even
    numbers of layers. No block is empty. Sums are exact, also of floats.

    Args:
        costs: of every layer, in any unit; not negative.
        partitions: the number of blocks.

    Returns:
        The number of layers of every block.

    Raises:
        TypeError: ``partitions`` is not an integer.
        ValueError: there are more blocks than layers, less than one, or a cost is negative or not finite.
    """
    check_partitions(partitions, len(costs))
    if any(not math.isfinite(cost) or cost < 0 for cost in costs):
        raise ValueError(f"balance_cost: costs must be finite and not negative, got {list(costs)}")
    sums, _ = _exact_sums(costs)
    limit, layers = _least_maximum(sums, partitions), len(costs)
    Way = tuple[int, int, tuple[int, ...]]
    best: dict[int, Way] = {0: (0, 0, ())}  # by layers: least squares of costs, and of sizes; the sizes of blocks
    for blocks_left in reversed(range(partitions)):
        further: dict[int, Way] = {}
        for start, (squares, size_squares, sizes) in best.items():
            for end in range(start + 1, layers - blocks_left + 1):
                cost, size = sums[end] - sums[start], end - start
                if cost > limit:
                    break
                way = squares + cost * cost, size_squares + size * size, (*sizes, size)
                further[end] = min(way, further.get(end, way))
        best = further
    return list(best[layers][2])


def least_maximum(costs: Sequence[float], partitions: int) -> float:
    """Return the greatest sum of a block in the best way to cut ``costs``, as :func:`balance_cost` does."""
    check_partitions(partitions, len(costs))
    sums, unit = _exact_sums(costs)
    return _least_maximum(sums, partitions) / unit


def check_partitions(partitions: int, layers: int) -> None:
    """Raise TypeError or ValueError unless ``partitions`` is from 1 to ``layers``."""
    if not isinstance(partitions, int) or isinstance(partitions, bool):
        raise TypeError(f"balance: partitions must be an integer, got {partitions!r}")
    if not 1 <= partitions <= layers:
        raise ValueError(f"balance: partitions must be from 1 to the number of layers, {layers}, got {partitions}")


def _exact_sums(costs: Sequence[float]) -> tuple[list[int], int]:
    """Return the sums of the first 0, 1, ... costs in a unit that makes them integers, and how many of it are 1."""
    ratios = [(cost if isinstance(cost, (int, float)) else float(cost)).as_integer_ratio() for cost in costs]
    unit = math.lcm(*[denominator for _, denominator in ratios])
    return [0, *accumulate(numerator * (unit // denominator) for numerator, denominator in ratios)], unit


def _least_maximum(sums: Sequence[int], partitions: int) -> int:
    """Return the least limit at which blocks that take all they can reach the end, found by bisection."""
    low, high = 0, sums[-1]
    while low < high:
        limit, end = (low + high) // 2, 0
        for _ in range(partitions):
            end = bisect.bisect_right(sums, sums[end] + limit) - 1
        low, high = (low, limit) if end == len(sums) - 1 else (limit + 1, high)
    return low
