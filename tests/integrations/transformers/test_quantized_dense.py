"""linear_bits: dense layers are packed while a checkpoint is read, saved, and read again, with the same bits."""

import copy
import json
import re

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from specs.comparison import assert_same_bits
from test_models import EVERY_MODEL, models
from test_quantizer import assert_not_saved, assert_same_model, checkpoint, edited, everything, logits
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pymoe import ops
from pymoe.integrations.transformers import PymoeConfig, quantized_dense
from pymoe.nn import QuantizedDenseLinear, quantize_experts, quantize_linears
from pymoe.nn.quantized_dense import is_dense
from pymoe.quantize import main

pytestmark = pytest.mark.only_on("cpu")

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
SHARED = {f"{name}_proj" for name in ("gate", "up", "down")}
NETWORK = {f"mlp.{name}" for name in SHARED}
LATENT = {"self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"}  # others have 16 inputs or outputs
CHANGED = {
    "deepseek_v3": [LATENT | NETWORK, LATENT | {f"mlp.shared_experts.{name}" for name in SHARED}],
    "gpt_oss": [ATTENTION] * 2,
    "granitemoe": [ATTENTION] * 2,
    "mixtral": [ATTENTION] * 2,
    "olmoe": [ATTENTION] * 2,
    "qwen2_moe": [ATTENTION | {f"mlp.shared_expert.{name}" for name in SHARED}] * 2,
    "qwen3_moe": [ATTENTION] * 2,
}
"""The layers that are packed, by model and number of the layer that holds them; lm_head is packed in all."""


def quantised(cls, folder, bits, linear_bits, **options):
    """Return the whole model, whose experts and dense layers are then quantised."""
    model = cls.from_pretrained(folder, experts_implementation="pymoe", **options)
    quantize_experts(model, bits)
    quantize_linears(model, linear_bits)
    return model


def changed(model):
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedDenseLinear)}


@pytest.mark.parametrize("linear_bits", [8, 4])
@pytest.mark.parametrize("name", models(EVERY_MODEL))
def test_a_checkpoint_is_read_in_few_bits_and_comes_back(name, linear_bits, tmp_path):
    cls = checkpoint(name, tmp_path / "whole")
    expected = quantised(cls, tmp_path / "whole", 4, linear_bits)
    read = cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(4, linear_bits=linear_bits))
    assert changed(expected)
    assert changed(read) == changed(expected)
    assert_same_model(read, expected)
    read.save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    again = cls.from_pretrained(tmp_path / "packed")
    assert_same_model(again, expected)
    again.save_pretrained(tmp_path / "twice")
    assert_same_model(cls.from_pretrained(tmp_path / "twice"), expected)
    expected.save_pretrained(tmp_path / "in memory")
    assert_same_model(cls.from_pretrained(tmp_path / "in memory"), expected)


@pytest.mark.parametrize("name", CHANGED)
def test_exactly_these_layers_are_packed(name):
    model = tiny_models.build(name)
    before = {path: type(module) for path, module in model.named_modules()}
    report = quantize_linears(model, 8)
    expected = {f"model.layers.{i}.{own}" for i, layer in enumerate(CHANGED[name]) for own in layer} | {"lm_head"}
    assert changed(model) == expected
    assert report.layers == len(expected)
    after = {path: type(module) for path, module in model.named_modules()}
    assert after == before | dict.fromkeys(expected, QuantizedDenseLinear)
    assert set(report.kept) == {path for path, kind in before.items() if issubclass(kind, nn.Linear)} - expected


