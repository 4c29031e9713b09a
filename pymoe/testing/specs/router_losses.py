"""router_losses and its two halves, load_balancing_loss and router_z_loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import pymoe.ops
import pymoe.reference
from pymoe.testing.samples import expanded, layouts, sprinkled, tied, uniform
from pymoe.testing.spec import BenchCase, ErrorInput, OpSpec, RawCall, Sample

SHAPES = (
    (0, 8), (1, 1), (7, 3), (40, 8), (64, 64), (65, 64), (130, 100), (37, 160), (19, 257), (300, 16), (3, 1500),
    (128, 1),
)  # fmt: skip


def _load(num_experts: int, generator: torch.Generator, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(0, 9, (num_experts,), generator=generator).to(dtype)


def _logits_and_load(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    for tokens, num_experts in SHAPES:
        logits = uniform(tokens, num_experts, dtype=dtype, generator=generator, scale=4.0)
        yield f"T{tokens}_E{num_experts}", logits, _load(num_experts, generator)
        yield f"T{tokens}_E{num_experts}_long", logits, _load(num_experts, generator, torch.int64)
    logits, load = uniform(90, 48, dtype=dtype, generator=generator, scale=4.0), _load(48, generator)
    special = sprinkled(logits, generator)
    for name, value in (
        ("tied", tied(90, 48, dtype=dtype, generator=generator)),
        ("equal", torch.zeros(90, 48, dtype=dtype)),
        ("special", special),
        ("one_nan", torch.where(torch.arange(90 * 48).view(90, 48) == 77, torch.nan, logits)),
        ("one_infinity", torch.where(torch.arange(90 * 48).view(90, 48) == 77, torch.inf, logits)),
        ("masked", torch.where(special.isnan(), -torch.inf, logits)),
        ("large", logits * 100),
        *layouts(logits),
        ("token_expanded", expanded(logits, 90)),
    ):
        yield name, value, load
    yield "no_load", logits, torch.zeros_like(load)
    yield "one_hot_load", logits, (torch.arange(48) == 5).int() * 1000
    yield "huge_load", logits, load.long() * 2**50
    for name, value in layouts(load):
        yield f"load_{name}", logits, value


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for i, (name, logits, load) in enumerate(_logits_and_load(dtype, generator)):
        both = (
            Sample(f"{name}_softmax", (logits, load)),
            Sample(f"{name}_sigmoid", (logits, load), {"score": "sigmoid"}),
        )
        yield from both if i % 4 < 2 else reversed(both)


def fewer_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    """Every other case: the kernel is that of router_losses."""
    yield from islice(samples(dtype, generator), 0, None, 2)


def z_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for name, logits, _ in _logits_and_load(dtype, generator):
        yield Sample(name, (logits,))


def logits_errors() -> Iterator[tuple[str, object, type[Exception], str]]:
    logits = torch.zeros(4, 6)
    yield "logits_list", [[1.0]], TypeError, "logits must be a tensor, got list"
    yield "logits_none", None, TypeError, "logits must be a tensor, got NoneType"
    yield "logits_string", "logits", TypeError, "logits must be a tensor, got str"
    yield "logits_int32", logits.int(), TypeError, "logits must have dtype float32"
    yield "logits_int64", logits.long(), TypeError, "logits must have dtype float32"
    yield "logits_bool", logits.bool(), TypeError, "logits must have dtype float32"
    yield "logits_complex", logits.to(torch.complex64), TypeError, "logits must have dtype float32"
    yield "logits_float8", logits.to(torch.float8_e4m3fn), TypeError, "logits must have dtype float32"
    yield "logits_scalar", logits[0, 0], ValueError, "logits must have shape (T, E), got ()"
    yield "logits_flat", logits[0], ValueError, "logits must have shape (T, E), got (6,)"
    yield "logits_deep", logits[None], ValueError, "logits must have shape (T, E), got (1, 4, 6)"
    yield "logits_empty", logits[:, :0], ValueError, "logits must have shape (T, E) with E >= 1, got (4, 0)"


def z_error_inputs() -> Iterator[ErrorInput]:
    for name, logits, error, match in logits_errors():
        yield ErrorInput(Sample(name, (logits,)), error, match)


def error_inputs() -> Iterator[ErrorInput]:
    logits, load = torch.zeros(4, 6), torch.ones(6, dtype=torch.int32)
    for name, bad, error, match in logits_errors():
        yield ErrorInput(Sample(name, (bad, load)), error, match)
    for name, bad, error, match in (
        ("load_list", [1] * 6, TypeError, "load must be a tensor, got list"),
        ("load_float", load.float(), TypeError, "load must have dtype int32 or int64, got torch.float32"),
        ("load_int16", load.short(), TypeError, "load must have dtype int32 or int64, got torch.int16"),
        ("load_rank", load[None], ValueError, "load must have shape (E,), got (1, 6)"),
        ("load_size", load[1:], ValueError, "load must have size 6 (E of logits)"),
        ("load_device", load.to("meta"), ValueError, "load must be on the device of logits (cpu), got meta"),
    ):
        yield ErrorInput(Sample(name, (logits, bad)), error, match)
    yield ErrorInput(Sample("score", (logits, load), {"score": "relu"}), ValueError, "'sigmoid', got 'relu'")
    yield ErrorInput(Sample("score_none", (logits, load), {"score": None}), TypeError, "score must be a string")


def gradient_samples(generator: torch.Generator) -> Iterator[Sample]:
    for tokens, num_experts in ((5, 4), (1, 3), (3, 17)):
        logits = uniform(tokens, num_experts, dtype=torch.float64, generator=generator).requires_grad_()
        for score in ("softmax", "sigmoid"):
            load = _load(num_experts, generator)
            yield Sample(f"T{tokens}_E{num_experts}_{score}", (logits, load), {"score": score})


def z_gradient_samples(generator: torch.Generator) -> Iterator[Sample]:
    for tokens, num_experts in ((5, 4), (1, 3), (3, 17)):
        logits = uniform(tokens, num_experts, dtype=torch.float64, generator=generator).requires_grad_()
        yield Sample(f"T{tokens}_E{num_experts}", (logits,))


def raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        logits, load = uniform(9, 12, dtype=dtype, generator=generator), _load(12, generator)
        grad = torch.tensor(0.7, dtype=wide)
        for score in ("softmax", "sigmoid"):
            for name, given, with_z in (("both", load, True), ("balance", load.long(), False), ("z", None, True)):
                yield RawCall(f"{dtype}_{score}_{name}", "router_losses", (logits, given, score, with_z))
                args = (grad, grad + 1, logits, given, score, with_z)
                yield RawCall(f"{dtype}_{score}_{name}", "router_losses_backward", args)
    yield RawCall("empty", "router_losses", (torch.zeros(0, 5), torch.ones(5, dtype=torch.int32), "softmax", True))


def _torch(logits: Tensor, load: Tensor, score: str = "softmax") -> tuple[Tensor, Tensor]:
    """What one writes with torch alone."""
    values = logits.float()
    scores = torch.softmax(values, 1) if score == "softmax" else values.sigmoid()
    probabilities = scores if score == "softmax" else scores / scores.sum(1, keepdim=True)
    balance = logits.shape[1] * (load.float() / load.sum() * probabilities.mean(0)).sum()
    return balance, torch.logsumexp(values, 1).square().mean()


def bench_cases() -> Iterator[BenchCase]:
    for tokens, num_experts, score, dtype, backward, source in (
        (16384, 64, "softmax", torch.float32, False, ""),
        (8192, 128, "softmax", torch.float32, True, "TransformerEngine"),
        (8192, 128, "softmax", torch.bfloat16, True, "TransformerEngine"),
        (8192, 256, "sigmoid", torch.float32, True, "DeepSeek-V3"),
    ):

        def make(
            generator: torch.Generator,
            shape: tuple[int, int] = (tokens, num_experts),
            score: str = score,
            dtype: torch.dtype = dtype,
            backward: bool = backward,
        ) -> Sample:
            logits = torch.randn(shape, generator=generator).to(dtype).requires_grad_(backward)
            return Sample("", (logits, _load(shape[1], generator)), {"score": score})

        yield BenchCase(
            f"T{tokens} E{num_experts} {score}",
            dtype,
            make,
            bytes=tokens * num_experts * dtype.itemsize * (3 if backward else 1),
            backward=backward,
            source=source,
            baseline=_torch,
        )


def _spec(name: str, **parts: Any) -> OpSpec:
    native: Callable[..., Any] = getattr(pymoe.ops, name)
    reference: Callable[..., Any] = getattr(pymoe.reference, name)
    tolerances = {  # sums over tokens run in another order than torch's; gradients are rounded to the logits' dtype
        torch.float32: (2e-5, 1e-6),
        torch.float64: (1e-12, 1e-14),
        torch.bfloat16: (1e-2, 1e-5),
        torch.float16: (2e-3, 1e-5),
    }
    return OpSpec(name=name, native=native, reference=reference, exact=(False,), tolerances=tolerances, **parts)


SPECS = [
    _spec(
        "router_losses",
        samples=samples,
        error_inputs=error_inputs,
        gradient_samples=gradient_samples,
        raw_calls=raw_calls,
        bench_cases=bench_cases,
    ),
    _spec("load_balancing_loss", samples=samples, error_inputs=error_inputs, gradient_samples=gradient_samples),
    _spec("router_z_loss", samples=z_samples, error_inputs=z_error_inputs, gradient_samples=z_gradient_samples),
]
