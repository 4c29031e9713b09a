"""Writes made-up checkpoints to disk in the hub's layout, and measures the memory that a process needs to load one."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor


def write_qwen3_moe(
    folder: Path, *, layers: int, hidden: int, ffn: int, experts: int, vocabulary: int, choices: int = 8
) -> int:
    """Write random bfloat16 weights of a Qwen3-MoE, with one file per layer, holding one layer in memory at a time.

    Returns:
        The bytes of all weights.
    """
    from transformers import Qwen3MoeConfig

    folder.mkdir(parents=True)
    heads = max(hidden // 64, 1)
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
        vocab_size=vocabulary,
        hidden_size=hidden,
        moe_intermediate_size=ffn,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=min(choices, experts),
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    config.save_pretrained(folder)
    queries, keys = 64 * heads, 64 * max(heads // 4, 1)
    attention = {
        **{"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)},
        **{"self_attn.q_norm.weight": (64,), "self_attn.k_norm.weight": (64,), "mlp.gate.weight": (experts, hidden)},
        **{"self_attn.q_proj.weight": (queries, hidden), "self_attn.o_proj.weight": (hidden, queries)},
        **{"self_attn.k_proj.weight": (keys, hidden), "self_attn.v_proj.weight": (keys, hidden)},
    }
    files: list[dict[str, tuple[int, ...]]] = [{"model.embed_tokens.weight": (vocabulary, hidden)}]
    for layer in range(layers):
        files.append({f"model.layers.{layer}.{name}": shape for name, shape in attention.items()})
        for expert in range(experts):
            place = f"model.layers.{layer}.mlp.experts.{expert}."
            files[-1][f"{place}gate_proj.weight"] = files[-1][f"{place}up_proj.weight"] = (ffn, hidden)
            files[-1][f"{place}down_proj.weight"] = (hidden, ffn)
    files.append({"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)})
    return _write(folder, files)


def write_gpt_oss(
    folder: Path, *, layers: int, hidden: int, ffn: int, experts: int, vocabulary: int, choices: int = 4
) -> int:
    """Write random weights of a GPT-OSS as it is published, one layer in memory at a time: experts in MXFP4, all other
    tensors in bfloat16, and a configuration that names the method but no dtype.

    Returns:
        The bytes of all weights.
    """
    from transformers import GptOssConfig

    folder.mkdir(parents=True)
    heads = max(hidden // 64, 2)
    config = GptOssConfig(
        architectures=["GptOssForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 8, 1),
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=min(choices, experts),
        pad_token_id=0,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
                *("model.embed_tokens", "lm_head"),
            ],
        },
    )
    config.save_pretrained(folder)
    layer: dict[str, tuple[int, ...]] = {"self_attn.sinks": (heads,)}
    for name in ("input_layernorm", "post_attention_layernorm"):
        layer[f"{name}.weight"] = (hidden,)
    queries, keys = 64 * heads, 64 * max(heads // 8, 1)
    linears = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    for name, shape in [
        *((f"self_attn.{name}_proj", shape) for name, shape in linears.items()),
        ("mlp.router", (experts, hidden)),
    ]:
        layer[f"{name}.weight"], layer[f"{name}.bias"] = shape, shape[:1]
    for name, outputs, inputs in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
        layer[f"mlp.experts.{name}_blocks"] = (experts, outputs, inputs // 32, 16)
        layer[f"mlp.experts.{name}_scales"] = (experts, outputs, inputs // 32)
        layer[f"mlp.experts.{name}_bias"] = (experts, outputs)
    files: list[dict[str, tuple[int, ...]]] = [{"model.embed_tokens.weight": (vocabulary, hidden)}]
    for number in range(layers):
        files.append({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    files.append({"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)})
    return _write(folder, files)


def _write(folder: Path, files: list[dict[str, tuple[int, ...]]]) -> int:
    """Write random tensors of these names and shapes, file by file, with their index; return their bytes."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    where: dict[str, str] = {}
    size = 0
    for number, shapes in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, file))
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("_blocks"):
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    if name.endswith("_scales"):  # codes stand for values of about 2.5, and products keep the size of their rows
        middle = 127 - round(math.log2(2.5 * (32 * shape[-1]) ** 0.5))
        return torch.randint(middle - 1, middle + 2, shape, generator=generator, dtype=torch.uint8)
    if name.endswith("bias"):
        return torch.randn(shape, generator=generator).mul_(0.1).bfloat16()
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).bfloat16()


class AnonymousMemory:
    """Measures the peak of this process's anonymous memory inside a ``with`` block, relative to its start.

    Mapped files do not count, since the system reclaims their pages when it needs them. A thread samples the memory
    every millisecond, so the result may be lower than the true peak, and is never higher.
    """

    def __enter__(self) -> AnonymousMemory:
        self._start = self._most = anonymous()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        """Return the peak in bytes above the start."""
        return self._most - self._start

    @property
    def stays(self) -> int:
        """Return the current number of bytes above the start."""
        return anonymous() - self._start

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._most = max(self._most, anonymous())
            time.sleep(0.001)


def anonymous() -> int:
    """Return the bytes of anonymous memory that this process has in RAM."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def load(
    way: str,
    folder: Path,
    bits: int,
    linear_bits: int | None = None,
    format: Literal["int", "mxfp"] = "int",
) -> tuple[Any, dict[str, float]]:
    """Load a model by one of :data:`WAYS` and have it compute one token.

    Returns:
        The model, and a record: seconds to load and to the end of the first forward, bytes of anonymous memory at the
        peak and at the end, and bytes of packed weights.
    """
    from transformers import AutoModelForCausalLM

    from pymoe.integrations.transformers import PymoeConfig
    from pymoe.nn import quantize_experts, quantize_linears

    start = time.perf_counter()
    with AnonymousMemory() as memory:
        if way == "whole, then quantised":
            model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="pymoe")
            quantize_experts(model, bits, format)
            if linear_bits is not None:
                quantize_linears(model, linear_bits)
        else:
            config = (
                {}
                if way == "saved in few bits"
                else {"quantization_config": PymoeConfig(bits, format, linear_bits=linear_bits)}
            )
            model = AutoModelForCausalLM.from_pretrained(folder, **config)
        loaded = time.perf_counter()
        stays = memory.stays
    with torch.no_grad():
        model(torch.tensor([[1]]))
    packed = sum(tensor.nbytes for name, tensor in model.named_buffers() if name.endswith(".packed"))
    seconds = {"load": loaded - start, "first forward": time.perf_counter() - start}
    return model, {**seconds, "peak": memory.peak, "stays": stays, "packed": packed}


WAYS = ("whole, then quantised", "quantised while read", "saved in few bits")
