"""The operators, with their promises of exactness and the inputs on which they are timed.

The tests' specifications (``tests/specs``) build on these records, so that an operator's promises are stated only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe import ops, reference
from pymoe._common.types import FLOATING, FORMATS, PACKED_ONLY, RUNS, WeightFormat, is_gated, packed_shape
from pymoe.bench.calls import BenchCase, Operator, Sample, Target
from pymoe.reference import Routing

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SOFTMAX = {"score": "softmax"}
GROUPS = {"score": "sigmoid", "num_groups": 8, "topk_groups": 4, "scale": 2.5}


def tolerances(float32: Any, float64: Any, bfloat16: Any, float16: Any) -> dict[torch.dtype, tuple[float, float]]:
    """Return the tolerances (rtol, atol) by dtype."""
    return dict(zip(FLOATING, (float32, float64, bfloat16, float16), strict=True))


# --- inputs ---


def uniform(*shape: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 2.0) -> Tensor:
    """Return uniformly distributed values in [-scale, scale), rounded to ``dtype``."""
    return ((torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * scale).to(dtype)


def distinct(tokens: int, choices: int, experts: int, generator: torch.Generator) -> Tensor:
    """Return a balanced router's choices: (T, K) int32, uniformly drawn, distinct within a token."""
    if tokens == 0:
        return torch.empty(0, choices, dtype=torch.int32)
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :choices].int().contiguous()


def offsets_of(counts: list[int]) -> Tensor:
    """Return the offsets, (E + 1,) int32, of experts where expert e owns ``counts[e]`` rows."""
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def random_counts(rows: int, experts: int, generator: torch.Generator, skew: float = 0.0) -> list[int]:
    """Return the number of rows of each expert; the larger ``skew``, the more rows the first experts get."""
    share = torch.arange(1, experts + 1, dtype=torch.float64) ** -skew
    owner = torch.multinomial(share, rows, replacement=True, generator=generator) if rows else torch.zeros(0).long()
    return torch.bincount(owner, minlength=experts).tolist()


