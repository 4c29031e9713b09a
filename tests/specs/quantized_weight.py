"""quantize_weight and dequantize_weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pymoe import reference
from pymoe.bench.calls import Sample
from pymoe.bench.operators import uniform
from specs import ErrorInput, RawCall, specify
from specs.samples import expanded, layouts, tied

SIZES = (
    (1, 1, 1),
    (2, 3, 5),
    (1, 64, 32),
    (3, 65, 33),
    (2, 10, 31),
    (1, 130, 64),
    (2, 63, 127),
    (1, 2, 300),
    (4, 7, 96),
)


def weights(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Weights of all kinds: sizes off the tiles, constant rows and groups, ties, extremes, none at all."""
    for sizes in SIZES:
        yield "x".join(map(str, sizes)), uniform(*sizes, dtype=dtype, generator=generator)
    for sizes in ((0, 3, 4), (2, 0, 5), (2, 3, 0)):
        yield "x".join(map(str, sizes)), torch.zeros(sizes, dtype=dtype)
    yield "zeros", torch.zeros(2, 5, 40, dtype=dtype)
    yield "minus_zeros", -torch.zeros(1, 5, 40, dtype=dtype)
    yield "constant", torch.full((1, 3, 70), 0.3, dtype=dtype)
    yield "tied", tied(2, 5, 90, dtype=dtype, generator=generator)
    base = uniform(2, 20, 70, dtype=dtype, generator=generator)
    some = base.clone()
    some[:, ::3] = 0
    some[:, 1::3, 32:64] = -1.5
    some[:, 2::3, 5] = 40
    yield "constant_rows_groups_and_outliers", some
    yield "far_from_zero", base / 64 + 8
    tiny = float(torch.finfo(dtype).smallest_normal)
    yield "subnormal", (base * tiny).to(dtype)
    if dtype in (torch.float32, torch.float64, torch.bfloat16):
        yield "smallest_steps", (base.double() * 2.0**-97).to(dtype)
        yield "largest", (base.double().sign() * 2.0**100).to(dtype)
    yield from layouts(base)
    yield "expanded", expanded(base, 3)


def _quantize_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for name, weight in weights(dtype, generator):
        for bits in (8, 4):
            yield Sample(f"{name}_int{bits}", (weight, bits))


def _dequantize_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _quantize_samples(dtype, generator):
        yield Sample(sample.name, (reference.quantize_weight(*sample.args),))


def _quantize_errors() -> Iterator[ErrorInput]:
    weight = torch.randn(2, 4, 3)

    def wrong(name: str, error: type[Exception], match: str, *args: object) -> ErrorInput:
        return ErrorInput(Sample(name, args), error, match)

    def with_value(value: float) -> Tensor:
        bad = weight.clone()
        bad[1, 2, 1] = value
        return bad

    yield wrong("weight_list", TypeError, "weight must be a tensor, got list", [[[1.0]]], 8)
    yield wrong("weight_none", TypeError, "weight must be a tensor", None, 4)
    yield wrong("weight_int", TypeError, "weight must have dtype", weight.int(), 8)
    yield wrong("weight_rank_2", ValueError, "weight must have shape (E, N, H), got (4, 3)", weight[0], 8)
    yield wrong("weight_rank_4", ValueError, "weight must have shape (E, N, H)", weight[None], 4)
    yield wrong("bits_2", ValueError, "bits must be 8 or 4, got 2", weight, 2)
    yield wrong("bits_6", ValueError, "bits must be 8 or 4, got 6", weight, 6)
    yield wrong("bits_16", ValueError, "bits must be 8 or 4, got 16", weight, 16)
    yield wrong("bits_float", TypeError, "bits must be an int, got float", weight, 8.0)
    yield wrong("bits_bool", TypeError, "bits must be an int, got bool", weight, True)
    yield wrong("bits_none", TypeError, "bits must be an int, got NoneType", weight, None)
    for name, value in (("nan", float("nan")), ("inf", float("inf")), ("minus_inf", -float("inf")), ("large", 2e30)):
        for bits in (8, 4):
            match = "weight must be finite and at most 2**100 in magnitude, which it is not at [1, 2, 1]"
            yield wrong(f"weight_{name}_int{bits}", ValueError, match, with_value(value), bits)


def wrong_weights() -> Iterator[tuple[str, object, type[Exception], str]]:
    """What is no packed weight of (2, 70, 40): name, value, error, message."""
    good = reference.quantize_weight(torch.ones(2, 70, 40), 8)
    yield "weight_tensor", good.packed, TypeError, "weight must be a QuantizedWeight, got Tensor"
    yield "weight_none", None, TypeError, "weight must be a QuantizedWeight, got NoneType"
    yield "weight_short", good[:3], TypeError, "weight must be a QuantizedWeight, got tuple"
    yield "weight_bits", good._replace(bits=3), ValueError, "weight.bits must be 8 or 4"
    yield "weight_other_bits", good._replace(bits=4), ValueError, "weight.packed must have size 2560"
    yield "weight_bits_none", good._replace(bits=None), TypeError, "weight.bits must be an int"
    yield "packed_list", good._replace(packed=[1]), TypeError, "weight.packed must be a tensor, got list"
    yield "packed_int8", good._replace(packed=good.packed.char()), TypeError, "weight.packed must have dtype uint8"
    yield "packed_rank", good._replace(packed=good.packed[0]), ValueError, "weight.packed must have shape (E, tiles, "
    yield "packed_cut", good._replace(packed=good.packed[..., 1:]), ValueError, "weight.packed must have size 4352"
    yield "outputs_none", good._replace(output_features=None), TypeError, "weight.output_features must be an int"
    yield "outputs_wrong", good._replace(output_features=40), ValueError, "weight.packed must have size 1"
    yield "outputs_negative", good._replace(output_features=-1), ValueError, "weight.output_features must be at least 0"
    yield "inputs_negative", good._replace(input_features=-1), ValueError, "weight.input_features must be at least 0"


def _dequantize_errors() -> Iterator[ErrorInput]:
    for name, value, error, match in wrong_weights():
        yield ErrorInput(Sample(name, (value,)), error, match)


def _raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    for bits in (8, 4):
        for dtype in (torch.float32, torch.bfloat16):
            weight = uniform(2, 5, 37, dtype=dtype, generator=generator)
            yield RawCall(f"int{bits}_{dtype}", "quantize_weight", (weight, bits))
            yield RawCall(f"int{bits}_{dtype}_transposed", "quantize_weight", (weight.transpose(1, 2), bits))


SPECS = [
    specify("quantize_weight", samples=_quantize_samples, error_inputs=_quantize_errors, raw_calls=_raw_calls),
    specify(
        "dequantize_weight",
        samples=_dequantize_samples,
        error_inputs=_dequantize_errors,
        dtypes=(torch.float32, torch.bfloat16),
    ),
]
