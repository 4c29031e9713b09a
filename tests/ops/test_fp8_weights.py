"""Tests of weights in FP8: their values, the bytes and scales of checkpoints, rounding, and products."""

import pytest
import torch
from specs.comparison import assert_same_bits
from specs.quantized_linear import check_products_with_one_input

import pymoe
from pymoe.bench.operators import offsets_of
from pymoe.reference.quantized_linear import fused_multiply_add
from pymoe.reference.quantized_weight import LARGEST_E4M3

pytestmark = pytest.mark.only_on("cpu")
BACKENDS = pytest.mark.parametrize("backend", [pymoe.ops, pymoe.reference], ids=["native", "reference"])
SIZES = pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (70, 45), (130, 257), (256, 128), (129, 384), (64, 160)]
)
NANS = [0x7F, 0xFF]


def e4m3():
    """Return the values of all codes in float64, by the formulas of the OCP 8-bit Floating Point Specification 1.0."""
    code = torch.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).double()
    size = torch.where(exponent == 0, 2.0**-6 * mantissa / 8, 2.0 ** (exponent.double() - 7) * (1 + mantissa / 8))
    size[NANS] = torch.nan
    return torch.where(code < 128, size, -size)


def stored(experts, outputs, inputs, seed=0):
    """Return codes without NaN, and scales of blocks."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (experts, outputs, inputs), generator=random, dtype=torch.uint8)
    codes = torch.where((codes & 127) == 127, 0x81, codes).to(torch.uint8)
    scales = torch.rand(experts, -(-outputs // 128), -(-inputs // 128), generator=random) + 0.01
    return codes.view(torch.float8_e4m3fn), scales


def wide(codes, scales):
    """Return the weights in float64, block by block."""
    weights = e4m3()[codes.view(torch.uint8).int()]
    for row in range(scales.shape[1]):
        for column in range(scales.shape[2]):
            block = weights[:, row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            block *= scales[:, row, column, None, None].double()
    return weights


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@BACKENDS
def test_codes_stand_for_what_the_standard_says(backend):
    """All codes are tested, with scales of many sizes; products of a code and a scale are rounded once, to float32."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(1, 60, 1)
    scales = 2.0 ** torch.arange(-60.0, 60.0, 2.0) * normal(60).abs()
    weight = backend.pack_weight(codes.view(torch.float8_e4m3fn), scales[None, :, None].expand(1, 60, 2))
    assert_same_bits(backend.dequantize_weight(weight)[0], (scales[:, None].double() * e4m3()).float(), "weights")


@BACKENDS
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("flush", [False, True], ids=["", "flush"])
def test_products_with_one_input_are_the_values_of_its_codes(backend, rows, flush):
    """Few rows and many go two ways through the kernel. Subnormal codes keep their values in a thread that flushes
    subnormal numbers of float32.
    """
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 160)
    weight = backend.pack_weight(codes[None].view(torch.float8_e4m3fn), torch.full((1, 2, 2), 0.75))
    weights = (e4m3() * 0.75).float()[:, None].expand(256, 160)
    check_products_with_one_input(backend, weight, weights, rows, (0, 3, 127, 128, 159), flush)


@pytest.mark.parametrize("rows", [1, 40])
def test_a_thread_that_flushes_subnormal_numbers_gets_the_same_products(rows):
    weight = pymoe.ops.pack_weight(*stored(1, 70, 200))
    x = normal(rows, 200) * 2.0 ** torch.linspace(-150, -110, 200)
    expected = pymoe.ops.quantized_linear(x, weight, offsets_of([rows]))
    torch.set_flush_denormal(True)
    try:
        y = pymoe.ops.quantized_linear(x, weight, offsets_of([rows]))
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(y, expected, "y")


