"""LoRA by rows on experts that are on ranks: outputs, gradients and files of one process."""

import adapted_parts
import pytest
from test_transformers import PADDED, equal

pytest.importorskip("peft")

FEW = ["MixtralExperts", "GptOssExperts"]
"""Classes without and with biases and transposed weights."""


@pytest.mark.parametrize("way", [{"over": 2}, {"over": 3, "chunks": 2}, {"over": 4, "several": True}, PADDED], ids=str)
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", FEW)
def test_adapters_on_ranks_have_the_bits_of_one_process(ranks, name, bits, way):
    equal(ranks, adapted_parts.one, name=name, bits=bits, **way)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_training_equals_one_process_and_files_are_pefts(ranks, tmp_path, name):
    for loss, adapters, tensors, outputs in ranks.run(
        adapted_parts.trained, name=name, folder=str(tmp_path), kind="ddp"
    ):
        assert loss < 1e-9
        assert adapters < 1e-6  # AdamW divides by small gradients
        assert tensors == 2 * 2 * 3  # in two layers, two factors for two weights of experts and one of attention
        assert outputs < 1e-9


def test_training_with_fsdp_equals_one_process(ranks, tmp_path):
    for loss, adapters in ranks.run(adapted_parts.trained, name="mixtral", folder=str(tmp_path), kind="fsdp"):
        assert loss < 1e-9
        assert adapters < 1e-6


def test_gradients_over_quantised_experts_equal_one_process(ranks):
    for error in ranks.run(adapted_parts.quantised_step):
        assert error < 1e-4


def test_a_model_is_read_by_parts_with_its_adapter(ranks, tmp_path):
    for apart, tensors in ranks.run(adapted_parts.read, folder=str(tmp_path)):
        assert apart < 1e-4
        assert tensors == 2 * 2 * 3


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("merge", "ValueError", "merge_adapter: expected experts on one rank, got 'experts"),
        ("clones", "ValueError", "experts with adapters must have no clones"),
        ("one rank without", "GroupError", "must agree on the options of its router, experts and"),
        ("one rank frozen", "GroupError", "must agree on the options of its router, experts and"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, what, kind, text):
    for said in ranks.run(adapted_parts.refused, what=what):
        assert said[0] == kind
        assert text in said[1]
