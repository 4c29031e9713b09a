"""expert_activation and its raw backward: samples, errors, shapes of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe import ops, reference
from pymoe.reference.expert_activation import KINDS
from pymoe.testing.samples import expanded, layouts, special_values, uniform
from pymoe.testing.spec import BenchCase, ErrorInput, OpSpec, RawCall, Sample


def _samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for kind in KINDS:
        parts = 2 if kind == "swiglu" else 1
        for rows, features in ((1, 1), (3, 7), (5, 8), (4, 16), (2, 31), (3, 33), (17, 100), (2, 5000), (300, 64)):
            h = uniform(rows, parts * features, dtype=dtype, generator=generator, scale=4.0)
            yield Sample(f"{kind}_{rows}x{features}", (h, kind))
        yield Sample(f"{kind}_no_rows", (uniform(0, parts * 8, dtype=dtype, generator=generator), kind))
        yield Sample(f"{kind}_no_features", (uniform(3, 0, dtype=dtype, generator=generator), kind))
        yield Sample(f"{kind}_zeros", (torch.zeros(2, parts * 9, dtype=dtype), kind))
        yield Sample(f"{kind}_tails", (uniform(9, parts * 50, dtype=dtype, generator=generator, scale=40.0), kind))
        steps = torch.linspace(-20, 20, 801, dtype=torch.float64).to(dtype)[:, None]
        yield Sample(f"{kind}_grid", (torch.cat((steps, steps.flip(0)), 1) if parts == 2 else steps, kind))
        special = special_values(dtype)[:, None]
        ones = torch.ones_like(special)
        yield Sample(f"{kind}_special", (torch.cat((special, ones), 1) if parts == 2 else special, kind))
        base = uniform(6, parts * 11, dtype=dtype, generator=generator)
        for name, view in layouts(base):
            yield Sample(f"{kind}_{name}", (view, kind))
        yield Sample(f"{kind}_expanded", (expanded(base, 6), kind))


def _error_inputs() -> Iterator[ErrorInput]:
    h = torch.randn(3, 4)

    def wrong(name: str, error: type[Exception], match: str, *args: object) -> ErrorInput:
        return ErrorInput(Sample(name, args), error, match)

    yield wrong("h_not_tensor", TypeError, "h must be a tensor", [[1.0]], "gelu")
    yield wrong("h_none", TypeError, "h must be a tensor", None, "relu")
    yield wrong("h_int", TypeError, "h must have dtype", h.int(), "gelu")
    yield wrong("h_bool", TypeError, "h must have dtype", h > 0, "relu")
    yield wrong("h_complex", TypeError, "h must have dtype", h.to(torch.complex64), "swiglu")
    yield wrong("kind_none", TypeError, "kind must be a str", h, None)
    yield wrong("kind_number", TypeError, "kind must be a str", h, 0)
    yield wrong("kind_unknown", ValueError, "kind must be one of", h, "tanh")
    yield wrong("kind_case", ValueError, "kind must be one of", h, "GELU")
    yield wrong("h_rank_1", ValueError, "h must have shape (S, F)", h[0], "gelu")
    yield wrong("h_rank_3", ValueError, "h must have shape (S, F)", h[None], "relu")
    yield wrong("h_rank_swiglu", ValueError, "h must have shape (S, 2F)", h[0], "swiglu")
    yield wrong("h_scalar", ValueError, "h must have shape (S, F)", h[0, 0], "gelu")
    yield wrong("h_odd", ValueError, "even second size", h[:, :3], "swiglu")


def _gradient_samples(generator: torch.Generator) -> Iterator[Sample]:
    for kind in KINDS:
        for rows, columns in ((2, 6), (1, 2), (0, 4)):
            h = uniform(rows, columns, dtype=torch.float64, generator=generator)
            h = torch.where(h.abs() < 0.1, h.sign() * 0.1 + h, h)  # away from the corner of relu
            yield Sample(f"{kind}_{rows}x{columns}", (h.requires_grad_(), kind))


def _raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    for dtype in (torch.float32, torch.bfloat16):
        for number, kind in enumerate(KINDS):
            h = uniform(5, 12, dtype=dtype, generator=generator)
            grad = uniform(5, 6 if kind == "swiglu" else 12, dtype=dtype, generator=generator)
            name = f"{kind}_{str(dtype).removeprefix('torch.')}"
            yield RawCall(name, "expert_activation", (h, number))
            yield RawCall(f"{name}_backward", "expert_activation_backward", (grad, h, number))


def _plain(h: Tensor, kind: str) -> Tensor:
    """What one writes with torch alone."""
    if kind == "swiglu":
        gate, up = h.chunk(2, dim=1)
        return F.silu(gate) * up
    return F.gelu(h) if kind == "gelu" else F.relu(h)


def _bench_cases() -> Iterator[BenchCase]:
    def maker(dtype: torch.dtype, shape: tuple[int, int], kind: str, grad: bool) -> Callable[..., Sample]:
        def make(generator: torch.Generator) -> Sample:
            return Sample("bench", (uniform(*shape, dtype=dtype, generator=generator).requires_grad_(grad), kind))

        return make

    for kind, features, dtype, backward, source in (
        ("swiglu", 768, torch.float32, False, "Qwen3-30B (Liger)"),
        ("swiglu", 768, torch.float32, True, "Qwen3-30B (Liger)"),
        ("swiglu", 768, torch.bfloat16, False, "Qwen3-30B (Liger)"),
        ("swiglu", 768, torch.bfloat16, True, "Qwen3-30B (Liger)"),
        ("gelu", 1024, torch.float32, False, "SonicMoE README, scaled"),
        ("relu", 1024, torch.float32, False, "SonicMoE README, scaled"),
    ):
        rows = 4096
        inputs = 2 * features if kind == "swiglu" else features
        moved = inputs + features + (2 * inputs + features if backward else 0)
        yield BenchCase(
            name=f"S{rows} F{features} {kind}" + (" fwd+bwd" if backward else ""),
            dtype=dtype,
            make=maker(dtype, (rows, inputs), kind, backward),
            bytes=rows * moved * dtype.itemsize,
            backward=backward,
            source=source,
            baseline=_plain,
        )


SPECS = [
    OpSpec(
        name="expert_activation",
        native=ops.expert_activation,
        reference=reference.expert_activation,
        samples=_samples,
        exact=(False,),
        tolerances={
            torch.float32: (2e-6, 2e-6),
            torch.float64: (1e-14, 1e-14),
            torch.bfloat16: (8e-3, 1e-6),
            torch.float16: (1e-3, 1e-6),
        },
        error_inputs=_error_inputs,
        gradient_samples=_gradient_samples,
        raw_calls=_raw_calls,
        bench_cases=_bench_cases,
    )
]
