"""balance_cost: finds the best way to cut costs into blocks, compared with all ways."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pymoe.pipe.balance import balance_cost


def sums(costs, sizes):
    ends = np.cumsum(sizes)
    return [sum(map(Fraction, costs[end - size : end])) for end, size in zip(ends, sizes, strict=True)]


def merit(costs, sizes):
    """Return a key by which better solutions are smaller."""
    blocks = sums(costs, sizes)
    return max(blocks), sum(block**2 for block in blocks), sum(size**2 for size in sizes)


def all_ways(layers, partitions):
    for cuts in combinations(range(1, layers), partitions - 1):
        yield [end - start for start, end in pairwise((0, *cuts, layers))]


COSTS = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=9),
    st.lists(st.sampled_from([0, 1e-300, 0.1, 0.3, 1e16, 1e16 + 2]), min_size=1, max_size=9),
)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(costs=COSTS, data=st.data())
def test_no_way_is_better(costs, data):
    partitions = data.draw(st.integers(1, len(costs)))
    found = balance_cost(costs, partitions)
    assert len(found) == partitions
    assert sum(found) == len(costs)
    assert min(found) >= 1
    assert merit(costs, found) == min(merit(costs, way) for way in all_ways(len(costs), partitions))


@pytest.mark.parametrize(
    ("costs", "partitions", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 5], 2, [3, 1]),
        ([5, 1, 1, 1], 2, [1, 3]),
        ([9, 1, 1, 1, 1], 3, [1, 2, 2]),  # the first block is fixed; the others are even
        ([0, 0, 0, 0, 0, 0], 3, [2, 2, 2]),
        ([1, 2, 3], 3, [1, 1, 1]),
        ([1, 2, 3], 1, [3]),
        ([0.1, 0.2, 0.3], 2, [2, 1]),  # 0.1 + 0.2 exceeds 0.3 only by rounding, and must not move the 0.2
    ],
)
def test_known_ways(costs, partitions, expected):
    assert balance_cost(costs, partitions) == expected


def test_a_long_row_is_cut():
    costs = [(7 * i) % 13 + 1 for i in range(400)]
    found = balance_cost(costs, 16)
    assert max(sums(costs, found)) <= sum(costs) / 16 + max(costs)


def test_numbers_of_numpy_are_numbers():
    assert balance_cost(np.array([1.0, 1.0, 2.0], dtype=np.float32), 2) == [2, 1]
    assert balance_cost(list(np.array([1, 1, 2])), 2) == [2, 1]


@pytest.mark.parametrize("partitions", [0, -1, 4])
def test_a_number_of_blocks_that_cannot_be_is_refused(partitions):
    with pytest.raises(ValueError, match=f"from 1 to the number of layers, 3, got {partitions}"):
        balance_cost([1, 2, 3], partitions)


@pytest.mark.parametrize("partitions", [1.0, "2", True, None])
def test_a_number_of_blocks_that_is_none_is_refused(partitions):
    with pytest.raises(TypeError, match="integer"):
        balance_cost([1, 2, 3], partitions)


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_refused(cost):
    with pytest.raises(ValueError, match="finite and not negative"):
        balance_cost([1, cost], 2)
