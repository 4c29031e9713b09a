"""Writes made-up checkpoints to disk in the hub's layout, and measures the memory that a process needs to load one."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor


def write_qwen3_moe(
    folder: Path, *, layers: int, hidden: int, ffn: int, experts: int, vocabulary: int, choices: int = 8
) -> int:
    """Write a Qwen3-MoE of these sizes as :func:`write_checkpoint` does; return the bytes of all weights."""
    from transformers import Qwen3MoeConfig

    heads = max(hidden // 64, 1)
    config = Qwen3MoeConfig(
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
    return write_checkpoint(folder, config)


def write_checkpoint(folder: Path, config: Any) -> int:
    """Write random bfloat16 weights for a configuration in the hub's layout: one tensor per expert (GPT-OSS stacks
    them), one file per layer, one layer in memory at a time.

    A configuration that has a ``quantization_config`` is one of a GPT-OSS in MXFP4, and names no dtype, as published.

    Returns:
        The bytes of all weights.
    """
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    in_mxfp4 = hasattr(config, "quantization_config")
    config.architectures, config.dtype = [type(model).__name__], None if in_mxfp4 else "bfloat16"
    config.save_pretrained(folder)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in model.state_dict().items():
        layer = re.match(r"model\.layers\.\d+\.", name)
        published = _as_published(name, tensor.shape, "mxfp4" if in_mxfp4 else config.model_type)
        files.setdefault(layer[0] if layer else name, {}).update(published)
    return _write(folder, list(files.values()))


def write_gpt_oss(
    folder: Path, *, layers: int, hidden: int, ffn: int, experts: int, vocabulary: int, choices: int = 4
) -> int:
    """Write a GPT-OSS of these sizes as :func:`write_checkpoint` does, in MXFP4; return the bytes of all weights."""
    from transformers import GptOssConfig

    heads = max(hidden // 64, 2)
    config = GptOssConfig(
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
    )
    config.quantization_config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
            *("model.embed_tokens", "lm_head"),
        ],
    }
    return write_checkpoint(folder, config)


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


def _as_published(name: str, shape: Sequence[int], model: str) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the hub's tensors that make up a tensor of the model of transformers."""
    gate, up, down = ("w1", "w3", "w2") if model == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    if model == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    path, _, last = name.rpartition(".")
    if model == "gpt_oss" or not path.endswith(".experts") or last.endswith("_bias"):
        return {name: tuple(shape)}
    experts, rows, columns = shape
    if model == "mxfp4":
        scales = (experts, columns, rows // 32)
        return {f"{name}_blocks": (*scales, 16), f"{name}_scales": scales}
    parts = (
        {gate: (rows // 2, columns), up: (rows // 2, columns)} if last == "gate_up_proj" else {down: (rows, columns)}
    )
    return {f"{path}.{expert}.{part}.weight": size for expert in range(experts) for part, size in parts.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("_blocks"):
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    if name.endswith("_scales"):  # codes stand for values of about 2.5, and products keep the size of their rows
        middle = 127 - round(math.log2(2.5 * (32 * shape[-1]) ** 0.5))
        return torch.randint(middle - 1, middle + 2, shape, generator=generator, dtype=torch.uint8)
    if "norm" in name.split(".")[-2]:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = 0.1 if name.endswith(("bias", "sinks")) else shape[-1] ** -0.5
    return torch.randn(shape, generator=generator).mul_(scale).bfloat16()


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
