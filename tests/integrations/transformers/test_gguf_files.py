"""GGUF files: experts keep the codes and scales of their types bit for bit where pymoe has a format, or are refused.

The files are made up: experts of random codes and scales, written by the package gguf, whose own way of widening a type
is the other side of the comparisons.
"""

import gc
import json
import random
import shutil
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from specs.comparison import assert_same_bits
from test_quantizer import assert_same_model, checkpoint, logits
from transformers import AutoModelForCausalLM, GgufConfig

from pymoe import ops
from pymoe.integrations.transformers import PymoeConfig, gguf_blocks
from pymoe.integrations.transformers.gguf_files import GgufFile
from pymoe.integrations.transformers.quantizer import PymoeQuantizer
from pymoe.nn import QuantizedDenseLinear, QuantizedLinear, quantize_experts
from pymoe.nn.prefetch import mappings
from pymoe.quantize import main

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # transformers asks for it
import gguf_models  # noqa: E402

pytestmark = pytest.mark.only_on("cpu")

CONFIG = PymoeConfig(format="stored")
MIXED = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K"}
"""Types as llama.cpp's Q4_K_M has them in half of the layers."""


def mixed(name):
    """Return the type of a tensor of experts: the second layer has Q4_K alone."""
    return "Q4_K" if ".1." in name else MIXED[name.split(".")[2]]


def read(path, config, quantization=CONFIG, **options):
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=str(path), config=config, quantization_config=quantization, **options
    )


def layers_of(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}