@pytest.mark.parametrize("name", models(EVERY_MODEL))
def test_what_chooses_experts_or_tokens_stays(name):
    model = tiny_models.build(name)
    quantize_linears(model, 8)
    words = re.compile(r"router|gate$|\.gate\.|indexer|mamba|embed|norm")
    assert not [path for path in changed(model) if words.search(path)]
    assert all(
        min(layer.in_features, layer.out_features) >= 32
        for layer in model.modules()
        if isinstance(layer, QuantizedDenseLinear)
    )


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", CHANGED)
def test_a_model_computes_with_its_rounded_weights(name, bits):
    model = tiny_models.build(name)
    rounded = copy.deepcopy(model)
    quantize_linears(model, bits)
    for path in changed(model):
        linear = rounded.get_submodule(path)
        linear.weight.copy_(ops.dequantize_weight(ops.quantize_weight(linear.weight[None], bits))[0])
    expected = logits(rounded)
    assert float((logits(model) - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_model_may_be_another_than_the_files(saved, dtype, tmp_path):
    cls = checkpoint("gpt_oss", tmp_path / "whole", saved)  # attention with biases
    config = PymoeConfig(4, linear_bits=8)
    read = cls.from_pretrained(tmp_path / "whole", dtype=dtype, quantization_config=config)
    assert read.model.layers[0].self_attn.q_proj.bias.dtype == dtype
    expected = quantised(cls, tmp_path / "whole", 4, 8, dtype=dtype)
    assert_same_model(read, expected)
    read.save_pretrained(tmp_path / "packed")
    assert_same_model(cls.from_pretrained(tmp_path / "packed"), expected)


def test_a_tied_head_stays_and_is_still_tied(tmp_path):
    model = tiny_models.build("mixtral")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "whole")
    cls = type(model)
    read = cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(4, linear_bits=8))
    expected = quantised(cls, tmp_path / "whole", 4, 8)
    for one in (read, expected):
        assert type(one.lm_head) is nn.Linear
        assert one.lm_head.weight is one.model.embed_tokens.weight
    assert_same_model(read, expected)
    for number, one in enumerate((read, expected)):
        one.save_pretrained(tmp_path / str(number))
        again = cls.from_pretrained(tmp_path / str(number))
        assert again.lm_head.weight is again.model.embed_tokens.weight
        assert_same_model(again, expected)
    model.set_experts_implementation("pymoe")
    assert "lm_head" in quantize_linears(model, 8).kept


def test_names_in_files_that_end_as_a_layers_name_are_not_taken():
    """vision_layers.0.o_proj is not layers.0.o_proj: its weight would have gone into another layer."""
    layer = "layers.0.self_attn.o_proj"
    ((weight, _),) = quantized_dense.sources(tiny_models.build("mixtral"), {f"model.{layer}"})
    patterns = weight, weight.removesuffix("$") + r"\.sizes$"
    for name in (f"model.{layer}", layer):
        assert [bool(re.search(pattern, f"{name}.weight")) for pattern in patterns] == [True, False]
        assert [bool(re.search(pattern, f"{name}.weight.sizes")) for pattern in patterns] == [False, True]
        assert re.search(weight, f"{name}.weight")[1] == layer
    for name in (f"vision_{layer}", f"model.{layer}ection", f"model.{layer.replace('0', '10')}"):
        assert not any(re.search(pattern, f"{name}.weight") for pattern in patterns)


def test_a_base_model_and_one_with_a_head_read_each_others_files(tmp_path):
    cls = checkpoint("mixtral", tmp_path / "whole")
    read = cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(4, linear_bits=8))
    read.save_pretrained(tmp_path / "packed")
    base = type(read.model).from_pretrained(tmp_path / "packed")
    assert_same_model(base, read.model)
    read.model.save_pretrained(tmp_path / "base")
    assert_same_model(type(base).from_pretrained(tmp_path / "base"), read.model)
    with pytest.raises(ValueError, match=r"expected the checkpoint to have 'lm_head.weight', got none$"):
        cls.from_pretrained(tmp_path / "base")


def test_files_hold_weights_under_their_names_and_the_configuration(tmp_path):
    cls = checkpoint("mixtral", tmp_path / "whole")
    read = cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(4, linear_bits=8))
    read.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    expected = {"quant_method": "pymoe", "bits": 4, "format": "int", "linear_bits": 8, "version": 2}
    assert config["quantization_config"] == expected
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    for name in changed(read):
        assert tensors[f"{name}.weight"].dtype == torch.uint8
        layer = read.get_submodule(name)
        assert tensors[f"{name}.weight.sizes"].tolist() == [8, layer.out_features, layer.in_features]
    assert not any("packed" in name for name in tensors)
    assert tensors["model.layers.0.block_sparse_moe.gate.weight"].dtype == torch.float32


