"""GGUF files of Qwen3.5-MoE, whose other tensors transformers turns around, against what transformers makes of them.

The files are made up: experts of random bytes, written by the package gguf under llama.cpp's names and shapes.
"""

import copy

import numpy
import pytest
import torch
from specs.comparison import assert_same_bits
from test_quantizer import logits
from transformers import AutoModelForCausalLM, GgufConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from pymoe import ops
from pymoe.integrations.transformers import PymoeConfig, gguf_blocks
from pymoe.nn import QuantizedDenseLinear, QuantizedLinear

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # transformers asks for it
import gguf_models  # noqa: E402

pytestmark = pytest.mark.only_on("cpu")

CONFIG = Qwen3_5MoeTextConfig(
    vocab_size=128,
    hidden_size=256,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=96,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=64,
    dtype="float32",
)
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    **{f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
    "mlp.experts.gate_up_proj": "ffn_gate_exps.weight ffn_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
"""llama.cpp's names of tensors by those of transformers, in a layer or in the model."""
FACTS = {
    "block_count": 3,
    "nextn_predict_layers": 1,
    "context_length": CONFIG.max_position_embeddings,
    "embedding_length": 256,
    "expert_feed_forward_length": 256,
    "expert_shared_feed_forward_length": 96,
    "expert_count": 4,
    "expert_used_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.layer_norm_rms_epsilon": CONFIG.rms_norm_eps,
    "full_attention_interval": 2,
    "rope.freq_base": 1e4,
    "rope.dimension_count": 16,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 256,
}


def write(path, dense="Q8_0", **changes):
    """Write a file with a third layer, which predicts further tokens; Q4_K and Q6_K for experts.

    Matrices are in the type ``dense`` if their rows are whole blocks of it.
    """
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dense]][0]
    random = numpy.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen35moe")
    for key, value in (FACTS | changes).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"qwen35moe.{key}", value)
    writer.add_array("qwen35moe.rope.dimension_sections", [3, 3, 2, 0])
    writer.add_array("tokenizer.ggml.tokens", [str(i) for i in range(128)])
    for name, tensor in Qwen3_5MoeForCausalLM(copy.deepcopy(CONFIG)).state_dict().items():
        before, _, own = name.removeprefix("model.layers.").partition(".")
        layer, own = (f"blk.{before}.", own) if before.isdigit() else ("", name)
        targets = NAMES[own].split()
        shape = (
            [tensor.shape[0], tensor.shape[1] // len(targets), *tensor.shape[2:]] if tensor.dim() > 1 else tensor.shape
        )
        shape = [size for size in shape if size > 1]  # llama.cpp keeps no dimension of 1
        for target in targets:
            values = random.normal(size=shape, scale=0.1).astype(numpy.float32) + ("norm" in target)
            values = -abs(values) if target == "ssm_a" else values
            kind = "F32"
            if "_exps" in target:
                kind = "Q6_K" if "down" in target else "Q4_K"
            elif len(shape) > 1 and "conv1d" not in target and "gate_inp" not in target and shape[-1] % block == 0:
                kind = dense
            data, _ = gguf_models.rounded(values, kind, random)
            writer.add_tensor(layer + target, data, raw_dtype=gguf.GGMLQuantizationType[kind])
            if layer == "blk.1.":
                writer.add_tensor(f"blk.2.{target}", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.add_tensor("blk.2.nextn.eh_proj.weight", numpy.zeros((256, 512), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path, quantization, **options):
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=quantization, dtype=torch.float32, **options
    )


@pytest.mark.parametrize("dense", ["Q8_0", "Q4_K", "Q6_K", "Q2_K"])
def test_it_is_the_model_that_transformers_widens(dense, tmp_path):
    """Heads are in another order in the file, norms are greater by 1, and decays are minus their exponentials.

    Columns of the last layer of linear attention are in another order, too, so its Q4_K becomes affine.
    """
    write(tmp_path / "x.gguf", dense)
    expected = read(tmp_path / "x.gguf", GgufConfig(dequantize=True), experts_implementation="eager")
    model = read(tmp_path / "x.gguf", PymoeConfig(format="stored"))
    theirs = dict(expected.named_parameters())
    formats, experts = {}, set()
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedDenseLinear):
            formats[name] = layer.format, layer.bits
            assert torch.equal(ops.dequantize_weight(layer.quantized_weight)[0], theirs.pop(f"{name}.weight")), name
        elif isinstance(layer, QuantizedLinear):
            experts.add((layer.format, layer.bits))
            assert torch.equal(ops.dequantize_weight(layer.weight), theirs.pop(name)), name
    assert experts == {("int", 4), ("symmetric", 8)}
    narrow = {f"model.layers.{i}.mlp.shared_expert.down_proj" for i in range(2)}  # 96 columns
    kept = {f"model.layers.{i}.mlp.shared_expert.{own}_proj" for i in range(2) for own in ("gate", "up", "down")}
    kept |= {f"model.layers.0.linear_attn.{own}" for own in ("in_proj_qkv", "in_proj_z", "out_proj")}
    kept |= {f"model.layers.1.self_attn.{own}_proj" for own in "qkvo"} | {"lm_head"}
    wanted = dict.fromkeys(kept if dense == "Q8_0" else kept - narrow, gguf_blocks.KEPT[dense])
    if dense == "Q4_K":
        wanted["model.layers.0.linear_attn.out_proj"] = ("affine", 8)
    assert formats == wanted
    ours = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert_same_bits(ours[name].detach(), parameter.detach(), name)
    got, wanted = logits(model), logits(expected)
    assert (got - wanted).norm() / wanted.norm() < 1e-3
    model.save_pretrained(tmp_path / "packed")
    assert_same_bits(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), got, "logits")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ssm.group_count": 1, "ssm.state_size": 32}, "ssm.group_count = 1 of the GGUF file, got 2"),
        ({"ssm.state_size": 32}, "ssm.state_size = 32 of the GGUF file, got 16"),
        ({"ssm.time_step_rank": 8}, "ssm.time_step_rank = 8 of the GGUF file, got 4"),
        ({"block_count": 2}, "block_count = 2 of the GGUF file, got 3"),
        ({"nextn_predict_layers": 0}, "block_count = 3 of the GGUF file, got 2"),
    ],
)
def test_a_configuration_that_contradicts_the_metadata_is_refused(change, words, tmp_path):
    write(tmp_path / "x.gguf", **change)
    with pytest.raises(ValueError, match=f"from_pretrained: expected a config that agrees with qwen35moe.{words}"):
        read(tmp_path / "x.gguf", PymoeConfig(format="stored"), config=CONFIG)