def distance(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def assert_holds(model, expected, *, exact=True):
    """Compare a model's packed weights with the model in floating point, and all other tensors bit for bit."""
    theirs = dict(expected.named_parameters())
    ours = dict(model.named_parameters())
    for name, layer in layers_of(model).items():
        if isinstance(layer, QuantizedDenseLinear):
            wide = theirs.pop(f"{name}.weight").detach()
            got = ops.dequantize_weight(layer.quantized_weight)[0]
            ours |= {} if layer.bias is None else {f"{name}.bias": layer.bias}
        else:
            wide = theirs.pop(name).detach()
            got = ops.dequantize_weight(layer.weight)
            wide = wide.mT if model.config.model_type == "gpt_oss" else wide
        if exact:
            assert torch.equal(got, wide), name
        else:
            assert 0 < distance(got, wide) < 0.012, name
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert_same_bits(ours[name].detach(), parameter.detach(), name)


@pytest.mark.parametrize("name", sorted(gguf_blocks.KEPT))
def test_kept_types_lose_nothing(name, tmp_path):
    config, expected, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", name, num_hidden_layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = read(tmp_path / "x.gguf", config)
    assert {(layer.format, layer.bits) for layer in layers_of(model).values()} == {gguf_blocks.KEPT[name]}
    assert_holds(model, expected)
    assert distance(logits(model), logits(expected)) < 5e-4, "rows are rounded to integers of 16 bits"


HALVES = {
    **dict.fromkeys(("Q5_1", "Q4_1"), slice(0, 4)),
    **dict.fromkeys(("Q8_0", "Q5_0", "Q4_0"), slice(0, 2)),
    **gguf_models.HALVES,
}
"""Where blocks have their float16."""


class Rows:
    """A tensor of ``GGUFReader`` with one expert, of random bytes except for its float16, which are any finite ones."""

    def __init__(self, name, outputs=2048):
        kind = gguf.GGMLQuantizationType[name]
        inputs, size = gguf.GGML_QUANT_SIZES[kind]
        random = torch.Generator().manual_seed(0)
        blocks = torch.randint(256, (1, outputs, 256 // inputs, size), generator=random, dtype=torch.uint8)
        if name == "MXFP4":
            blocks[..., 0].clamp_(max=251)
        else:
            halves = blocks[..., HALVES[name]]
            finite = torch.randint(0x7C00, (*halves.shape[:3], halves.shape[3] // 2), generator=random)
            halves[:] = (finite | finite << 15 & 0x8000).to(torch.uint16).view(torch.uint8)
        self.name, self.tensor_type, self.shape = "x", kind, (256, outputs, 1)
        self.data = blocks.flatten(2).numpy()

    def packed(self):
        format = gguf_blocks.KEPT[self.tensor_type.name]
        packed = gguf_blocks.packed_weight([self], format, torch.cat, gguf)
        return ops.dequantize_weight(ops.QuantizedWeight(packed, format[1], self.shape[1], 256, format[0]))[0]


@pytest.mark.parametrize("name", sorted(gguf_blocks.KEPT))
def test_blocks_of_any_bytes_lose_nothing(name):
    """In 2048 blocks each of the 256 scales of Q6_K meets each of its 64 codes."""
    rows = Rows(name)
    assert torch.equal(rows.packed(), torch.from_numpy(gguf.dequantize(rows.data, rows.tensor_type))[0])


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E01], ids=["inf", "-inf", "nan"])
@pytest.mark.parametrize("name", sorted(HALVES.keys() & gguf_blocks.KEPT.keys()))
def test_blocks_whose_scale_is_not_finite_are_refused(name, half):
    """Even if the codes are zero."""
    rows = Rows(name, outputs=3)
    blocks = torch.from_numpy(rows.data).view(1, 3, -1, gguf.GGML_QUANT_SIZES[rows.tensor_type][1])
    blocks[0, 1, -1] = 0
    blocks[0, 1, -1, HALVES[name]][-2:] = torch.tensor([half & 255, half >> 8])
    with pytest.raises(
        ValueError, match=rf"scales that are finite, .* in {name} at block \[1, {blocks.shape[2] - 1}\]"
    ):
        rows.packed()


@pytest.mark.parametrize("name", ["IQ3_S"])
def test_other_types_are_rounded_to_8_bits_with_a_warning(name, tmp_path):
    config, expected, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", name, num_hidden_layers=1)
    text = f"2 of 2 weights of experts are rounded to 8 bits, .*: 2 in {name}; the first is 'blk.0.ffn_gate_exps.weight"
    with pytest.warns(UserWarning, match=text) as caught:
        model = read(tmp_path / "x.gguf", config)
    assert len([one for one in caught if "rounded" in str(one.message)]) == 1
    assert {(layer.format, layer.bits) for layer in layers_of(model).values()} == {("int", 8)}
    assert_holds(model, expected, exact=False)
    expected.set_experts_implementation("pymoe")
    quantize_experts(rounded := expected.float(), 8)
    assert_same_model(model, rounded)


@pytest.mark.parametrize("architecture", gguf_models.CLASSES)
@pytest.mark.parametrize("name", ["Q4_K", "MXFP4"])
def test_every_architecture_computes_what_its_widened_model_does(architecture, name, tmp_path):
    """Gate and up of GPT-OSS take turns, and its weights are transposed and have biases."""
    path = tmp_path / "x.gguf"
    config, expected, _ = gguf_models.write(path, architecture, name, dense="Q8_0")
    model = read(path, config)
    assert model.dtype == torch.float32
    assert model.config._experts_implementation == "pymoe"
    assert not model.training
    assert_holds(model, expected)
    assert distance(logits(model), logits(expected)) < 1e-3
    assert distance(logits(read(path, config, dtype=torch.bfloat16)), logits(expected)) < 0.1


def test_transformers_own_metadata_is_enough_where_it_names_all_sizes(tmp_path):
    """It leaves the experts' width at that of Qwen3-30B-A3B; other widths need a configuration."""
    _, expected, _ = gguf_models.write(
        tmp_path / "x.gguf", "qwen3moe", "Q4_K", num_hidden_layers=1, moe_intermediate_size=768, num_key_value_heads=2
    )
    options = {"gguf_file": "x.gguf", "quantization_config": CONFIG}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert_holds(model, expected)
    assert distance(logits(model), logits(expected)) < 5e-4
    gguf_models.write(tmp_path / "x.gguf", "qwen3moe", "Q4_K", num_hidden_layers=1)
    with pytest.raises(
        ValueError, match=r"shape \(4, 768, 256\) for .*, got \(4, 256, 256\); .* pass the model's conf"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize(
    ("gate", "up", "format"),
    [
        ("Q4_K", "Q8_0", ("affine", 8)),
        ("Q5_K", "Q4_0", ("affine", 8)),
        ("Q3_K", "Q6_K", ("symmetric", 8)),
        ("Q4_K", "Q6_K", ("int", 8)),
        ("MXFP4", "Q8_0", ("int", 8)),
    ],
)
@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])
def test_gate_and_up_of_different_types_get_a_format_that_holds_both(architecture, gate, up, format, tmp_path):
    kinds = {"gate": gate, "up": up, "down": gate}
    path = tmp_path / "x.gguf"
    written = gguf_models.write(
        path,
        architecture,
        lambda name: kinds[name.split("_")[1]],
        num_hidden_layers=1,
        num_experts=2,
        num_local_experts=2,
    )
    model = read(path, written[0])
    layer = model.model.layers[0].mlp.experts.gate_up_proj
    assert (layer.format, layer.bits) == format
    wide = written[1].model.layers[0].mlp.experts.gate_up_proj.detach()
    error = distance(ops.dequantize_weight(layer.weight), wide.mT if architecture == "gpt-oss" else wide)
    assert error == 0 if format != ("int", 8) else 0 < error < 0.012


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen2moe", "gpt-oss"])
def test_a_model_of_several_formats_is_saved_and_mapped(architecture, tmp_path):
    path = tmp_path / "x.gguf"
    config, _, _ = gguf_models.write(path, architecture, mixed)
    model = read(path, config)
    assert {(layer.format, layer.bits) for layer in layers_of(model).values()} == {("int", 4), ("symmetric", 8)}
    model.save_pretrained(tmp_path / "packed", max_shard_size="500KB")
    said = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "pymoe", "format": "stored", "version": 2}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_model(again, model)
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "twice")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "twice"), model)
    base = transformers.AutoModel.from_pretrained(tmp_path / "packed")
    assert_same_model(base, model.model)
    base.save_pretrained(tmp_path / "base")
    assert_same_model(transformers.AutoModel.from_pretrained(tmp_path / "base"), base)


