"""A token that chose several experts of a rank travels there once: tests of what is sent and how close results are."""

import pytest
import ways


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("top_k", [2, 8])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_sums_by_rank_are_within_their_bound(ranks, dtype, top_k, chunks):
    """The bound is K + 3 roundings, relative to the sum of the terms' magnitudes."""
    assert max(ranks.run(ways.error_of_sums, dtype=dtype, top_k=top_k, chunks=chunks)) <= 1


def test_gradients_of_experts_and_weights_have_the_bits_of_a_row_a_choice(ranks):
    for differ in ranks.run(ways.gradients_of_weights):
        assert differ == []


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.6}])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_token_travels_once_to_a_rank_in_a_chunk(ranks, chunks, options):
    for found in ranks.run(ways.sent_once, ep_ranks=4, experts=10, top_k=4, chunks=chunks, tokens=30, **options):
        assert found["as chosen"]
        assert found["rows"] == found["away"] < found["choices away"]
        # Rows there and back, in both passes; numbers and weights there, and gradients of weights back.
        assert found["exchanges"] == [4 * chunks, 3 * chunks]
        assert found["beside"] == [[4, "float32"], [4, "int32"]]


@pytest.mark.parametrize(
    ("ep_ranks", "experts", "top_k", "saved"), [(2, 64, 2, 0.25), (2, 64, 8, 0.75), (4, 64, 8, 0.54), (4, 64, 2, 0.12)]
)
def test_a_uniform_router_saves_what_the_formula_says(ranks, ep_ranks, experts, top_k, saved):
    run = ranks.run(ways.sent_once, ep_ranks=ep_ranks, experts=experts, top_k=top_k, chunks=1, tokens=400)
    rows, choices = (sum(found[name] for found in run[:ep_ranks]) for name in ("rows", "choices away"))
    assert 1 - rows / choices == pytest.approx(saved, abs=0.04)


def test_ranks_whose_weights_need_gradients_on_some_only_all_raise(ranks):
    for (kind, text, who), afterwards in ranks.run(ways.weights_frozen_on_one_rank):
        assert kind == "GroupError"
        assert (
            "agree on whether the weights that travel need gradients, got rank 0: yes, rank 1: yes, rank 2: no" in text
        )
        assert who == [ways.WRONG]
        assert afterwards is None
