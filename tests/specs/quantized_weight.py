"""quantize_weight, dequantize_weight, pack_weight and unpack_weight."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe import reference
from pymoe._common.types import BLOCK, GROUP, PACKED_ONLY, RUNS, TILE, QuantizedWeight, packed_shape, up
from pymoe._common.types import FORMATS as NUMBERS
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
    (1, 66, 545),
)


FORMATS = {f"{format}{bits}": (bits, format) for format, bits in NUMBERS if format not in PACKED_ONLY}
"""The formats by name to which weights are rounded: what quantize_weight is called with."""
STORED = {f"{format}{bits}": (bits, format) for format, bits in NUMBERS if format in PACKED_ONLY}
"""The formats that only hold what other programs have rounded."""
EVERY_FORMAT = FORMATS | STORED


def in_format(weight: Tensor, bits: int, format: str, backend: ModuleType = reference) -> QuantizedWeight:
    """Return weights in a format, also in those to which quantize_weight does not round."""
    if format not in PACKED_ONLY:
        return backend.quantize_weight(weight, bits, format)
    experts, outputs, inputs = weight.shape
    size, _ = RUNS[NUMBERS[format, bits]]
    groups = F.pad(weight.float(), (0, up(inputs, size) - inputs)).view(
        experts, outputs, up(inputs, size) // size, size
    )
    if format == "symmetric":
        largest = groups.abs().amax(3) if inputs else groups.new_zeros(experts, outputs, 0)
        steps = torch.where(largest > 0, largest / 127, 1)
        codes = (groups / steps[..., None]).round().to(torch.int8)
        return backend.pack_weight(codes.flatten(2)[:, :, :inputs], largest / 127)
    least = groups.amin(3) if inputs else groups.new_zeros(experts, outputs, 0)
    scales = (groups.amax(3) - least if inputs else least) / (2**bits - 1)
    steps = torch.where(scales > 0, scales, 1)
    codes = ((groups - least[..., None]) / steps[..., None]).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return backend.pack_weight(codes.flatten(2)[:, :, :inputs], scales, least, bits)


def weights(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of all kinds: sizes off the tiles, constant rows and groups, ties, extremes, and empty weights."""
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
        wide = uniform(1, 70, 600, dtype=torch.float64, generator=generator)
        rows = 2.0 ** torch.linspace(-140, 99, 70, dtype=torch.float64).round()
        yield "rows_of_all_sizes", (wide * rows[:, None]).to(dtype)
        parts = 2.0 ** torch.tensor([0.0, -8, -28, -60, 40, -90], dtype=torch.float64).repeat_interleave(100)
        yield "super_blocks_of_all_sizes", (wide[:, :9] * parts).to(dtype)
    yield "positive", uniform(2, 20, 300, dtype=dtype, generator=generator).abs() + 0.25
    yield "negative", -uniform(2, 20, 300, dtype=dtype, generator=generator).abs() - 0.25
    yield from layouts(base)
    yield "expanded", expanded(base, 3)


def _quantize_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for name, weight in weights(dtype, generator):
        for form, options in FORMATS.items():
            yield Sample(f"{name}_{form}", (weight, *options))


def _dequantize_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _quantize_samples(dtype, generator):
        yield Sample(sample.name, (reference.quantize_weight(*sample.args),))
    for name, *parts in every_stored(generator):
        yield Sample(f"stored_{name}", (reference.pack_weight(*parts),))
    for name, weight in super_blocks(generator):
        yield Sample(name, (weight,))