def test_one_format_is_saved_under_its_name(tmp_path):
    """So that earlier versions read it, too."""
    config, _, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", "Q4_K", num_hidden_layers=1)
    model = read(tmp_path / "x.gguf", config)
    model.save_pretrained(tmp_path / "packed")
    said = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "pymoe", "bits": 4, "format": "int", "version": 2}
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"), model)


def test_a_model_without_a_head_is_refused(tmp_path):
    config, _, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", "Q4_K", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"tensors Qwen3MoeModel has, got 'blk.0"):
        transformers.AutoModel.from_pretrained(tmp_path, gguf_file="x.gguf", config=config, quantization_config=CONFIG)


def test_without_a_configuration_transformers_reads_the_file_as_ever(tmp_path):
    config, expected, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", "Q4_K", num_hidden_layers=1)
    for quantization in (None, GgufConfig()):
        model = read(tmp_path / "x.gguf", config, quantization)
        assert not layers_of(model)
        assert torch.equal(logits(model), logits(expected))


def test_transformers_without_the_wrapper_refuses(tmp_path, monkeypatch):
    """A release of transformers that no longer asked would not silently load something else."""
    config, _, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", "Q4_K", num_hidden_layers=1)
    module = transformers.modeling_utils
    monkeypatch.setattr(module, "get_hf_quantizer", module.get_hf_quantizer.__wrapped__)
    with pytest.raises(ValueError, match="cannot combine Quantization and loading a model from a GGUF file"):
        read(tmp_path / "x.gguf", config)


def test_the_quantizer_has_what_transformers_own_for_such_files_has():
    def public(cls):
        return {name for name in vars(cls) if not name.startswith("_")}

    asked = public(transformers.quantizers.quantizer_gguf.GgufHfQuantizer) - public(transformers.quantizers.HfQuantizer)
    assert {"read_header", "get_state_dict"} <= asked
    assert asked - {"requires_calibration"} <= set(dir(PymoeQuantizer))


