"""A whole simulation: its figures are those of brute-force counts, also on recorded gates, and move the right way."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expert_counts import examples, random_choices
from hypothesis import given
from hypothesis import strategies as st

from pymoe.ep.placement import contiguous
from pymoe.ep.simulate import (
    BALANCES,
    MACHINES,
    NETWORKS,
    PRESETS,
    Block,
    Layer,
    Load,
    Machine,
    Network,
    recorded,
    simulate,
    uniform,
    zipf,
)
from pymoe.ep.simulate.alternatives import crossing_of, data_parallel_bytes, fully_sharded_bytes
from pymoe.ep.simulate.balance import plans, spreads

RECORDED = Path(__file__).parent / "language_model.npz"
SMALL = Block("small", 64, 64, 16, 4)
H100, NVLINK = MACHINES["h100"], NETWORKS["nvlink"]


def simulated(block=SMALL, ranks=4, tokens=64, load=None, machine=H100, network=NVLINK, **options):
    load = uniform(block, tokens * ranks) if load is None else load
    return simulate(block, ranks, tokens, load, machine, network, **options)


def counted(choices, ranks, experts, deduplicate):
    """(bytes of a row's size 1 that leave a rank in the mean, fullest rank over mean), row by row."""
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
        assert traffic.bytes == pytest.approx(4 * 64 * 2 * sum(sent) / len(sent))
    factors = [counted(step, ranks, 16, False)[1] for step in steps]
    assert found.balance.imbalance == pytest.approx(sum(factors) / len(factors))
    assert found.balance.worst == pytest.approx(max(factors))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_and_balance_of_a_step_foretell_the_next_within_a_twentieth(ranks):
    """What was recorded in two steps, simulated, beside what the next two really sent, counted row by row."""
    load = recorded(SMALL, RECORDED)
    past = Load("past", tuple(layer[:2] for layer in load.choices), 16)
    found = simulated(ranks=ranks, tokens=load.tokens // ranks, load=past)
    now = [step for layer in load.choices for step in layer[2:]]
    for traffic in found.traffic:
        sent = [counted(step, ranks, 16, traffic.deduplicated)[0] for step in now]
        assert traffic.bytes == pytest.approx(4 * 64 * 2 * sum(sent) / len(sent), rel=0.05)
    factors = [counted(step, ranks, 16, False)[1] for step in now]
    assert found.balance.imbalance == pytest.approx(sum(factors) / len(factors), rel=0.05)


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_fewer_tokens_foretell_many_within_a_twentieth(skew):
    """Rows scale with the tokens, and the balance hardly changes."""
    few, many = (random_choices(tokens, 16, 4, seed, skew) for tokens, seed in ((2048, 1), (16384, 2)))
    found = simulated(tokens=4096, load=Load("few", ((few,),), 16))
    for traffic in found.traffic:
        sent, factor = counted(many, 4, 16, traffic.deduplicated)
        assert traffic.bytes == pytest.approx(4 * 64 * 2 * sent, rel=0.05)
        assert found.balance.imbalance == pytest.approx(factor, rel=0.05)


def test_a_uniform_load_has_the_rows_of_the_formulas():
    found = simulated(tokens=4096)
    for traffic in found.traffic:
        assert traffic.rows == pytest.approx(traffic.expected, rel=0.01)
    assert found.balance.imbalance == pytest.approx(found.expected_imbalance, rel=0.05)
    assert found.traffic[1].saved == pytest.approx(1 - found.traffic[1].rows / found.traffic[0].rows)


def test_no_formula_is_given_where_none_holds():
    skewed = simulated(load=zipf(SMALL, 256, 1.0))
    assert skewed.expected_imbalance is None
    grouped = replace(SMALL, groups=4, kept_groups=2)
    for found in (skewed, simulated(grouped), simulated(spread="1 clone a rank")):
        assert [traffic.expected for traffic in found.traffic] == [None, None]


def test_group_limited_routing_reaches_fewer_ranks():
    """The best four of eight groups: on eight ranks a token goes to four at most."""
    block = PRESETS["deepseek-v3"]
    load = uniform(block, 4096)
    assert max(len(set(chosen)) for chosen in (load.choices[0][0] // 32).tolist()) <= 4
    found = simulate(block, 8, 512, load, H100, NVLINK)
    assert found.traffic[1].saved == pytest.approx(0.504, abs=0.01)


def test_plans_help_a_skewed_load():
    """By the step before, by this step's counts: an expert stays hot, so both bring the fullest rank near the mean."""
    block = Block("many experts", 64, 64, 128, 8)
    found = simulated(block, 32, 256, load=zipf(block, 32 * 256, 1.0), worth=1)
    factor = {one.name: one.imbalance for one in found.balances}
    assert tuple(factor) == BALANCES
    assert factor["as it is"] > 2.5
    assert factor["placed, 1 replica a rank"] < 1.15
    assert factor["placed, 2 replicas a rank"] < 1.15
    assert factor["2 clones a rank"] <= factor["1 clone a rank"] < 1.2


@pytest.mark.slow
@examples(25)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.7, 1.5]), st.integers(1, 8), st.integers(1, 60))
def test_clones_never_increase_the_fullest_rank(seed, skew, ranks, worth):
    load = Load("random", ((random_choices(128, 16, 4, seed, skew),),), 16)
    rows = {one.name: one.rows for one in simulated(ranks=ranks, tokens=64, load=load, worth=worth).balances}
    assert rows["2 clones a rank"] <= rows["1 clone a rank"] <= rows["as it is"]


def times(found):
    return [one.seconds for one in found.passes]


@pytest.mark.slow
@examples(16)
@given(st.integers(0, 99), st.floats(1, 100), st.sampled_from(["bandwidth", "local_bandwidth", "flops", "memory"]))
def test_more_bandwidth_or_speed_is_never_slower(seed, factor, what):
    load = Load("random", ((random_choices(256, 16, 4, seed, 0.7),),), 16)
    machine, network = Machine("slow", 1e12, 1e10), Network("slow", 1e-6, 1e9, 2, 4e9)
    before = simulated(load=load, machine=machine, network=network, spread="1 clone a rank", worth=1)
    if what == "flops":
        machine = replace(machine, flops=factor * machine.flops)
    elif what == "memory":
        machine = replace(machine, memory_bandwidth=factor * machine.memory_bandwidth)
    else:
        network = replace(network, **{what: factor * getattr(network, what)})
    after = simulated(load=load, machine=machine, network=network, spread="1 clone a rank", worth=1)
    assert all(new <= old for new, old in zip(times(after), times(before), strict=True))


@examples(30)
@given(st.integers(1, 4000), st.integers(1, 4000))
def test_more_tokens_are_never_faster(one, another):
    load = Load("random", ((random_choices(256, 16, 4, 0),),), 16)
    few, many = sorted((one, another))
    pairs = zip(times(simulated(tokens=few, load=load)), times(simulated(tokens=many, load=load)), strict=True)
    assert all(low <= high for low, high in pairs)


def test_the_crossings_in_bytes_are_those_of_the_closed_forms():
    """Below 1.5 E F / K tokens less than data parallelism, below 2.25 E F / K less than FSDP: gated experts."""
    for name, tokens in (("qwen3-30b-a3b", 18_432), ("mixtral-8x7b", 86_016)):
        block = PRESETS[name]
        data, sharded = simulated(block, 8, 1024).alternatives
        assert 1.5 * block.experts * block.ffn / block.choices == tokens
        assert data.fewer_bytes_below == pytest.approx(tokens, rel=0.01)
        assert sharded.fewer_bytes_below == pytest.approx(1.5 * tokens, rel=0.01)


def test_bytes_of_data_parallelism_are_those_of_a_ring():
    """In R - 1 steps each rank sends an R-th of the gradients, and again to spread the sums; 4 ranks, 240 bytes."""
    block = Block("tiny", 2, 5, 4, 1)
    assert data_parallel_bytes(block, 4) == 2 * 3 * (4 * 30 * 2 / 4)
    assert fully_sharded_bytes(block, 4) == 3 * 3 * (4 * 30 * 2 / 4)
    assert data_parallel_bytes(block, 1) == 0


def test_times_cross_where_the_simulation_says():
    block = PRESETS["qwen3-30b-a3b"]
    network = NETWORKS["infiniband"]
    load = uniform(block, 8 * 1024)
    data = simulated(block, 8, 1024, load=load, network=network).alternatives[0]
    tokens = int(data.faster_below)
    below, above = (simulated(block, 8, number, load=load, network=network) for number in (tokens - 30, tokens + 30))
    assert below.best.seconds <= below.alternatives[0].seconds
    assert above.best.seconds > above.alternatives[0].seconds


def test_a_crossing_is_found_where_it_is():
    assert crossing_of(lambda tokens: tokens, lambda tokens: 1000.0) == pytest.approx(1000, rel=2e-3)
    assert crossing_of(lambda tokens: 2.0, lambda tokens: 1.0) == 0
    assert crossing_of(lambda tokens: tokens, lambda tokens: 2 * tokens) is None


def test_more_chunks_than_experts_of_a_rank_gain_nothing():
    """Mixtral on eight ranks: one expert each, so all rows are in the last of four chunks.

    Both passes wait for three empty dispatches; the empty ways back are over before the experts are.
    """
    block = PRESETS["mixtral-8x7b"]
    one, four = simulated(block, 8, 1024, network=NETWORKS["ethernet"], chunks=(1, 4)).passes[:2]
    assert four.rows == one.rows
    assert four.seconds == pytest.approx(one.seconds + 2 * 3 * NETWORKS["ethernet"].latency, rel=1e-3)


def test_a_token_travels_once_in_every_chunk_that_has_its_experts():
    """Two choices on the other rank: in one chunk they share a row, in two each has its own."""
    block = Block("two", 8, 8, 4, 2)
    choices = torch.tensor([[2, 3]] * 4 + [[0, 1]] * 4)
    found = simulate(block, 2, 4, Load("crossed", ((choices,),), 4), H100, NVLINK, chunks=(1, 2))
    assert [(one.deduplicated, one.chunks, one.rows) for one in found.passes] == [
        (False, 1, 2.0),
        (False, 2, 2.0),
        (True, 1, 1.0),
        (True, 2, 2.0),
    ]


@examples(30)
@given(st.integers(0, 99), st.integers(1, 8), st.integers(1, 5))
def test_chunks_carry_all_rows_and_experts_once(seed, ranks, chunks):
    load = Load("random", ((random_choices(128, 16, 4, seed, 0.7),),), 16)
    layer = Layer(SMALL, ranks, H100, NVLINK)
    for name, plan in plans(1).items():
        (spread,) = spreads(name, plan, load, ranks, 128 / ranks)
        for deduplicate in (False, True):
            cut = layer.cut(spread, 128 / ranks, chunks, deduplicate=deduplicate)
            rows = sum(chunk.rows for chunk in cut.chunks)
            assert rows.tolist() == spread.shares.destinations().sum(0).tolist()
            assert sum(chunk.experts for chunk in cut.chunks).tolist() == [len(held) for held in spread.held]
            received = sum(chunk.received for chunk in cut.chunks)
            assert (received <= rows).all()
            assert deduplicate or received.tolist() == rows.tolist()


def test_one_rank_sends_nothing_and_is_as_fast_as_without_expert_parallelism():
    found = simulated(ranks=1)
    assert [traffic.bytes for traffic in found.traffic] == [0, 0]
    assert found.best.seconds == pytest.approx(found.alternatives[0].seconds)
    assert found.alternatives[0].fewer_bytes_below is None


def test_clones_and_their_gradients_are_counted():
    """Rank 1 clones the expert that everybody of rank 1 chose: one expert there, its gradient back."""
    block = Block("hot", 8, 8, 2, 1)
    load = Load("hot", ((torch.zeros(64, 1, dtype=torch.int64),),), 2)
    found = simulate(block, 2, 32, load, H100, NVLINK, spread="1 clone a rank", worth=1)
    assert found.balance.clones == 1
    assert found.clones_bytes == 2 * 1 / 2 * (3 * 8 * 8 * 2)
    assert found.balance.imbalance == 1
    assert found.traffic[0].bytes == 0
    assert {"clones", "clones back"} <= {
        event.name for one in (found.best.forward, found.best.backward) for event in one.timeline.events
    }


def test_what_a_clone_is_worth_is_in_rows_of_the_tokens_that_are_simulated():
    """64 rows recorded of the one expert, all of them on rank 0, of which 32 would move; each may stand for ten."""
    block = Block("hot", 8, 8, 2, 1)
    load = Load("hot", ((torch.zeros(64, 1, dtype=torch.int64),),), 2)

    def clones(tokens, worth):
        found = simulate(block, 2, tokens, load, H100, NVLINK, spread="1 clone a rank", worth=worth)
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
        ({"spread": "evenly"}, ValueError, "simulate: spread must be one of 'as it is', .* got 'evenly'"),
        ({"worth": 0}, ValueError, "simulate: worth must be at least 1, got 0"),
        ({"optimizer_bytes": -1}, ValueError, "simulate: optimizer_bytes must be finite and at least 0, got -1"),
        ({"block": replace(SMALL, choices=2)}, ValueError, "simulate: load must have E 16 and K 2, got E 16 and K 4"),
        ({"ranks": 100}, ValueError, "simulate: load must have a token for each of 100 ranks, got 64"),
    ],
)
def test_errors_say_what_was_expected(options, error, message):
    with pytest.raises(error, match=message):
        simulated(**{"load": uniform(SMALL, 64), **options})