def random_load(num_experts: int, generator: torch.Generator, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return random counts from 0 to 8, (E,)."""
    return torch.randint(0, 9, (num_experts,), generator=generator).to(dtype)


# --- baselines: equivalents in plain torch ---


def torch_build_routing(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the token of every row, and the number of rows of each expert."""
    flat = experts.flatten()
    return torch.argsort(flat, stable=True) // experts.shape[1], torch.bincount(flat, minlength=num_experts)


def torch_dispatch(x: Tensor, routing: Routing, *, out: Tensor | None = None) -> Tensor:
    """Copy each token's row to the rows of its choices. No choice may be dropped."""
    return torch.index_select(x, 0, routing.token, out=out)


def torch_combine(y: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """Multiply each row by its weight and add up the rows of each token. No choice may be dropped."""
    slot, token, _ = routing
    weight_of_row = torch.empty_like(weights.view(-1)).index_put((slot.view(-1),), weights.view(-1))
    weighted = y * weight_of_row[:, None].to(y.dtype)
    return y.new_zeros(slot.shape[0], y.shape[1]).index_add(0, token, weighted)


def torch_gather_batch(tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    return torch.cat(list(tensors)), tuple(len(tensor) for tensor in tensors)


def torch_gate_topk(logits: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.softmax(logits.float(), 1) if options.get("score") != "sigmoid" else logits.float().sigmoid()
    choice = scores + options["bias"] if "bias" in options else scores
    if "num_groups" in options:
        grouped = choice.view(len(logits), options["num_groups"], -1)
        groups = grouped.topk(2, dim=2).values.sum(2).topk(options["topk_groups"], dim=1).indices
        mask = torch.ones(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter(1, groups, False)
        choice = grouped.masked_fill(mask[:, :, None], -torch.inf).flatten(1)
    experts = choice.topk(k, dim=1).indices
    weights = scores.gather(1, experts)
    weights = weights / weights.sum(1, keepdim=True) * options.get("scale", 1.0)
    return weights, experts.int(), torch.bincount(experts.flatten(), minlength=logits.shape[1]).int()


def torch_router_losses(logits: Tensor, load: Tensor, score: str = "softmax") -> tuple[Tensor, Tensor]:
    values = logits.float()
    scores = torch.softmax(values, 1) if score == "softmax" else values.sigmoid()
    probabilities = scores if score == "softmax" else scores / scores.sum(1, keepdim=True)
    balance = logits.shape[1] * (load.float() / load.sum() * probabilities.mean(0)).sum()
    return balance, torch.logsumexp(values, 1).square().mean()


def torch_grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply ``F.linear`` expert by expert."""
    bounds = offsets.tolist()
    blocks = [
        F.linear(x[bounds[e] : bounds[e + 1]], weight[e], None if bias is None else bias[e])
        for e in range(weight.shape[0])
    ]
    return torch.cat(blocks)


def torch_expert_activation(h: Tensor, kind: str) -> Tensor:
    if kind == "swiglu":
        gate, up = h.chunk(2, dim=1)
        return F.silu(gate) * up
    return F.gelu(h) if kind == "gelu" else F.relu(h)


# --- cases ---


def build_routing_case(tokens: int, choices: int, experts: int, source: str = "") -> BenchCase:
    return BenchCase(
        f"T{tokens} K{choices} E{experts}",
        torch.int32,
        lambda random: Sample("", (distinct(tokens, choices, experts, random), experts)),
        bytes=4 * (3 * tokens * choices + experts + 1),
        source=source,
        baseline=torch_build_routing,
        target=Target("baseline", 5.0),
        cuda_target=Target("seconds", 5e-6) if tokens == 4096 else None,
    )


def dispatch_case(
    tokens: int, hidden: int, choices: int, experts: int, dtype: torch.dtype, source: str, given: bool
) -> BenchCase:
    def make(random: torch.Generator) -> Sample:
        routing = reference.build_routing(distinct(tokens, choices, experts, random), experts)
        x = torch.randn(tokens, hidden, generator=random).to(dtype)
        out = {"out": torch.zeros(tokens * choices, hidden, dtype=dtype)} if given else {}
        return Sample("", (x, routing), out)

    return BenchCase(
        f"T{tokens} H{hidden} K{choices} {'into a buffer' if given else 'fresh'}",
        dtype,
        make,
        bytes=tokens * (1 + choices) * hidden * dtype.itemsize,
        source=source,
        baseline=torch_dispatch,
        target=Target("floor", 0.8) if given else None,
        cuda_target=Target("seconds", 0.135e-3) if hidden == 7168 else None,
    )


def combine_case(
    tokens: int,
    hidden: int,
    choices: int,
    experts: int,
    dtype: torch.dtype,
    source: str = "",
    target: Target | None = None,
    backward: bool = False,
) -> BenchCase:
    def make(random: torch.Generator) -> Sample:
        routing = reference.build_routing(distinct(tokens, choices, experts, random), experts)
        y = torch.randn(tokens * choices, hidden, generator=random).to(dtype).requires_grad_(backward)
        return Sample("", (y, routing, torch.rand(tokens, choices, generator=random).requires_grad_(backward)))

    rows = 1 + choices + (1 + 2 * choices if backward else 0)
    return BenchCase(
        f"T{tokens} H{hidden} K{choices}",
        dtype,
        make,
        bytes=tokens * rows * hidden * dtype.itemsize,
        backward=backward,
        source=source,
        baseline=torch_combine,
        target=target,
        cuda_target=Target("seconds", 0.128e-3) if hidden == 7168 else None,
    )


def gather_batch_case(count: int, rows: int, columns: int) -> BenchCase:
    return BenchCase(
        f"{count} of {rows}x{columns}",
        FLOAT32,
        lambda random: Sample("", ([torch.randn(rows, columns, generator=random) for _ in range(count)],)),
        bytes=2 * 4 * count * rows * columns,
        baseline=torch_gather_batch,
    )


def gate_topk_case(
    tokens: int,
    num_experts: int,
    k: int,
    dtype: torch.dtype,
    source: str = "",
    options: dict[str, Any] = SOFTMAX,
    backward: bool = False,
    target: Target | None = None,
    cuda_seconds: float | None = None,
) -> BenchCase:
    def make(random: torch.Generator) -> Sample:
        logits = torch.randn(tokens, num_experts, generator=random).to(dtype).requires_grad_(backward)
        return Sample("", (logits, k), options)

    extra = " ".join(name for name in ("bias", "num_groups") if name in options).replace("num_groups", "groups")
    return BenchCase(
        f"T{tokens} E{num_experts} K{k} {options['score']} {extra}".strip(),
        dtype,
        make,
        bytes=tokens * (num_experts * dtype.itemsize * (2 if backward else 1) + k * 8),
        backward=backward,
        source=source,
        baseline=torch_gate_topk,
        target=target,
        cuda_target=Target("seconds", cuda_seconds) if cuda_seconds else None,
    )


def router_losses_case(
    tokens: int, num_experts: int, score: str, dtype: torch.dtype, backward: bool, source: str
) -> BenchCase:
    def make(random: torch.Generator) -> Sample:
        logits = torch.randn(tokens, num_experts, generator=random).to(dtype).requires_grad_(backward)
        return Sample("", (logits, random_load(num_experts, random)), {"score": score})

    return BenchCase(
        f"T{tokens} E{num_experts} {score}",
        dtype,
        make,
        bytes=tokens * num_experts * dtype.itemsize * (3 if backward else 1),
        backward=backward,
        source=source,
        baseline=torch_router_losses,
    )


def grouped_linear_case(
    source: str,
    rows: int,
    experts: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype = FLOAT32,
    skew: float = 0.0,
    backward: bool = False,
) -> BenchCase:
    def make(random: torch.Generator) -> Sample:
        counts = random_counts(rows, experts, random, skew)
        x = uniform(rows, inputs, dtype=dtype, generator=random)
        weight = uniform(experts, outputs, inputs, dtype=dtype, generator=random, scale=inputs**-0.5)
        return Sample("", (x.requires_grad_(backward), weight.requires_grad_(backward), offsets_of(counts)))

    passes = 3 if backward else 1
    elements = rows * (inputs + outputs) + experts * inputs * outputs
    name = f"S{rows} E{experts} H{inputs} N{outputs}" + (" skewed" if skew else "")
    return BenchCase(
        name + (" fwd+bwd" if backward else ""),
        dtype,
        make,
        bytes=elements * dtype.itemsize * passes,
        flops=2 * rows * inputs * outputs * passes,
        backward=backward,
        source=source,
        baseline=torch_grouped_linear,
    )


def quantized_linear_case(
    source: str, rows: int, bits: int, format: WeightFormat = "int", dtype: torch.dtype = BFLOAT16
) -> BenchCase:
    experts, outputs, inputs = 8, 1536, 2048

    def make(random: torch.Generator) -> Sample:
        x = uniform(rows * experts, inputs, dtype=dtype, generator=random)
        if format in PACKED_ONLY:
            codes = torch.randint(2**bits, (experts, outputs, inputs), generator=random, dtype=torch.uint8)
            size, heads = RUNS[FORMATS[format, bits]]
            ends = uniform(heads, experts, outputs, inputs // size, dtype=FLOAT32, generator=random)
            if heads > 1:
                packed = ops.pack_weight(codes, ends[0], ends[1], bits)
            else:
                packed = ops.pack_weight(codes.view(torch.int8), ends[0])
        else:
            weight = uniform(experts, outputs, inputs, dtype=dtype, generator=random, scale=inputs**-0.5)
            packed = ops.quantize_weight(weight, bits, format)
        return Sample("", (x, packed, offsets_of([rows] * experts)))

    return BenchCase(
        f"S{rows * experts} E{experts} H{inputs} N{outputs} {format}{bits}",
        dtype,
        make,
        bytes=math.prod(packed_shape(FORMATS[format, bits], outputs, inputs, experts)),
        flops=2 * rows * experts * inputs * outputs,
        source=source,
    )


def expert_activation_case(kind: str, features: int, dtype: torch.dtype, backward: bool, source: str) -> BenchCase:
    rows = 4096
    inputs = 2 * features if is_gated(kind) else features

    def make(random: torch.Generator) -> Sample:
        return Sample("", (uniform(rows, inputs, dtype=dtype, generator=random).requires_grad_(backward), kind))

    moved = inputs + features + (2 * inputs + features if backward else 0)
    return BenchCase(
        f"S{rows} F{features} {kind}" + (" fwd+bwd" if backward else ""),
        dtype,
        make,
        bytes=rows * moved * dtype.itemsize,
        backward=backward,
        source=source,
        baseline=torch_expert_activation,
    )


# --- operators ---

# Native and reference sums over tokens run in different orders, and gradients are rounded to the logits' dtype.
LOSS_TOLERANCES = tolerances((2e-5, 1e-6), (1e-12, 1e-14), (1e-2, 1e-5), (2e-3, 1e-5))
NO_TOLERANCE = dict.fromkeys(FLOATING, (0.0, 0.0))


def _operator(
    name: str,
    exact: tuple[bool, ...],
    tolerances: dict[torch.dtype, tuple[float, float]],
    *cases: BenchCase,
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Operator:
    return Operator(name, getattr(ops, name), getattr(reference, name), exact, tolerances, cases, devices)


_ALL = (
    _operator(
        "build_routing",
        (True, True, True),
        {},
        build_routing_case(16384, 2, 64),
        build_routing_case(4096, 8, 128, "TileOPs"),
        build_routing_case(4096, 8, 256, "Transformer Engine, test_permutation"),
        build_routing_case(8192, 8, 128, "Qwen3-30B: Liger-Kernel"),
        build_routing_case(32768, 8, 128, "SonicMoE"),
    ),
    _operator(
        "combine",
        (True,),
        tolerances((1e-5, 5e-5), (1e-13, 1e-13), (0.008, 1e-4), (0.001, 1e-4)),
        combine_case(16384, 1024, 2, 64, FLOAT32, target=Target("baseline", 4.0)),
        combine_case(16384, 1024, 2, 64, FLOAT32, backward=True),
        combine_case(16384, 1024, 8, 64, FLOAT32, target=Target("baseline", 6.0)),
        combine_case(16384, 1024, 2, 64, BFLOAT16),
        combine_case(16384, 1024, 2, 64, BFLOAT16, backward=True),
        combine_case(4096, 7168, 8, 256, BFLOAT16, "TileOPs; Transformer Engine, test_permutation"),
        combine_case(8192, 2048, 8, 128, BFLOAT16, "Qwen3-30B: Liger-Kernel"),
    ),
    _operator(
        "dispatch",
        (True,),
        # These apply to gradients only: outputs are exact.
        tolerances((2e-6, 1e-6), (1e-14, 1e-14), (0.008, 1e-5), (0.001, 1e-5)),
        *(
            dispatch_case(*sizes, given)
            for sizes in (
                (16384, 1024, 2, 64, FLOAT32, ""),
                (16384, 1024, 2, 64, BFLOAT16, ""),
                (4096, 7168, 8, 256, BFLOAT16, "TileOPs; Transformer Engine, test_permutation"),
                (8192, 2048, 8, 128, BFLOAT16, "Qwen3-30B: Liger-Kernel"),
            )
            for given in (True, False)
        ),
    ),
    _operator(
        "expert_activation",
        (False,),
        tolerances((2e-6, 2e-6), (1e-14, 1e-14), (8e-3, 1e-6), (1e-3, 1e-6)),
        expert_activation_case("swiglu", 768, FLOAT32, False, "Qwen3-30B (Liger)"),
        expert_activation_case("swiglu", 768, FLOAT32, True, "Qwen3-30B (Liger)"),
        expert_activation_case("swiglu", 768, BFLOAT16, False, "Qwen3-30B (Liger)"),
        expert_activation_case("swiglu", 768, BFLOAT16, True, "Qwen3-30B (Liger)"),
        expert_activation_case("gelu", 1024, FLOAT32, False, "SonicMoE README, scaled"),
        expert_activation_case("relu", 1024, FLOAT32, False, "SonicMoE README, scaled"),
    ),
    _operator(
        "gate_topk",
        (False, True, True),
        # These apply to weights and gradients, which are rounded to the dtype of the logits.
        tolerances((2e-6, 1e-6), (1e-13, 1e-14), (1e-2, 1e-5), (2e-3, 1e-5)),
        gate_topk_case(16384, 64, 2, FLOAT32, target=Target("reference", 15)),
        gate_topk_case(16384, 64, 2, BFLOAT16),
        gate_topk_case(4096, 128, 8, FLOAT32, "TileOPs", target=Target("baseline", 8), cuda_seconds=4e-6),
        gate_topk_case(4096, 128, 8, BFLOAT16, "TileOPs", cuda_seconds=4e-6),
        gate_topk_case(16384, 128, 8, FLOAT32, "FreeToken", target=Target("baseline", 8), cuda_seconds=8e-6),
        gate_topk_case(8192, 128, 4, FLOAT32, "TransformerEngine", backward=True),
        gate_topk_case(16384, 256, 8, FLOAT32, "SonicMoE"),
        gate_topk_case(4096, 192, 8, FLOAT32, "TransformerEngine", GROUPS),
        gate_topk_case(4096, 256, 8, FLOAT32, "DeepSeek-V3", {**GROUPS, "bias": torch.linspace(-0.1, 0.1, 256)}),
        gate_topk_case(8192, 2304, 36, FLOAT32, "TransformerEngine"),
    ),
    _operator(
        "gather_batch",
        (True,),
        NO_TOLERANCE,
        gather_batch_case(64, 1, 1024),
        gather_batch_case(64, 64, 1024),
        gather_batch_case(8, 2048, 1024),
    ),
    _operator("split_batch", (True,), NO_TOLERANCE),
    _operator(
        "grouped_linear",
        (False,),
        # These allow for different orders in sums of up to 1100 terms, and for 16-bit results that are rounded to a
        # neighbouring value.
        tolerances((1e-5, 1e-4), (1e-13, 1e-12), (8e-3, 1e-4), (1e-3, 1e-4)),
        grouped_linear_case("SonicMoE Fig. 13, scaled", 4096, 8, 1024, 1024),
        grouped_linear_case("SonicMoE Fig. 13, scaled", 4096, 8, 1024, 1024, backward=True),
        grouped_linear_case("Qwen3-30B (Liger), scaled", 4096, 32, 768, 1024),
        grouped_linear_case("Qwen3-30B (Liger), scaled", 4096, 32, 768, 1024, BFLOAT16),
        grouped_linear_case("TileOPs 80/20 skew, scaled", 4096, 32, 768, 1024, skew=1.0),
        grouped_linear_case("DeepSeek-V3, few rows an expert, scaled", 2048, 64, 512, 1024),
        grouped_linear_case("a small model", 2048, 8, 512, 128),
        grouped_linear_case("a small model", 2048, 8, 512, 128, backward=True),
    ),
    _operator("quantize_weight", (True,), NO_TOLERANCE, devices=("cpu",)),
    _operator("dequantize_weight", (True,), NO_TOLERANCE),
    _operator("pack_weight", (True,), NO_TOLERANCE),
    _operator("unpack_weight", (True,), NO_TOLERANCE),
    _operator(
        "quantized_linear",
        (True,),
        NO_TOLERANCE,
        *(quantized_linear_case("Qwen3-30B, eight experts", rows, bits) for bits in (8, 4) for rows in (1, 64)),
        *(quantized_linear_case("Qwen3-30B, eight experts", rows, 4, "mxfp") for rows in (1, 64)),
        *(quantized_linear_case("Qwen3-30B, eight experts", rows, 8, "fp") for rows in (1, 64)),
        *(
            quantized_linear_case("Qwen3-30B, eight experts", rows, bits, "affine")
            for bits in (8, 4)
            for rows in (1, 64)
        ),
        *(quantized_linear_case("Qwen3-30B, eight experts", rows, 8, "symmetric") for rows in (1, 64)),
        devices=("cpu",),
    ),
    _operator(
        "router_losses",
        (False,),
        LOSS_TOLERANCES,
        router_losses_case(16384, 64, "softmax", FLOAT32, False, ""),
        router_losses_case(8192, 128, "softmax", FLOAT32, True, "TransformerEngine"),
        router_losses_case(8192, 128, "softmax", BFLOAT16, True, "TransformerEngine"),
        router_losses_case(8192, 256, "sigmoid", FLOAT32, True, "DeepSeek-V3"),
    ),
    _operator("load_balancing_loss", (False,), LOSS_TOLERANCES),
    _operator("router_z_loss", (False,), LOSS_TOLERANCES),
)
OPERATORS = {operator.name: operator for operator in _ALL}
