"""The operators: what each one promises, and the inputs that the benchmark times it with.

The tests' specifications (``tests/specs``) build on these records, so that an operator's promises are said once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe import ops, reference
from pymoe.bench.calls import FLOATING, BenchCase, Operator, Sample, Target
from pymoe.reference import Routing

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def tolerances(float32: Any, float64: Any, bfloat16: Any, float16: Any) -> dict[torch.dtype, tuple[float, float]]:
    """(rtol, atol) by dtype."""
    return dict(zip(FLOATING, (float32, float64, bfloat16, float16), strict=True))


# --- inputs ---


def uniform(*shape: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 2.0) -> Tensor:
    """Values of both signs in [-scale, scale)."""
    return ((torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * scale).to(dtype)


def distinct(tokens: int, choices: int, experts: int, generator: torch.Generator) -> Tensor:
    """(T, K) int32, distinct within a token, uniformly drawn: what a balanced router chooses."""
    if tokens == 0:
        return torch.empty(0, choices, dtype=torch.int32)
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :choices].int().contiguous()


def offsets_of(counts: list[int]) -> Tensor:
    """(E + 1,) int32 offsets of experts that own ``counts`` rows."""
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def random_counts(rows: int, experts: int, generator: torch.Generator, skew: float = 0.0) -> list[int]:
    """How many of ``rows`` rows each expert owns; the larger ``skew``, the more the first experts take."""
    share = torch.arange(1, experts + 1, dtype=torch.float64) ** -skew
    owner = torch.multinomial(share, rows, replacement=True, generator=generator) if rows else torch.zeros(0).long()
    return torch.bincount(owner, minlength=experts).tolist()


def random_load(num_experts: int, generator: torch.Generator, dtype: torch.dtype = torch.int32) -> Tensor:
    """(E,) small counts."""
    return torch.randint(0, 9, (num_experts,), generator=generator).to(dtype)


# --- baselines: what one writes with torch alone ---


def torch_build_routing(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The token of every row, and the experts' loads."""
    flat = experts.flatten()
    return torch.argsort(flat, stable=True) // experts.shape[1], torch.bincount(flat, minlength=num_experts)


def torch_dispatch(x: Tensor, routing: Routing, *, out: Tensor | None = None) -> Tensor:
    """Where no slot was dropped."""
    return torch.index_select(x, 0, routing.token, out=out)


