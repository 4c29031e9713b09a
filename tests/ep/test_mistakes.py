"""Users' mistakes are found before rows travel, on all ranks or on one that tells the others."""

import re

import mistakes
import pytest
from failures import WRONG, without_models

FAILED = "rank 2 of the expert-parallel group failed before it sent rows: "


def assert_one_rank_fails(results, kind, text):
    """Check that one rank raised an error of ``kind`` and told the others, and that all can go on."""
    for rank, (said, afterwards) in enumerate(results):
        assert said[0] == (kind if rank == WRONG else "GroupError")
        assert text in said[1]
        assert rank == WRONG or FAILED in said[1]
        assert afterwards is None


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ("dtype", "TypeError", "experts.w_in must have the dtype of the rows (torch.float32), got torch.bfloat16"),
        ("dtype inside autocast", "TypeError", "must have the dtype of the rows (torch.bfloat16), got torch.float64"),
        ("shape", "ValueError", "MoE: experts.w_in must have shape (2, 16, 12) on this rank, got (6, 16, 12)"),
    ],
)
def test_parameters_that_do_not_fit_raise_on_all_ranks_also_without_experts(ranks, wrong, kind, text):
    for rank, (said, afterwards) in enumerate(ranks.run(mistakes.wrong_parameters, wrong=wrong)):
        assert said[0] == kind
        assert text.replace("(2,", "(0,") in said[1] if rank == 3 else text in said[1]
        assert afterwards is None


def test_a_rank_whose_shared_experts_do_not_fit_tells_the_others(ranks):
    text = "shared.w_in must have the dtype of the rows (torch.float32), got torch.bfloat16"
    assert_one_rank_fails(ranks.run(mistakes.wrong_parameters, wrong="shared dtype"), "TypeError", text)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ("weights", "ValueError", "weights must have the shape of experts ((3, 2)), got (3, 1)"),
        ("tokens", "ValueError", "experts must have size 3 (T of x)"),
        ("dtype", "TypeError", "experts must have dtype int32 or int64, got torch.float32"),
    ],
)
def test_a_rank_whose_router_makes_wrong_choices_tells_the_others(ranks, change, kind, text):
    assert_one_rank_fails(ranks.run(mistakes.wrong_choices, change=change), kind, text)


@pytest.mark.parametrize("options", [{}, {"chunks": 2}, {"deduplicate": True}], ids=str)
def test_a_rank_that_chooses_an_expert_that_does_not_exist_tells_the_others(ranks, options):
    """In chunks and in padded rows expert -1 was the last one, and with deduplication another rank raised."""
    assert_one_rank_fails(
        ranks.run(mistakes.wrong_choices, change="indices", **options), "IndexError", "experts must lie in"
    )


def test_padded_rows_take_no_expert_that_does_not_exist(ranks):
    for kind, text, *_ in ranks.run(mistakes.wrong_index_in_padded_rows):
        assert kind == "IndexError"
        assert "experts must lie in" in text


def test_a_gate_of_another_router_may_have_another_load_and_dtype(ranks):
    """Others waited for the rows that the load announced, and for the bytes of weights in their own dtype."""
    assert all(distance < 1e-2 for distance in ranks.run(mistakes.gates_of_others))


@pytest.mark.parametrize(("returned", "seen"), [("nothing", "NoneType"), ("a column", r"\(3, 1\)")])
def test_what_replaced_shared_experts_return_is_checked(ranks, returned, seen):
    for kind, text, *_ in ranks.run(mistakes.wrong_shared, returned=returned):
        assert kind == "ValueError"
        assert re.search(f"shared experts must return rows .* got {seen}", text)


def test_weights_of_other_losses_are_checked(ranks):
    for kind, text, *_ in ranks.run(mistakes.wrong_weights):
        assert kind == "TypeError"
        assert "weights must not have dtype float64 for x of torch.float32" in text


