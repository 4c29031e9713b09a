"""Writes tiny models as GGUF files, with the package gguf and llama.cpp's names, and says what the files hold."""

import copy

import gguf
import numpy
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from tiny_models import configuration

from benchmarks.models import gguf_files

SIZES = dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_experts=4, num_local_experts=4)
SIZES |= dict(
    num_experts_per_tok=2, shared_expert_intermediate_size=96, num_attention_heads=4, head_dim=64, norm_topk_prob=True
)
CLASSES = {
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
}
NAMES = gguf_files.NAMES | {
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
}
HALVES = {
    "Q2_K": slice(80, 84),
    "Q3_K": slice(108, 110),
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
    "IQ4_NL": slice(0, 2),
    "IQ4_XS": slice(0, 2),
    "IQ3_S": slice(0, 2),
}
"""The float16 of a block of those types that the package gguf does not write."""


def config_of(architecture, **sizes):
    cls = getattr(transformers, CLASSES[architecture])
    return configuration(cls.config_class, SIZES | sizes)


def rounded(values, name, random):
    """Return the bytes of a tensor in a type and what they stand for; the types of ``HALVES``
    get other values of a similar size.
    """
    kind = Type[name]
    if name in HALVES:
        inputs, size = gguf.GGML_QUANT_SIZES[kind]
        data = random.integers(0, 256, (*values.shape[:-1], values.shape[-1] // inputs, size), dtype=numpy.uint8)
        halves = (1e-4 + 4e-4 * random.random(data[..., HALVES[name]].view(numpy.float16).shape)).astype(numpy.float16)
        data[..., HALVES[name]] = halves.view(numpy.uint8)
        data = data.reshape(*values.shape[:-1], -1)
    else:
        data = gguf.quantize(values, kind)
    return data, torch.from_numpy(numpy.array(gguf.dequantize(data, kind)))


def parts_of(name, weight, config):
    """Yield the names in a GGUF file of what a weight of the hub's model becomes, and functions of it and back."""
    found = name.removeprefix("model.").split(".", 2)
    if found[0] != "layers":
        path, _, last = name.rpartition(".")
        yield f"{NAMES[path]}.{last}", weight, lambda one: one
        return
    block, rest = f"blk.{found[1]}.", found[2]
    turned = config.model_type == "gpt_oss"
    if ".experts." in rest:
        own, ending = rest.split(".")[-1].removesuffix("_bias"), "bias" if rest.endswith("_bias") else "weight"
        rows = weight.mT if turned and ending == "weight" else weight
        back = (lambda one: one.mT) if turned and ending == "weight" else (lambda one: one)
        if own == "down_proj":
            yield f"{block}ffn_down_exps.{ending}", rows, back
            return
        half = rows.shape[1] // 2
        for number, part in enumerate(("gate", "up")):
            place = slice(number, None, 2) if turned else slice(number * half, (number + 1) * half)

            def whole(one, place=place):
                full = torch.zeros_like(rows)
                full[:, place] = one
                return back(full)

            yield f"{block}ffn_{part}_exps.{ending}", rows[:, place], whole
        return
    if rest in NAMES:
        yield block + NAMES[rest], weight, lambda one: one
        return
    path, _, last = rest.rpartition(".")
    renamed = "post_attention_norm" if turned and path == "post_attention_layernorm" else NAMES[path]
    flat = path == "mlp.shared_expert_gate"
    yield (
        f"{block}{renamed}.{last}",
        weight[0] if flat else weight,
        (lambda one: one[None]) if flat else (lambda one: one),
    )


def write(path, architecture, experts, dense="F32", split=0, **sizes):
    """Write a tiny model with random weights.

    Args:
        path: of the file.
        architecture: a key of ``CLASSES``.
        experts: a function of a tensor's name that returns the type of experts' weights, or a type.
        dense: the type of other matrices except routers, or a function of the name of any other matrix.
        split: most tensors of a part, ``NAME-00001-of-00003.gguf`` and so on; 0 for one file.
        sizes: of the configuration.

    Returns:
        The configuration, the model in float32 that the file describes, and the values of its tensors by their names.
    """
    random = numpy.random.default_rng(0)
    config = config_of(architecture, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES[architecture])(copy.deepcopy(config)).eval()
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split, small_first_shard=split > 0)
    for key, value in gguf_files.facts(config.to_dict(), config.num_hidden_layers).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key if key.startswith("tokenizer") else f"{architecture}.{key}", value)
    state, tensors = {}, {}
    for name, weight in model.state_dict().items():
        weight = torch.nn.init.normal_(weight, std=0.2) if "norm" not in name else weight
        state[name] = -0.0  # a sum with it keeps the signs of zeros
        for target, values, back in parts_of(name, weight, config):
            kind = "F32"
            if target.endswith("_exps.weight"):
                kind = experts if isinstance(experts, str) else experts(target)
            elif values.dim() == 2 and not target.endswith(".bias"):
                kind = dense(target) if callable(dense) else "F32" if "gate_inp" in target else dense
            data, tensors[target] = rounded(values.contiguous().numpy(), kind, random)
            writer.add_tensor(target, data, raw_dtype=Type[kind])
            state[name] = state[name] + back(tensors[target])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(state)
    return config, model, tensors
