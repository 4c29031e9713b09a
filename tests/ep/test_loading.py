"""``from_pretrained`` onto ranks: each reads its own experts alone, and the model is the one that one process reads."""

import sys
from pathlib import Path

import loaded_parts
import pytest
from failures import WRONG
from test_transformers import REFUSED
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "transformers"))

import integer_files
from experts_classes import experts_classes

from benchmarks.layers.checkpoints import write_checkpoint, write_gpt_oss, write_qwen3_moe
from pymoe.integrations.transformers import PymoeConfig

FEW = ["mixtral", "gpt_oss", "nemotron_h", "qwen3_moe"]
"""Files with a tensor for each expert, with stacked and transposed weights and biases, and without a gate."""
SLACK = 16 << 20
"""Allowance in bytes for memory other than weights."""


def same(found):
    """Assert that every rank has read a model with the weights and outputs of one process."""
    for one in found:
        if one is not None:
            assert one[0] == []
            assert one[1] > 0


@pytest.mark.parametrize("over", [2, 3])
@pytest.mark.parametrize("name", FEW)
def test_ranks_read_the_model_that_one_process_reads(ranks, tmp_path, name, over):
    same(ranks.run(loaded_parts.read, name=name, folder=str(tmp_path), over=over))


def test_files_with_stacked_experts(ranks, tmp_path):
    same(ranks.run(loaded_parts.read, name="mixtral", folder=str(tmp_path), over=3, stacked=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({one.model for one in experts_classes() if one.name not in REFUSED}))
def test_all_models_are_read_as_in_one_process(ranks, tmp_path, name):
    same(ranks.run(loaded_parts.read, name=name, folder=str(tmp_path), over=3))


@pytest.mark.parametrize("name", FEW[:2])
def test_a_rank_without_experts_reads_none(ranks, tmp_path, name):
    assert ranks.run(loaded_parts.few_experts, folder=str(tmp_path), name=name) == [[[], 1], [[], 1], [[], 0], [[], 0]]


@pytest.mark.parametrize("name", FEW[:2])
def test_what_ranks_have_read_is_saved_as_it_was(ranks, tmp_path, name):
    folders = {"folder": str(tmp_path / "first"), "again": str(tmp_path / "again")}
    assert ranks.run(loaded_parts.saved_again, name=name, **folders) == [[]] * 4


MIXTRAL = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 5, "num_hidden_layers": 2}
MIXTRAL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "num_experts_per_tok": 2}
QWEN = {"layers": 2, "hidden": 128, "ffn": 64, "experts": 5, "vocabulary": 128, "choices": 2}
GPT_OSS = {"layers": 2, "hidden": 128, "ffn": 128, "experts": 5, "vocabulary": 128, "choices": 2}


def write_packed(folder):
    """Write what a model saves that was quantised while it was read."""
    write_qwen3_moe(folder / "whole", **QWEN)
    config = PymoeConfig(bits=4, linear_bits=8)
    model = AutoModelForCausalLM.from_pretrained(folder / "whole", quantization_config=config)
    model.save_pretrained(folder / "packed")
    return folder / "packed"


def write_published(kind, folder):
    """Write a folder in a format, and return it and what must be passed to read it."""
    if kind == "while read":
        write_qwen3_moe(folder / "whole", **QWEN)
        return folder / "whole", {"bits": 4, "linear_bits": 8}
    if kind == "saved":
        return write_packed(folder), None
    if kind == "mxfp4":
        write_gpt_oss(folder / "published", **GPT_OSS)
        return folder / "published", {"bits": 4, "format": "mxfp"}
    published, _ = integer_files.write(folder, MixtralConfig(**MIXTRAL), kind, 4, 128)
    return published, {"bits": 4, "format": "affine"}


@pytest.mark.parametrize("over", [2, 3])
@pytest.mark.parametrize("kind", ["while read", "saved", "mxfp4", "gptq", "compressed"])
def test_quantised_experts_are_read_by_parts(ranks, tmp_path, kind, over):
    folder, config = write_published(kind, tmp_path)
    same(ranks.run(loaded_parts.read_packed, folder=str(folder), over=over, config=config))


@pytest.mark.parametrize("kind", ["while read", "saved"])
def test_a_rank_without_quantised_experts(ranks, tmp_path, kind):
    """Five experts on four ranks are two, two, one and none."""
    folder, config = write_published(kind, tmp_path)
    same(ranks.run(loaded_parts.read_packed, folder=str(folder), over=4, config=config))


def write_stacked(folder, layers, hidden, ffn, experts, vocabulary):
    """Write a GPT-OSS in bfloat16, whose files have stacked experts; return the bytes of all weights."""
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_local_experts": experts, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0}
    return write_checkpoint(folder, GptOssConfig(num_hidden_layers=layers, **sizes, **heads))


def test_packed_experts_are_saved_as_they_were(ranks, tmp_path):
    folders = {"folder": str(write_packed(tmp_path)), "again": str(tmp_path / "again")}
    assert ranks.run(loaded_parts.packed_again, **folders) == [[]] * 4


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(("write", "dtype"), [(write_qwen3_moe, "bfloat16"), (write_stacked, "float32")])
def test_a_rank_needs_memory_for_its_share_and_one_layer(ranks, tmp_path, write, dtype):
    """Stacked weights of the files' own dtype would stay in the mapped files, and take no memory of the process."""
    folder = tmp_path / "whole"
    sizes = {"layers": 6, "hidden": 512, "ffn": 256, "experts": 24, "vocabulary": 512}
    width = {"bfloat16": 2, "float32": 4}[dtype]
    whole = write(folder, **sizes) * width // 2
    layer = 3 * sizes["experts"] * sizes["ffn"] * sizes["hidden"] * width
    for found in ranks.run(loaded_parts.memory, folder=str(folder), dtype=dtype)[:3]:
        peak, own, peak_of_whole = found
        assert own < whole // 3 + layer // 3
        assert peak < own + layer // 3 + SLACK
        assert peak_of_whole > own + layer + SLACK, "the counter sees a whole model"


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("nothing", "ValueError", "from_pretrained must load a model in the context, got none"),
        ("two", "ValueError", "one model must be loaded in the context, got MixtralForCausalLM and MixtralForCausalLM"),
        ("eager", "ValueError", "must run with experts_implementation='pymoe', got "),
        ("quantised", "ValueError", "experts for ranks that pymoe or nobody quantises, got a Mxfp4HfQuantizer"),
        ("another checkpoint", "GroupError", "all ranks of the group must have the same weight 'model.norm.weight'"),
    ],
)
def test_what_cannot_be_read_by_parts_is_refused(ranks, tmp_path, what, kind, text):
    for said in ranks.run(loaded_parts.refused, folder=str(tmp_path), what=what):
        assert said[0] == kind
        assert text in said[1]


@pytest.mark.parametrize(
    ("what", "wrong", "text"),
    [
        ("no folder", WRONG, "Repo id must"),
        ("damaged experts", 3, "for every expert of the model, got none"),
        ("wrong sizes", 0, "for every expert of the model, got none"),
    ],
)
def test_a_rank_that_cannot_read_tells_the_others(ranks, tmp_path, what, wrong, text):
    for rank, said in enumerate(ranks.run(loaded_parts.refused, folder=str(tmp_path), what=what)):
        assert (said[0] == "GroupError") == (rank != wrong), said
        assert text in said[1], said
        assert rank == wrong or f"rank {wrong} of the group failed" in said[1]
