"""Writes a checkpoint in the hub's layout as a GGUF file in 16 bits, for llama.cpp to run and to quantise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

ARCHITECTURES = {
    "olmoe": "olmoe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "mixtral": "llama",
    "deepseek_v2": "deepseek2",
}
"""llama.cpp's names of architectures by those of transformers."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **dict.fromkeys(("mlp.gate", "mlp.router", "block_sparse_moe.gate"), "ffn_gate_inp"),
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
"""llama.cpp's names of modules (or tensors) by those of the hub."""
EXPERT = r"(?:mlp|block_sparse_moe)\.experts\.0\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight"
Entry = tuple[str, tuple[int, ...], Callable[[], Tensor]]
"""A tensor's name and shape, and a function that reads it."""


def write_gguf(folder: Path, file: Path, layers: int, gguf: Any) -> None:
    """Write the first ``layers`` layers of the checkpoint in ``folder``: matrices in bfloat16, the rest in float32.

    Args:
        folder: the checkpoint, in bfloat16.
        file: is written.
        layers: how many layers the model gets.
        gguf: the package of this name.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    for key, value in facts(config, layers).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](
            key if "." in key and key.startswith(("tokenizer", "general")) else f"{writer.arch}.{key}", value
        )
    entries = list(tensors(folder, config, layers))
    for name, shape, _ in entries:
        half = is_half(name, shape)
        size = torch.Size(shape).numel() * (2 if half else 4)
        kind = gguf.GGMLQuantizationType.BF16 if half else gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(name, shape, torch.zeros(1).numpy().dtype, size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, read in entries:
        tensor = read().contiguous()
        assert tuple(tensor.shape) == shape
        writer.write_tensor_data((tensor.view(torch.int16) if is_half(name, shape) else tensor.float()).numpy())
    writer.close()


def is_half(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether llama.cpp's own converter would write a tensor in 16 bits."""
    return len(shape) > 1 and not name.endswith(("ffn_gate_inp.weight", ".bias"))


def facts(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the entries that llama.cpp reads, without the architecture in front of their names."""
    model = config["model_type"]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or hidden // heads
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "no_vocab",
        "vocab_size": config["vocab_size"],
        "block_count": layers,
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "expert_count": experts(config),
        "expert_used_count": config["num_experts_per_tok"],
    }
    if model != "mixtral":
        found["expert_feed_forward_length"] = width
    if model == "gpt_oss":
        found["attention.sliding_window"] = config["sliding_window"]
    if model == "deepseek_v2":
        nope, turned, value, rank = (
            config[f"{key}"] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        )
        found |= {
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + turned,
            "attention.value_length": rank,
            "attention.key_length_mla": nope + turned,
            "attention.value_length_mla": value,
            "rope.dimension_count": turned,
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": bool(config["norm_topk_prob"]),
            "expert_gating_func": 1,
        }
    return found


def experts(config: dict[str, Any]) -> int:
    """Return the number of experts of a layer."""
    return int(next(config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config))


class Checkpoint:
    """A checkpoint in the hub's layout whose tensors are read by name."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.config = config
        self.where: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        self.files = {name: safe_open(folder / name, "pt") for name in set(self.where.values())}

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        tensor: Tensor = self.files[self.where[name]].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self.files[self.where[name]].get_slice(name).get_shape())

    def entry(self, target: str, name: str) -> Entry:
        """Return a tensor as it is, under another name."""
        return target, self.shape(name), lambda: self.read(name)


def tensors(folder: Path, config: dict[str, Any], layers: int) -> Iterator[Entry]:
    """Yield all tensors of the file."""
    checkpoint = Checkpoint(folder, config)
    for name in checkpoint.where:
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if found is None:
            yield checkpoint.entry(_renamed(name, config), name)
        elif int(found[1]) < layers:
            of = _of_experts if ".experts." in found[2] else _of_layer
            yield from of(checkpoint, name, f"blk.{found[1]}.", found[2])


def _of_layer(checkpoint: Checkpoint, name: str, block: str, rest: str) -> Iterator[Entry]:
    """Yield the entries for a layer's tensor that does not belong to an expert."""
    config = checkpoint.config
    target = block + _renamed(rest, config)
    if config["model_type"] == "mixtral" and rest.startswith(("self_attn.q_proj", "self_attn.k_proj")):
        heads = config["num_attention_heads" if "q_proj" in rest else "num_key_value_heads"]
        yield target, checkpoint.shape(name), lambda: _turned(checkpoint.read(name), heads)
    elif rest == "self_attn.kv_b_proj.weight":
        nope, value, rank = (config[key] for key in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank"))
        heads = config["num_attention_heads"]

        def parts() -> Tensor:
            return checkpoint.read(name).view(heads, nope + value, rank)

        yield f"{block}attn_k_b.weight", (heads, rank, nope), lambda: parts()[:, :nope].transpose(1, 2)
        yield f"{block}attn_v_b.weight", (heads, value, rank), lambda: parts()[:, nope:]
    else:
        yield checkpoint.entry(target, name)


def _of_experts(checkpoint: Checkpoint, name: str, block: str, rest: str) -> Iterator[Entry]:
    """Yield the entries for the stacked experts when the first expert's tensor comes; yield nothing for the others."""
    config, read = checkpoint.config, checkpoint.read
    count = experts(config)
    if found := re.fullmatch(EXPERT, rest):
        part = {"w1": "gate", "w3": "up", "w2": "down"}.get(found[1], found[1].removesuffix("_proj"))
        names = [name.replace(".experts.0.", f".experts.{number}.") for number in range(count)]
        shape = (count, *checkpoint.shape(name))
        yield f"{block}ffn_{part}_exps.weight", shape, lambda: torch.stack([read(one) for one in names])
    elif config["model_type"] == "gpt_oss":
        # (E, in, out), with columns of gate and up in turns; biases (E, out).
        shape = checkpoint.shape(name)
        kind = "bias" if rest.endswith("bias") else "weight"
        outputs = shape[-1] // (2 if "gate_up" in rest else 1)
        whole = (count, outputs) if kind == "bias" else (count, outputs, shape[1])
        steps = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if "gate_up" in rest else {"down": slice(None)}
        for part, step in steps.items():
            yield (
                f"{block}ffn_{part}_exps.{kind}",
                whole,
                lambda step=step: read(name)[..., step] if kind == "bias" else read(name)[..., step].transpose(1, 2),
            )


def _renamed(name: str, config: dict[str, Any]) -> str:
    if name in NAMES:
        return NAMES[name]
    path, _, last = name.rpartition(".")
    if config["model_type"] == "gpt_oss" and path == "post_attention_layernorm":
        return f"post_attention_norm.{last}"
    return f"{NAMES.get(path, path)}.{last}"


def _turned(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of queries or keys in the order of llama.cpp's rotary embeddings, in which the rows of a pair are
    adjacent.
    """
    return weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)