def test_an_activation_that_does_not_exist_is_refused_before_rows_travel(ranks):
    for said, afterwards in ranks.run(mistakes.unknown_activation):
        assert said[0] == "ValueError"
        assert "MoE: experts.activation must be" in said[1]
        assert afterwards is None


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes are of Python 3.11")
def test_an_error_after_the_announcement_says_that_others_wait(ranks):
    for (note,), afterwards in ranks.run(mistakes.late_error):
        assert "this rank had sent its counts already; other ranks" in note
        assert afterwards is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("many", "which layer they call, got rank 0: 'few', rank 1: 'few', rank 2: 'many', rank 3: 'few'"),
        ("model", "which layer they call, got rank 0: 'few'"),
        ("capacity", "its capacity_factor, got rank 0: 1.25, rank 1: 1.25, rank 2: None, rank 3: 1.25"),
        ("top_k", "its top_k, got rank 0: 2, rank 1: 2, rank 2: 3, rank 3: 2"),
        (
            "scale",
            "the options of its router, experts and losses, got rank 0: score='softmax', renormalize=True, scale",
        ),
        ("activation", "num_groups=None, topk_groups=None, bias_update_rate=0.0, activation='swiglu'"),
        ("loss", "activation='swiglu', aux_loss_coef=0.0, z_loss_coef=0.0"),
        ("frozen", "rank 1: w_in and w_out, rank 2: w_out, rank 3: w_in and w_out"),
    ],
)
def test_ranks_in_unequal_calls_all_raise(ranks, wrong, text):
    for said, afterwards in ranks.run(mistakes.unequal_calls, wrong=wrong):
        kind, seen, who = said
        assert kind == "GroupError"
        if wrong == "model":  # the model's number depends on how many models other tests have created
            assert "rank 2: 'few' of model " in seen
        else:
            assert text in without_models(seen)
        assert who == [WRONG]
        assert afterwards is None


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("order", "ValueError", "mesh must list its ranks in the order of their group, [0, 1, 2, 3], got [2, 0, 1, 3]"),
        ("hook", "ValueError", "Experts that nothing is attached to"),
        ("hook", "ValueError", "got 'few' with hooks; remove it first"),
        ("experts' forward", "ValueError", "got 'few' with a forward of its own; remove it first"),
        ("layer's forward", "ValueError", "got 'few' with a forward of its own; remove it first"),
        ("scores", "ValueError", "since tokens travel as they are, got 'few' with score_before_experts=True"),
        ("no module", "TypeError", "shard: model must be a module, got NoneType"),
    ],
)
def test_what_would_lose_its_effect_is_refused(ranks, what, kind, text):
    for said in ranks.run(mistakes.refused, what=what):
        assert said[0] == kind
        assert text in said[1]


@pytest.mark.parametrize("what", ["mesh", "group"])
def test_a_rank_outside_of_the_ranks_is_told_so(ranks, what):
    inside = [None, None]
    *first, third, fourth = ranks.run(mistakes.refused, what=f"outside the {what}")
    assert first == inside
    for rank, said in ((2, third), (3, fourth)):
        assert said[0] == "ValueError"
        assert "shard: mesh must have this rank, got " in said[1]
        assert f"rank {rank}" in said[1]


def test_a_process_without_a_group_is_told_what_to_call():
    kind, text, _ = mistakes.no_group()
    assert kind == "TypeError"
    assert "got None; call init_process_group first" in text


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("no module", "rank 2 of the group failed: TypeError: shard: model must be a module, got NoneType"),
        ("order of rows", "the same layer 'few', got checksum of router.weight "),
        ("order of shared rows", "the same layer 'few', got checksum of shared.w_in "),
        ("gate", "the same layer 'few', got checksum of shared.w_gate "),
        ("bias", "the same layer 'few', got checksum of router.bias "),
        ("expert bias", "the same layer 'few', got checksum of router.expert_bias "),
    ],
)
def test_one_rank_with_another_model_is_noticed_by_all(ranks, wrong, text):
    for rank, (kind, said, who) in enumerate(ranks.run(mistakes.refused_by_all, wrong=wrong)):
        if rank == WRONG and wrong == "no module":
            assert (kind, said) == ("TypeError", "shard: model must be a module, got NoneType")
        else:
            assert kind == "GroupError"
            assert text in said
            assert who == ([0] if rank == WRONG else [WRONG])


def test_equal_routers_with_nan_are_equal(ranks):
    assert ranks.run(mistakes.refused_by_all, wrong="nothing") == [None] * 4


def test_a_model_that_has_been_called_can_be_saved_whole(ranks):
    assert all(ranks.run(mistakes.saved_whole))