def super_blocks(generator: torch.Generator) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield int4 weights of random bytes, with factors and powers of a usual size: more than rounding makes."""
    for experts, outputs, inputs in ((1, 1, 1), (2, 70, 256), (1, 64, 300), (2, 65, 545), (1, 3, 2048)):
        shape = packed_shape(NUMBERS["int", 4], outputs, inputs, experts)
        packed = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        packed[:, :, :TILE] = torch.randint(100, 150, packed[:, :, :TILE].shape, generator=generator)
        for begin in range(TILE, shape[2], TILE * (16 + 8 * GROUP // 2)):
            factors = torch.randn(*shape[:2], 2 * TILE, generator=generator).half().view(torch.uint8)
            packed[:, :, begin : begin + 4 * TILE] = factors
        yield f"bytes_{experts}x{outputs}x{inputs}", QuantizedWeight(packed, 4, outputs, inputs)


def stored(generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, codes and scales of MXFP4 weights as checkpoints store them, including all codes with all scales."""

    def some(*sizes: int, scales: tuple[int, int] = (120, 131)) -> tuple[Tensor, Tensor]:
        codes = torch.randint(256, (*sizes, 16), generator=generator, dtype=torch.uint8)
        return codes, torch.randint(*scales, sizes, generator=generator, dtype=torch.uint8)

    def alike(code: int, scale: int) -> tuple[Tensor, Tensor]:
        return torch.full((1, 5, 3, 16), code, dtype=torch.uint8), torch.full((1, 5, 3), scale, dtype=torch.uint8)

    for sizes in (
        (1, 1, 1),
        (2, 3, 5),
        (1, 64, 4),
        (3, 65, 3),
        (1, 130, 9),
        (2, 63, 1),
        (0, 3, 2),
        (2, 0, 2),
        (2, 3, 0),
    ):
        yield "x".join(map(str, sizes)), *some(*sizes)
    every = torch.arange(256, dtype=torch.uint8)
    pairs = every.view(1, 1, 16, 16).repeat(1, 256, 1, 1)  # all pairs of codes in 16 groups, for each scale
    yield "all_codes_and_scales", pairs, every.view(1, 256, 1).repeat(1, 1, 16)
    for name, code, scale in (("zeros", 0, 0), ("minus_zeros", 0x88, 127), ("largest_codes", 0x7F, 127)):
        yield name, *alike(code, scale)
    for name, ends in (("small_scales", (0, 3)), ("wide_scales", (60, 190)), ("scales_at_the_limit", (225, 228))):
        yield name, *some(2, 20, 5, scales=ends)
    codes, scales = some(2, 20, 5)
    yield "nan_scales", codes, torch.where(torch.rand(2, 20, 5, generator=generator) < 0.1, 255, scales).to(torch.uint8)
    for name, view in layouts(codes):
        yield f"codes_{name}", view, scales
    for name, view in layouts(scales):
        yield f"scales_{name}", codes, view


