"""Checkpoints in FP8 with scales of blocks: PymoeConfig keeps all codes and scales bit for bit, or refuses.

The folders are made up: a tiny model's weights, rounded to FP8 here, in blocks that are cut short in every direction.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from specs.comparison import assert_same_bits
from test_quantizer import assert_dense_layers_are_rounded, logits
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import MergeModulelist, WeightConverter

from pymoe import ops
from pymoe.integrations.transformers import PymoeConfig, fp8_files
from pymoe.integrations.transformers.quantizer import PymoeQuantizer
from pymoe.nn import QuantizedDenseLinear, QuantizedLinear
from pymoe.quantize import main

pytestmark = pytest.mark.only_on("cpu")

CONFIG = PymoeConfig(bits=8, format="fp")
METHOD = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
EXPERT = "model.layers.1.mlp.experts.2"
FILE = "model.safetensors"


def stays(name):
    return not name.endswith("proj.weight")


def to_fp8(weight):
    """Return codes, and scales of blocks of 128 x 128."""
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[place].float().abs().max() / 448
            codes[place] = (weight[place].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def widened(codes, scales):
    return (
        codes.float()
        * scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
    )


@pytest.fixture
def folders(tmp_path):
    """Return folders of a tiny Qwen3-MoE in FP8, and of the same with all weights widened."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 160, "moe_intermediate_size": 144, "intermediate_size": 200, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 36}
    config = Qwen3MoeConfig(
        vocab_size=128, **sizes, **heads, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0], dtype="float32"
    )
    plain, published = tmp_path / "plain", tmp_path / "published"
    AutoModelForCausalLM.from_config(config).save_pretrained(plain)
    tensors = load_file(plain / FILE)
    assert f"{EXPERT}.gate_proj.weight" in tensors
    for name in [name for name in tensors if not stays(name)]:
        codes, scales = to_fp8(tensors[name])
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
    published.mkdir()
    save_file(tensors, published / FILE, metadata={"format": "pt"})
    wide = {
        name: widened(tensor, tensors[f"{name}_scale_inv"]) if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }
    save_file(wide, plain / FILE, metadata={"format": "pt"})
    entries = json.loads((plain / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**entries, "quantization_config": METHOD}))
    return published, plain


def read(folder, config=CONFIG, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


def test_every_code_and_scale_is_kept_and_other_weights_are_those_of_the_files(folders):
    published, plain = folders
    model, files = read(published), load_file(published / FILE)
    wide = load_file(plain / FILE)
    for name, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        layer = model.get_submodule(f"model.layers.1.mlp.experts.{name}")
        assert isinstance(layer, QuantizedLinear)
        assert layer.format == "fp"
        codes, scales = ops.unpack_weight(layer.weight)
        for expert in range(4):
            first = 0
            for own in projections:
                source = f"model.layers.1.mlp.experts.{expert}.{own}.weight"
                expected, blocks = files[source], files[f"{source}_scale_inv"]
                rows = slice(first, first + len(expected))
                assert torch.equal(codes[expert, rows].view(torch.uint8), expected.view(torch.uint8))
                assert_same_bits(scales[expert, rows], blocks.repeat_interleave(128, 0)[: len(expected)], source)
                first += len(expected)
    dense = {name: one for name, one in model.named_modules() if isinstance(one, QuantizedDenseLinear)}
    assert len(dense) == 4 * 2 + 3
    for name, layer in dense.items():
        assert layer.format == "fp"
        assert_same_bits(ops.dequantize_weight(layer.quantized_weight)[0], wide[f"{name}.weight"], name)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert_same_bits(parameter.detach(), wide[name], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_the_widened_model_does(folders, dtype):
    published, plain = folders
    model = read(published, dtype=dtype)
    assert model.dtype == dtype
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, experts_implementation="pymoe"))
    error = (logits(model).float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 3e-2)


def test_it_is_saved_and_mapped(folders, tmp_path):
    model = read(folders[0])
    model.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["format"]) == ("pymoe", 8, "fp")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_bits(logits(again), logits(model), "logits")


def test_the_format_of_the_files_need_not_be_known(folders):
    published, _ = folders
    assert_same_bits(logits(read(published, PymoeConfig(format="stored"))), logits(read(published)), "logits")


def test_dense_layers_are_rounded_with_linear_bits(folders):
    published, plain = folders
    model = read(published, PymoeConfig(bits=8, format="fp", linear_bits=8))
    assert assert_dense_layers_are_rounded(model, plain) == 4 * 2 + 3 + 1


