"""Rows on the wire: formulas are checked against counts, and counts against loops over single rows."""

import itertools
import math

import pytest
import torch
from expert_counts import examples, random_choices
from hypothesis import given
from hypothesis import strategies as st

from pymoe.ep.clones import plan_clones
from pymoe.ep.placement import contiguous, place, share_evenly
from pymoe.ep.simulate import SPREADS, Block, Load
from pymoe.ep.simulate.loads import source_ranks
from pymoe.ep.simulate.rows import (
    counts_of,
    destinations_of,
    expected_imbalance,
    expected_rows,
    pairs_of,
    spreads,
    travelling,
)


def block_of(experts, top_k):
    return Block("test", 8, 8, experts, top_k)


@st.composite
def gates(draw):
    """Draw (choices (N, K), R, E); there may be fewer tokens than ranks."""
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    top_k = draw(st.integers(1, experts))
    seed, tokens = draw(st.integers(0, 10**6)), draw(st.integers(1, 60))
    return random_choices(tokens, experts, top_k, seed, skew=draw(st.sampled_from([0.0, 1.5]))), ranks, experts


def loop_over_rows(choices, ranks, shares, deduplicate):
    """Count the (R, R) rows sent in plain Python, one row at a time."""
    tokens = len(choices)
    source = [token * ranks // tokens for token in range(tokens)]
    taken, pairs = {}, [[0] * ranks for _ in range(ranks)]
    for token in range(tokens):
        reached = []
        for expert in choices[token].tolist():
            number = taken.get((source[token], expert), 0)
            taken[source[token], expert] = number + 1
            ends = list(itertools.accumulate(shares.rows[source[token], expert].tolist()))
            reached.append(shares.hosts[expert][next(at for at, end in enumerate(ends) if number < end)])
        for rank in set(reached) if deduplicate else reached:
            pairs[source[token]][rank] += 1
    return pairs


@examples(120)
@given(gates(), st.sampled_from(["contiguous", "placed", "cloned"]), st.booleans())
def test_counted_rows_are_those_of_a_loop_over_rows(found, how, deduplicate):
    choices, ranks, experts = found
    source = source_ranks(len(choices), ranks)
    counts = counts_of(choices, source, ranks, experts)
    if how == "cloned":
        shares = plan_clones(counts, 2)
    else:
        placement = contiguous(experts, ranks) if how == "contiguous" else place(counts.sum(0), ranks, replicas=1)
        shares = share_evenly(counts, placement)
    where = destinations_of(choices, source, shares)
    pairs = pairs_of(where, source, ranks, deduplicate)
    assert pairs.tolist() == loop_over_rows(choices, ranks, shares, deduplicate)
    if not deduplicate:
        assert pairs.equal(shares.destinations())


@examples(30)
@given(st.integers(0, 99), st.integers(1, 8), st.integers(1, 5))
def test_chunks_carry_all_rows_once(seed, ranks, chunks):
    load = Load("random", ((random_choices(128, 16, 4, seed, 0.7),),), 16)
    for name in SPREADS:
        (spread,) = spreads(name, load, ranks, 128 / ranks, 1)
        assert spread.pairs(False, chunks).sum(0).tolist() == spread.shares.destinations().tolist()
        assert spread.clones == sum(map(len, spread.held)) - 16
        once = spread.pairs(True, chunks).sum(0)
        assert (once <= spread.pairs(False)).all()
        assert (once >= spread.pairs(True)).all()


@examples(60)
@given(gates())
def test_a_row_a_rank_is_never_more_than_a_row_a_choice(found):
    choices, ranks, experts = found
    source = source_ranks(len(choices), ranks)
    shares = share_evenly(counts_of(choices, source, ranks, experts), contiguous(experts, ranks))
    where = destinations_of(choices, source, shares)
    plain, once = (pairs_of(where, source, ranks, deduplicate) for deduplicate in (False, True))
    assert bool((once <= plain).all())
    assert int(plain.sum()) == choices.numel()


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks"), [(4, 2, 2), (5, 2, 2), (6, 3, 4), (6, 2, 3), (7, 7, 3), (3, 1, 4)]
)
def test_expected_rows_are_the_mean_over_all_sets_of_experts(experts, top_k, ranks):
    """The expectation is exact, since every set of K experts occurs once from every rank."""
    sets = torch.tensor(list(itertools.combinations(range(experts), top_k)))
    owner = torch.tensor(contiguous(experts, ranks).owner)
    for deduplicate in (False, True):
        sent = 0
        for rank in range(ranks):
            source = torch.full((len(sets),), rank)
            sent += travelling(pairs_of(owner[sets], source, ranks, deduplicate))
        expected = expected_rows(block_of(experts, top_k), ranks, deduplicate)
        assert sent / (len(sets) * ranks) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 8), (128, 8), (30, 4)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_expected_rows_are_those_of_a_uniform_router_within_a_hundredth(experts, top_k, ranks):
    choices = random_choices(8192, experts, top_k, seed=ranks)
    source = source_ranks(len(choices), ranks)
    owner = torch.tensor(contiguous(experts, ranks).owner)
    for deduplicate in (False, True):
        counted = travelling(pairs_of(owner[choices], source, ranks, deduplicate)) / len(choices)
        assert counted == pytest.approx(expected_rows(block_of(experts, top_k), ranks, deduplicate), rel=0.01)


def test_known_savings():
    """A quarter of the rows is saved at K 2 on 2 ranks of 64 experts, and 54 % at K 8 on 4 ranks."""

    def saved(experts, top_k, ranks):
        block = block_of(experts, top_k)
        return 1 - expected_rows(block, ranks, True) / expected_rows(block, ranks, False)

    assert saved(64, 2, 2) == pytest.approx(0.246, abs=0.001)
    assert saved(64, 8, 4) == pytest.approx(0.543, abs=0.001)
    assert saved(64, 8, 64) == 0


@pytest.mark.parametrize(("experts", "top_k", "ranks", "tokens"), [(64, 8, 8, 256), (128, 8, 32, 256), (8, 2, 8, 512)])
def test_the_expected_imbalance_is_that_of_a_uniform_router_within_a_twentieth(experts, top_k, ranks, tokens):
    factors = []
    owner = torch.tensor(contiguous(experts, ranks).owner)
    for seed in range(20):
        load = torch.bincount(owner[random_choices(tokens * ranks, experts, top_k, seed)].flatten(), minlength=ranks)
        factors.append(float(load.max()) / (float(load.sum()) / ranks))
    expected = expected_imbalance(block_of(experts, top_k), ranks, tokens)
    assert sum(factors) / len(factors) == pytest.approx(expected, rel=0.05)
    # The part above 1 comes only from chance, and the formula gives its size.
    assert sum(factors) / len(factors) - 1 == pytest.approx(expected - 1, rel=0.5)


def test_one_rank_is_always_even():
    assert expected_imbalance(block_of(8, 2), 1, 64) == 1
    assert expected_rows(block_of(8, 2), 1, True) == expected_rows(block_of(8, 2), 1, False) == 0


@pytest.mark.parametrize(("tokens", "ranks"), [(8, 4), (9, 4), (3, 4), (1000, 7)])
def test_ranks_have_consecutive_tokens_of_nearly_equal_number(tokens, ranks):
    source = source_ranks(tokens, ranks)
    assert source.equal(source.sort().values)
    numbers = torch.bincount(source, minlength=ranks)
    assert int(numbers.max()) - int(numbers.min()) <= 1
    assert math.isclose(float(numbers.sum()), tokens)