def torch_combine(y: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """Where no slot was dropped: weight the rows, add them up by token."""
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
    """``F.linear`` expert by expert."""
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


def build_routing_cases() -> Iterator[BenchCase]:
    for tokens, choices, experts, source in (
        (16384, 2, 64, ""),
        (4096, 8, 128, "TileOPs"),
        (4096, 8, 256, "Transformer Engine, test_permutation"),
        (8192, 8, 128, "Qwen3-30B: Liger-Kernel"),
        (32768, 8, 128, "SonicMoE"),
    ):

        def make(generator: torch.Generator, shape: tuple[int, int, int] = (tokens, choices, experts)) -> Sample:
            return Sample("", (distinct(*shape, generator), shape[2]))

        yield BenchCase(
            f"T{tokens} K{choices} E{experts}",
            torch.int32,
            make,
            bytes=4 * (3 * tokens * choices + experts + 1),
            source=source,
            baseline=torch_build_routing,
            target=Target("baseline", 5.0),
            cuda_target=Target("seconds", 5e-6) if tokens == 4096 else None,
        )


def dispatch_cases() -> Iterator[BenchCase]:
    for (tokens, hidden, choices, experts, dtype, source), given in product(
        (
            (16384, 1024, 2, 64, FLOAT32, ""),
            (16384, 1024, 2, 64, BFLOAT16, ""),
            (4096, 7168, 8, 256, BFLOAT16, "TileOPs; Transformer Engine, test_permutation"),
            (8192, 2048, 8, 128, BFLOAT16, "Qwen3-30B: Liger-Kernel"),
        ),
        (True, False),
    ):

        def make(
            generator: torch.Generator,
            shape: tuple[int, int, int] = (tokens, choices, experts),
            hidden: int = hidden,
            dtype: torch.dtype = dtype,
            given: bool = given,
        ) -> Sample:
            tokens, choices, experts = shape
            chosen = distinct(*shape, generator)
            x = torch.randn(tokens, hidden, generator=generator).to(dtype)
            out = {"out": torch.zeros(tokens * choices, hidden, dtype=dtype)} if given else {}
            return Sample("", (x, reference.build_routing(chosen, experts)), out)

        yield BenchCase(
            f"T{tokens} H{hidden} K{choices} {'into a buffer' if given else 'fresh'}",
            dtype,
            make,
            bytes=tokens * (1 + choices) * hidden * dtype.itemsize,
            source=source,
            baseline=torch_dispatch,
            target=Target("floor", 0.8) if given else None,
            cuda_target=Target("seconds", 0.135e-3) if hidden == 7168 else None,
        )


def combine_cases() -> Iterator[BenchCase]:
    for tokens, hidden, choices, experts, dtype, source, target in (
        (16384, 1024, 2, 64, FLOAT32, "", Target("baseline", 4.0)),
        (16384, 1024, 8, 64, FLOAT32, "", Target("baseline", 6.0)),
        (16384, 1024, 2, 64, BFLOAT16, "", None),
        (4096, 7168, 8, 256, BFLOAT16, "TileOPs; Transformer Engine, test_permutation", None),
        (8192, 2048, 8, 128, BFLOAT16, "Qwen3-30B: Liger-Kernel", None),
    ):

        def make(
            generator: torch.Generator,
            shape: tuple[int, int, int] = (tokens, choices, experts),
            hidden: int = hidden,
            dtype: torch.dtype = dtype,
        ) -> Sample:
            tokens, choices, experts = shape
            chosen = distinct(*shape, generator)
            y = torch.randn(tokens * choices, hidden, generator=generator).to(dtype)
            weights = torch.rand(tokens, choices, generator=generator)
            return Sample("", (y, reference.build_routing(chosen, experts), weights))

        name, row = f"T{tokens} H{hidden} K{choices}", hidden * dtype.itemsize
        yield BenchCase(
            name,
            dtype,
            make,
            bytes=tokens * (1 + choices) * row,
            source=source,
            baseline=torch_combine,
            target=target,
            cuda_target=Target("seconds", 0.128e-3) if hidden == 7168 else None,
        )
        if choices == 2:
            forward, backward = tokens * (1 + choices) * row, tokens * (1 + 2 * choices) * row
            yield BenchCase(name, dtype, make, bytes=forward + backward, backward=True, baseline=torch_combine)


def gather_batch_cases() -> Iterator[BenchCase]:
    for count, rows, columns in ((64, 1, 1024), (64, 64, 1024), (8, 2048, 1024)):

        def make(generator: torch.Generator, count: int = count, rows: int = rows, columns: int = columns) -> Sample:
            return Sample("", ([torch.randn(rows, columns, generator=generator) for _ in range(count)],))

        moved = 2 * 4 * count * rows * columns
        yield BenchCase(f"{count} of {rows}x{columns}", FLOAT32, make, bytes=moved, baseline=torch_gather_batch)


def gate_topk_cases() -> Iterator[BenchCase]:
    plain = {"score": "softmax"}
    groups = {"score": "sigmoid", "num_groups": 8, "topk_groups": 4, "scale": 2.5}
    deepseek = {**groups, "bias": torch.linspace(-0.1, 0.1, 256)}
    for tokens, num_experts, k, dtype, options, backward, source, target, cuda_target in (
        (16384, 64, 2, FLOAT32, plain, False, "", Target("reference", 15), None),
        (16384, 64, 2, BFLOAT16, plain, False, "", None, None),
        (4096, 128, 8, FLOAT32, plain, False, "TileOPs", Target("baseline", 8), Target("seconds", 4e-6)),
        (4096, 128, 8, BFLOAT16, plain, False, "TileOPs", None, Target("seconds", 4e-6)),
        (16384, 128, 8, FLOAT32, plain, False, "FreeToken", Target("baseline", 8), Target("seconds", 8e-6)),
        (8192, 128, 4, FLOAT32, plain, True, "TransformerEngine", None, None),
        (16384, 256, 8, FLOAT32, plain, False, "SonicMoE", None, None),
        (4096, 192, 8, FLOAT32, groups, False, "TransformerEngine", None, None),
        (4096, 256, 8, FLOAT32, deepseek, False, "DeepSeek-V3", None, None),
        (8192, 2304, 36, FLOAT32, plain, False, "TransformerEngine", None, None),
    ):

        def make(
            generator: torch.Generator,
            shape: tuple[int, int] = (tokens, num_experts),
            k: int = k,
            dtype: torch.dtype = dtype,
            options: dict[str, Any] = options,
            backward: bool = backward,
        ) -> Sample:
            logits = torch.randn(shape, generator=generator).to(dtype).requires_grad_(backward)
            return Sample("", (logits, k), options)

        extra = " ".join(name for name in ("bias", "num_groups") if name in options).replace("num_groups", "groups")
        yield BenchCase(
            f"T{tokens} E{num_experts} K{k} {options['score']} {extra}".strip(),
            dtype,
            make,
            bytes=tokens * (num_experts * dtype.itemsize * (2 if backward else 1) + k * 8),
            backward=backward,
            source=source,
            baseline=torch_gate_topk,
            target=target,
            cuda_target=cuda_target,
        )


def router_losses_cases() -> Iterator[BenchCase]:
    for tokens, num_experts, score, dtype, backward, source in (
        (16384, 64, "softmax", FLOAT32, False, ""),
        (8192, 128, "softmax", FLOAT32, True, "TransformerEngine"),
        (8192, 128, "softmax", BFLOAT16, True, "TransformerEngine"),
        (8192, 256, "sigmoid", FLOAT32, True, "DeepSeek-V3"),
    ):

        def make(
            generator: torch.Generator,
            shape: tuple[int, int] = (tokens, num_experts),
            score: str = score,
            dtype: torch.dtype = dtype,
            backward: bool = backward,
        ) -> Sample:
            logits = torch.randn(shape, generator=generator).to(dtype).requires_grad_(backward)
            return Sample("", (logits, random_load(shape[1], generator)), {"score": score})

        yield BenchCase(
            f"T{tokens} E{num_experts} {score}",
            dtype,
            make,
            bytes=tokens * num_experts * dtype.itemsize * (3 if backward else 1),
            backward=backward,
            source=source,
            baseline=torch_router_losses,
        )


def grouped_linear_cases() -> Iterator[BenchCase]:
    for source, rows, experts, sizes, dtype, skew, backward in (
        ("SonicMoE Fig. 13, scaled", 4096, 8, (1024, 1024), FLOAT32, 0.0, False),
        ("SonicMoE Fig. 13, scaled", 4096, 8, (1024, 1024), FLOAT32, 0.0, True),
        ("Qwen3-30B (Liger), scaled", 4096, 32, (768, 1024), FLOAT32, 0.0, False),
        ("Qwen3-30B (Liger), scaled", 4096, 32, (768, 1024), BFLOAT16, 0.0, False),
        ("TileOPs 80/20 skew, scaled", 4096, 32, (768, 1024), FLOAT32, 1.0, False),
        ("DeepSeek-V3, few rows an expert, scaled", 2048, 64, (512, 1024), FLOAT32, 0.0, False),
        ("a small model", 2048, 8, (512, 128), FLOAT32, 0.0, False),
        ("a small model", 2048, 8, (512, 128), FLOAT32, 0.0, True),
    ):
        outputs, inputs = sizes

        def make(
            generator: torch.Generator,
            shape: tuple[int, int, int, int] = (rows, experts, outputs, inputs),
            dtype: torch.dtype = dtype,
            skew: float = skew,
            grad: bool = backward,
        ) -> Sample:
            rows, experts, outputs, inputs = shape
            counts = random_counts(rows, experts, generator, skew)
            x = uniform(rows, inputs, dtype=dtype, generator=generator)
            weight = uniform(experts, outputs, inputs, dtype=dtype, generator=generator, scale=inputs**-0.5)
            return Sample("", (x.requires_grad_(grad), weight.requires_grad_(grad), offsets_of(counts)))

        passes = 3 if backward else 1
        elements = rows * (inputs + outputs) + experts * inputs * outputs
        name = f"S{rows} E{experts} H{inputs} N{outputs}" + (" skewed" if skew else "")
        yield BenchCase(
            name + (" fwd+bwd" if backward else ""),
            dtype,
            make,
            bytes=elements * dtype.itemsize * passes,
            flops=2 * rows * inputs * outputs * passes,
            backward=backward,
            source=source,
            baseline=torch_grouped_linear,
        )


def expert_activation_cases() -> Iterator[BenchCase]:
    for kind, features, dtype, backward, source in (
        ("swiglu", 768, FLOAT32, False, "Qwen3-30B (Liger)"),
        ("swiglu", 768, FLOAT32, True, "Qwen3-30B (Liger)"),
        ("swiglu", 768, BFLOAT16, False, "Qwen3-30B (Liger)"),
        ("swiglu", 768, BFLOAT16, True, "Qwen3-30B (Liger)"),
        ("gelu", 1024, FLOAT32, False, "SonicMoE README, scaled"),
        ("relu", 1024, FLOAT32, False, "SonicMoE README, scaled"),
    ):
        rows = 4096
        inputs = 2 * features if kind == "swiglu" else features

        def make(
            generator: torch.Generator,
            shape: tuple[int, int] = (rows, inputs),
            dtype: torch.dtype = dtype,
            kind: str = kind,
            grad: bool = backward,
        ) -> Sample:
            return Sample("", (uniform(*shape, dtype=dtype, generator=generator).requires_grad_(grad), kind))

        moved = inputs + features + (2 * inputs + features if backward else 0)
        yield BenchCase(
            f"S{rows} F{features} {kind}" + (" fwd+bwd" if backward else ""),
            dtype,
            make,
            bytes=rows * moved * dtype.itemsize,
            backward=backward,
            source=source,
            baseline=torch_expert_activation,
        )


# --- operators ---

# Sums over tokens run in another order than torch's; gradients are rounded to the logits' dtype.
LOSS_TOLERANCES = tolerances((2e-5, 1e-6), (1e-12, 1e-14), (1e-2, 1e-5), (2e-3, 1e-5))
NO_TOLERANCE = dict.fromkeys(FLOATING, (0.0, 0.0))


def _operator(
    name: str,
    exact: tuple[bool, ...],
    tolerances: dict[torch.dtype, tuple[float, float]],
    cases: Callable[[], Iterator[BenchCase]] = lambda: iter(()),
) -> Operator:
    return Operator(name, getattr(ops, name), getattr(reference, name), exact, tolerances, cases)


OPERATORS = {
    operator.name: operator
    for operator in (
        _operator("build_routing", (True, True, True), {}, build_routing_cases),
        _operator(
            "combine",
            (True,),
            tolerances((1e-5, 5e-5), (1e-13, 1e-13), (0.008, 1e-4), (0.001, 1e-4)),
            combine_cases,
        ),
        _operator(
            "dispatch",
            (True,),
            # Of gradients: the reference adds up a token's choices in torch's order.
            tolerances((2e-6, 1e-6), (1e-14, 1e-14), (0.008, 1e-5), (0.001, 1e-5)),
            dispatch_cases,
        ),
        _operator(
            "expert_activation",
            (False,),
            tolerances((2e-6, 2e-6), (1e-14, 1e-14), (8e-3, 1e-6), (1e-3, 1e-6)),
            expert_activation_cases,
        ),
        _operator(
            "gate_topk",
            (False, True, True),
            # Of weights, and of gradients, which are rounded to the dtype of the logits.
            tolerances((2e-6, 1e-6), (1e-13, 1e-14), (1e-2, 1e-5), (2e-3, 1e-5)),
            gate_topk_cases,
        ),
        _operator("gather_batch", (True,), NO_TOLERANCE, gather_batch_cases),
        _operator("split_batch", (True,), NO_TOLERANCE),
        _operator(
            "grouped_linear",
            (False,),
            # Sums of up to 1100 terms in another order; the 16-bit types may round to the neighbour.
            tolerances((1e-5, 1e-4), (1e-13, 1e-12), (8e-3, 1e-4), (1e-3, 1e-4)),
            grouped_linear_cases,
        ),
        _operator("router_losses", (False,), LOSS_TOLERANCES, router_losses_cases),
        _operator("load_balancing_loss", (False,), LOSS_TOLERANCES),
        _operator("router_z_loss", (False,), LOSS_TOLERANCES),
    )
}
