"""expert_activation and its raw backward: samples, errors, shapes of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pymoe._common.types import KINDS, ActivationKind, activation_options, is_gated
from pymoe.bench.calls import Sample
from pymoe.bench.operators import offsets_of, uniform
from pymoe.reference import ClampedSwiglu
from specs import ErrorInput, RawCall, specify
from specs.samples import expanded, layouts, special_values, sprinkled

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
        yield from _biased_samples(name, kind, parts, dtype, generator)


def _biased_samples(
    name: str, kind: ActivationKind, parts: int, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Sample]:
    # Experts without rows at the beginning, in the middle and at the end; rows without an expert.
    for counts, past, features in (([4], 0, 1), ([0, 3, 0, 0, 9, 1, 0], 2, 7), ([1] * 40, 1, 32), ([2, 3], 1, 5000)):
        h = uniform(sum(counts) + past, parts * features, dtype=dtype, generator=generator, scale=4.0)
        bias = uniform(len(counts), parts * features, dtype=dtype, generator=generator, scale=4.0)
        if dtype.itemsize == 2:  # as in specs/combine.py
            bias = sprinkled(bias, generator)
        yield Sample(f"{name}_bias_E{len(counts)}x{features}", (h, kind, bias, offsets_of(counts)))
    if kind in ("geglu_tanh", CLAMPED["gpt_oss"]):
        offsets = offsets_of([2, 3])
        for layout, view in layouts(bias):
            yield Sample(f"{name}_bias_{layout}", (h, kind, view, offsets))
        for layout, view in layouts(offsets):
            yield Sample(f"{name}_bias_offsets_{layout}", (h, kind, bias, view))
        yield Sample(f"{name}_bias_no_rows", (h[:0], kind, bias, 0 * offsets))
        yield Sample(f"{name}_bias_no_experts", (h, kind, bias[:0], offsets[:1]))


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
    bias, offsets = torch.zeros(2, 4), offsets_of([1, 2])
    with_bias = (h, "swiglu", bias)
    together = "bias and offsets must be given together, got {} without {}"
    yield wrong("bias_alone", ValueError, together.format("bias", "offsets"), *with_bias)
    yield wrong("offsets_alone", ValueError, together.format("offsets", "bias"), h, "gelu", None, offsets)
    yield wrong("bias_list", TypeError, "bias must be a tensor, got list", h, "gelu", [[1.0]], offsets)
    yield wrong("bias_half", TypeError, "bias must have dtype float32", h, "gelu", bias.half(), offsets)
    yield wrong("bias_flat", ValueError, "bias must have shape (E, N), got (4,)", h, "gelu", bias[0], offsets)
    yield wrong("bias_experts", ValueError, "bias must have size 2 (E of offsets)", h, "gelu", bias[1:], offsets)
    yield wrong("bias_half_wide", ValueError, "size 4 (the second size of h)", h, "swiglu", bias[:, :2], offsets)
    yield wrong("bias_device", ValueError, "bias must be on the device of h", h, "gelu", bias.to("meta"), offsets)
    yield wrong("offsets_long", TypeError, "offsets must have dtype int32", *with_bias, offsets.long())
    yield wrong("offsets_matrix", ValueError, "offsets must have shape (E + 1,), got (1, 3)", *with_bias, offsets[None])
    yield wrong("offsets_none", ValueError, "offsets must have shape (E + 1,), got (0,)", *with_bias, offsets[:0])
    yield wrong("offsets_device", ValueError, "offsets must be on the device of h", *with_bias, offsets.to("meta"))
    yield wrong("offsets_start", ValueError, "offsets must start at 0, got 1", *with_bias, offsets + 1)
    yield wrong("offsets_down", ValueError, "must not decrease, got 1 after 2", *with_bias, offsets_of([2, -1]))
    yield wrong("offsets_past", IndexError, "must lie in [0, S] (S = 3), got 4", *with_bias, offsets_of([2, 2]))


def _gradient_samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, kind in ACTIVATIONS.items():
        for rows, columns in ((2, 6), (1, 2), (0, 4)):
            h = uniform(rows, columns, dtype=torch.float64, generator=generator)
            h = torch.where(h.abs() < 0.1, h.sign() * 0.1 + h, h)  # away from the corner of relu
            yield Sample(f"{name}_{rows}x{columns}", (h.requires_grad_(), kind))
        h = uniform(5, 4, dtype=torch.float64, generator=generator)
        bias = h.new_tensor([[3.0], [-3.0], [3.0]]) + uniform(3, 4, dtype=h.dtype, generator=generator, scale=0.9)
        offsets = offsets_of([1, 0, 3])  # the last row has no expert
        h[4] = h[4].sign() * (0.1 + h[4].abs())
        yield Sample(f"{name}_both", (h.requires_grad_(), kind, bias.requires_grad_(), offsets))
        yield Sample(f"{name}_bias_alone", (h.detach(), kind, bias, offsets))
        yield Sample(f"{name}_fixed_bias", (h, kind, bias.detach(), offsets))


def _raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    for dtype in (torch.float32, torch.bfloat16):
        for kind_name, kind in ACTIVATIONS.items():
            h = uniform(5, 12, dtype=dtype, generator=generator)
            grad = uniform(5, 6 if is_gated(kind) else 12, dtype=dtype, generator=generator)
            name = f"{kind_name}_{str(dtype).removeprefix('torch.')}"
            yield RawCall(name, "expert_activation", (h, *activation_options(kind)))
            yield RawCall(f"{name}_backward", "expert_activation_backward", (grad, h, *activation_options(kind)))
            bias, offsets = uniform(3, 12, dtype=dtype, generator=generator), offsets_of([2, 0, 2])
            arguments = (h, *activation_options(kind), bias, offsets)
            yield RawCall(f"{name}_bias", "expert_activation", arguments)
            yield RawCall(f"{name}_bias_backward", "expert_activation_backward", (grad, *arguments))


SPECS = [
    specify(
        "expert_activation",
        samples=_samples,
        error_inputs=_error_inputs,
        gradient_samples=_gradient_samples,
        raw_calls=_raw_calls,
    )
]
