"""Tests that placement by load places every expert within the limits, is never worse than contiguous shards, and is
repeatable.
"""

import pytest
import torch
from expert_counts import counts, examples
from hypothesis import given
from hypothesis import strategies as st

from pymoe.ep.placement import Placement, Shares, contiguous, place, rows_of_ranks, share_evenly, share_rows

MANY = examples(150)
RANKS = st.integers(1, 9)
LOADS = st.lists(st.integers(0, 50) | st.integers(0, 5000), min_size=1, max_size=24)


@pytest.mark.parametrize(("experts", "ranks"), [(6, 4), (8, 2), (3, 4), (1, 1), (7, 3), (64, 5)])
def test_contiguous_shards_are_those_of_torch_chunk(experts, ranks):
    expected = [tuple(part.tolist()) for part in torch.arange(experts).chunk(ranks)]
    assert contiguous(experts, ranks).held == (*expected, *[()] * (ranks - len(expected)))


def test_a_hot_expert_gets_the_replicas():
    placed = place(torch.tensor([90, 10, 10, 10]), 2, replicas=1)
    assert placed == Placement(hosts=((0, 1), (0, 1), (0,), (1,)), ranks=2)
    assert rows_of_ranks(torch.tensor([90, 10, 10, 10]), placed) == [60, 60]


def test_the_loads_of_the_example_of_eplb_become_even():
    """The loads are those of the first layer in the example of EPLB's README: 16 places for 12 experts."""
    load = torch.tensor([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86])
    placed = place(load, 4, replicas=1)
    assert sum(map(len, placed.held)) == 16
    assert max(rows_of_ranks(load, placed)) <= 1.05 * float(load.sum()) / 4


@MANY
@given(LOADS, RANKS, st.integers(0, 3))
def test_every_expert_is_held_within_the_room(load, ranks, replicas):
    placed = place(torch.tensor(load), ranks, replicas=replicas)
    assert len(placed.hosts) == len(load)
    assert all(hosts and len(set(hosts)) == len(hosts) and set(hosts) <= set(range(ranks)) for hosts in placed.hosts)
    assert max(map(len, placed.held)) <= -(-len(load) // ranks) + replicas


@MANY
@given(LOADS, RANKS, st.integers(0, 3))
def test_placement_never_makes_the_fullest_rank_fuller(load, ranks, replicas):
    rows = torch.tensor(load)
    placed = place(rows, ranks, replicas=replicas)
    filled = rows_of_ranks(rows, placed)
    assert sum(filled) == sum(load)
    assert max(filled) <= max(rows_of_ranks(rows, contiguous(len(load), ranks)))


@MANY
@given(LOADS, RANKS)
def test_without_replicas_every_rank_has_as_many_experts_as_before(load, ranks):
    placed = place(torch.tensor(load), ranks)
    assert [len(held) for held in placed.held] == [len(held) for held in contiguous(len(load), ranks).held]


def test_nothing_moves_where_nothing_is_gained():
    even = torch.full((16,), 7)
    assert place(even, 4, replicas=2) == contiguous(16, 4)


@MANY
@given(counts())
def test_shares_send_every_row_once(rows):
    placed = place(rows.sum(0), rows.shape[0], replicas=1)
    shares = share_evenly(rows, placed)
    assert shares.rows.sum(2).equal(rows)
    assert shares.rows.min() >= 0
    assert shares.destinations().sum(0).tolist() == rows_of_ranks(rows.sum(0), placed)


@MANY
@given(counts())
def test_destinations_are_the_sums_of_the_shares(rows):
    shares = share_evenly(rows, place(rows.sum(0), rows.shape[0], replicas=2))
    expected = torch.zeros(rows.shape[0], rows.shape[0], dtype=torch.int64)
    for source in range(rows.shape[0]):
        for expert, hosts in enumerate(shares.hosts):
            for number, rank in enumerate(hosts):
                expected[source, rank] += shares.rows[source, expert, number]
    assert shares.destinations().equal(expected)


def test_a_host_keeps_its_own_rows_before_others_use_its_quota():
    shares = share_rows(torch.tensor([[4], [6], [0]]), [(2, 0)], [(5, 5)])
    assert shares.rows[:, 0, :].tolist() == [[0, 4], [5, 1], [0, 0]]
    assert isinstance(shares, Shares)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: contiguous(0, 2), ValueError, "contiguous: experts must be at least 1, got 0"),
        (lambda: place(torch.ones(3), 2), TypeError, "place: load must have dtype int32 or int64, got torch.float32"),
        (lambda: place(torch.ones(3, 1).int(), 2), ValueError, r"place: load must have shape \(E,\), got \(3, 1\)"),
        (lambda: place(torch.tensor([], dtype=torch.int64), 2), ValueError, "place: load must have E >= 1"),
        (lambda: place(torch.tensor([3, -1]), 2), ValueError, "place: load must not be negative, got -1"),
        (lambda: place(torch.tensor([3, 1]), 2, replicas=-1), ValueError, "place: replicas must be at least 0, got -1"),
        (
            lambda: rows_of_ranks(torch.tensor([1, 2]), contiguous(3, 2)),
            ValueError,
            "rows_of_ranks: placement must hold 2 experts, got 3",
        ),
        (
            lambda: share_evenly(torch.ones(3, 4).int(), contiguous(4, 2)),
            ValueError,
            r"share_evenly: counts must have size 2 \(the ranks of placement\) in dimension 0, got \(3, 4\)",
        ),
    ],
)
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()
