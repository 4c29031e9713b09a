"""Every call sends the same number of rows: tests of what is sent, of rows that do not fit, and of disagreement."""

import pytest
import ways


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_call_sends_as_many_rows(ranks, chunks):
    rows = 120 // (4 * chunks)
    for rank, (sent, widths) in enumerate(ranks.run(ways.padded_rows, chunks=chunks)):
        to = [rows, rows, rows, 0]  # the last rank has no experts
        from_it = [[rows] * 4 if rank < 3 else [0] * 4] * chunks
        assert sent == ([to] * chunks + from_it) * 4
        assert widths == ([1] * chunks + [12] * 4 * chunks) * 2  # expert numbers travel before the rows


@pytest.mark.parametrize("capacity", [None, 0.8])
@pytest.mark.parametrize(("chunks", "room"), [(1, 4), (1, 12), (2, 16), (2, 40), (1, 1000)])
def test_rows_that_do_not_fit_are_dropped_in_the_order_of_tokens(ranks, chunks, room, capacity):
    for dtype in ("float32", "bfloat16"):
        run = ranks.run(ways.overflowing, chunks=chunks, room=room, dtype=dtype, capacity=capacity)
        for differ, overflow in run:
            assert differ == []
            assert (overflow > 0) == (room < (1000 if capacity is None else 40))


def test_rows_that_did_not_fit_are_counted_over_calls(ranks):
    for tokens, (first, second, afterwards, dropped) in zip(ways.TOKENS, ranks.run(ways.overflow_adds_up), strict=True):
        assert (first > 0) == (tokens > 0)
        assert second == 2 * first
        assert afterwards == 0
        assert dropped == first


def test_a_layer_is_trained_after_a_call_in_inference_mode(ranks):
    for tokens, (same, overflow, load) in zip(ways.TOKENS, ranks.run(ways.evaluated_first), strict=True):
        assert same
        assert overflow == 0
        assert sum(load) == 2 * tokens


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            "layer",
            "agree on which layer they call, got rank 0: 'first', rank 1: 'first', rank 2: 'second', rank 3: 'fi",
        ),
        ("capacity", "agree on its capacity_factor, got rank 0: None, rank 1: None, rank 2: 1.5, rank 3: None"),
    ],
)
def test_ranks_that_disagreed_are_told_when_they_ask(ranks, wrong, text):
    for silent, (kind, said, who), again in ranks.run(ways.disagreeing, wrong=wrong):
        assert silent is None
        assert kind == "GroupError"
        assert text in said
        assert who == [ways.WRONG]
        assert again is None


def test_ranks_that_agree_have_nothing_to_be_told(ranks):
    assert ranks.run(ways.disagreeing, wrong="nothing") == [[None, None, None]] * 4


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"transport": "padded"}, "ValueError", "room must be given with transport='padded', got None"),
        (
            {"transport": "padded", "room": 7, "chunks": 2},
            "ValueError",
            "room must be at least 8 with transport='padded', a row from each rank in each chunk, got 7",
        ),
        (
            {"transport": "padded", "room": 99, "deduplicate": True},
            "ValueError",
            "deduplicate must be False with transport='padded', got True",
        ),
        (
            {"transport": "padded", "room": 99, "clones": 1},
            "ValueError",
            "clones must be 0 with transport='padded', got 1",
        ),
        ({"deduplicate": True, "clones": 2}, "ValueError", "clones must be 0 with deduplicate=True, got 2"),
        ({"transport": "symmetric"}, "ValueError", "transport must be one of 'exact', 'padded', got 'symmetric'"),
        ({"deduplicate": 1}, "TypeError", "deduplicate must be a bool, got int"),
    ],
)
def test_options_that_make_no_sense_are_refused(ranks, options, kind, text):
    for said in ranks.run(ways.padded_is_refused, options=options):
        assert said[:2] == [kind, f"shard: {text}"]
