"""Clones of hot experts: weights travel once either way, rows keep their bits, and ranks become even."""

import cloned
import pytest
import torch

from pymoe.ep.clones import plan_clones
from pymoe.ep.placement import contiguous, place, share_evenly


@pytest.mark.parametrize("chunks", [1, 2])
def test_weights_of_clones_travel_once_and_their_gradients_once_back(ranks, chunks):
    for found in ranks.run(cloned.travelled, chunks=chunks):
        assert found["clones"] > 0
        assert found["exchanges"] == [2 * (chunks + 1) + 1] * 2
        assert found["weights"]
        assert found["rows"]
        assert found["computed"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_an_expert_is_the_owners_and_its_clones_added_in_the_order_of_ranks(ranks, dtype):
    for wrong, most in ranks.run(cloned.sums_of_gradients, dtype=dtype):
        assert not wrong
        assert most > (2 if dtype == "float32" else 1)  # torch 2.11 draws other weights in bfloat16


def test_gradients_of_clones_are_the_same_in_every_run(ranks):
    assert ranks.run(cloned.repeated) == [[]] * 4


def test_without_a_clone_that_is_worth_its_way_nothing_changes(ranks):
    assert ranks.run(cloned.without_need, min_rows_to_clone=1000) == [[4, []]] * 4


def test_weights_travel_while_ranks_compute_with_shared_experts_and_their_own(ranks):
    for forward, backward in ranks.run(cloned.order_of_events):
        assert forward == [
            *("start 0", "start 1", "start 2", "start weights", "shared"),
            *("finish 0", "compute 0", "start 0", "finish 1", "compute 1", "start 1"),
            *("finish 2", "finish weights", "compute 2", "start 2", "finish 0", "finish 1", "finish 2"),
        ]
        assert backward == [
            *("start 2", "start 1", "start 0", "finish 2", "start 2", "start weights"),
            *("finish 1", "start 1", "finish 0", "start 0", "shared"),
            *("finish weights", "finish 0", "finish 1", "finish 2"),
        ]


def test_room_counts_the_rows_that_a_rank_computes_with_clones(ranks):
    assert ranks.run(cloned.room, clones=1, less=0) == [None] * 4
    for said in ranks.run(cloned.room, clones=0, less=0):
        assert "a rank must receive at most room = 26 rows in a call, got rank 0 would receive 55" in said
    for said in ranks.run(cloned.room, clones=1, less=1):
        assert "got rank 0 would receive 26, rank 1 would receive 26, rank 2 would receive 26" in said


@pytest.mark.parametrize(
    ("activation", "bias", "rows"),
    [("swiglu", False, 9), ("relu", False, 6), ("swiglu", True, 11)],  # rows: 1.5 F, F, (3 H F + 2 F + H) / (2 H)
)
def test_a_clone_is_taken_where_its_weights_travel_no_longer_than_its_rows(ranks, activation, bias, rows):
    assert ranks.run(cloned.default_min_rows_to_clone, activation=activation, bias=bias) == [rows] * 4


@pytest.mark.parametrize(
    ("own", "kind", "text"),
    [
        ({"clones": -1}, "ValueError", "shard: clones must be at least 0, got -1"),
        ({"clones": 1.5}, "TypeError", "shard: clones must be an int, got float"),
        (
            {"clones": 1, "min_rows_to_clone": 0},
            "ValueError",
            "shard: min_rows_to_clone must be None or at least 1, got 0",
        ),
    ],
)
def test_wrong_options_are_told_to_all(ranks, own, kind, text):
    for rank, said in enumerate(ranks.run(cloned.wrong_arguments, own=own, others={"clones": 1})):
        assert said == [kind, text] if rank == 2 else said[0] == "GroupError"
        assert text in said[1]


def test_ranks_must_give_equal_numbers_of_clones(ranks):
    for rank, said in enumerate(ranks.run(cloned.wrong_arguments, own={"clones": 2}, others={"clones": 1})):
        here, there, other = ("2", "1", 0) if rank == 2 else ("1", "2", 2)
        text = f"the same argument 'clones', got {here} here and {there} on rank {other}"
        assert said == ["GroupError", f"shard: all ranks of the group must have {text}"]


def over_mean(rows):
    """Return the fullest rank's rows divided by the mean."""
    return max(rows) * len(rows) / sum(rows)


@pytest.mark.parametrize(("clones", "most"), [(1, 2.5), (2, 1.6), (4, 1.1)])
def test_clones_bring_the_fullest_of_four_ranks_to_a_tenth_over_the_mean(ranks, clones, most):
    for step in ranks.run(cloned.balance, placed=False, clones=clones)[0]:
        loads = torch.tensor(step["loads"])
        before = over_mean(share_evenly(loads, contiguous(128, 4)).destinations().sum(0).tolist())
        assert before > 3.7
        assert over_mean(step["rows"]) <= most
        simulated = over_mean(plan_clones(loads, clones).destinations().sum(0).tolist())
        assert over_mean(step["rows"]) == pytest.approx(simulated, rel=0.05)


def test_a_placement_by_the_load_before_brings_the_fullest_of_four_ranks_to_a_tenth_over_the_mean(ranks):
    first, past, now = ranks.run(cloned.balance, placed=True, clones=0)[0]
    loads = torch.tensor(now["loads"])
    as_it_was = over_mean(share_evenly(loads, contiguous(128, 4)).destinations().sum(0).tolist())
    placed = place(torch.tensor(past["loads"]).sum(0), 4)
    assert over_mean(first["rows"]) > 3.7
    assert over_mean(now["rows"]) <= 1.1
    assert as_it_was > 3.7
    simulated = over_mean(share_evenly(loads, placed).destinations().sum(0).tolist())
    assert over_mean(now["rows"]) == pytest.approx(simulated, rel=0.05)


def test_clones_even_out_what_a_placement_by_the_load_before_has_left(ranks):
    *_, now = ranks.run(cloned.balance, placed=True, clones=1)[0]
    assert over_mean(now["rows"]) <= 1.01
