"""Checkpoints in MXFP4, as GPT-OSS is published: PymoeConfig takes their codes and scales bit for bit, or refuses.

The folders are made up: experts of random codes and scales, everything else as the hub has it. What transformers itself
makes of the same files, with every weight widened, is the other side of the comparisons.
"""

import copy
import json
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from specs.comparison import assert_same_bits
from test_quantizer import assert_same_model, everything, logits
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers import AutoHfQuantizer

from benchmarks.layers.checkpoints import write_gpt_oss
from pymoe import ops
from pymoe.integrations.transformers import PymoeConfig
from pymoe.nn import QuantizedDenseLinear, QuantizedLinear, quantize_experts, quantize_linears
from pymoe.quantize import main

pytestmark = pytest.mark.only_on("cpu")

CONFIG = PymoeConfig(bits=4, format="mxfp")
EXPERTS = "model.layers.1.mlp.experts"
FILE = "model-00003-of-00005.safetensors"
"""The file that holds the layer whose experts are :data:`EXPERTS`."""


@pytest.fixture
def published(tmp_path):
    """Return a folder with a tiny GPT-OSS as it is published, in several files.

    The outputs of down_proj fill one tile and a half.
    """
    write_gpt_oss(tmp_path / "published", layers=2, hidden=96, ffn=160, experts=8, vocabulary=128)
    return tmp_path / "published"


def tensors_of(folder):
    """Return all tensors of a folder's files, by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def read(folder, config=CONFIG, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


def widened(folder, implementation="pymoe", **options):
    """Return what transformers makes of such files on a machine without its kernels for them."""
    options["experts_implementation"] = implementation
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), use_kernels=False, **options
    )


def distance(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def test_the_format_of_the_files_need_not_be_known(published):
    assert_same_bits(logits(read(published, PymoeConfig(format="stored"))), logits(read(published)), "logits")


def test_every_code_and_scale_is_kept_and_so_is_all_else(published):
    """So are scales that rounding would not choose, as of groups whose largest code is 1/2."""
    tensors = load_file(published / FILE)
    for name in ("gate_up_proj", "down_proj"):
        tensors[f"{EXPERTS}.{name}_blocks"][:, ::2] &= 0x99
        tensors[f"{EXPERTS}.{name}_scales"].view(-1)[:255] = torch.arange(255)
    save_file(tensors, published / FILE, metadata={"format": "pt"})
    model, files = read(published), tensors_of(published)
    assert type(model) is GptOssForCausalLM
    assert model.dtype == torch.bfloat16, "the files say it, as the configuration does not"
    assert model.config._experts_implementation == "pymoe"
    assert not model.training
    packed = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert len(packed) == 4
    for name, layer in packed.items():
        codes, scales = ops.unpack_weight(layer.weight)
        assert_same_bits(codes, files.pop(f"{name}_blocks"), name)
        assert_same_bits(scales, files.pop(f"{name}_scales"), name)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == files.keys()
    for name, parameter in parameters.items():
        assert_same_bits(parameter.detach(), files[name], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_those_that_transformers_makes_of_the_files(dtype, published):
    """Row n of the blocks is column n of the model's weight, gate and up alternating, and is so in both."""
    model, expected = read(published, dtype=dtype), widened(published, dtype=dtype)
    compared = 0
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            theirs = expected.get_parameter(name).detach()
            assert theirs.dtype == dtype
            assert torch.equal(ops.dequantize_weight(layer.weight).transpose(1, 2), theirs.float())
            compared += 1
    assert compared == 4


@pytest.mark.parametrize("implementation", ["eager", "pymoe"])
def test_it_computes_what_the_widened_model_does(implementation, published):
    """Rows are rounded to integers of 16 bits, which changes these logits by about 1e-4."""
    expected = logits(widened(published, implementation, dtype=torch.float32))
    assert distance(logits(read(published, dtype=torch.float32)), expected) < 5e-4


