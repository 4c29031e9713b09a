"""Gradients over a mesh of ranks equal the gradients of one process: with DDP and with FSDP, accumulated, scaled and
clipped.
"""

import parallel
import pytest

SHAPES = [(2, 2), (1, 4), (4,), (4, 1)]


@pytest.mark.thinned(usual=6)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_mean_loss(ranks, shape, kind, micro_batches):
    for error in ranks.run(parallel.gradients, shape=shape, kind=kind, micro_batches=micro_batches):
        assert error < 1e-12


@pytest.mark.parametrize(("shape", "kind"), [((4,), "ddp"), ((2, 2), "ddp"), ((2, 2), "fsdp")])
def test_gradients_of_experts_with_clones_are_those_of_the_mean_loss(ranks, shape, kind):
    for error in ranks.run(parallel.gradients, shape=shape, kind=kind, micro_batches=2, clones=1):
        assert error < 1e-12


@pytest.mark.parametrize("way", [{"deduplicate": True}, {"transport": "padded", "room": 200}])
@pytest.mark.parametrize(("shape", "kind"), [((2, 2), "ddp"), ((2, 2), "fsdp"), ((4,), "fsdp")])
def test_gradients_with_another_exchange_are_those_of_the_mean_loss(ranks, shape, kind, way):
    for error in ranks.run(parallel.gradients, shape=shape, kind=kind, micro_batches=2, **way):
        assert error < 1e-12


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("shape", [(2, 2), (4,)])
def test_gradients_in_float32_are_those_of_the_mean_loss(ranks, shape, kind):
    assert max(ranks.run(parallel.one_step, shape=shape, kind=kind, dtype="float32")) < 1e-5


@pytest.mark.parametrize(
    ("replaced", "shape", "kind"),
    [
        ("cast", (4,), "ddp"),
        ("cast", (2, 2), "ddp"),
        ("cast", (4,), "fsdp"),
        ("loaded", (2, 2), "ddp"),
        ("loaded", (4,), "fsdp"),
        ("memory", (4,), "fsdp"),
        ("memory", (2, 2), "fsdp"),
        ("thawed", (2, 2), "ddp"),
        ("thawed", (4,), "fsdp"),
    ],
)
def test_gradients_are_means_also_of_parameters_that_were_replaced_or_thawed(ranks, replaced, shape, kind):
    assert max(ranks.run(parallel.one_step, shape=shape, kind=kind, replaced=replaced)) < 1e-12


@pytest.mark.parametrize(("shape", "kind"), [((4,), "ddp"), ((2, 2), "ddp"), ((4,), "fsdp")])
def test_gradients_of_a_weight_that_layers_share_are_divided_once(ranks, shape, kind):
    assert max(ranks.run(parallel.one_step, shape=shape, kind=kind, tied=True)) < 1e-12


def test_experts_spread_over_a_process_group_are_cut_further(ranks):
    assert max(ranks.run(parallel.spread_over_a_group)) < 1e-12


@pytest.mark.parametrize(("shape", "clones"), [((2, 2), 0), ((1, 4), 0), ((2, 2), 1)])
def test_fsdp_casts_experts_as_the_rest(ranks, shape, clones):
    for error, dtypes in ranks.run(parallel.mixed_precision, shape=shape, clones=clones):
        assert error < 0.1
        assert set(dtypes) == {"torch.float32"}


def test_what_the_model_tells_ddp_to_ignore_stays_ignored(ranks):
    for is_own, is_mean in ranks.run(parallel.ignored_by_ddp):
        assert is_own
        assert is_mean


def test_packed_dense_weights_are_compared_once_and_not_sent_in_every_forward(ranks):
    """They are buffers, and DDP sent all of them before every forward."""
    assert ranks.run(parallel.dense_in_few_bits, differ=False) == [0, 1, 2, 3]
    for said in ranks.run(parallel.dense_in_few_bits, differ=True):
        assert "data_parallel: all ranks of the group must have the same checksum of '0.packed'" in said


def test_gradients_accumulate_where_every_backward_pass_sums_over_ranks(ranks):
    assert max(ranks.run(parallel.accumulated_with_every_sum)) < 1e-12


def test_ranks_with_the_same_experts_sum_their_gradients_once_a_step(ranks):
    for with_sums, without, parameters in ranks.run(parallel.sums_over_twins):
        assert (with_sums, without) == (parameters, 0)


@pytest.mark.thinned(usual=3)
@pytest.mark.parametrize("clip", [0.1, 1e9])
@pytest.mark.parametrize(("shape", "kind"), [((2, 2), "ddp"), ((2, 2), "fsdp"), ((4,), "fsdp")])
def test_steps_with_clipping_and_expert_biases_are_those_of_one_process(ranks, shape, kind, clip):
    for norms, parameters, biases in ranks.run(parallel.training, shape=shape, kind=kind, clip=clip):
        assert norms < 1e-10
        assert parameters < 1e-8
        assert biases


