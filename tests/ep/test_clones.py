"""Clones planned from a step's counts: never worse, within their number, every row computed once."""

import random
import sys
from itertools import pairwise

import pytest
import torch
from expert_counts import counts, examples, random_choices
from hypothesis import given
from hypothesis import strategies as st

from pymoe.ep.clones import plan_clones
from pymoe.ep.placement import contiguous, divide_rows, share_evenly, share_rows

MANY = examples(200)


def filled(shares):
    """Return the rows that each rank computes."""
    return shares.destinations().sum(0).tolist()


def test_a_hot_expert_is_cloned_to_the_emptiest_rank():
    """Rank 0 has 100 rows, 90 of them of expert 0; rank 1 has 20. 40 rows move to rank 1, rows of its own tokens
    first.
    """
    shares = plan_clones(torch.tensor([[40, 5, 5, 5], [50, 5, 5, 5]]), 1)
    assert shares.hosts == ((0, 1), (0,), (1,), (1,))
    assert shares.rows[:, 0].tolist() == [[40, 0], [10, 40]]
    assert filled(shares) == [60, 60]


def test_without_clones_everything_stays():
    rows = torch.tensor([[40, 5, 5, 5], [50, 5, 5, 5]])
    assert filled(plan_clones(rows, 0)) == filled(share_evenly(rows, contiguous(4, 2))) == [100, 20]


def test_an_expert_is_not_cloned_for_fewer_rows_than_it_is_worth():
    rows = torch.tensor([[40, 5, 5, 5], [50, 5, 5, 5]])
    assert filled(plan_clones(rows, 2, min_rows_to_clone=40)) == [60, 60]
    assert filled(plan_clones(rows, 2, min_rows_to_clone=41)) == [100, 20]


def test_owners_may_be_others_than_contiguous_shards():
    shares = plan_clones(torch.tensor([[9, 0, 9, 0], [9, 0, 9, 0]]), 1, owner=[1, 0, 1, 0])
    assert shares.hosts[0] == (1, 0)
    assert filled(shares) == [18, 18]


def hosts_and_quotas(rows, seed):
    """Return random hosts of every expert, and quotas of theirs that sum to its rows; some are 0."""
    drawn = random.Random(seed)
    hosts, quotas = [], []
    for total in rows.sum(0).tolist():
        hosts.append(drawn.sample(range(len(rows)), drawn.randint(1, len(rows))))
        cuts = [0, *sorted(drawn.choices(range(total + 1), k=len(hosts[-1]) - 1)), total]
        quotas.append([high - low for low, high in pairwise(cuts)])
    return hosts, quotas


@MANY
@given(counts(), st.integers(0, 999))
def test_every_row_has_one_host_and_every_host_its_quota(rows, seed):
    hosts, quotas = hosts_and_quotas(rows, seed)
    found = share_rows(rows, hosts, quotas).rows
    assert found.tolist() == divide_rows(rows.tolist(), hosts, quotas)
    assert torch.equal(found.sum(2), rows.long())
    for expert, its_quotas in enumerate(quotas):
        given_rows = found[:, expert].sum(0).tolist()
        assert given_rows == its_quotas + [0] * (found.shape[2] - len(its_quotas))
        for rank, quota in zip(hosts[expert], its_quotas, strict=True):
            place = hosts[expert].index(rank)
            assert found[rank, expert, place] >= min(int(rows[rank, expert]), quota)  # it keeps its own rows


def test_work_grows_with_ranks_and_not_with_their_square():
    """The simulator tried every host for every source: for 1,000 ranks it printed nothing for minutes."""
    ranks, calls = 200, 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    rows = torch.full((ranks, 1), ranks)
    sys.setprofile(count)
    try:
        share_rows(rows, [range(ranks)], [[ranks] * ranks])
        share_rows(rows, [range(ranks)], [[0] * (ranks - 1) + [ranks * ranks]])
    finally:
        sys.setprofile(None)
    assert calls < 10 * ranks


@MANY
@given(counts(), st.integers(0, 3), st.integers(1, 30))
def test_clones_never_make_the_fullest_rank_fuller(rows, clones, min_rows_to_clone):
    before = filled(share_evenly(rows, contiguous(rows.shape[1], rows.shape[0])))
    after = filled(plan_clones(rows, clones, min_rows_to_clone=min_rows_to_clone))
    assert sum(after) == sum(before)
    assert max(after) <= max(before)


@MANY
@given(counts(), st.integers(0, 2))
def test_more_clones_never_make_the_fullest_rank_fuller(rows, clones):
    assert max(filled(plan_clones(rows, clones + 1))) <= max(filled(plan_clones(rows, clones)))


@MANY
@given(counts(), st.integers(0, 3))
def test_every_row_is_computed_once_and_no_rank_takes_too_many_clones(rows, clones):
    shares = plan_clones(rows, clones)
    assert shares.rows.sum(2).equal(rows)
    assert shares.rows.min() >= 0
    taken = [rank for _, *cloned in shares.hosts for rank in cloned]
    assert max(map(taken.count, range(rows.shape[0]))) <= clones
    assert all(len(set(hosts)) == len(hosts) for hosts in shares.hosts)


def test_one_clone_a_rank_brings_a_skewed_load_to_a_tenth_of_the_mean():
    """E 128, K 8, 32 ranks: without clones the fullest rank has more than twice the mean."""
    for seed in range(3):
        choices = random_choices(32 * 256, 128, 8, seed, skew=1.0)
        source = torch.arange(len(choices)) // 256
        rows = torch.bincount((source[:, None] * 128 + choices).flatten(), minlength=32 * 128).view(32, 128)
        mean = rows.sum().item() / 32
        assert max(filled(plan_clones(rows, 0))) > 2 * mean
        assert max(filled(plan_clones(rows, 1))) <= 1.15 * mean
        assert max(filled(plan_clones(rows, 2))) <= 1.1 * mean


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: plan_clones(torch.ones(2, 2), 1),
            TypeError,
            "counts must have dtype int32 or int64, got torch.float32",
        ),
        (lambda: plan_clones(torch.ones(4).int(), 1), ValueError, r"counts must have shape \(R, E\), got \(4,\)"),
        (
            lambda: plan_clones(torch.zeros(0, 4).int(), 1),
            ValueError,
            r"counts must have R >= 1 and E >= 1, got \(0, 4\)",
        ),
        (lambda: plan_clones(torch.tensor([[1, -2]]), 1), ValueError, "counts must not be negative, got -2"),
        (lambda: plan_clones(torch.ones(2, 2).int(), -1), ValueError, "clones must be at least 0, got -1"),
        (lambda: plan_clones(torch.ones(2, 2).int(), 1.0), TypeError, "clones must be an int, got float"),
        (
            lambda: plan_clones(torch.ones(2, 2).int(), 1, min_rows_to_clone=0),
            ValueError,
            "min_rows_to_clone must be at least 1, got 0",
        ),
        (
            lambda: plan_clones(torch.ones(2, 2).int(), 1, owner=[0, 2]),
            ValueError,
            r"plan_clones: owner must have 2 ranks in 0..1, got \[0, 2\]",
        ),
    ],
)
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()
