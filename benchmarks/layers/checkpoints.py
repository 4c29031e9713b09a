"""Writes made-up checkpoints to disk in the hub's layout, and measures the memory that a process needs to load one."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pymoe._common.types import WeightFormat

POOL = 2**22 - 3
"""Number of normal numbers that are drawn. It is a prime, so that no two rows of a matrix begin at the same number."""


def write_qwen3_moe(
    folder: Path, *, layers: int, hidden: int, ffn: int, experts: int, vocabulary: int, choices: int = 8
) -> int:
    """Write a Qwen3-MoE of these sizes with :func:`write_checkpoint`; return the bytes of all weights."""
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


def write_checkpoint(folder: Path, config: Any, shard: int | None = None) -> int:
    """Write random bfloat16 weights for a configuration, in the hub's layout: one tensor per expert (GPT-OSS stacks
    them). A file has at most ``shard`` bytes and may end within a layer; if ``shard`` is None, each layer has its own
    file. Only one tensor is in memory at a time.

    A configuration with a ``quantization_config`` must describe a GPT-OSS in MXFP4; it names no dtype, like the
    published one.

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
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        shapes |= _as_published(name, tensor.shape, "mxfp4" if in_mxfp4 else config.model_type)
    return _write(folder, list(_shards(shapes, shard) if shard else _layers(shapes)))


def write_gpt_oss(
    folder: Path, *, layers: int, hidden: int, ffn: int, experts: int, vocabulary: int, choices: int = 4
) -> int:
    """Write a GPT-OSS of these sizes in MXFP4 with :func:`write_checkpoint`; return the bytes of all weights."""
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
    """Write random tensors of these names and shapes, file by file, with their index; return their bytes.

    A file is eight bytes with the length of its header, the header, padded to eight bytes, and the tensors one after
    another. It is written here because the function of safetensors takes all tensors of a file at once.
    """
    generator = torch.Generator().manual_seed(0)
    where: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + _size(name, shape)
            dtype = "U8" if _is_packed(name) else "BF16"
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            for name, shape in shapes.items():
                target.write(_random(name, shape, generator).view(torch.uint8).numpy().data)
        where.update(dict.fromkeys(shapes, file))
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _shards(shapes: Mapping[str, tuple[int, ...]], limit: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield tensors in their order, in parts of at most ``limit`` bytes; a larger tensor is a part of its own."""
    part: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        if part and size + _size(name, shape) > limit:
            yield part
            part, size = {}, 0
        part[name] = shape
        size += _size(name, shape)
    yield part


def _layers(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the tensors of every layer together, and each other tensor by itself."""
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        layer = re.match(r"model\.layers\.\d+\.", name)
        parts.setdefault(layer[0] if layer else name, {})[name] = shape
    yield from parts.values()


def _is_packed(name: str) -> bool:
    return name.endswith(("_blocks", "_scales"))


def _size(name: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * (1 if _is_packed(name) else 2)


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
    if name.endswith("_scales"):  # codes represent values of about 2.5, and products keep the magnitude of their rows
        middle = 127 - round(math.log2(2.5 * (32 * shape[-1]) ** 0.5))
        return torch.randint(middle - 1, middle + 2, shape, generator=generator, dtype=torch.uint8)
    if "norm" in name.split(".")[-2]:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = 0.1 if name.endswith(("bias", "sinks")) else shape[-1] ** -0.5
    size, start = math.prod(shape), int(torch.randint(POOL, (), generator=generator))
    whole, rest = divmod(size, POOL)
    pool = _pool(scale)[start : start + POOL]
    values = torch.cat([*[pool] * whole, pool[:rest]]) if whole else pool[:rest]
    return values.view(shape)


@functools.lru_cache(maxsize=8)
def _pool(scale: float) -> Tensor:
    """Return the same normal numbers in every call, times ``scale`` and repeated once. Drawing new numbers for every
    tensor would take most of a checkpoint's time.
    """
    numbers = torch.randn(POOL, generator=torch.Generator().manual_seed(0)).mul_(scale).bfloat16()
    return numbers.repeat(2)


LIMIT_STATUS = 137
"""Exit status of a process that exceeds its memory limit; a shell reports the same status if the system kills a
process."""


class AnonymousMemory:
    """Measures the peak of this process's anonymous memory inside a ``with`` block, relative to its start.

    Mapped files do not count, since the system reclaims their pages when it needs them. A thread samples the memory
    every millisecond, so the result may be lower than the true peak, and is never higher.

    Args:
        limit: bytes, not relative to the start. If the process has more, it is ended with the exit status
            :data:`LIMIT_STATUS`, as a system with so little memory would end it. None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit

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
            now = anonymous()
            self._most = max(self._most, now)
            if self._limit is not None and now > self._limit:
                print(f"{now:,} bytes of anonymous memory, of at most {self._limit:,}", file=sys.stderr, flush=True)
                os._exit(LIMIT_STATUS)
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
    format: WeightFormat = "int",
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
