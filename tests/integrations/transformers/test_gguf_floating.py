"""GGUF files whose experts are in floating point: they take the model's dtype, next to others in few bits."""

import re
import warnings

import pytest
import torch
from specs.comparison import assert_same_bits
from test_quantizer import assert_same_model, logits
from transformers import AutoModelForCausalLM

from pymoe.quantize import main

pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # transformers asks for it
import gguf_models
from test_gguf_files import assert_holds, distance, layers_of, read, resaved

pytestmark = pytest.mark.only_on("cpu")

FLOATING = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])
@pytest.mark.parametrize("name", FLOATING)
def test_experts_in_floating_point_take_the_dtype_of_the_model(name, architecture, tmp_path):
    path = tmp_path / "x.gguf"
    config, expected, _ = gguf_models.write(path, architecture, lambda one: "Q4_K" if ".1." in one else name)
    wide = dict(expected.named_parameters())
    for dtype in FLOATING.values():
        holds = dtype in (torch.float32, FLOATING[name])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = read(path, config, dtype=dtype)
        texts = [str(one.message) for one in caught if "rounded" in str(one.message)]
        assert len(texts) == (0 if holds else 1)
        if not holds:
            counted = rf"2 of 4 weights of experts are rounded to the dtype of the model, {dtype}: 2 in {name}; the "
            assert re.search(rf"{counted}first is 'blk.0.ffn_gate_exps.weight'", texts[0])
        assert {layer.format for layer in layers_of(model).values()} == {"int"}
        assert {name.split(".")[2] for name in layers_of(model)} == {"1"}
        for own in ("gate_up_proj", "down_proj"):
            weight = model.get_parameter(f"model.layers.0.mlp.experts.{own}")
            assert weight.is_contiguous()
            assert_same_bits(weight.detach(), wide[f"model.layers.0.mlp.experts.{own}"].detach().to(dtype), own)
        if dtype == torch.float32:
            assert_holds(model, expected)
            assert distance(logits(model), logits(expected)) < 5e-4
        model.save_pretrained(tmp_path / str(dtype), max_shard_size="1MB")
        assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / str(dtype)), model)


def test_a_file_without_any_quantised_weight_keeps_its_16_bits(tmp_path):
    path = tmp_path / "in" / "x.gguf"
    path.parent.mkdir()
    config, expected, _ = gguf_models.write(path, "qwen3moe", "BF16", dense="BF16", moe_intermediate_size=768)
    model = read(path, config, dtype=torch.bfloat16)
    wide = dict(expected.named_parameters())
    assert main([str(path), str(tmp_path / "out")]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16, "the file alone says it"
    for one in (model, again):
        assert not layers_of(one)
        for name, parameter in one.named_parameters():
            assert_same_bits(parameter.detach(), wide[name].detach().bfloat16(), name)


def test_gate_and_up_may_be_in_different_types_of_16_bits(tmp_path):
    path = tmp_path / "x.gguf"
    config, expected, _ = gguf_models.write(
        path, "qwen3moe", lambda name: "F16" if "gate" in name else "BF16", num_hidden_layers=1
    )
    assert_holds(read(path, config), expected)


def test_weights_of_one_network_are_both_packed_or_both_not(tmp_path):
    path = tmp_path / "x.gguf"
    config, expected, _ = gguf_models.write(
        path, "qwen3moe", lambda name: "BF16" if "down" in name else "Q4_K", num_hidden_layers=1
    )
    with pytest.warns(UserWarning, match=r"1 of 2 weights of experts are rounded to 8 bits, .*: 1 in BF16; the first"):
        model = read(path, config)
    assert [layer.bits for layer in layers_of(model).values()] == [4, 8]
    assert distance(logits(model), logits(expected)) < 1e-2


def test_a_folder_that_lacks_weights_in_floating_point_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    config, _, _ = gguf_models.write(path, "qwen3moe", lambda name: "Q4_K" if ".1." in name else "BF16")
    read(path, config).save_pretrained(tmp_path / "packed")
    name = "model.layers.0.mlp.experts.down_proj"
    resaved(tmp_path / "packed", lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"expected the checkpoint to have '{name}', got none"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
