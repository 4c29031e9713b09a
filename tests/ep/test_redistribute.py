"""redistribute moves experts and all that belongs to them, while training goes on as if they had stayed."""

import moved
import pytest

WAYS = [((4,), None, "adamw"), ((4,), "ddp", "momentum"), ((2, 2), "ddp", "adamw"), ((2, 2), "fsdp", "amsgrad")]


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize(("shape", "kind", "optimizer"), WAYS)
def test_training_goes_on_as_if_experts_had_stayed(ranks, shape, kind, optimizer):
    for (still, moving), differing, moves in ranks.run(moved.training, shape=shape, kind=kind, optimizer=optimizer):
        assert still == moving
        assert not differing
        assert moves == 3


def test_experts_may_have_several_optimizers(ranks):
    assert ranks.run(moved.several_optimizers) == [[]] * 4


def test_an_optimizer_that_is_made_later_may_load_a_state_before_its_first_step(ranks):
    assert ranks.run(moved.loaded_before_a_step) == [[[], 1]] * 4


def test_experts_move_where_fsdp_casts_and_keeps_whole_parameters(ranks):
    assert ranks.run(moved.mixed_precision) == [[]] * 4


def test_gradients_move_with_their_experts(ranks):
    assert ranks.run(moved.accumulated) == [[]] * 4


def test_a_placement_may_be_for_one_layer_or_for_all(ranks):
    for rank, (orders, same, text, own) in enumerate(ranks.run(moved.one_layer, placement="by name")):
        assert orders == [False, True]
        assert same
        assert f"own experts: {' and '.join(map(str, own)) if rank < 3 else 'none'}" in text or own[1] == own[0] + 1
    for orders, same, _, _ in ranks.run(moved.one_layer, placement="one"):
        assert orders == [True, True]
        assert same


@pytest.mark.parametrize("tied", [False, True])
def test_experts_shared_between_layers_move_together(ranks, tied):
    for one_order, same, said in ranks.run(moved.shared, tied=tied):
        assert one_order
        assert same
        assert said == "redistribute: layers that share parameters must have one placement, got two for '1.0' and '2'"


def test_a_copy_of_a_model_keeps_its_placement(ranks):
    assert all(ranks.run(moved.copied))


def test_a_call_that_fails_has_moved_nothing(ranks):
    for said, unchanged, works in ranks.run(moved.all_or_nothing):
        assert "experts that change their ranks did not arrive: a rank of the expert-parallel group has died" in said
        assert unchanged
        assert works


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("placement", "the same layer '1.0', got order of experts ("),
        (
            "replicas",
            "must have one rank in 0..3 for every expert, got [0, 1, 2, 3] for expert 0; for hot experts use shard(",
        ),
        ("optimizer", "got exp_avg of w_in "),
        ("gradients", "got gradient of w_in "),
    ],
)
def test_ranks_that_disagree_all_raise_and_move_nothing(ranks, wrong, text):
    for rank, (kind, said, unmoved) in enumerate(ranks.run(moved.disagreement, wrong=wrong)):
        assert kind == ("ValueError" if wrong == "replicas" and rank == 2 else "GroupError")
        assert text in said
        assert unmoved


def test_an_optimizer_that_was_left_out_raises_at_its_next_step(ranks):
    for (first, after, again), later in ranks.run(moved.left_out):
        assert first is None
        text = "an optimizer must be given to the call of redistribute that moves its experts, got AdamW with state"
        assert text in after
        assert text in again
        assert later is None


def test_files_of_an_optimizer_that_is_made_later_have_experts_in_their_order(ranks):
    assert ranks.run(moved.made_later) == [[]] * 4


def test_a_backward_pass_of_a_graph_from_before_raises(ranks):
    for said in ranks.run(moved.graph_from_before):
        assert "modified" in said
        assert "inplace" in said


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("experts", "ValueError", "placement of '1.0' must hold 6 experts on 4 ranks, got 8 on 4"),
        ("ranks", "ValueError", "placement of '1.0' must hold 6 experts on 4 ranks, got 6 on 3"),
        ("replicas", "ValueError", "must have one rank in 0..3 for every expert, got [0, 1] for expert 0; for hot"),
        ("rank", "ValueError", "must have one rank in 0..3 for every expert, got [7] for expert 0"),
        ("sizes", "ValueError", "must have [2, 2, 2, 0] experts on the ranks, as torch.chunk cuts them, got [2, 2, 1"),
        ("name", "ValueError", "placement must name layers of model, ['1.0', '2'], got '1'"),
        ("kind", "TypeError", "placement must be a Placement, or some by names of layers, got list"),
        ("optimizer", "TypeError", "optimizer must be an Optimizer, several or None, got str"),
        ("no layer", "ValueError", "model must hold a layer sharded before, got a Linear without"),
        ("no module", "TypeError", "model must be a module, got NoneType"),
        ("state", "ValueError", "must be numbers, or DTensors that are cut as the parameters are, got 'scales' of"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, what, kind, text):
    for said in ranks.run(moved.refused, what=what):
        assert said[0] == kind
        assert text in said[1]


def test_experts_that_fsdp_has_cut_are_initialised_as_in_one_process(ranks):
    assert ranks.run(moved.recut) == [[]] * 4


def test_experts_may_move_before_they_have_memory(ranks):
    assert ranks.run(moved.before_memory) == [[]] * 4


def test_experts_cut_by_hand_are_initialised_and_do_not_move(ranks):
    for wrong, said in ranks.run(moved.cut_by_hand):
        assert not wrong
        assert said.startswith("MoE: experts that fully_shard has cut must have been given to pymoe.ep.data_parallel")