def outputs(files, place, x, index, weights):
    """Return what experts of GPT-OSS compute in float64 from the tensors of files, in which gate and up alternate."""
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for expert in index.unique().tolist():

        def layer(rows, name, expert=expert):
            parts = (files[f"{place}.{name}_{part}"][expert : expert + 1] for part in ("blocks", "scales"))
            bias = files[f"{place}.{name}_bias"][expert]
            return rows @ convert_moe_packed_tensors(*parts)[0].double() + bias.double()

        rows = layer(x.double(), "gate_up_proj")
        gate, up = rows[:, 0::2].clamp(max=7.0), rows[:, 1::2].clamp(-7.0, 7.0)
        y = layer((up + 1) * gate * torch.sigmoid(1.702 * gate), "down_proj")
        expected += y * ((index == expert) * weights).sum(dim=1, keepdim=True).double()
    return expected


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 1e-2)])
def test_experts_compute_what_the_files_say(dtype, tolerance, published):
    """In bfloat16 they are at least as close to it as with widened weights."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16, 96, generator=random).to(dtype)
    index = torch.rand(16, 8, generator=random).argsort(dim=1)[:, :4]
    weights = torch.rand(16, 4, generator=random).to(dtype)
    expected = outputs(tensors_of(published), EXPERTS, x, index, weights)
    error, theirs = (
        distance(model.get_submodule(EXPERTS)(x, index, weights), expected)
        for model in (read(published, dtype=dtype), widened(published, dtype=dtype))
    )
    assert error < tolerance
    assert dtype == torch.float32 or error < 1.1 * theirs


def test_it_is_saved_and_mapped(published, tmp_path):
    model = read(published)
    model.save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "pymoe", "bits": 4, "format": "mxfp", "version": 2}
    names = set(tensors_of(tmp_path / "packed"))
    assert {name for name in tensors_of(published) if not name.endswith(("_blocks", "_scales"))} <= names
    assert {f"{EXPERTS}.down_proj", f"{EXPERTS}.down_proj.sizes"} <= names
    assert not any(name.endswith(("_blocks", "_scales", "packed")) for name in names)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert str(tmp_path / "packed" / "model-") in Path("/proc/self/maps").read_text()
    assert_same_model(again, model)
    again.save_pretrained(tmp_path / "twice")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "twice"), model)


def test_a_model_without_a_head_reads_the_same_files(published, tmp_path):
    model = read(published)
    base = transformers.AutoModel.from_pretrained(published, quantization_config=CONFIG)
    assert_same_model(base, model.model)
    base.save_pretrained(tmp_path / "base")
    assert_same_model(transformers.AutoModel.from_pretrained(tmp_path / "base"), base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("linear_bits", [8, 4])
def test_dense_layers_are_packed_next_to_them(linear_bits, dtype, published, tmp_path):
    config = PymoeConfig(bits=4, format="mxfp", linear_bits=linear_bits)
    model = read(published, config, dtype=dtype)
    expected = read(published, dtype=dtype)
    quantize_linears(expected, linear_bits)
    dense = [name for name, one in model.named_modules() if isinstance(one, QuantizedDenseLinear)]
    assert len(dense) == 9, "attention and the head"
    assert_same_model(model, expected)
    model.save_pretrained(tmp_path / "packed")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"), expected)
    expected.save_pretrained(tmp_path / "in memory")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "in memory"), expected)


def test_files_of_another_dtype_are_rounded_to_the_models_first(published):
    """Dense layers are packed from what the model would hold, also where the files hold more."""
    for file in published.glob("*.safetensors"):
        tensors = {
            name: tensor if tensor.dtype == torch.uint8 else tensor.float() * 1.001
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    assert read(published).dtype == torch.float32
    expected = read(published, dtype=torch.bfloat16)
    quantize_linears(expected, 8)
    config = PymoeConfig(bits=4, format="mxfp", linear_bits=8)
    assert_same_model(read(published, config, dtype=torch.bfloat16), expected)


def test_it_generates_and_has_gradients(published):
    model = read(published)
    ids = tiny_models.tokens()
    tokens = copy.deepcopy(model).generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 16)
    model(ids).logits.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert model.is_quantized
    assert model.hf_quantizer.is_trainable is True


def written_as_mxfp4(name, folder, **sizes):
    """Write a tiny model whose experts' weights have codes and scales in their places, and return its class."""
    config_class = getattr(transformers, name).config_class
    model = tiny_models.built(getattr(transformers, name), tiny_models.configuration(config_class, sizes))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(key).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=random)
        tensors[f"{key}_blocks"] = blocks
        tensors[f"{key}_scales"] = torch.randint(118, 122, blocks.shape[:3], dtype=torch.uint8, generator=random)
    assert any(key.endswith("_blocks") for key in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    name_method(folder)
    return type(model)


def name_method(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_model_in_which_gate_stands_before_up_is_read_as_transformers_reads_it(tmp_path):
    cls = written_as_mxfp4("OpenAIPrivacyFilterForTokenClassification", tmp_path, intermediate_size=96)
    model = cls.from_pretrained(tmp_path, quantization_config=CONFIG)
    options = {"quantization_config": Mxfp4Config(dequantize=True), "experts_implementation": "pymoe"}
    expected = cls.from_pretrained(tmp_path, **options)
    layers = [(name, one) for name, one in model.named_modules() if isinstance(one, QuantizedLinear)]
    assert len(layers) == 4
    for name, layer in layers:
        theirs = expected.get_parameter(name).detach()
        assert torch.equal(ops.dequantize_weight(layer.weight).transpose(1, 2), theirs.float())
    ids = tiny_models.tokens()
    with torch.no_grad():
        assert distance(model(ids).logits, expected(ids).logits) < 5e-4


def replace(tensors, name, change):
    tensors[f"{EXPERTS}.{name}"] = change(tensors[f"{EXPERTS}.{name}"]).contiguous()


def drop(tensors, *names):
    for name in names:
        del tensors[f"{EXPERTS}.{name}"]


def widen(tensors):
    """Put the weights themselves in the place of blocks and scales."""
    drop(tensors, "down_proj_blocks", "down_proj_scales")
    tensors[f"{EXPERTS}.down_proj"] = torch.zeros(8, 160, 96, dtype=torch.bfloat16)


def nan(scales):
    scales[3, 2, 1] = 255
    return scales


BLOCKS, SCALES = f"{EXPERTS}.down_proj_blocks", f"{EXPERTS}.down_proj_scales"
EDITS = {
    "no scales": (lambda t: drop(t, "down_proj_scales"), f"the checkpoint to have '{SCALES}', got none$"),
    "no blocks": (lambda t: drop(t, "down_proj_blocks"), f"the checkpoint to have '{BLOCKS}', got none$"),
    "neither": (
        lambda t: drop(t, "down_proj_blocks", "down_proj_scales"),
        f"the checkpoint to have '{BLOCKS}', got none$",
    ),
    "weights in floating point": (widen, f"the checkpoint to have '{BLOCKS}', got none$"),
    "no bias": (
        lambda t: drop(t, "down_proj_bias"),
        f"the checkpoint to have '{EXPERTS}.down_proj_bias', got none$",
    ),
    "two weights less": (
        lambda t: drop(t, "down_proj_blocks", "down_proj_scales", "gate_up_proj_scales"),
        r"'model.layers.1.mlp.experts.\w+', got none \(and 1 more\)$",
    ),
    "fewer experts": (
        lambda t: replace(t, "down_proj_blocks", lambda b: b[1:]),
        rf"'{BLOCKS}' to be \(8, 96, 5, 16\) uint8, got \(7, 96, 5, 16\) uint8$",
    ),
    "fewer experts with scales": (
        lambda t: [replace(t, f"down_proj_{part}", lambda b: b[1:]) for part in ("blocks", "scales")],
        rf"'{BLOCKS}' to be \(8, 96, 5, 16\) uint8, got \(7, 96, 5, 16\) uint8$",
    ),
    "fewer groups": (
        lambda t: [replace(t, f"down_proj_{part}", lambda b: b[:, :, 1:]) for part in ("blocks", "scales")],
        rf"'{BLOCKS}' to be \(8, 96, 5, 16\) uint8, got \(8, 96, 4, 16\) uint8$",
    ),
    "fewer outputs, in the same tiles": (
        lambda t: [replace(t, f"down_proj_{part}", lambda b: b[:, 1:]) for part in ("blocks", "scales")],
        rf"'{BLOCKS}' to be \(8, 96, 5, 16\) uint8, got \(8, 95, 5, 16\) uint8$",
    ),
    "transposed": (
        lambda t: replace(t, "down_proj_blocks", lambda b: b.transpose(1, 2)),
        rf"'{BLOCKS}' to be \(8, 96, 5, 16\) uint8, got \(8, 5, 96, 16\) uint8$",
    ),
    "bytes in one dimension": (
        lambda t: replace(t, "down_proj_blocks", lambda b: b.flatten(2)),
        rf"'{BLOCKS}' to be \(8, 96, 5, 16\) uint8, got \(8, 96, 80\) uint8$",
    ),
    "other scales": (
        lambda t: replace(t, "down_proj_scales", lambda s: s[:, :, :1]),
        rf"'{SCALES}' to be \(8, 96, 5\) uint8, got \(8, 96, 1\) uint8$",
    ),
    "blocks in floating point": (
        lambda t: replace(t, "down_proj_blocks", torch.Tensor.float),
        rf"'{BLOCKS}' to be \(8, 96, 5, 16\) uint8, got \(8, 96, 5, 16\) float32$",
    ),
    "signed blocks": (
        lambda t: replace(t, "down_proj_blocks", lambda b: b.view(torch.int8)),
        rf"'{BLOCKS}' to be .* got \(8, 96, 5, 16\) int8$",
    ),
    "scales in floating point": (
        lambda t: replace(t, "down_proj_scales", torch.Tensor.bfloat16),
        rf"'{SCALES}' to be .* got \(8, 96, 5\) bfloat16$",
    ),
    "scales as e8m0": (
        lambda t: replace(t, "down_proj_scales", lambda s: s.view(torch.float8_e8m0fnu)),
        rf"'{SCALES}' to be .* got \(8, 96, 5\) float8_e8m0fnu$",
    ),
    "a scale that is NaN": (
        lambda t: replace(t, "down_proj_scales", nan),
        rf"'{SCALES}' to be numbers, got NaN \(a scale of 255\) at \[3, 2, 1\]$",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_files_that_do_not_fit_are_refused(edit, published):
    change, words = EDITS[edit]
    tensors = load_file(published / FILE)
    assert BLOCKS in tensors
    change(tensors)
    save_file(tensors, published / FILE, metadata={"format": "pt"})
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(ValueError, match=f"^from_pretrained: expected .*{words}"):
            read(published, **options)


def test_a_file_that_is_cut_short_is_refused(published):
    file = published / FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"^from_pretrained: expected a whole safetensors file, got {file}"):
        read(published)


@pytest.mark.parametrize("config", [PymoeConfig(), PymoeConfig(bits=4), PymoeConfig(bits=8, linear_bits=8)])
def test_they_are_not_rounded_to_another_format(config, published):
    words = (
        r"^from_pretrained: expected PymoeConfig\(bits=4, format='mxfp'\) for a checkpoint in MXFP4, .* got "
        rf"bits={config.bits} and format='int' for 'model.layers.0.mlp.experts.down_proj_blocks'$"
    )
    with pytest.raises(ValueError, match=words):
        read(published, config)


def test_models_of_which_transformers_does_not_say_the_layout_are_refused(tmp_path):
    model = tiny_models.build("qwen3_moe")
    model.save_pretrained(tmp_path)
    name_method(tmp_path)
    words = r"expected a model with weights \(E, in, out\), .* got 'model.layers.0.mlp.experts.down_proj' of Qwen3Moe"
    with pytest.raises(ValueError, match=words):
        type(model).from_pretrained(tmp_path, quantization_config=CONFIG)


def test_inputs_that_are_no_whole_groups_are_refused(tmp_path):
    write_gpt_oss(tmp_path / "published", layers=1, hidden=64, ffn=48, experts=4, vocabulary=128)
    with pytest.raises(ValueError, match=r"expected '.*down_proj' to have a multiple of 32 inputs, got 48$"):
        read(tmp_path / "published")


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_another_implementation_is_refused(implementation, published):
    with pytest.raises(ValueError, match=f"experts_implementation='pymoe' .* got '{implementation}'"):
        read(published, experts_implementation=implementation)


def test_without_a_configuration_transformers_widens_them_as_ever(published, monkeypatch):
    """Its quantizer asks for accelerate, which the widened model does not need."""
    monkeypatch.setattr("transformers.quantizers.quantizer_mxfp4.is_accelerate_available", lambda: True)
    model = AutoModelForCausalLM.from_pretrained(published, experts_implementation="pymoe")
    assert not any(isinstance(one, QuantizedLinear) for one in model.modules())
    expected = everything(widened(published))
    assert everything(model).keys() == expected.keys()
    for name, tensor in everything(model).items():
        assert_same_bits(tensor.detach(), expected[name].detach(), name)
    quantize_experts(model, 4, "mxfp")  # what was widened keeps its values
    packed = read(published)
    for name, layer in packed.named_modules():
        if isinstance(layer, QuantizedLinear):
            again = ops.dequantize_weight(model.get_submodule(name).weight)
            assert torch.equal(ops.dequantize_weight(layer.weight), again)


def test_the_configuration_that_was_passed_stays_as_it_is(published, tmp_path):
    """It served files in MXFP4, and then those of a checkpoint that is not quantised."""
    config = PymoeConfig(bits=4, format="mxfp")
    before = copy.deepcopy(vars(config))
    cls = GptOssForCausalLM  # AutoModelForCausalLM would pass a copy on
    model = cls.from_pretrained(published, quantization_config=config)
    assert vars(config) == before
    tiny_models.build("gpt_oss").save_pretrained(tmp_path / "whole")
    expected = cls.from_pretrained(tmp_path / "whole", experts_implementation="pymoe")
    quantize_experts(expected, 4, "mxfp")
    for one in (config, model.config.quantization_config):
        assert_same_model(cls.from_pretrained(tmp_path / "whole", quantization_config=one), expected)


def test_the_files_of_other_methods_are_left_to_transformers(published):
    for method, words in (("fbgemm_fp8", "FbgemmFp8Config"), ("pymoe", r"to have '.*down_proj', got none")):
        config = json.loads((published / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method}
        (published / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=words):
            read(published)


def test_transformers_without_the_wrapper_refuses(published, monkeypatch):
    """A release of transformers that no longer asked would not silently load something else."""
    merge = AutoHfQuantizer.merge_quantization_configs
    monkeypatch.setattr(AutoHfQuantizer, "merge_quantization_configs", merge.__wrapped__)
    with pytest.raises(ValueError, match="quantized with Mxfp4Config but you are passing a PymoeConfig"):
        read(published)


@pytest.mark.parametrize("options", [[], ["--bits", "4"], ["--linear-bits", "8"]])
def test_the_command_takes_such_a_folder(options, published, tmp_path, capfd):
    (published / "tokenizer.json").write_text("{}")
    (published / "original").mkdir()
    out = tmp_path / "below" / "packed"
    assert main([str(published), str(out), "--format", "mxfp", "--max-shard-size", "50KB", *options]) == 0
    capfd.readouterr()
    assert [file.name for file in out.parent.iterdir()] == [out.name], "nothing else is left"
    assert (out / "tokenizer.json").exists()
    linear_bits = 8 if "--linear-bits" in options else None
    expected = read(published, PymoeConfig(bits=4, format="mxfp", linear_bits=linear_bits))
    assert_same_model(AutoModelForCausalLM.from_pretrained(out), expected)


@pytest.mark.parametrize("options", [[], ["--bits", "4"]])
def test_the_command_does_not_round_it(options, published, tmp_path, capsys):
    assert main([str(published), str(tmp_path / "out"), *options]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("pymoe.quantize: from_pretrained: expected PymoeConfig(bits=4, format='mxfp')")
    assert [file.name for file in tmp_path.iterdir()] == ["published"]


@pytest.mark.slow
@torch.no_grad()
def test_a_layer_of_gpt_oss_20b(tmp_path):
    """32 experts of 2880 features: codes and scales are those of the files, and so are the outputs of experts."""
    folder = tmp_path / "published"
    write_gpt_oss(folder, layers=1, hidden=2880, ffn=2880, experts=32, vocabulary=128)
    experts = read(folder, dtype=torch.float32).model.layers[0].mlp.experts
    files = load_file(folder / "model-00002-of-00004.safetensors")
    place = "model.layers.0.mlp.experts"
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).weight
        for expert in range(32):
            parts = ops.unpack_weight(weight._replace(packed=weight.packed[expert : expert + 1]))
            for part, ending in zip(parts, ("blocks", "scales"), strict=True):
                assert_same_bits(part, files[f"{place}.{name}_{ending}"][expert : expert + 1], f"{name} {expert}")
    random = torch.Generator().manual_seed(0)
    x, index = torch.randn(4, 2880, generator=random), torch.tensor([[0, 31, 7, 8], [1, 7, 30, 0], [5] * 4, [31] * 4])
    weights = torch.rand(4, 4, generator=random)
    assert distance(experts(x, index, weights), outputs(files, place, x, index, weights)) < 2e-4


def test_gpt_oss_20b_takes_less_than_14_gib():
    """Counts the bytes of a model without memory: attention, embedding and head in bfloat16, experts in MXFP4."""
    config = GptOssConfig(num_hidden_layers=24, num_local_experts=32, pad_token_id=0)
    with torch.device("meta"):
        model = GptOssForCausalLM._from_config(config, dtype=torch.bfloat16, experts_implementation="pymoe").eval()
    layer = 423_014_400  # bytes, as test_loading_memory.py finds them in memory
    assert quantize_experts(model, 4, "mxfp").bytes_after == 24 * layer
    size = sum(tensor.nbytes for tensor in everything(model).values())
    assert 12.5 * 2**30 < size < 14 * 2**30
