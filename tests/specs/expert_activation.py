"""expert_activation and its raw backward: samples, errors, shapes of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pymoe._common.types import KINDS, is_gated
from pymoe.bench.calls import Sample
from pymoe.bench.operators import uniform
from pymoe.ops.expert_activation import kernel_options
from pymoe.reference import ClampedSwiglu
from specs import ErrorInput, RawCall, specify
from specs.samples import expanded, layouts, special_values

CLAMPED = {
    "gpt_oss": ClampedSwiglu(7.0, alpha=1.702, up_offset=1.0, interleaved=True),
    "deepseek_v4": ClampedSwiglu(10.0),
    "tight": ClampedSwiglu(0.625, alpha=-0.5, up_offset=2.0),
    "without_limit": ClampedSwiglu(float("inf"), interleaved=True),
}
ACTIVATIONS = {**{kind: kind for kind in KINDS}, **CLAMPED}


def _samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for name, kind in ACTIVATIONS.items():
        parts = 2 if is_gated(kind) else 1
        for rows, features in ((1, 1), (3, 7), (5, 8), (4, 16), (2, 31), (3, 33), (17, 100), (2, 5000), (300, 64)):
            h = uniform(rows, parts * features, dtype=dtype, generator=generator, scale=4.0)
            yield Sample(f"{name}_{rows}x{features}", (h, kind))
        yield Sample(f"{name}_no_rows", (uniform(0, parts * 8, dtype=dtype, generator=generator), kind))
        yield Sample(f"{name}_no_features", (uniform(3, 0, dtype=dtype, generator=generator), kind))
        yield Sample(f"{name}_zeros", (torch.zeros(2, parts * 9, dtype=dtype), kind))
        yield Sample(f"{name}_tails", (uniform(9, parts * 50, dtype=dtype, generator=generator, scale=40.0), kind))
        steps = torch.linspace(-20, 20, 801, dtype=torch.float64).to(dtype)[:, None]
        yield Sample(f"{name}_grid", (torch.cat((steps, steps.flip(0)), 1) if parts == 2 else steps, kind))
        special = special_values(dtype)[:, None]
        ones = torch.ones_like(special)
        yield Sample(f"{name}_special", (torch.cat((special, ones), 1) if parts == 2 else special, kind))
        base = uniform(6, parts * 11, dtype=dtype, generator=generator)
        for layout, view in layouts(base):
            yield Sample(f"{name}_{layout}", (view, kind))
        yield Sample(f"{name}_expanded", (expanded(base, 6), kind))


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
    yield wrong("h_rank_geglu", ValueError, "h must have shape (S, 2F)", h[0], "geglu_tanh")
    yield wrong("limit_zero", ValueError, "kind.limit must be greater than 0, got 0.0", h, ClampedSwiglu(0.0))
    yield wrong("limit_nan", ValueError, "kind.limit must be finite, got nan", h, ClampedSwiglu(float("nan")))
    yield wrong("limit_none", TypeError, "kind.limit must be a float, got NoneType", h, ClampedSwiglu(None))
    yield wrong("alpha_inf", ValueError, "kind.alpha must be finite, got inf", h, ClampedSwiglu(7.0, float("inf")))
    yield wrong("offset_bool", TypeError, "kind.up_offset must be a float, got bool", h, ClampedSwiglu(7.0, 1.0, True))
    yield wrong("interleaved_int", TypeError, "kind.interleaved must be a bool", h, ClampedSwiglu(7.0, 1.0, 0.0, 1))
    yield wrong("h_odd_clamped", ValueError, "even second size", h[:, :3], ClampedSwiglu(7.0))
    yield wrong("h_odd", ValueError, "even second size", h[:, :3], "swiglu")


def _gradient_samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, kind in ACTIVATIONS.items():
        for rows, columns in ((2, 6), (1, 2), (0, 4)):
            h = uniform(rows, columns, dtype=torch.float64, generator=generator)
            h = torch.where(h.abs() < 0.1, h.sign() * 0.1 + h, h)  # away from the corner of relu
            yield Sample(f"{name}_{rows}x{columns}", (h.requires_grad_(), kind))


def _raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    for dtype in (torch.float32, torch.bfloat16):
        for kind_name, kind in ACTIVATIONS.items():
            h = uniform(5, 12, dtype=dtype, generator=generator)
            grad = uniform(5, 6 if is_gated(kind) else 12, dtype=dtype, generator=generator)
            name = f"{kind_name}_{str(dtype).removeprefix('torch.')}"
            yield RawCall(name, "expert_activation", (h, *kernel_options(kind)))
            yield RawCall(f"{name}_backward", "expert_activation_backward", (grad, h, *kernel_options(kind)))


SPECS = [
    specify(
        "expert_activation",
        samples=_samples,
        error_inputs=_error_inputs,
        gradient_samples=_gradient_samples,
        raw_calls=_raw_calls,
    )
]