def test_the_command_converts_a_folder(folders, tmp_path):
    assert main([str(folders[0]), str(tmp_path / "packed"), "--format=fp"]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_bits(logits(again), logits(read(folders[0])), "logits")


def without(tensors, name):
    del tensors[name]


def with_nan(tensors, name):
    tensors[name].view(torch.uint8)[3, 5] = 0x7F


def cut(tensors, name):
    tensors[name] = tensors[name][:1].clone()


def infinite(tensors, name):
    tensors[name][0, 0] = torch.inf


def plain(tensors, name):
    tensors[name] = tensors[name].float()


@pytest.mark.parametrize(
    ("change", "name", "match"),
    [
        (
            without,
            f"{EXPERT}.up_proj.weight_scale_inv",
            "got 'model.layers.1.mlp.experts.gate_up_proj': expected weight_scale_inv of 4 weights, got 3",
        ),
        (without, f"{EXPERT}.up_proj.weight", "gate_up_proj': expected weight_scale_inv of 3 weights, got 4"),
        (with_nan, f"{EXPERT}.down_proj.weight", "down_proj' to be numbers, got NaN"),
        (infinite, f"{EXPERT}.down_proj.weight_scale_inv", "down_proj' to be numbers, got NaN or an infinity"),
        (cut, f"{EXPERT}.down_proj.weight_scale_inv", r"down_proj': expected scales \(2, 2\) in float32, got \(1, 2\)"),
        (plain, f"{EXPERT}.down_proj.weight", "down_proj': expected float8_e4m3fn with _scale_inv, got torch.float32"),
        (
            without,
            "model.layers.0.mlp.up_proj.weight_scale_inv",
            "layers.0.mlp.up_proj.weight': expected float8_e4m3fn",
        ),
        (cut, "model.layers.0.self_attn.q_proj.weight_scale_inv", r"q_proj.weight': expected scales \(2, 2\)"),
        (with_nan, "model.layers.0.self_attn.q_proj.weight", "q_proj.weight' to be numbers, got NaN"),
        (infinite, "model.layers.0.self_attn.q_proj.weight_scale_inv", "q_proj.weight' to be numbers, got NaN"),
    ],
)
def test_files_that_do_not_fit_are_refused(folders, change, name, match):
    tensors = load_file(folders[0] / FILE)
    change(tensors, name)
    save_file(tensors, folders[0] / FILE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"from_pretrained: expected.*{match}"):
        read(folders[0])


@pytest.mark.parametrize(("change", "part"), [(with_nan, ""), (infinite, "_scale_inv")])
def test_so_are_weights_to_round_that_are_no_numbers(folders, change, part):
    tensors = load_file(folders[0] / FILE)
    change(tensors, f"model.layers.0.self_attn.q_proj.weight{part}")
    save_file(tensors, folders[0] / FILE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"q_proj.weight': expected numbers, got NaN or an infinity"):
        read(folders[0], PymoeConfig(bits=8, format="fp", linear_bits=8))


@pytest.mark.parametrize("inputs", [1, 33, 130])
def test_a_single_row_of_any_number_of_inputs(inputs):
    """Its scales follow the codes, at a byte that is no multiple of 4."""
    codes, scales = torch.randn(1, inputs).to(torch.float8_e4m3fn), torch.rand(1, -(-inputs // 128))
    parts = {"weight": codes, "weight_scale_inv": scales}
    layer = QuantizedLinear(inputs, 1, 1, bits=8, format="fp")
    layer.packed = fp8_files.STORED.packed_weight("weight", fp8_files.STORED.joined(parts)[None], layer)
    assert torch.equal(ops.dequantize_weight(layer.weight)[0], widened(codes, scales))
    assert torch.equal(fp8_files.STORED.widened(parts, torch.float32), widened(codes, scales))


@pytest.mark.parametrize("config", [PymoeConfig(bits=8), PymoeConfig(bits=4), PymoeConfig(bits=4, format="mxfp")])
def test_another_format_is_refused(folders, config):
    with pytest.raises(ValueError, match=r"expected PymoeConfig\(bits=8, format='fp'\) for a checkpoint in FP8"):
        read(folders[0], config)


@pytest.mark.parametrize(
    "change",
    [
        {"weight_block_size": [64, 64]},
        {"weight_block_size": None},
        {"weight_block_size": 128},
        {"expert_dtype": "fp4"},
    ],
)
def test_other_blocks_are_refused(folders, change):
    entries = json.loads((folders[0] / "config.json").read_text())
    entries["quantization_config"] = METHOD | change
    (folders[0] / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"expected a checkpoint in FP8 whose weight_block_size is \[128, 128\], got"):
        read(folders[0])


def test_a_weight_that_would_lose_its_scales_is_refused(folders, monkeypatch):
    """A converter of transformers that takes a part of a name, as that of Mistral 4, got codes without their scales."""
    published, _ = folders
    taking = WeightConverter(r"self_attn\.q_proj\.", "self_attn.q_proj.", operations=[MergeModulelist(dim=0)])
    update = PymoeQuantizer.update_weight_conversions

    def with_one_more(self, conversions, model):
        return update(self, [*conversions, taking], model)

    with monkeypatch.context() as patch:
        patch.setattr(PymoeQuantizer, "update_weight_conversions", with_one_more)
        with pytest.raises(ValueError, match=r"without their scales, got 'model.layers.0.self_attn.q_proj.weight'"):
            read(published)
    tensors = load_file(published / FILE)
    tensors["model.layers.0.self_attn.table"] = torch.zeros(128, 128).to(torch.float8_e4m3fn)
    save_file(tensors, published / FILE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"without their scales, got 'model.layers.0.self_attn.table'"):
        read(published)


def test_a_weight_that_stays_in_float32_is_refused_in_another_dtype(folders, monkeypatch):
    """Routers that transformers keeps in float32 became bfloat16, which may choose other experts."""
    published, _ = folders
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_keep_in_fp32_modules_strict", {"mlp.gate.weight"})
    with pytest.raises(ValueError, match=r"got torch.bfloat16 for 'model.layers.1.mlp.gate.weight', which stays"):
        read(published, dtype=torch.bfloat16)
    read(published, dtype=torch.float32)
