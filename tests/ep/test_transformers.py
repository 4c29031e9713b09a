"""Experts of transformers on 1 to 4 ranks equal those in one process that has the tokens of all ranks.

Outputs and gradients of hidden states, of weights of choices and of experts are equal bit for bit, with the exceptions
of clones and of deduplication that :func:`pymoe.ep.shard` names.
"""

import sys
from pathlib import Path

import experts_modules
import pytest
from failures import WRONG

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "transformers"))

from experts_classes import experts_classes

FEW = ["MixtralExperts", "GptOssExperts", "NemotronHExperts", "AriaExperts", "DeepseekV4Experts"]
"""Classes with and without a gate, with biases, with transposed weights, and with a clamped gate."""
REFUSED = {"MuseSparkExperts"}
"""Classes with a norm after every expert."""
EXACT = [{"over": 1}, {"over": 2}, {"over": 3}, {"over": 4, "chunks": 2}, {"over": 3, "dtype": "bfloat16"}]
PADDED = {"over": 3, "chunks": 2, "transport": "padded", "room": 400}


def equal(ranks, function, **options):
    """Assert that nothing differs on any rank."""
    found = {rank: one for rank, one in enumerate(ranks.run(function, **options)) if one}
    assert not found


@pytest.mark.thinned(usual=11)
@pytest.mark.parametrize("way", [*EXACT, PADDED], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_experts_on_ranks_have_the_bits_of_one_process(ranks, name, way):
    equal(ranks, experts_modules.one, name=name, **way)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [one.name for one in experts_classes() if one.name not in REFUSED])
def test_all_classes_have_the_bits_of_one_process(ranks, name, dtype):
    equal(ranks, experts_modules.one, name=name, over=3, dtype=dtype)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(
    ("bits", "format", "way"),
    [
        (4, "int", {"over": 2}),
        (8, "int", {"over": 3, "chunks": 2, "dtype": "bfloat16"}),
        (4, "mxfp", {"over": 4}),
        (8, "fp", PADDED),
    ],
    ids=str,
)
def test_quantised_experts_on_ranks_have_the_bits_of_one_process(ranks, name, bits, format, way):
    equal(ranks, experts_modules.quantised, name=name, bits=bits, format=format, **way)


@pytest.mark.parametrize("name", FEW[:2])
def test_clones_change_gradients_of_experts_by_rounding_alone(ranks, name):
    for found in ranks.run(experts_modules.one, name=name, over=4, clones=2, min_rows_to_clone=1):
        assert found
        assert max(found.values()) < 1e-6
        assert not {"y", "dx", "dweights"} & found.keys()


@pytest.mark.parametrize("name", FEW[:2])
def test_deduplicated_rows_change_outputs_and_gradients_of_inputs_by_rounding_alone(ranks, name):
    found = ranks.run(experts_modules.one, name=name, over=4, deduplicate=True)
    assert any(found)
    for one in found:
        assert one.keys() <= {"y", "dx"}
        assert max(one.values(), default=0) < 1e-6


def test_ranks_without_experts(ranks):
    equal(ranks, experts_modules.few_experts)


@pytest.mark.parametrize("name", FEW[:2])
def test_experts_that_moved_have_the_bits_of_one_process(ranks, name):
    equal(ranks, experts_modules.moved, name=name, over=3)


@pytest.mark.parametrize("how", ["copied", "by keyword", "checkpointed", "compiled", "hooked"])
def test_a_spread_module_is_used_like_another(ranks, how):
    equal(ranks, experts_modules.used, how=how)


def test_modules_that_share_a_parameter_still_share_it(ranks):
    assert ranks.run(experts_modules.shared) == [[[], True]] * 4


def test_pickles_have_the_class_of_transformers(ranks):
    assert all(ranks.run(experts_modules.pickled))


@pytest.mark.parametrize("name", FEW[:2])
def test_autocast(ranks, name):
    assert all(ranks.run(experts_modules.autocast, name=name))


@pytest.mark.thinned(usual=4)
@pytest.mark.parametrize(("shape", "kind"), [((4,), "ddp"), ((2, 2), "ddp"), ((2, 2), "fsdp"), ((4,), "fsdp")])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_training_steps_equal_those_of_one_process(ranks, name, shape, kind):
    for loss, norm, parameters, trained in ranks.run(experts_modules.trained, name=name, shape=shape, kind=kind):
        assert max(loss, norm) < 1e-9
        assert parameters < 1e-6  # AdamW divides by small gradients
        assert trained > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({one.model for one in experts_classes() if one.name not in REFUSED}))