def test_a_configuration_without_linear_bits_is_as_ever(tmp_path):
    assert PymoeConfig(4).to_dict() == {"quant_method": "pymoe", "bits": 4, "format": "int", "version": 2}
    cls = checkpoint("mixtral", tmp_path / "whole")
    read = cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(4))
    assert not changed(read)
    read.save_pretrained(tmp_path / "experts alone")
    again = cls.from_pretrained(tmp_path / "experts alone")
    assert not changed(again)
    quantize_linears(again, 8)  # afterwards, in memory
    again.save_pretrained(tmp_path / "both")
    assert_same_model(cls.from_pretrained(tmp_path / "both"), again)
    assert_same_model(again, quantised(cls, tmp_path / "whole", 4, 8))


@pytest.mark.parametrize(("value", "error"), [(5, ValueError), ("4", TypeError)])
def test_other_bits_are_refused(value, error):
    with pytest.raises(error, match="PymoeConfig: linear_bits must be"):
        PymoeConfig(4, linear_bits=value)


Q = "model.layers.1.self_attn.q_proj.weight"
EDITS = {
    "a missing weight": (lambda t: [t.pop(Q), t.pop(f"{Q}.sizes")], f"to have '{Q}', got none"),
    "missing bytes": (lambda t: t.pop(Q), rf"'{Q}' with its format's number.*, got \[8, 64, 64\]$"),
    "missing sizes": (lambda t: t.pop(f"{Q}.sizes"), rf"'{Q}' with its format's number.*, got \[1, 1, "),
    "other sizes": (lambda t: t.update({f"{Q}.sizes": torch.tensor([8, 64, 63])}), r"got \[8, 64, 63, 1, 1, "),
    "another dtype": (lambda t: t.update({Q: t[Q].float()}), Q),
    "no bias": (lambda t: t.pop(Q.replace("weight", "bias")), f"to have '{Q.replace('weight', 'bias')}', got none"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_packed_file_that_does_not_fit_is_refused(edit, tmp_path):
    cls = checkpoint("gpt_oss", tmp_path / "whole")
    config = PymoeConfig(4, linear_bits=8)
    cls.from_pretrained(tmp_path / "whole", quantization_config=config).save_pretrained(tmp_path / "packed")
    change, words = EDITS[edit]
    wrong = edited(tmp_path / "packed", tmp_path / "edited", change)
    with pytest.raises(ValueError, match=f"^from_pretrained: expected .*{words}"):
        cls.from_pretrained(wrong)


def test_a_configuration_with_other_bits_than_the_files_is_refused(tmp_path):
    cls = checkpoint("mixtral", tmp_path / "whole")
    config = PymoeConfig(4, linear_bits=8)
    cls.from_pretrained(tmp_path / "whole", quantization_config=config).save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "config.json"
    written = json.loads(file.read_text())
    written["quantization_config"]["linear_bits"] = 4
    file.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"expected .* \[4, 128, 64.* got \[8, 128, 64"):
        cls.from_pretrained(tmp_path / "packed")
    del written["quantization_config"]["linear_bits"]  # the files say it, too
    file.write_text(json.dumps(written))
    assert_same_model(cls.from_pretrained(tmp_path / "packed"), quantised(cls, tmp_path / "whole", 4, 8))


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    model = tiny_models.build("gpt_oss")
    model.save_pretrained(tmp_path)
    bias = Q.replace("weight", "bias")
    edits = {
        f"to have '{Q}', got none": lambda t: t.pop(Q),
        f"to have '{bias}', got none": lambda t: t.pop(bias),
        rf"packed, got '{Q}': expected the shape \(64, 64\), got \(63, ": lambda t: t.update({Q: t[Q][1:]}),
        rf"packed, got '{Q}': .*must be finite": lambda t: t[Q][3, 2].fill_(float("nan")),
    }
    for number, (words, edit) in enumerate(edits.items()):
        wrong = edited(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{number}"), edit)
        with pytest.raises(ValueError, match=f"^from_pretrained: expected .*{words}"):
            type(model).from_pretrained(wrong, quantization_config=PymoeConfig(8, linear_bits=8))


def pack_some(model):
    quantize_linears(model.model.layers[1], 8)


def pack_in_two_kinds(model):
    quantize_linears(model.model, 8)
    quantize_linears(model, 4)


def pack_all(model):
    """Pack also the gate of shared experts, which has one output."""
    assert "model.layers.0.mlp.shared_expert_gate" in quantize_linears(model, 8).kept
    quantize_linears(model, 8, select=lambda *_: True)


def pack_in_another_format(model):
    found = {name: one for name, one in model.named_modules() if type(one) is nn.Linear and is_dense(name, one)}
    for name, linear in found.items():
        model.set_submodule(name, QuantizedDenseLinear.from_linear(linear, 4, format="mxfp"))


@pytest.mark.parametrize("pack", [pack_some, pack_in_two_kinds, pack_all, pack_in_another_format])
def test_layers_that_no_linear_bits_pack_come_back(pack, tmp_path):
    model = tiny_models.build("qwen2_moe")
    model.set_experts_implementation("pymoe")
    quantize_experts(model, 8)
    pack(model)
    assert changed(model)
    model.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert "linear_bits" not in config
    again = type(model).from_pretrained(tmp_path / "packed")
    assert changed(again) == changed(model)
    assert_same_model(again, model)
    for change, words in (
        (lambda t: t.pop(Q), f"'{Q}' with its format's number"),
        (lambda t: t.pop(f"{Q}.sizes"), f"the checkpoint to have '{Q}.sizes', got none"),
        (lambda t: t[f"{Q}.sizes"].copy_(torch.tensor([5, 64, 64])), f"'{Q}.sizes' to hold the number of a format"),
    ):
        wrong = edited(tmp_path / "packed", tmp_path / f"edited {len(words)}", change)
        with pytest.raises(ValueError, match=f"^from_pretrained: expected {words}"):
            type(model).from_pretrained(wrong)


def refuse_a_tied_head(model):
    quantize_experts(model, 8)
    quantize_linears(model, 8)
    model.config.tie_word_embeddings = True  # from now on
    return "ties no dense layer in few bits to another layer, got 'lm_head'"


def test_a_tied_head_in_few_bits_is_not_saved(tmp_path):
    """from_pretrained would put the embedding in its place."""
    assert_not_saved(refuse_a_tied_head, tmp_path)


@pytest.mark.parametrize("bits", [8, None])
def test_dense_layers_are_saved_without_packed_experts(bits, tmp_path):
    model = tiny_models.build("mixtral")
    model.set_experts_implementation("pymoe")
    quantize_linears(model if bits else model.model.layers[1], 8)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["format"], config.get("linear_bits")) == ("stored", bits)
    assert_same_model(type(model).from_pretrained(tmp_path), model)


def test_a_model_without_experts_is_not_saved(tmp_path):
    """from_pretrained needs experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
    quantize_linears(model, 8)
    with pytest.raises(ValueError, match="expected a model with experts if its dense layers are quantised, got Llama"):
        model.save_pretrained(tmp_path)


def test_it_generates_and_has_gradients(tmp_path):
    cls = checkpoint("mixtral", tmp_path)
    read = cls.from_pretrained(tmp_path, quantization_config=PymoeConfig(8, linear_bits=8))
    expected = quantised(cls, tmp_path, 8, 8)
    ids = tiny_models.tokens()
    tokens = [
        copy.deepcopy(m).generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (read, expected)
    ]
    assert torch.equal(*tokens)
    read(ids).logits.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in read.parameters())


def test_a_state_dict_comes_back(tmp_path):
    cls = checkpoint("gpt_oss", tmp_path / "whole")
    model = quantised(cls, tmp_path / "whole", 8, 4)
    save_file({name: one.contiguous() for name, one in model.state_dict().items()}, tmp_path / "state")
    other = tiny_models.build("gpt_oss")
    other.set_experts_implementation("pymoe")
    quantize_experts(other, 8)
    quantize_linears(other, 4)
    for tensor in everything(other).values():
        tensor.data.zero_()
    other.load_state_dict(load_file(tmp_path / "state"))
    other.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # its buffers are in no state
    assert_same_bits(logits(other), logits(model), "logits")


@pytest.mark.parametrize("linear_bits", [8, 4])
def test_the_command_packs_dense_layers(linear_bits, tmp_path, capfd):
    cls = checkpoint("qwen2_moe", tmp_path / "whole", torch.bfloat16)
    arguments = [str(tmp_path / "whole"), str(tmp_path / "packed"), "--bits", "4", "--linear-bits", str(linear_bits)]
    assert main([*arguments, "--max-shard-size", "50KB"]) == 0
    capfd.readouterr()
    assert_same_model(cls.from_pretrained(tmp_path / "packed"), quantised(cls, tmp_path / "whole", 4, linear_bits))
