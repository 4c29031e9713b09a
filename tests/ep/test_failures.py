"""Ranks that disagree or fail before the exchange all raise an error that names ranks and reason; the group can be used
afterwards.
"""

import failures
import pytest
from failures import WRONG, without_models

SAID = {
    "layer": "agree on which layer they call, got rank 0: 'first', rank 1: 'first', rank 2: 'second', rank 3: 'first'",
    "experts": "agree on which layer they call, got rank 0: 'first', rank 1: 'first', rank 2: 'third', rank 3: 'first'",
    "dtype": "agree on the dtype of its rows, got rank 0: float32, rank 1: float32, rank 2: bfloat16, rank 3: float32",
    "no gradients": "agree on whether its rows need gradients, got rank 0: yes, rank 1: yes, rank 2: no, rank 3: yes",
    "frozen input": "agree on whether its rows need gradients, got rank 0: yes, rank 1: yes, rank 2: no, rank 3: yes",
    "frozen experts": "agree on which parameters of its experts need gradients, got rank 0: w_in and w_out",
    "width": "rank 2 of the expert-parallel group failed before it sent rows: ValueError: MoE: x must have shape "
    "(..., H) with H = 12, got (3, 13)",
    "a bug": "rank 2 of the expert-parallel group failed before it sent rows: ArithmeticError: a bug of rank 2",
}
OWN_ERROR = {"width": "ValueError", "a bug": "ArithmeticError"}


@pytest.mark.parametrize("wrong", SAID)
def test_ranks_that_disagree_all_raise_and_can_go_on(ranks, wrong):
    for rank, (said, _, afterwards) in enumerate(ranks.run(failures.one_wrong_call, wrong=wrong)):
        kind, text, who = said
        if rank == WRONG and wrong in OWN_ERROR:
            assert kind == OWN_ERROR[wrong]
        else:
            assert kind == "GroupError"
            assert SAID[wrong] in without_models(text)
            assert text.startswith("MoE 'second'" if (rank, wrong) == (WRONG, "layer") else "MoE '")
            assert who == [WRONG]
        assert afterwards is None


@pytest.mark.parametrize("scope", ["rank", "group"])
def test_rows_that_would_not_fit_are_refused_before_they_are_allocated(ranks, scope):
    for said, fits, allocated, _ in ranks.run(failures.too_many_rows, scope=scope):
        kind, text, who = said
        assert kind == "GroupError"
        assert "must receive at most room = " in text
        assert all(f"rank {rank} would receive " in text for rank in who)
        assert who
        assert fits is None
        assert not allocated


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("seed", "the same layer '0', got"),
        ("experts", "the same layer '0', got"),
        ("frozen", "the same layer '0', got"),
        ("layers", "the same layer '1', got"),
        ("chunks", "the same argument 'chunks', got"),
        ("bad chunks", "rank 2 of the group failed: ValueError: shard: chunks must be at least 1, got 0"),
    ],
)
def test_ranks_that_shard_different_models_all_raise(ranks, wrong, text):
    for rank, (kind, said, who) in enumerate(ranks.run(failures.wrong_arguments, wrong=wrong)):
        if rank == WRONG and wrong == "bad chunks":
            assert (kind, said) == ("ValueError", "shard: chunks must be at least 1, got 0")
        else:
            assert kind == "GroupError"
            assert text in said
            assert who == ([0] if rank == WRONG else [WRONG])


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("no layer", "ValueError", "transformers is imported), got a Linear without them"),
        ("twice", "ValueError", "shard: layers must not be sharded yet, got '0' on 4 ranks"),
        ("own class", "TypeError", "shard: layers must be of the class MoE itself, got '0' of Own"),
        ("quantised", "TypeError", "of the class Experts itself, got '0' with QuantizedExperts"),
        ("no group", "TypeError", "shard: mesh must be a DeviceMesh or a ProcessGroup, got str"),
        ("two dimensions", "ValueError", "shard: mesh must have one dimension, as mesh['ep'] has, got DeviceMesh"),
        ("scope", "ValueError", "shard: scope must be one of 'rank', 'group', got 'world'"),
        ("room", "ValueError", "shard: room must be None or at least 0, got -1"),
        ("torch.func", "RuntimeError", "MoE: experts on several ranks have no derivatives inside torch.func"),
        ("forward mode", "RuntimeError", "MoE: experts on several ranks have no derivatives inside torch.func"),
    ],
)
def test_what_cannot_be_sharded_is_refused(ranks, what, kind, text):
    for said in ranks.run(failures.refused, what=what):
        assert said[0] == kind
        assert text in said[1]


def test_a_long_error_is_cut(ranks):
    lengths = ranks.run(failures.length_of_text)
    assert lengths[WRONG] == 10_000
    assert all(100 < length < 1000 for rank, length in enumerate(lengths) if rank != WRONG)
