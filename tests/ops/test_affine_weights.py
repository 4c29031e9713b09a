"""Tests of affine weights: their values, the codes, scales and offsets of other programs, and products."""

from fractions import Fraction

import pytest
import torch
from specs.comparison import assert_same_bits
from specs.quantized_linear import check_products_with_one_input

import pymoe
from pymoe.bench.operators import offsets_of

pytestmark = pytest.mark.only_on("cpu")
BACKENDS = pytest.mark.parametrize("backend", [pymoe.ops, pymoe.reference], ids=["native", "reference"])
BITS = pytest.mark.parametrize("bits", [8, 4, 2])
SIZES = pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (70, 45), (130, 257), (256, 128), (129, 384), (64, 160), (3, 33)]
)
GROUP = {8: 32, 4: 128, 2: 16}
"""Inputs that share a scale and an offset."""


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(experts, outputs, inputs, bits, seed=0):
    """Return codes, scales and offsets of both signs."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (experts, outputs, inputs), generator=random, dtype=torch.uint8)
    scales, offsets = torch.randn(2, experts, outputs, -(-inputs // GROUP[bits]), generator=random).unbind()
    return codes, scales, offsets


def wide(codes, scales, offsets, bits):
    """Return the weights in float64: right to a few units of its last bit."""
    place = torch.arange(codes.shape[2]) // GROUP[bits]
    return scales.double()[:, :, place] * codes + offsets.double()[:, :, place]


def nearest(value):
    """Return the float32 nearest to a fraction, ties to even."""
    size = abs(value)
    unit = Fraction(2) ** -149
    while size / unit >= 2**24:
        unit *= 2
    return float(round(value / unit) * unit)


@BACKENDS
@BITS
def test_every_code_stands_for_scale_times_code_plus_offset_rounded_once(backend, bits):
    """All codes are tested against fractions, with scales and offsets that cancel, are subnormal, or lie far apart."""
    codes = torch.arange(2**bits, dtype=torch.uint8).repeat(1, 40, 1)
    groups = -(-codes.shape[2] // GROUP[bits])
    scales = normal(1, 40, groups) * 2.0 ** torch.linspace(-145, 100, 40)[:, None]
    offsets = normal(1, 40, groups, seed=1) * scales.abs() * 2.0 ** torch.arange(-30, 34, 1.6)[:40, None]
    offsets[:, ::3] = -scales[:, ::3] * 2 ** (bits - 1) * (1 + 2.0**-20)
    weight = backend.pack_weight(codes, scales, offsets, bits)
    came = backend.dequantize_weight(weight)[0]
    for row in range(40):
        for code in range(2**bits):
            group = code // GROUP[bits]
            exact = Fraction(float(scales[0, row, group])) * code + Fraction(float(offsets[0, row, group]))
            assert float(came[row, code]) == nearest(exact), (row, code)


@BACKENDS
@BITS
@SIZES
def test_stored_weights_come_back_byte_by_byte(backend, outputs, inputs, bits):
    codes, scales, offsets = stored(3, outputs, inputs, bits)
    scales[0, 0, 0], offsets[2, 0, 0] = torch.nan, torch.inf
    weight = backend.pack_weight(codes, scales, offsets, bits)
    assert (weight.bits, weight.output_features, weight.input_features, weight.format) == (
        bits,
        outputs,
        inputs,
        "affine",
    )
    for came, part in zip(backend.unpack_weight(weight), (codes, scales, offsets), strict=True):
        assert came.is_contiguous()
        assert_same_bits(came, part, "part")


@BACKENDS
@BITS
@pytest.mark.parametrize("sizes", [(0, 3, 40), (2, 0, 40), (2, 3, 0)])
def test_empty_weights_come_back(backend, sizes, bits):
    parts = stored(*sizes, bits)
    weight = backend.pack_weight(*parts, bits)
    assert backend.dequantize_weight(weight).shape == sizes
    for came, part in zip(backend.unpack_weight(weight), parts, strict=True):
        assert_same_bits(came, part, "part")


def test_a_weight_takes_ten_bits_or_four_and_a_half_or_six():
    for bits, size in ((8, 10), (4, 4.5), (2, 6)):
        assert pymoe.ops.pack_weight(*stored(3, 256, 384, bits), bits).packed.nbytes == 3 * 256 * 384 * size / 8


def test_the_layout_is_the_one_that_the_module_describes():
    """Kernels, and files, depend on it."""
    for bits in (8, 4, 2):
        codes, scales, offsets = stored(1, 64, 288, bits)
        packed = pymoe.ops.pack_weight(codes, scales, offsets, bits).packed[0, 0]
        at = 0
        for group in range(scales.shape[2]):
            for part in (scales, offsets):
                assert_same_bits(packed[at : at + 256].view(torch.float32), part[0, :, group], "numbers")
                at += 256
            some = codes[0, :, group * GROUP[bits] : (group + 1) * GROUP[bits]]
            together = 8 // bits
            some = sum(some[:, i::together] << bits * i for i in range(together))
            assert torch.equal(packed[at : at + some.numel()], some.T.flatten())
            at += some.numel()
        assert at == len(packed)


@BACKENDS
@BITS
@SIZES
@pytest.mark.parametrize("rows", [3, 30])
def test_products_are_those_of_the_weights_in_float32(backend, outputs, inputs, rows, bits):
    parts = stored(1, outputs, inputs, bits)
    x = normal(rows, inputs)
    weights = wide(*parts, bits)[0].T
    exact, size = x.double() @ weights, x.double().abs() @ weights.abs()
    y = backend.quantized_linear(x, backend.pack_weight(*parts, bits), offsets_of([rows]))
    steps = min(inputs, 128) + inputs / 128 + 2
    bound = size * 2.0**-24 * steps + x.double().abs() @ (weights.abs() * 2.0**-24)
    assert bool(((y - exact).abs() <= bound).all())


@BACKENDS
@BITS
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize("flush", [False, True], ids=["", "flush"])
def test_products_with_one_input_are_the_weights(backend, rows, flush, bits):
    """Few rows and many go two ways through the kernel. A thread that flushes subnormal numbers keeps them here."""
    codes, scales, offsets = stored(1, 70, 160, bits)
    scales, offsets = (part * 2.0 ** torch.linspace(-146, 30, 70)[:, None] for part in (scales, offsets))
    weight = backend.pack_weight(codes, scales, offsets, bits)
    weights = backend.dequantize_weight(weight)[0]
    places = 0, 3, 31, 32, 127, 128, 159
    check_products_with_one_input(backend, weight, weights, rows, places, flush and backend is pymoe.ops)


@BACKENDS
@BITS
def test_sums_follow_the_order_of_the_inputs(backend, bits):
    """2**24 takes no 1 that comes after it, and a block of 128 inputs begins anew, but a group of 32 does not."""
    codes = torch.ones(1, 2, 256, dtype=torch.uint8)
    ends = torch.ones(1, 2, 256 // GROUP[bits])
    weight = backend.pack_weight(codes, ends, ends * 0, bits)
    x = torch.zeros(3, 256)
    x[0, [0, 40, 80, 130]] = torch.tensor([1, 1, 2.0**24, 2])
    x[1, [0, 40, 80, 130]] = torch.tensor([2.0**24, 1, 1, 2])
    x[2, [0, 128, 200]] = torch.tensor([2.0**24, 1, 1])
    y = backend.quantized_linear(x, weight, offsets_of([3]))
    assert (y[:, 0] - 2**24).tolist() == [4, 2, 2]


@BACKENDS
@BITS
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("sign", [1, -1])
def test_products_are_added_with_one_rounding(backend, rows, sign, bits):
    """1.5 (1 + 2**-23) is halfway between two numbers of float32, so 2**-60 decides. It would be lost if the product
    were rounded first, or the sum to float64.
    """
    codes = torch.tensor([2, 3], dtype=torch.uint8).repeat(1, 3, 1)  # 1 and 1.5
    half = torch.full((1, 3, 1), 0.5)
    x = torch.tensor([[sign * 2.0**-60, 1 + 2.0**-23]]).repeat(rows, 1)
    y = backend.quantized_linear(x, backend.pack_weight(codes, half, half * 0, bits), offsets_of([rows]))
    assert y.unique().tolist() == [1.5 + (2.0**-22 if sign > 0 else 2.0**-23)]


@BACKENDS
@BITS
@pytest.mark.parametrize("rows", [2, 30])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_scale_or_an_offset_that_is_not_finite_spoils_its_output_and_no_other(backend, rows, value, bits):
    codes, scales, offsets = stored(1, 70, 200, bits)
    x = normal(rows, 200)
    expected = backend.quantized_linear(x, backend.pack_weight(codes, scales, offsets, bits), offsets_of([rows]))
    scales[0, 5, 1] = offsets[0, 69, 0] = value
    y = backend.quantized_linear(x, backend.pack_weight(codes, scales, offsets, bits), offsets_of([rows]))
    assert not y[:, [5, 69]].isfinite().any()
    others = [i for i in range(70) if i not in (5, 69)]
    assert_same_bits(y[:, others], expected[:, others], "the other outputs")


def test_no_weights_are_rounded_to_it_but_layers_of_the_meta_device_have_its_sizes():
    weight = normal(2, 70, 45)
    for backend in (pymoe.ops, pymoe.reference):
        with pytest.raises(ValueError, match="quantize_weight: format must be one to which weights are rounded"):
            backend.quantize_weight(weight, 8, "affine")
        for bits in (8, 4, 2):
            empty = backend.quantize_weight(weight.to("meta"), bits, "affine")
            whole = pymoe.ops.pack_weight(*stored(2, 70, 45, bits), bits)
            assert empty.packed.shape == whole.packed.shape
            assert empty[1:] == whole[1:]


def q8_0(codes, scales):
    """Return GGUF's values: ggml's dequantize_row_q8_0 computes ``q * d`` in float32, with d in float16."""
    return codes.float() * scales.float()[..., None]


def q5_k(codes, factors, fields):
    """Return GGUF's values: ggml's dequantize_row_q5_K computes ``(d * s) * q - dmin * m`` in float32."""
    scales, minima = (factors.float()[..., None] * fields).unbind(2)
    return scales[..., None] * codes - minima[..., None], scales, -minima


def test_blocks_of_gguf_are_held_bit_for_bit():
    random = torch.Generator().manual_seed(0)
    halves = torch.randint(0, 1 << 16, (64, 6, 2), generator=random).to(torch.uint16).view(torch.float16)
    halves = torch.where(halves.isfinite(), halves, 0.5)
    codes = torch.randint(-128, 128, (64, 6, 32), generator=random)
    scales = halves[..., 0].float()
    weight = pymoe.ops.pack_weight((codes + 128).to(torch.uint8).view(1, 64, 192), scales[None], -128 * scales[None])
    assert torch.equal(pymoe.ops.dequantize_weight(weight)[0], q8_0(codes, halves[..., 0]).view(64, 192))
    fields = torch.randint(0, 64, (64, 6, 2, 8), generator=random).float()
    codes = torch.randint(0, 32, (64, 6, 8, 32), generator=random)
    values, scales, offsets = q5_k(codes, halves, fields)
    parts = codes.to(torch.uint8).view(1, 64, -1), scales.reshape(1, 64, -1), offsets.reshape(1, 64, -1)
    assert torch.equal(pymoe.ops.dequantize_weight(pymoe.ops.pack_weight(*parts))[0], values.view(64, -1))


def test_zero_points_of_other_programs_are_offsets():
    """AWQ and GPTQ compute ``(q - z) * s`` with a float16 s; every code, with every zero point, is exact."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 16 * 40, 8)
    zeros = torch.arange(16.0).repeat(40)[None, :, None]
    scales = (normal(40) * 2.0 ** torch.linspace(-22, 13, 40)).half().float().repeat_interleave(16)[None, :, None]
    weight = pymoe.ops.pack_weight(codes, scales, -scales * zeros, 4)
    assert torch.equal(pymoe.ops.dequantize_weight(weight), (codes - zeros) * scales)