def test_whole_models_equal_one_process(ranks, name):
    assert max(ranks.run(experts_modules.whole_model, name=name)[:2]) < 1e-5


def test_ranks_that_stop_at_different_lengths_generate_the_tokens_of_one_process(ranks):
    assert all(ranks.run(experts_modules.generated))


def test_a_checkpoint_is_loaded_on_another_number_of_ranks(ranks, tmp_path):
    ranks.run(experts_modules.saved, folder=str(tmp_path), over=3)
    for number in (1, 2, 4):
        equal(ranks, experts_modules.loaded, folder=str(tmp_path), over=number)


def test_the_state_dict_of_a_whole_model_is_loaded(ranks):
    equal(ranks, experts_modules.takes_whole_state)


def test_save_pretrained_takes_a_whole_state_dict(ranks, tmp_path):
    for (kind, text, _), differing in ranks.run(experts_modules.pretrained, folder=str(tmp_path)):
        assert kind == "ValueError"
        assert "has only this rank's experts; call get_model_state_dict(" in text
        assert not differing


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("eager", "ValueError", "must run with experts_implementation='pymoe', got 'eager'; call model.set_experts_"),
        ("eager later", "ValueError", "must run with experts_implementation='pymoe', got 'eager'"),
        ("twice", "ValueError", "layers must not be sharded yet, got 'experts' on 4 ranks"),
        ("outside", "ValueError", "behind transformers' interface, got those of Llama4TextMoe, which are outside"),
        ("no experts", "ValueError", "must hold a pymoe.nn.MoE, or experts of transformers (which are found once"),
        (
            "quantised by others",
            "ValueError",
            "in tensors or quantised by pymoe, got MixtralExperts with others",
        ),
        ("clones of quantised", "ValueError", "clones must be 0 for quantised experts, got 1 and 'experts'"),
        ("quantised ones that move", "ValueError", "experts must not be quantised, got those of 'experts'"),
        ("quantised later", "ValueError", "with weights that are spread over ranks"),
        ("norm", "ValueError", "no norm after every expert, got MuseSparkExperts, which has post_expert_norm"),
        ("transformers' own", "ValueError", "got MixtralExperts with transformers' own expert or tensor parallelism"),
        ("transformers' own model", "ValueError", "got ModuleDict with transformers' own expert or tensor parallelism"),
        ("scope", "ValueError", "scope must be 'rank' for experts of transformers"),
        ("forward", "ValueError", "got 'experts' with a forward of its own"),
        ("tied", "ValueError", "must share no parameters with other modules, got 'experts' with 'other.0'"),
        ("fsdp", "ValueError", "parameters that are spread over ranks already"),
        ("parametrized", "ValueError", "must have only the parameters gate_up_proj and down_proj, got 'experts' with"),
        ("dtypes", "TypeError", "must have parameters of one floating dtype, got 'experts' with float32, bfloat16"),
        ("adapter", "ValueError", "must have experts that nothing adapts, got 'experts' with an adapter"),
        ("optimizer", "RuntimeError", "an optimizer must be made after pymoe.ep.shard"),
    ],
)
def test_what_cannot_be_spread_is_refused(ranks, what, kind, text):
    for said in ranks.run(experts_modules.refused, what=what):
        assert said[0] == kind
        assert text in said[1]


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("index", "IndexError", "experts must lie in [0, E) (E = 8), got "),
        ("activation", "GroupError", "must agree on the options of its router, experts and"),
        ("width", "ValueError", "hidden_states must have size 48 (H of the experts)"),
        ("frozen", "GroupError", "which parameters of its experts need gradients"),
        ("another model", "GroupError", "all ranks of the group must have the same layer 'experts', got options"),
    ],
)
def test_a_mistake_of_one_rank_is_told_to_all(ranks, what, kind, text):
    for rank, (found, said, _) in enumerate(ranks.run(experts_modules.refused, what=what)):
        assert found == (kind if rank == WRONG else "GroupError")
        assert text in said


def test_the_biases_of_balancing_stay_with_ddp(ranks):
    """Every rank has all of them, so DDP keeps them equal, as it does with other buffers."""
    assert ranks.run(experts_modules.left_to_ddp) == [["down_proj", "gate_up_proj"]] * 4