def stored_fp8(generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, codes and scales of FP8 weights as checkpoints store them, with scales of blocks or of outputs."""

    def some(experts: int, outputs: int, inputs: int, by_output: bool = False) -> tuple[Tensor, Tensor]:
        codes = torch.randint(256, (experts, outputs, inputs), generator=generator, dtype=torch.uint8)
        codes[(codes & 127) == 127] = 1
        sizes = experts, outputs if by_output else up(outputs, BLOCK) // BLOCK, up(inputs, BLOCK) // BLOCK
        return codes.view(torch.float8_e4m3fn), torch.randn(sizes, generator=generator)

    for sizes in ((1, 1, 1), (2, 3, 5), (1, 64, 128), (3, 65, 129), (1, 130, 257), (2, 129, 31), (0, 3, 40)):
        for by_output in (False, True):
            yield "x".join(map(str, sizes)) + "_fp8" + "_by_output" * by_output, *some(*sizes, by_output)
    yield "no_outputs_fp8", *some(2, 0, 40)
    yield "no_inputs_fp8", *some(2, 3, 0)
    every = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 160)
    yield "all_codes_fp8", every.view(torch.float8_e4m3fn), torch.tensor([0.5, -3e-7]).repeat(1, 2, 1)
    codes, scales = some(2, 20, 140)
    yield "special_scales_fp8", codes, torch.tensor([[[0.0, torch.nan]], [[1e-42, 3e38]]])
    codes.view(torch.uint8)[torch.rand(2, 20, 140, generator=generator) < 0.01] = 0xFF
    yield "nan_codes_fp8", codes, scales
    for name, view in layouts(codes.view(torch.uint8)):
        yield f"codes_{name}_fp8", view.view(torch.float8_e4m3fn), scales
    for name, view in layouts(scales):
        yield f"scales_{name}_fp8", codes, view


def stored_affine(generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor, Tensor, int]]:
    """Yield name, codes, scales, offsets and bits of affine weights, including all codes and scales of all sizes."""

    def some(experts: int, outputs: int, inputs: int, bits: int) -> tuple[Tensor, Tensor, Tensor, int]:
        codes = torch.randint(2**bits, (experts, outputs, inputs), generator=generator, dtype=torch.uint8)
        size, _ = RUNS[NUMBERS["affine", bits]]
        ends = torch.randn(2, experts, outputs, up(inputs, size) // size, generator=generator)
        return codes, *ends.unbind(), bits

    for bits in (8, 4, 2):
        name = f"affine{bits}"
        for sizes in ((1, 1, 1), (2, 3, 5), (1, 64, 128), (3, 65, 129), (1, 130, 257), (2, 129, 31), (1, 5, 224)):
            yield "x".join(map(str, sizes)) + f"_{name}", *some(*sizes, bits)
        for empty, sizes in (("experts", (0, 3, 40)), ("outputs", (2, 0, 40)), ("inputs", (2, 3, 0))):
            yield f"no_{empty}_{name}", *some(*sizes, bits)
        codes, scales, offsets, _ = some(2, 70, 300, bits)
        codes[:, :, :256] = torch.arange(256) % 2**bits
        yield f"all_codes_{name}", codes, scales, offsets, bits
        sizes = 2.0 ** torch.linspace(-140, 120, scales.numel()).view(scales.shape)
        yield f"all_sizes_{name}", codes, scales * sizes, offsets * sizes.flip(1), bits
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, 3e38])
        yield (
            f"special_scales_{name}",
            codes,
            scales.where(scales < 1, special[torch.arange(70) % 7, None]),
            offsets,
            bits,
        )
        yield (
            f"special_offsets_{name}",
            codes,
            scales,
            offsets.where(scales < 1, special[torch.arange(70) % 7, None]),
            bits,
        )
        for layout, view in layouts(codes):
            yield f"codes_{layout}_{name}", view, scales, offsets, bits
        for layout, view in layouts(scales):
            yield f"ends_{layout}_{name}", codes, view, view, bits


def stored_symmetric(generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, codes and scales of symmetric weights, including all codes and scales of all sizes."""

    def some(experts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(-128, 128, (experts, outputs, inputs), generator=generator, dtype=torch.int8)
        return codes, torch.randn(experts, outputs, up(inputs, 16) // 16, generator=generator)

    for sizes in ((1, 1, 1), (2, 3, 5), (1, 64, 128), (3, 65, 129), (1, 130, 257), (2, 129, 17), (1, 5, 16)):
        yield "x".join(map(str, sizes)) + "_symmetric", *some(*sizes)
    for empty, sizes in (("experts", (0, 3, 40)), ("outputs", (2, 0, 40)), ("inputs", (2, 3, 0))):
        yield f"no_{empty}_symmetric", *some(*sizes)
    codes, scales = some(2, 70, 300)
    codes[:, :, :256] = torch.arange(-128, 128)
    yield "all_codes_symmetric", codes, scales
    sizes = 2.0 ** torch.linspace(-148, 120, scales.numel()).view(scales.shape)
    yield "all_sizes_symmetric", codes, scales * sizes
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, 3e38])
    yield "special_scales_symmetric", codes, scales.where(scales < 1, special[torch.arange(70) % 7, None])
    for layout, view in layouts(codes):
        yield f"codes_{layout}_symmetric", view, scales
    for layout, view in layouts(scales):
        yield f"scales_{layout}_symmetric", codes, view


def every_stored(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield name and arguments of pack_weight for each kind of weights that it takes."""
    yield from stored(generator)
    yield from stored_fp8(generator)
    yield from stored_affine(generator)
    yield from stored_symmetric(generator)


def _pack_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for turn in range(2):  # other values
        for name, *parts in every_stored(generator):
            yield Sample(f"{name}_{turn}", tuple(parts))


def _unpack_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _pack_samples(dtype, generator):
        yield Sample(sample.name, (reference.pack_weight(*sample.args),))
    weight = uniform(2, 70, 45, dtype=torch.float32, generator=generator)
    yield Sample("quantised", (reference.quantize_weight(weight, 4, "mxfp"),))
    yield Sample("quantised_fp8", (reference.quantize_weight(weight, 8, "fp"),))
    for name, options in STORED.items():
        yield Sample(f"quantised_{name}", (in_format(weight, *options),))


def _pack_errors() -> Iterator[ErrorInput]:
    codes, scales = torch.zeros(2, 4, 3, 16, dtype=torch.uint8), torch.zeros(2, 4, 3, dtype=torch.uint8)

    def wrong(name: str, error: type[Exception], match: str, *args: object) -> ErrorInput:
        return ErrorInput(Sample(name, args), error, match)

    yield wrong("codes_list", TypeError, "codes must be a tensor, got list", [1], scales)
    yield wrong("codes_none", TypeError, "codes must be a tensor", None, scales)
    yield wrong("codes_int16", TypeError, "codes must have dtype uint8", codes.short(), scales)
    yield wrong("codes_float", TypeError, "codes must have dtype uint8", codes.float(), scales)
    yield wrong("codes_rank", ValueError, "codes must have shape (E, N, H / 32, 16), got", codes.flatten(2), scales)
    yield wrong("codes_15", ValueError, "codes must have size 16 (bytes of 32 codes)", codes[..., 1:], scales)
    yield wrong("scales_list", TypeError, "scales must be a tensor, got list", codes, [1])
    yield wrong("scales_none", TypeError, "scales must be a tensor", codes, None)
    yield wrong("scales_float", TypeError, "scales must have dtype uint8", codes, scales.float())
    yield wrong("scales_rank", ValueError, "scales must have shape (E, N, H / 32)", codes, scales[0])
    yield wrong("scales_E", ValueError, "scales must have size 2 (E of codes)", codes, scales[:1])
    yield wrong("scales_N", ValueError, "scales must have size 4 (N of codes)", codes, scales[:, :3])
    yield wrong("scales_H", ValueError, "scales must have size 3 (H / 32 of codes)", codes, scales[:, :, :1])
    yield wrong("scales_device", ValueError, "scales must be on the device of codes", codes, scales.to("meta"))

    codes, scales = torch.zeros(2, 130, 140).to(torch.float8_e4m3fn), torch.ones(2, 2, 2)
    yield wrong("fp8_codes_e5m2", TypeError, "uint8 or float8_e4m3fn or int8", codes.to(torch.float8_e5m2), scales)
    yield wrong("fp8_codes_rank", ValueError, "codes must have shape (E, N, H), got (130, 140)", codes[0], scales)
    yield wrong("fp8_scales_double", TypeError, "scales must have dtype float32", codes, scales.double())
    yield wrong("fp8_scales_list", TypeError, "scales must be a tensor, got list", codes, [1])
    yield wrong("fp8_scales_rank", ValueError, "scales must have shape (E, N / 128, H / 128)", codes, scales[0])
    yield wrong("fp8_scales_E", ValueError, "scales must have size 2 (E of codes)", codes, scales[:1])
    match = "scales must have size 2 (blocks of N of codes) or 130 (N of codes) in dimension 1, got 1"
    yield wrong("fp8_scales_N", ValueError, match, codes, scales[:, :1])
    yield wrong("fp8_scales_H", ValueError, "size 2 (blocks of H of codes)", codes, scales[:, :, :1])
    yield wrong("fp8_scales_device", ValueError, "scales must be on the device of codes", codes, scales.to("meta"))
    yield wrong("fp8_bits", ValueError, "bits must be 8 without offsets", codes, scales, None, 4)

    codes, ends = torch.zeros(2, 70, 140, dtype=torch.int8), torch.ones(2, 70, 9)
    yield wrong("symmetric_codes_rank", ValueError, "codes must have shape (E, N, H), got", codes[0], ends)
    yield wrong("symmetric_scales_half", TypeError, "scales must have dtype float32", codes, ends.half())
    yield wrong("symmetric_scales_list", TypeError, "scales must be a tensor, got list", codes, [1])
    yield wrong("symmetric_scales_rank", ValueError, "scales must have shape (E, N, H / 16)", codes, ends[0])
    yield wrong("symmetric_scales_E", ValueError, "scales must have size 2 (E of codes)", codes, ends[:1])
    yield wrong("symmetric_scales_N", ValueError, "scales must have size 70 (N of codes)", codes, ends[:, :3])
    yield wrong("symmetric_scales_H", ValueError, "size 9 (groups of 16 of H of codes)", codes, ends[..., :5])
    yield wrong("symmetric_device", ValueError, "scales must be on the device of codes", codes, ends.to("meta"))
    yield wrong("symmetric_bits", ValueError, "bits must be 8 without offsets", codes, ends, None, 4)
    yield wrong("symmetric_offsets", TypeError, "codes must have dtype uint8, got", codes, ends, ends)

    codes, ends = torch.zeros(2, 70, 140, dtype=torch.uint8), torch.ones(2, 70, 5)
    four = torch.ones(2, 70, 2)
    yield wrong("affine_codes_int8", TypeError, "codes must have dtype uint8", codes.char(), ends, ends)
    yield wrong("affine_codes_fp8", TypeError, "codes must have dtype uint8", codes.to(torch.float8_e4m3fn), ends, ends)
    yield wrong("affine_codes_rank", ValueError, "codes must have shape (E, N, H), got", codes[0], ends, ends)
    yield wrong("affine_scales_half", TypeError, "scales must have dtype float32", codes, ends.half(), ends)
    yield wrong("affine_offsets_half", TypeError, "offsets must have dtype float32", codes, ends, ends.half())
    yield wrong("affine_offsets_list", TypeError, "offsets must be a tensor, got list", codes, ends, [1])
    yield wrong("affine_scales_rank", ValueError, "scales must have shape (E, N, H / 32)", codes, ends[0], ends)
    yield wrong("affine_offsets_rank", ValueError, "offsets must have shape (E, N, H / 128)", codes, four, four[0], 4)
    yield wrong("affine_scales_E", ValueError, "scales must have size 2 (E of codes)", codes, ends[:1], ends)
    yield wrong("affine_offsets_N", ValueError, "offsets must have size 70 (N of codes)", codes, ends, ends[:, :3])
    yield wrong("affine_scales_H", ValueError, "size 5 (groups of 32 of H of codes) in", codes, four, ends)
    yield wrong("affine_offsets_H", ValueError, "size 2 (groups of 128 of H of codes) in", codes, four, ends, 4)
    yield wrong("affine_device", ValueError, "offsets must be on the device of codes", codes, ends, ends.to("meta"))
    yield wrong("affine_bits", ValueError, "bits must be 8, 4 or 2 for format 'affine', got 5", codes, ends, ends, 5)
    yield wrong("affine_bits_bool", TypeError, "bits must be an int, got bool", codes, ends, ends, True)
    large = codes.clone()
    large[1, 2, 3] = 16
    match = "codes must be at most 15 with 4 bits, got 16 at [1, 2, 3]"
    yield wrong("affine_codes_16", ValueError, match, large, four, four, 4)
    two = torch.ones(large.shape[0], large.shape[1], up(large.shape[2], 16) // 16)
    match = "codes must be at most 3 with 2 bits, got 16 at [1, 2, 3]"
    yield wrong("affine_codes_4", ValueError, match, large.clamp(max=3).where(large < 16, large), two, two, 2)


def _unpack_errors() -> Iterator[ErrorInput]:
    yield from _dequantize_errors()
    for bits in (8, 4):
        weight = reference.quantize_weight(torch.ones(1, 2, 3), bits)
        match = "weight.format must be 'affine', 'symmetric', 'mxfp' or 'fp', got 'int'"
        yield ErrorInput(Sample(f"int{bits}", (weight,)), ValueError, match)


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
        for form, options in FORMATS.items():
            match = "weight must be finite and at most 2**100 in magnitude, which it is not at [1, 2, 1]"
            yield wrong(f"weight_{name}_{form}", ValueError, match, with_value(value), *options)
    yield wrong("bits_of_mxfp", ValueError, "bits must be 4 for format 'mxfp', got 8", weight, 8, "mxfp")
    yield wrong("bits_of_fp", ValueError, "bits must be 8 for format 'fp', got 4", weight, 4, "fp")
    yield wrong("bits_of_mxfp_6", ValueError, "bits must be 4 for format 'mxfp', got 6", weight, 6, "mxfp")
    yield wrong(
        "format_unknown",
        ValueError,
        "format must be 'int', 'mxfp', 'fp', 'affine' or 'symmetric', got 'nvfp'",
        weight,
        4,
        "nvfp",
    )
    yield wrong("format_none", TypeError, "format must be a str, got NoneType", weight, 4, None)
    for name, (bits, form) in STORED.items():
        match = f"format must be one to which weights are rounded, got {form!r}, which only holds weights"
        yield wrong(f"format_{name}", ValueError, match, weight, bits, form)


def wrong_weights() -> Iterator[tuple[str, object, type[Exception], str]]:
    """Yield (name, value, error, message) for values that are no packed weight of shape (2, 70, 40)."""
    good = reference.quantize_weight(torch.ones(2, 70, 40), 8)
    yield "weight_tensor", good.packed, TypeError, "weight must be a QuantizedWeight, got Tensor"
    yield "weight_none", None, TypeError, "weight must be a QuantizedWeight, got NoneType"
    yield "weight_short", good[:3], TypeError, "weight must be a QuantizedWeight, got tuple"
    yield "weight_bits", good._replace(bits=3), ValueError, "weight.bits must be 8 or 4"
    yield "weight_format", good._replace(format="mxfp"), ValueError, "weight.bits must be 4 for format 'mxfp', got 8"
    yield "weight_other_format", good._replace(bits=4, format="mxfp"), ValueError, "weight.packed must have size 2176"
    yield "weight_format_none", good._replace(format=None), TypeError, "weight.format must be a str"
    yield "weight_other_bits", good._replace(bits=4), ValueError, "weight.packed must have size 3136"
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
    for number in (NUMBERS[format, bits] for bits, format in FORMATS.values()):
        for dtype in (torch.float32, torch.bfloat16):
            weight = uniform(2, 5, 37, dtype=dtype, generator=generator)
            yield RawCall(f"{number}_{dtype}", "quantize_weight", (weight, number))
            yield RawCall(f"{number}_{dtype}_transposed", "quantize_weight", (weight.transpose(1, 2), number))


SPECS = [
    specify("quantize_weight", samples=_quantize_samples, error_inputs=_quantize_errors, raw_calls=_raw_calls),
    specify(
        "dequantize_weight",
        samples=_dequantize_samples,
        error_inputs=_dequantize_errors,
        dtypes=(torch.float32, torch.bfloat16),
    ),
    specify("pack_weight", samples=_pack_samples, error_inputs=_pack_errors, dtypes=(torch.float32,)),
    specify("unpack_weight", samples=_unpack_samples, error_inputs=_unpack_errors, dtypes=(torch.float32,)),
]
