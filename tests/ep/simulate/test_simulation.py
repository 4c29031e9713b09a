"""Figures of a whole simulation equal brute-force counts, also on recorded gates, and move in the right direction."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expert_counts import examples, random_choices
from hypothesis import given
from hypothesis import strategies as st

from pymoe.ep.placement import contiguous
from pymoe.ep.simulate import PRESETS, SPREADS, Block, Load, recorded, simulate, uniform, zipf
from pymoe.nn import MoE

RECORDED = Path(__file__).parent / "language_model.npz"
SMALL = Block("small", 64, 64, 16, 4)
# The bytes of a row of SMALL in four exchanges, and of the indices and weights of a row with several choices.
ROW, INDEXED = 4 * 64 * 2, 12 * 4


def simulated(block=SMALL, ranks=4, tokens=64, load=None, **options):
    load = uniform(block, tokens * ranks) if load is None else load
    options.setdefault("chunks", (1,))
    return simulate(block, ranks, tokens, load, **options)


def size_of(traffic):
    return ROW + INDEXED * traffic.deduplicated


def test_weights_of_choices_travel_in_float64_where_the_router_computes_in_it():
    found = simulated(Block("wide", 64, 64, 16, 4, dtype="float64"))
    (moved,) = [one for one in found.traffic if one.deduplicated]
    assert moved.bytes == pytest.approx(moved.rows * 64 * (4 * 64 * 8 + (4 + 2 * 8) * 4))


def counted(choices, ranks, experts, deduplicate):
    """Return (rows that a rank sends on average, fullest rank over mean), counted row by row."""
    owner = contiguous(experts, ranks).owner
    sent, filled = 0, [0] * ranks
    for token, chosen in enumerate(choices.tolist()):
        home = token * ranks // len(choices)
        reached = [owner[expert] for expert in chosen]
        for rank in reached:
            filled[rank] += 1
        sent += sum(rank != home for rank in (set(reached) if deduplicate else reached))
    return sent / ranks, max(filled) / (sum(filled) / ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_recorded_gates_are_counted_row_by_row(ranks):
    load = recorded(SMALL, RECORDED)
    tokens = load.tokens // ranks
    found = simulated(ranks=ranks, tokens=tokens, load=load)
    steps = [step for layer in load.choices for step in layer[1:]]
    for traffic in found.traffic:
        sent = [counted(step, ranks, 16, traffic.deduplicated)[0] for step in steps]
        assert traffic.bytes == pytest.approx(size_of(traffic) * sum(sent) / len(sent))
    factors = [counted(step, ranks, 16, False)[1] for step in steps]
    assert found.balance.imbalance == pytest.approx(sum(factors) / len(factors))
    assert found.balance.worst == pytest.approx(max(factors))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_and_balance_of_a_step_foretell_the_next_within_a_twentieth(ranks):
    """A simulation of two recorded steps is compared with what the next two steps really sent, counted row by row."""
    load = recorded(SMALL, RECORDED)
    past = Load("past", tuple(layer[:2] for layer in load.choices), 16)
    found = simulated(ranks=ranks, tokens=load.tokens // ranks, load=past)
    now = [step for layer in load.choices for step in layer[2:]]
    for traffic in found.traffic:
        sent = [counted(step, ranks, 16, traffic.deduplicated)[0] for step in now]
        assert traffic.bytes == pytest.approx(size_of(traffic) * sum(sent) / len(sent), rel=0.05)
    factors = [counted(step, ranks, 16, False)[1] for step in now]
    assert found.balance.imbalance == pytest.approx(sum(factors) / len(factors), rel=0.05)


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_fewer_tokens_foretell_many_within_a_twentieth(skew):
    """Rows scale with the tokens, and the balance hardly changes."""
    few, many = (random_choices(tokens, 16, 4, seed, skew) for tokens, seed in ((2048, 1), (16384, 2)))
    found = simulated(tokens=4096, load=Load("few", ((few,),), 16))
    for traffic in found.traffic:
        sent, factor = counted(many, 4, 16, traffic.deduplicated)
        assert traffic.bytes == pytest.approx(size_of(traffic) * sent, rel=0.05)
        assert found.balance.imbalance == pytest.approx(factor, rel=0.05)


def test_a_uniform_load_has_the_rows_of_the_formulas():
    found = simulated(tokens=4096)
    for traffic in found.traffic:
        assert traffic.rows == pytest.approx(traffic.expected, rel=0.01)
    assert found.balance.imbalance == pytest.approx(found.expected_imbalance, rel=0.05)
    assert found.traffic[1].saved == pytest.approx(1 - found.traffic[1].bytes / found.traffic[0].bytes)


def test_no_formula_is_given_where_none_holds():
    skewed = simulated(load=zipf(SMALL, 256, 1.0))
    assert skewed.expected_imbalance is None
    grouped = replace(SMALL, groups=4, kept_groups=2)
    for found in (skewed, simulated(grouped), simulated(spread="placed")):
        assert [traffic.expected for traffic in found.traffic] == [None, None]
    assert [traffic.expected is None for traffic in simulated(chunks=(1, 2)).traffic] == [False, False, True]


def test_group_limited_routing_reaches_fewer_ranks():
    """If tokens choose among the best four of eight groups, a token on eight ranks is sent to at most four."""
    block = PRESETS["deepseek-v3"]
    load = uniform(block, 4096)
    assert max(len(set(chosen)) for chosen in (load.choices[0][0] // 32).tolist()) <= 4
    found = simulate(block, 8, 512, load)
    assert 1 - found.traffic[1].rows / found.traffic[0].rows == pytest.approx(0.504, abs=0.01)


def test_plans_help_a_skewed_load():
    """Placement follows the counts of the previous step, and clones follow the counts of this step; both even out a
    skewed load.
    """
    block = Block("many experts", 64, 64, 128, 8)
    found = simulated(block, 32, 256, load=zipf(block, 32 * 256, 1.0), min_rows_to_clone=1)
    factor = {one.name: one.imbalance for one in found.balances}
    assert tuple(factor) == tuple(SPREADS)
    assert factor["contiguous"] > 2.5
    assert factor["placed"] < 0.9 * factor["contiguous"], "the hottest expert alone fills its rank"
    assert factor["2-clones"] <= factor["1-clone"] < 1.2


@pytest.mark.slow
@examples(25)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.7, 1.5]), st.integers(1, 8), st.integers(1, 60))
def test_clones_never_increase_the_fullest_rank(seed, skew, ranks, min_rows_to_clone):
    load = Load("random", ((random_choices(128, 16, 4, seed, skew),),), 16)
    rows = {
        one.name: one.rows
        for one in simulated(ranks=ranks, tokens=64, load=load, min_rows_to_clone=min_rows_to_clone).balances
    }
    assert rows["2-clones"] <= rows["1-clone"] <= rows["contiguous"]


def test_the_crossings_in_bytes_are_those_of_the_closed_forms():
    """Gated experts move less than data parallelism below 1.5 E F / K tokens, and than FSDP below 2.25 E F / K."""
    for name, tokens in (("qwen3-30b-a3b", 18_432), ("mixtral-8x7b", 86_016)):
        block = PRESETS[name]
        found = simulated(block, 8, 1024)
        assert 1.5 * block.experts * block.ffn / block.choices == tokens
        assert found.tokens_below(found.traffic[0], "DP") == pytest.approx(tokens, rel=0.01)
        assert found.tokens_below(found.traffic[0], "FSDP") == pytest.approx(1.5 * tokens, rel=0.01)


def test_bytes_are_equal_where_they_cross():
    """Test clones, whose bytes do not depend on the tokens if as many clones are made, and counts."""
    block = Block("hot", 8, 8, 2, 1)
    load = Load("skewed", ((torch.tensor([0, 0, 0, 1]).repeat(16)[:, None],),), 2)
    found = simulated(block, 2, 32, load, spread="1-clone", min_rows_to_clone=1)
    assert found.balance.clones == 1
    assert found.alternatives["FSDP"] < found.counts_bytes + found.clones_bytes
    assert found.tokens_below(found.traffic[0], "FSDP") == 0
    large = replace(block, hidden=64, ffn=64)
    found = simulated(large, 2, 32, load, spread="1-clone", min_rows_to_clone=1)
    tokens = found.tokens_below(found.traffic[0], "FSDP")
    sent = found.traffic[0].bytes / 32 * tokens + found.counts_bytes + found.clones_bytes
    assert sent == pytest.approx(found.alternatives["FSDP"])


def test_bytes_of_data_parallelism_are_those_of_a_ring():
    """In each of R - 1 steps, each rank sends 1/R of the gradients, and in as many more steps it sends 1/R of the sums;
    4 ranks, 240 bytes.
    """
    block = Block("tiny", 2, 5, 4, 1)
    four, one = (simulate(block, ranks, 8, uniform(block, 32)).alternatives for ranks in (4, 1))
    assert four == {"DP": 2 * 3 * (4 * 30 * 2 / 4), "FSDP": 3 * 3 * (4 * 30 * 2 / 4)}
    assert one == {"DP": 0, "FSDP": 0}


def test_a_token_travels_once_in_every_chunk_that_has_its_experts():
    """Two choices on the other rank: in one chunk they share a row, in two each has its own."""
    block = Block("two", 8, 8, 4, 2)
    choices = torch.tensor([[2, 3]] * 4 + [[0, 1]] * 4)
    found = simulate(block, 2, 4, Load("crossed", ((choices,),), 4), chunks=(1, 2))
    assert [(one.deduplicated, one.chunks, one.rows) for one in found.traffic] == [
        (False, 1, 2.0),
        (True, 1, 1.0),
        (True, 2, 2.0),
    ]


def test_one_rank_sends_nothing():
    found = simulated(ranks=1)
    assert [traffic.bytes for traffic in found.traffic] == [0, 0]
    assert (found.counts_bytes, found.clones_bytes) == (0, 0)
    assert found.tokens_below(found.traffic[0], "DP") is None
    assert found.memory["EP"] == found.memory["DP"]


def test_clones_and_their_gradients_are_counted():
    """Rank 1 clones the expert that all its tokens chose: one expert travels there, and its gradient back."""
    block = Block("hot", 8, 8, 2, 1)
    load = Load("hot", ((torch.zeros(64, 1, dtype=torch.int64),),), 2)
    found = simulate(block, 2, 32, load, spread="1-clone", min_rows_to_clone=1)
    assert found.balance.clones == 1
    assert found.clones_bytes == 2 * 1 / 2 * (3 * 8 * 8 * 2)
    assert found.balance.imbalance == 1
    assert found.traffic[0].bytes == 0
    assert len(found.traffic) == 1, "layers with clones do not deduplicate"
    assert set(found.memory) == {"EP", "DP", "FSDP"}
    # A rank's memory of weights is one expert; the clone's weights count as activations.
    alone = simulate(block, 2, 32, load).memory["EP"]
    assert found.memory["EP"].weights == alone.weights
    rows = 2 * 32 * (8 + 3 * 8)  # bytes saved for the 32 rows that rank 0 no longer computes
    assert found.memory["EP"].activations == alone.activations - rows + 3 * 8 * 8 * 2


def test_clones_pay_off_from_the_rows_from_which_a_layer_makes_them():
    """``min_rows_to_clone`` has the same default as in ``shard``: 1.5 F rows for gated experts without biases."""
    block = Block("odd", 8, 7, 4, 2, dtype="float32")
    found = simulate(block, 2, 32, uniform(block, 64))
    assert found.min_rows_to_clone == 11
    numbers = sum(one.numel() for one in MoE(8, 7, 4, 2).experts.parameters()) / 4
    assert found.min_rows_to_clone == math.ceil(numbers / (2 * 8))


def test_what_a_clone_is_worth_is_in_rows_of_the_tokens_that_are_simulated():
    """The recorded load has 64 rows for one expert, all on rank 0, of which 32 would move. Each row may represent
    ten.
    """
    block = Block("hot", 8, 8, 2, 1)
    load = Load("hot", ((torch.zeros(64, 1, dtype=torch.int64),),), 2)

    def clones(tokens, min_rows_to_clone):
        found = simulate(block, 2, tokens, load, spread="1-clone", min_rows_to_clone=min_rows_to_clone)
        return found.balance.clones

    assert [clones(32, 32), clones(32, 33)] == [1, 0]
    assert [clones(320, 320), clones(320, 330)] == [1, 0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ranks": 0}, ValueError, "simulate: ranks must be at least 1, got 0"),
        ({"tokens": 0}, ValueError, "simulate: tokens must be at least 1, got 0"),
        ({"tokens": 1.5}, TypeError, "simulate: tokens must be an int, got float"),
        ({"chunks": ()}, ValueError, "simulate: chunks must name at least one number, got none"),
        ({"chunks": (2, 0)}, ValueError, "simulate: chunks must be at least 1, got 0"),
        ({"spread": "evenly"}, ValueError, "simulate: spread must be one of 'contiguous', .* got 'evenly'"),
        ({"min_rows_to_clone": 0}, ValueError, "simulate: min_rows_to_clone must be at least 1, got 0"),
        ({"optimizer_bytes": -1}, ValueError, "simulate: optimizer_bytes must be finite and at least 0, got -1"),
        ({"block": replace(SMALL, choices=2)}, ValueError, "simulate: load must have E 16 and K 2, got E 16 and K 4"),
        ({"ranks": 100}, ValueError, "simulate: load must have a token for each of 100 ranks, got 64"),
    ],
)
def test_errors_say_what_was_expected(options, error, message):
    with pytest.raises(error, match=message):
        simulated(**{"load": uniform(SMALL, 64), **options})