def test_the_mean_over_ranks_of_a_groups_losses_is_that_of_all_tokens(ranks):
    for error, without_losses in ranks.run(parallel.scaled_losses):
        assert error < 1e-12
        assert without_losses > 1e-3, "the losses have gradients that are seen"


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("norm_type", ["2", "1", "3", "inf"])
def test_clipping_over_meshes_is_that_of_one_process(ranks, norm_type, max_norm):
    for norm, gradients, expected in ranks.run(parallel.clipped, norm_type=norm_type, max_norm=max_norm):
        assert norm < 1e-9 * expected
        assert gradients < 1e-9


def test_clipping_over_stages_of_a_pipe(ranks):
    total = 3 * (1 + 4 + 9 + 16)
    for rank, (squared, gradient) in enumerate(ranks.run(parallel.clipped_over_stages)):
        assert squared == pytest.approx(total)
        assert gradient == pytest.approx([(rank + 1) / total**0.5] * 3, rel=1e-6)


def test_a_norm_that_is_not_finite_is_refused_where_asked_for(ranks):
    for said in ranks.run(parallel.not_finite):
        assert said == "clip_grad_norm_: the norm of order 2.0 must be finite, got nan"


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        (
            "other ranks",
            "ValueError",
            "data_parallel: the last dimension of mesh must be the ranks over which layers are",
        ),
        ("no mesh", "TypeError", "data_parallel: mesh must be a DeviceMesh, got ProcessGroup"),
        (
            "not sharded",
            "ValueError",
            "data_parallel: model must hold a layer sharded before, got a Sequential without",
        ),
        ("kind", "ValueError", "data_parallel: kind must be one of 'ddp', 'fsdp', got 'zero'"),
        ("twice", "ValueError", "data_parallel: model must not have been given to it before, as '1.0.experts' has"),
        (
            "wrapped",
            "ValueError",
            "data_parallel: model must not have been given to it before, as 'module.1.0.experts' has",
        ),
        ("turned", "ValueError", "data_parallel: the last dimension of mesh must be "),
        ("group", "TypeError", "data_parallel: the ranks must be given only by mesh, got process_group, too"),
        ("no modules", "TypeError", "data_parallel: blocks must be modules, got str"),
        ("one module", "TypeError", "data_parallel: blocks must be several modules, got Linear"),
        ("module of another", "ValueError", "data_parallel: blocks must be modules of model, got a Linear of another"),
        (
            "cast on one dimension",
            "ValueError",
            "data_parallel: mesh must have two dimensions, such as (1, 4), for an mp",
        ),
        ("no expert on a rank", "ValueError", "data_parallel: every rank must have experts with kind='fsdp' and this"),
        ("blocks", "ValueError", "data_parallel: blocks must be empty with kind='ddp', got 1"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, what, kind, text):
    for said in ranks.run(parallel.refused, what=what):
        assert said[0] == kind
        assert text in said[1]


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("a module", "TypeError", "parameters must be tensors, got Linear"),
        ("modules", "TypeError", "parameters must be tensors, got Linear"),
        (("1", 2.0), "TypeError", "max_norm must be a number, got str"),
        ((-1.0, 2.0), "ValueError", "max_norm must be at least 0, got -1.0"),
        ((1.0, "inf"), "TypeError", "norm_type must be a number, got str"),
        ((1.0, 0), "ValueError", "norm_type must be above 0, got 0"),
        ((1.0, -1.0), "ValueError", "norm_type must be above 0, got -1.0"),
        ((1.0, float("nan")), "ValueError", "norm_type must be above 0, got nan"),
    ],
)
def test_clipping_refuses_what_is_no_parameter_or_number(what, kind, text):
    assert parallel.clip_refused(0, 1, what) == [kind, f"clip_grad_norm_: {text}"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_with_the_same_experts_start_from_those_of_the_first(ranks, kind):
    """With a different seed on each rank, copies of an expert stayed different, and so did their outputs."""
    for row, differed, right in ranks.run(parallel.twins, kind=kind):
        assert differed == (row == 1)
        assert right


def test_nothing_is_sent_where_ddp_is_told_so(ranks):
    assert all(right for _, _, right in ranks.run(parallel.twins, kind="ddp", init_sync=False))


def test_ranks_whose_twins_have_other_experts_are_told(ranks):
    for said in ranks.run(parallel.other_twins):
        assert (
            "data_parallel: all ranks of the group must have the same layer 'experts', got options hidden_size" in said
        )


def test_an_optimizer_from_before_the_model_was_sharded_is_noticed(ranks):
    """The optimizer kept the parameters from before sharding, and the experts never trained."""
    for said in ranks.run(parallel.early_optimizer):
        assert "SGD: an optimizer must be made after pymoe.ep.shard" in said


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_norm_of_16_bit_gradients_is_not_rounded_to_16_bits(ranks, dtype):
    assert max(ranks.run(parallel.norm_of_16_bits, dtype=dtype)) < 1e-6