@BACKENDS
@SIZES
@pytest.mark.parametrize("by_row", [False, True], ids=["blocks", "rows"])
def test_stored_weights_come_back_byte_by_byte(backend, outputs, inputs, by_row):
    codes, scales = stored(3, outputs, inputs)
    codes.view(torch.uint8)[0, 0, 0] = 0xFF
    if by_row:
        scales = normal(3, outputs, scales.shape[2])
    weight = backend.pack_weight(codes, scales)
    assert (weight.bits, weight.output_features, weight.input_features, weight.format) == (8, outputs, inputs, "fp")
    came_back, by_output = backend.unpack_weight(weight)
    assert came_back.dtype == torch.float8_e4m3fn
    assert torch.equal(came_back.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(by_output if by_row or outputs == 1 else by_output[:, ::128], scales)
    assert torch.equal(backend.pack_weight(came_back, by_output).packed, weight.packed)


def test_a_weight_takes_eight_and_a_quarter_bits():
    assert pymoe.ops.pack_weight(*stored(3, 256, 384)).packed.nbytes == 3 * 256 * 384 * 8.25 / 8


@BACKENDS
@SIZES
def test_stored_weights_are_those_of_their_blocks(backend, outputs, inputs):
    codes, scales = stored(2, outputs, inputs)
    weights = backend.dequantize_weight(backend.pack_weight(codes, scales))
    assert_same_bits(weights, wide(codes, scales).float(), "weights")


@BACKENDS
@SIZES
@pytest.mark.parametrize("rows", [3, 30])
def test_products_are_those_of_the_weights_in_float32(backend, outputs, inputs, rows):
    codes, scales = stored(1, outputs, inputs)
    x = normal(rows, inputs)
    weights = wide(codes, scales)[0].T
    exact, size = x.double() @ weights, x.double().abs() @ weights.abs()
    y = backend.quantized_linear(x, backend.pack_weight(codes, scales), offsets_of([rows]))
    assert bool(((y - exact).abs() <= size * 2.0**-24 * (min(inputs, 128) + 2 * scales.shape[2])).all())


@BACKENDS
@SIZES
def test_rounding_takes_the_nearest_value_and_the_scale_that_deepseek_takes(backend, outputs, inputs):
    weight = normal(2, outputs, inputs) * 10.0 ** (torch.arange(outputs)[:, None] // 128 + torch.arange(inputs) // 128)
    weight[0, 0, 0] = -0.0
    codes, scales = backend.unpack_weight(backend.quantize_weight(weight, 8, "fp"))
    values = e4m3()[:127]
    even = torch.arange(127) % 2
    for expert in range(2):
        for row in range(0, outputs, 128):
            for column in range(0, inputs, 128):
                place = expert, slice(row, row + 128), slice(column, column + 128)
                scale = weight[place].abs().max() / LARGEST_E4M3
                assert bool((scales[expert, row : row + 128, column // 128] == scale).all())
                quotients = weight[place] / scale if scale > 0 else weight[place]
                far = (quotients.double().abs()[..., None] - values).abs()
                ties = far == far.amin(-1, keepdim=True)
                expected = torch.where(ties, even, 2).argmin(-1) | quotients.signbit().int() << 7
                assert torch.equal(codes.view(torch.uint8)[place].int(), expected.int())


@BACKENDS
def test_ties_go_to_the_even_code_and_nothing_passes_the_largest(backend):
    values = e4m3()[:127]
    middles = (values[:-1] + values[1:]) / 2
    weight = torch.cat([middles, middles * (1 + 2.0**-20), middles * (1 - 2.0**-20), -middles, torch.tensor([448.0])])
    upper, lower = torch.arange(1, 127), torch.arange(126)
    even = torch.where(upper % 2 == 0, upper, lower)
    expected = torch.cat([even, upper, lower, even | 128, torch.tensor([126])])
    # The middles are ties only under a scale of 1, so each of them meets a 448 in a block of its own.
    blocks = torch.full((1, 1, len(weight) * 128), 448.0)
    blocks[..., ::128] = weight.float()
    codes, scales = backend.unpack_weight(backend.quantize_weight(blocks, 8, "fp"))
    assert bool((scales == 1).all())
    assert torch.equal(codes.view(torch.uint8)[0, 0, ::128].long(), expected)
    assert bool((codes.view(torch.uint8)[0, 0, 1::128] == 126).all())


@BACKENDS
@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-140, 448 * 2.0**-101])
def test_blocks_that_are_too_small_for_a_scale_become_zero(backend, value):
    weight = torch.full((1, 130, 130), value)
    weight[0, :128, :128] = 1
    wide = backend.dequantize_weight(backend.quantize_weight(weight, 8, "fp"))
    assert bool((wide[0, :128, :128] - 1).abs().max() < 1e-6)
    wide[0, :128, :128] = 0
    assert not wide.any()


@BACKENDS
def test_stored_weights_are_kept_when_they_are_rounded_again(backend):
    """The claim holds for blocks with a code of the largest magnitude, and scales that division gives back."""
    codes, scales = stored(2, 200, 300)
    codes.view(torch.uint8)[:, ::128, ::128] = 0xFE
    weight = backend.pack_weight(codes, 2.0 ** (scales * 20).round())
    again = backend.quantize_weight(backend.dequantize_weight(weight), 8, "fp")
    assert_same_bits(again.packed, weight.packed, "packed")


@BACKENDS
@pytest.mark.parametrize("rows", [2, 30])
@pytest.mark.parametrize("what", ["code", "scale"])
def test_a_code_or_a_scale_that_is_nan_makes_its_output_nan_and_no_other(backend, rows, what):
    codes, scales = stored(1, 70, 200)
    x = normal(rows, 200)
    x[:, 150] = 0
    expected = backend.quantized_linear(x, backend.pack_weight(codes, scales), offsets_of([rows]))
    by_output = scales.repeat_interleave(128, 1)[:, :70].clone()
    if what == "code":
        codes.view(torch.uint8)[0, 5, 150], codes.view(torch.uint8)[0, 69, 3] = NANS
    else:
        by_output[0, 5, 1] = by_output[0, 69, 0] = torch.nan
    y = backend.quantized_linear(x, backend.pack_weight(codes, by_output), offsets_of([rows]))
    assert bool(y[:, [5, 69]].isnan().all())
    others = [i for i in range(70) if i not in (5, 69)]
    assert_same_bits(y[:, others], expected[:, others], "the other outputs")


@BACKENDS
@pytest.mark.parametrize("rows", [3, 20])
def test_infinities_of_a_row_go_the_way_of_float32(backend, rows):
    codes = torch.tensor([0x00, 0x38, 0xB8], dtype=torch.uint8).repeat(140, 1).T.contiguous()  # 0, 1 and -1
    weight = backend.pack_weight(codes[None].view(torch.float8_e4m3fn), torch.ones(1, 1, 2))
    x = torch.ones(rows, 140)
    x[1, 135] = torch.inf
    y = backend.quantized_linear(x, weight, offsets_of([rows]))
    assert y[1, 0].isnan()
    assert y[1, 1:].tolist() == [torch.inf, -torch.inf]
    assert y[0].tolist() == y[2].tolist() == [0, 140, -140]


@BACKENDS
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("sign", [1, -1])
def test_products_are_added_with_one_rounding(backend, rows, sign):
    """1.5 (1 + 2**-23) is halfway between two numbers of float32, so 2**-60 decides. It would be lost if the product
    were rounded first, or the sum to float64.
    """
    codes = torch.tensor([0x38, 0x3C], dtype=torch.uint8).repeat(1, 3, 1)  # 1 and 1.5
    weight = backend.pack_weight(codes.view(torch.float8_e4m3fn), torch.ones(1, 1, 1))
    x = torch.tensor([[sign * 2.0**-60, 1 + 2.0**-23]]).repeat(rows, 1)
    y = backend.quantized_linear(x, weight, offsets_of([rows]))
    assert y.unique().tolist() == [1.5 + (2.0**-22 if sign > 0 else 2.0**-23)]


@BACKENDS
def test_sums_follow_the_order_of_the_inputs(backend):
    """2**24 takes no 1 that comes after it, and a block begins anew."""
    weight = backend.pack_weight(
        torch.full((1, 2, 256), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(1, 1, 2)
    )
    x = torch.zeros(3, 256)
    x[0, [0, 1, 2, 130]] = torch.tensor([1, 1, 2.0**24, 2])
    x[1, [0, 1, 2, 130]] = torch.tensor([2.0**24, 1, 1, 2])
    x[2, [0, 128, 129]] = torch.tensor([2.0**24, 1, 1])
    y = backend.quantized_linear(x, weight, offsets_of([3]))
    assert (y[:, 0] - 2**24).tolist() == [4, 2, 2]


def test_the_reference_multiplies_and_adds_as_the_fused_operation_where_it_says_so():
    """Rows of 16-bit dtypes take the short way, and float32 the long one; bfloat16 rows as float32 take both."""
    codes, scales = stored(1, 66, 140)
    weight = pymoe.reference.pack_weight(codes, scales)
    x = (normal(7, 140) * 2.0 ** torch.arange(140).sub(70)).bfloat16().float()
    short = pymoe.reference.quantized_linear(x, weight, offsets_of([7]))
    x = torch.cat([x, torch.full((1, 140), 1 / 3)])  # 24 significant bits: all rows take the long way
    assert_same_bits(pymoe.reference.quantized_linear(x, weight, offsets_of([8]))[:7], short, "y")
    a, b, c = normal(3, 1000).unbind()
    off = fused_multiply_add(a, b, c).double() - (a.double() * b.double() + c.double())
    assert bool((off.abs() <= fused_multiply_add(a, b, c).abs().double() * 2.0**-24).all())


def test_the_reference_rounds_once_where_float64_rounds_to_the_middle_of_two_numbers():
    """float64 rounds each sum up to a number halfway between two in float32, whose even neighbour is the wrong one."""
    small = 2.0**-12
    a = torch.tensor([(1 + 2.0**-15) * small, 4097.0])
    b = torch.tensor([(1 - 2.0**-15) * small, 4099.0])
    c = torch.tensor([1 + 2.0**-23, -(2.0**-40)])
    assert fused_multiply_add(a, b, c).tolist() == [1 + 2.0**-23, 16793602.0]
    for one in range(2):
        assert fused_multiply_add(a[one], b[one], c[one]) == fused_multiply_add(a, b, c)[one]


def test_rounding_costs_what_it_says():
    weight = normal(2, 512, 512)
    error = pymoe.ops.dequantize_weight(pymoe.ops.quantize_weight(weight, 8, "fp")) - weight
    assert 0.025 < float(error.norm() / weight.norm()) < 0.027