def test_a_configuration_of_other_files_of_the_model_does_not_matter(tmp_path):
    """That of openai/gpt-oss-20b, for instance, names MXFP4."""
    config, expected, _ = gguf_models.write(tmp_path / "x.gguf", "gpt-oss", "Q8_0", num_hidden_layers=1)
    config.quantization_config = {"quant_method": "mxfp4"}
    assert_holds(read(tmp_path / "x.gguf", config), expected)


@pytest.mark.parametrize("passed", [PymoeConfig(), PymoeConfig(bits=4), PymoeConfig(bits=4, format="mxfp")])
def test_files_are_not_rounded_to_a_format_of_choice(passed, tmp_path):
    config, _, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", "Q4_K", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"expected PymoeConfig\(format='stored'\) for a checkpoint in GGUF"):
        read(tmp_path / "x.gguf", config, passed)


def test_stored_takes_no_bits_and_needs_quantised_files(tmp_path):
    with pytest.raises(ValueError, match="bits must be left out for format 'stored', got 8"):
        PymoeConfig(bits=8, format="stored")
    checkpoint("mixtral", tmp_path / "whole")
    with pytest.raises(
        ValueError, match=r"expected a checkpoint with quantised experts for PymoeConfig\(format='stored'"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=CONFIG)


def resaved(folder, change):
    """Change the tensors of a folder's one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_folder_of_several_formats_with_other_sizes_is_refused(tmp_path):
    config, _, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", mixed)
    read(tmp_path / "x.gguf", config).save_pretrained(tmp_path / "packed")
    name = "model.layers.1.mlp.experts.down_proj"
    for change, words in (
        (lambda tensors: tensors.pop(f"{name}.sizes"), f"expected the checkpoint to have '{name}.sizes', got none"),
        (lambda tensors: tensors[f"{name}.sizes"].copy_(torch.tensor([5, 256, 256])), "the number of a format, one of"),
        (
            lambda tensors: tensors[f"{name}.sizes"].copy_(torch.tensor([8, 256, 256])),
            "got .4, 256, 256|expected .* shape",
        ),
        (lambda tensors: tensors[f"{name}.sizes"].copy_(torch.tensor([4, 255, 256])), "output and input features"),
        (lambda tensors: tensors.pop(name), f"'{name}'"),
    ):
        folder = tmp_path / "changed"
        shutil.copytree(tmp_path / "packed", folder)
        resaved(folder, change)
        with pytest.raises(ValueError, match=f"from_pretrained: .*({words})"):
            AutoModelForCausalLM.from_pretrained(folder)
        shutil.rmtree(folder)


def rewritten(path, change, architecture="qwen3moe"):
    """Write the tensors of a file again, with changed names, values and types, and its metadata."""
    reader = gguf.GGUFReader(path)
    tensors = {one.name: (one.data, one.tensor_type) for one in reader.tensors}
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF")}
    metadata.pop("general.architecture")
    architecture = change(tensors, metadata) or architecture
    writer = gguf.GGUFWriter(path.with_name("y.gguf"), architecture)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("y.gguf")


DOWN = "blk.0.ffn_down_exps.weight"


def with_infinite_scale(tensors, _):
    data, kind = tensors[DOWN]
    data = data.copy()
    data[1, 2, :2] = (0, 0x7C)
    tensors[DOWN] = (data, kind)


def with_nan_at_mxfp4(tensors, _):
    data, _ = tensors[DOWN]
    tensors[DOWN] = (
        torch.full((*data.shape[:2], 8 * 17), 255, dtype=torch.uint8).numpy(),
        gguf.GGMLQuantizationType.MXFP4,
    )


def with_nan_at_f16(tensors, _):
    data, _ = tensors[DOWN]
    wide = torch.zeros(*data.shape[:2], 256, dtype=torch.float16)
    wide[3, 2, 1] = torch.nan
    tensors[DOWN] = (wide.numpy(), gguf.GGMLQuantizationType.F16)


def with_integers(tensors, _):
    data, _ = tensors[DOWN]
    wide = torch.zeros(*data.shape[:2], 256, dtype=torch.int8)
    tensors[DOWN] = (wide.numpy(), gguf.GGMLQuantizationType.I8)


CHANGES = {
    "no experts": (lambda t, m: t.pop(DOWN) and None, f"with '{DOWN}' for .*down_proj', got none"),
    "no router": (
        lambda t, m: t.pop("blk.0.ffn_gate_inp.weight") and None,
        "with a tensor for 'model.layers.0.mlp.gate.w",
    ),
    "no head": (lambda t, m: t.pop("output.weight") and None, "with a tensor for 'lm_head.weight', got none"),
    "another tensor": (lambda t, m: t.update({"x.weight": t[DOWN]}), "tensors Qwen3MoeForCausalLM has, got 'x.weight'"),
    "fewer experts": (
        lambda t, m: t.update({DOWN: (t[DOWN][0][1:], t[DOWN][1])}),
        rf"'{DOWN}' of shape \(4, 256, 256\) for .*, got \(3, 256, 256\)",
    ),
    "fewer tokens": (
        lambda t, m: t.update({"output.weight": (t["output.weight"][0][1:], t["output.weight"][1])}),
        r"'output.weight' of shape \(128, 256\) for 'lm_head.weight', got \(127, 256\)",
    ),
    "a head and a config that ties it": (
        lambda t, m: None,
        "a config that does not tie 'lm_head.weight' and 'model.embed_tokens.weight', as the GGUF file has both",
    ),
    "a number that is a text": (
        lambda t, m: m.update({"qwen3moe.rope.freq_base": "x"}),
        "a config that agrees with qwen3moe.rope.freq_base = x of the GGUF file, got 10000.0",
    ),
    "a turned matrix": (
        lambda t, m: t.update({"output.weight": (t["output.weight"][0].T.copy(), t["output.weight"][1])}),
        r"'output.weight' of shape \(128, 256\) for 'lm_head.weight', got \(256, 128\)",
    ),
    "an infinite scale": (
        with_infinite_scale,
        rf"got '{DOWN}' for .*: expected scales that are finite, got .* \[2, 0\]",
    ),
    "scales of 255": (
        with_nan_at_mxfp4,
        rf"got '{DOWN}' for .*: expected scales that are finite, got another one in MXFP4",
    ),
    "a weight that is NaN": (with_nan_at_f16, f"got '{DOWN}' for .*: quantize_weight: weight must be finite"),
    "a type of other numbers": (with_integers, f"whose types can be widened, got '{DOWN}' in I8"),
    "another number of experts per token": (
        lambda t, m: m.update({"qwen3moe.expert_used_count": 3}),
        "a config that agrees with qwen3moe.expert_used_count = 3 of the GGUF file, got 2",
    ),
    "other rotary embeddings": (
        lambda t, m: m.update({"qwen3moe.rope.freq_base": 1e6}),
        "a config that agrees with qwen3moe.rope.freq_base = 1000000.0 of the GGUF file",
    ),
    "scaled rotary embeddings": (
        lambda t, m: m.update({"qwen3moe.rope.scaling.factor": 4.0}),
        "a config that agrees with qwen3moe.rope.scaling.factor = 4.0 of the GGUF file, got 1.0",
    ),
    "other scales of rotary embeddings": (
        lambda t, m: m.update({"qwen3moe.rope.scaling.type": "yarn"}),
        "a config that agrees with qwen3moe.rope.scaling.type = yarn of the GGUF file, got none",
    ),
    "another original context": (
        lambda t, m: m.update({"qwen3moe.rope.scaling.original_context_length": 77}),
        r"a config that agrees with qwen3moe.rope.scaling.original_context_length = 77 of the GGUF file, got \d+",
    ),
    "fewer turned features": (
        lambda t, m: m.update({"qwen3moe.rope.dimension_count": 32}),
        "a config that agrees with qwen3moe.rope.dimension_count = 32 of the GGUF file, got 64",
    ),
    "factors of rotary embeddings": (
        lambda t, m: t.update({"rope_freqs.weight": t["output_norm.weight"]}),
        "a GGUF file whose tensors Qwen3MoeForCausalLM has, got 'rope_freqs.weight'",
    ),
    "a part of a model": (
        lambda t, m: m.update({"split.no": 1, "split.count": 2}),
        r"the first of 2 parts .* ends in '-00001-of-00002.gguf', got split.no 1: .*y\.gguf",
    ),
    "another architecture": (lambda t, m: "llama", "of the architecture 'qwen2moe', .*, got 'llama'"),
    "another known architecture": (lambda t, m: "gpt-oss", "a model of type 'gpt_oss' .*, got 'qwen3_moe'"),
}


@pytest.mark.filterwarnings("ignore:.*rounded to 8 bits")
@pytest.mark.parametrize("name", CHANGES)
def test_files_that_are_not_the_models_are_refused(name, tmp_path):
    change, words = CHANGES[name]
    config, _, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", "Q4_K", num_hidden_layers=1)
    config.tie_word_embeddings = "ties" in name
    with pytest.raises(ValueError, match=f"^from_pretrained: expected .*{words}"):
        read(rewritten(tmp_path / "x.gguf", change), config)


def parts(folder, split=10):
    """Write a model in parts, the first of which has no tensors; return a configuration, a model, and the parts."""
    sizes = {"num_hidden_layers": 1}
    config, expected, _ = gguf_models.write(folder / "x.gguf", "qwen3moe", "Q4_K", split=split, **sizes)
    return config, expected, sorted(folder.glob("x-*.gguf"))


def test_the_head_may_be_in_a_later_part(tmp_path):
    """Without a configuration, transformers takes embeddings for tied if the first part has no head."""
    sizes = {"num_hidden_layers": 1, "moe_intermediate_size": 768}
    _, expected, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", "Q4_K", split=10, **sizes)
    model = read(min(tmp_path.glob("x-*.gguf")), None)
    assert_holds(model, expected)
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_parts_are_one_file(tmp_path):
    config, expected, files = parts(tmp_path)
    assert [one.name for one in files] == ["x-00001-of-00003.gguf", "x-00002-of-00003.gguf", "x-00003-of-00003.gguf"]
    assert not gguf.GGUFReader(files[0]).tensors
    assert_holds(read(files[0], config), expected)
    (tmp_path / "in").mkdir()
    for one in files:
        shutil.move(one, tmp_path / "in" / one.name)
    config.save_pretrained(tmp_path / "in")
    assert main([str(tmp_path / "in" / files[0].name), str(tmp_path / "out")]) == 0
    assert_holds(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), expected)


def of_another_number(files):
    shutil.copy(files[1], files[2])


def of_another_count(files):
    parts(files[0].parent, split=7)
    four = sorted(files[0].parent.glob("x-*-of-00004.gguf"))
    shutil.copy(four[1], files[1])


def with_a_tensor_of_another(files):
    data = bytearray(files[1].read_bytes())
    data[data.index(b"split.no") + 12] = 2
    files[2].write_bytes(data)


def with_fewer_tensors(files):
    for one in files:
        data = bytearray(one.read_bytes())
        data[data.index(b"split.tensors.count") + 19 + 4] += 1
        one.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: files[2].unlink(), "3 parts of a GGUF file in a folder, got no .*/x-00003-of-00003.gguf"),
        (of_another_number, r"whose split.no, .* are \[2, 3, 15\], got \[1, 3, 15\]: .*/x-00003-of-00003.gguf"),
        (of_another_count, r"whose split.no, .* are \[1, 3, 15\], got \[1, 4, 15\]: .*/x-00002-of-00003.gguf"),
        (with_a_tensor_of_another, "'.*' in one part of a GGUF file, got two: .*/x-00003-of-00003.gguf"),
        (with_fewer_tensors, "with 16 tensors, got 15: .*/x-00001-of-00003.gguf"),
        (lambda files: shutil.move(files[1], files[0]), "the first of 3 parts .*, got split.no 1"),
        (lambda files: files[1].write_bytes(files[1].read_bytes()[:-1]), "a whole GGUF file, got .*/x-00002-of"),
        (lambda files: files[1].write_bytes(files[1].read_bytes()[:60]), "a whole GGUF file, got .*/x-00002-of"),
        (lambda files: files[1].write_bytes(b""), "a whole GGUF file, got .*/x-00002-of"),
    ],
)
def test_parts_that_are_missing_or_of_another_file_are_refused(change, words, tmp_path):
    config, _, files = parts(tmp_path)
    change(files)
    with pytest.raises(ValueError, match=f"^from_pretrained: expected .*{words}"):
        read(files[0], config)


def test_a_file_without_an_architecture_is_refused(tmp_path):
    _, _, files = parts(tmp_path)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(files[1].read_bytes().replace(b"split.count", b"split.other"))
    with pytest.raises(ValueError, match="a GGUF file that names its architecture, got "):
        GgufFile(str(alone))


def test_files_that_are_cut_short_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    config, _, _ = gguf_models.write(path, "qwen3moe", "Q4_K", num_hidden_layers=1)
    whole = path.read_bytes()
    for size in (0, 3, 4, 20, 24, 100, 700, 2000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"from_pretrained: expected a whole GGUF file, got .*x\.gguf"):
            GgufFile(str(path))
        with pytest.raises(ValueError, match=r"from_pretrained: expected a whole GGUF file, got .*x\.gguf"):
            read(path, config)
    with pytest.raises(OSError, match=r"missing\.gguf"):
        GgufFile(str(tmp_path / "missing.gguf"))


def test_a_damaged_header_is_refused_or_says_the_same(tmp_path):
    """Bytes of the header are changed at random: the file is refused, or its tensors are where they were."""
    path = tmp_path / "x.gguf"
    gguf_models.write(path, "qwen3moe", "Q4_K", num_hidden_layers=1, vocab_size=8)
    whole = path.read_bytes()
    expected = GgufFile(str(path)).tensors
    first = min(one.data_offset for one in expected.values())
    places = random.Random(0)
    refused = 0
    for _ in range(600):
        changed = bytearray(whole)
        for _ in range(places.choice([1, 1, 2, 8])):
            place = places.randrange(first)
            changed[place] = places.choice([0, 1, 255, changed[place] ^ 1 << places.randrange(8)])
        path.write_bytes(changed)
        try:
            found = GgufFile(str(path))
        except ValueError:
            refused += 1
            continue
        offsets = [one.data_offset for one in found.tensors.values()]
        assert offsets == [one.data_offset for one in expected.values()][: len(offsets)]
    assert 100 < refused < 600


@pytest.mark.filterwarnings("ignore:.*rounded to 8 bits")
@pytest.mark.parametrize(("down", "count"), [("IQ3_S", 1 + 4), ("Q6_K", 2 * 4)])
def test_experts_are_never_widened_as_a_whole(down, count, tmp_path, monkeypatch):
    """Only one expert's rows at a time are floating point: those that are rounded, of which one block is tried before,
    or, twice, those that are products of codes and scales.
    """
    config, _, _ = gguf_models.write(
        tmp_path / "x.gguf", "qwen3moe", lambda name: down if mixed(name) == "Q6_K" else "Q4_K"
    )
    widened = []
    original = gguf.dequantize
    monkeypatch.setattr(
        gguf, "dequantize", lambda data, kind: widened.append((data.ndim, kind.name)) or original(data, kind)
    )
    read(tmp_path / "x.gguf", config)
    assert {dims for dims, _ in widened} <= {1, 2}
    assert [kind for _, kind in widened].count(down) == count
    assert "Q4_K" not in {kind for _, kind in widened}


@pytest.mark.parametrize("described", [True, False])
def test_the_command_takes_such_a_file(described, tmp_path, capfd):
    path = tmp_path / "in" / "x.gguf"
    path.parent.mkdir()
    config, _, _ = gguf_models.write(path, "qwen3moe", mixed, moe_intermediate_size=768)
    if described:
        config.save_pretrained(path.parent)
        (path.parent / "tokenizer.json").write_text("{}")
    assert main([str(path), str(tmp_path / "out"), "--max-shard-size", "2MB"]) == 0
    capfd.readouterr()
    assert (tmp_path / "out" / "tokenizer.json").exists() == described
    assert not list((tmp_path / "out").glob("*.gguf"))
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), read(path, config))


def test_the_command_names_the_way_around_metadata_that_transformers_cannot_read(tmp_path, capsys):
    """As llama.cpp writes the rotary embeddings of GPT-OSS, transformers 5.23 raises a TypeError for them."""
    path = tmp_path / "x.gguf"
    gguf_models.write(path, "gpt-oss", "MXFP4", num_hidden_layers=1)
    entries = {"gpt-oss.rope.scaling.type": "yarn", "gpt-oss.rope.scaling.factor": 32.0}
    path = rewritten(path, lambda _, metadata: metadata.update(entries), "gpt-oss")
    assert main([str(path), str(tmp_path / "out")]) == 1
    assert "metadata transformers can read, or config.json next to it, got" in capsys.readouterr().err


def test_a_wrong_configuration_next_to_it_is_not_taken_for_wrong_metadata(tmp_path, capsys):
    path = tmp_path / "x.gguf"
    gguf_models.write(path, "qwen3moe", "Q4_K", num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody"}))
    assert main([str(path), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "nobody" in said
    assert "metadata" not in said


def test_a_folder_may_be_called_as_such_a_file(tmp_path, capsys):
    (tmp_path / "x.gguf").mkdir()
    assert main([str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 1
    assert "expected a folder with config.json" in capsys.readouterr().err


def test_a_tensor_may_have_a_dimension_of_1_more(tmp_path):
    config, _, _ = gguf_models.write(tmp_path / "x.gguf", "qwen2moe", "Q4_K", num_hidden_layers=1)
    expected = read(tmp_path / "x.gguf", config)

    def change(tensors, _):
        name = "blk.0.ffn_gate_inp_shexp.weight"
        tensors[name] = (tensors[name][0].reshape(1, -1), tensors[name][1])

    assert_same_model(read(rewritten(tmp_path / "x.gguf", change, "qwen2moe"), config), expected)


def test_no_part_of_the_file_stays_mapped(tmp_path):
    """A model that holds a tensor of the file would change, or end the program, when the file is replaced."""
    dense = {"output.weight": "F32"}
    config, _, _ = gguf_models.write(
        tmp_path / "x.gguf", "qwen3moe", "Q4_K", lambda name: dense.get(name, "Q4_K"), num_hidden_layers=1
    )
    model = read(tmp_path / "x.gguf", config)
    gc.collect()
    assert not [one for one in mappings() if one.path == str(tmp_path / "x.gguf")]
    assert model.lm_head.weight.isfinite().all()


def test_weights_are_put_on_the_device_that_is_asked_for(tmp_path):
    config, _, _ = gguf_models.write(tmp_path / "x.gguf", "qwen3moe", "Q4_K", "Q8_0", num_hidden_layers=1)
    model = read(tmp_path / "x.gguf", config, device_map={"": "meta"})
    assert {layer.packed.device.type for layer in layers_of(model).values()} == {"meta"}


def test_the_command_refuses_damaged_files_and_formats(tmp_path, capsys):
    path = tmp_path / "x.gguf"
    assert main([str(path), str(tmp_path / "out")]) == 1
    assert "expected a GGUF file, got" in capsys.readouterr().err
    config, _, _ = gguf_models.write(path, "qwen3moe", "Q4_K", num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    assert main([str(path), str(tmp_path / "out"), "--format", "int"]) == 1
    assert "expected PymoeConfig(format='stored') for a checkpoint in GGUF" in capsys.readouterr().err
    assert main([str(path), str(tmp_path / "out"), "--bits", "4"]) == 1
    assert "bits must be left out for format 'stored', got 4" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:1000])
    assert main([str(path), str(tmp_path / "out")]) == 1
    assert "expected a whole GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
