"""router_losses and its two halves, load_balancing_loss and router_z_loss."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from pymoe.bench.calls import Sample
from pymoe.bench.operators import random_load, uniform
from specs import ErrorInput, RawCall, specify
from specs.samples import expanded, layouts, sprinkled, tied

SHAPES = (
    (0, 8), (1, 1), (7, 3), (40, 8), (64, 64), (65, 64), (130, 100), (37, 160), (19, 257), (300, 16), (3, 1500),
    (128, 1),
)  # fmt: skip


def _logits_and_load(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    for tokens, num_experts in SHAPES:
        logits = uniform(tokens, num_experts, dtype=dtype, generator=generator, scale=4.0)
        yield f"T{tokens}_E{num_experts}", logits, random_load(num_experts, generator)
        yield f"T{tokens}_E{num_experts}_long", logits, random_load(num_experts, generator, torch.int64)
    logits, load = uniform(90, 48, dtype=dtype, generator=generator, scale=4.0), random_load(48, generator)
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
    """Yield every other case; fewer are enough because router_losses has the same kernel."""
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
            load = random_load(num_experts, generator)
            yield Sample(f"T{tokens}_E{num_experts}_{score}", (logits, load), {"score": score})


def z_gradient_samples(generator: torch.Generator) -> Iterator[Sample]:
    for tokens, num_experts in ((5, 4), (1, 3), (3, 17)):
        logits = uniform(tokens, num_experts, dtype=torch.float64, generator=generator).requires_grad_()
        yield Sample(f"T{tokens}_E{num_experts}", (logits,))


def raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        logits, load = uniform(9, 12, dtype=dtype, generator=generator), random_load(12, generator)
        grad = torch.tensor(0.7, dtype=wide)
        for score in ("softmax", "sigmoid"):
            for name, given, with_z in (("both", load, True), ("balance", load.long(), False), ("z", None, True)):
                yield RawCall(f"{dtype}_{score}_{name}", "router_losses", (logits, given, score, with_z))
                args = (grad, grad + 1, logits, given, score, with_z)
                yield RawCall(f"{dtype}_{score}_{name}", "router_losses_backward", args)
    yield RawCall("empty", "router_losses", (torch.zeros(0, 5), torch.ones(5, dtype=torch.int32), "softmax", True))


SPECS = [
    specify(
        "router_losses",
        samples=samples,
        error_inputs=error_inputs,
        gradient_samples=gradient_samples,
        raw_calls=raw_calls,
    ),
    specify("load_balancing_loss", samples=samples, error_inputs=error_inputs, gradient_samples=gradient_samples),
    specify("router_z_loss", samples=z_samples, error_inputs=z_error_inputs, gradient_samples=z_gradient_samples),
]
