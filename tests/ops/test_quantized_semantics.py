"""What quantize_weight and quantized_linear promise by name: errors of weights and activations, and their exactness."""

import pytest
import torch
from specs.comparison import assert_same_bits
from specs.samples import tied

import pymoe
from pymoe._common.types import GROUP, up
from pymoe.bench.operators import offsets_of, random_counts
from pymoe.reference.quantized_linear import BLOCK, LARGEST_CODE, round_rows
from pymoe.reference.quantized_weight import unpack

pytestmark = pytest.mark.only_on("cpu")
BACKENDS = pytest.mark.parametrize("backend", [pymoe.ops, pymoe.reference], ids=["native", "reference"])
BITS = pytest.mark.parametrize("bits", [8, 4])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_trip(weight, bits):
    return pymoe.ops.dequantize_weight(pymoe.ops.quantize_weight(weight, bits))


def relative(error, values):
    return float(error.double().norm() / values.double().norm())


def by_group(weight):
    """The weights in groups, (..., groups, 32), the last filled up with its last one."""
    inputs = weight.shape[-1]
    last = weight[..., -1:].expand(*weight.shape[:-1], up(inputs, GROUP) - inputs)
    return torch.cat([weight, last], dim=-1).unflatten(-1, (-1, GROUP))


def test_the_norm_of_the_error_is_within_one_percent_at_8_bits_and_eight_at_4():
    weight = normal(4, 256, 512)
    assert relative(round_trip(weight, 8) - weight, weight) < 0.0075
    assert relative(round_trip(weight, 4) - weight, weight) < 0.0725


@pytest.mark.parametrize("kind", ["normal", "far", "outliers", "tied", "constant", "tiny"])
def test_every_weight_is_within_half_a_step_at_8_bits(kind):
    weight = weights_of(kind)
    step = weight.abs().amax(dim=2, keepdim=True) / 127
    assert bool(((round_trip(weight, 8) - weight).abs() <= step * (0.5 + 1e-5)).all())


def weights_of(kind):
    weight = normal(2, 70, 100)
    if kind == "far":
        weight = weight / 64 + 8
    elif kind == "outliers":
        weight[:, :, ::37] *= 50
    elif kind == "tied":
        weight = tied(2, 70, 100, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    elif kind == "constant":
        weight = weight[:, :, :1].expand(2, 70, 100).contiguous()
    elif kind == "tiny":
        weight = weight * 2.0**-90
    return weight


@pytest.mark.parametrize("kind", ["normal", "far", "outliers", "tied", "constant", "tiny"])
def test_the_error_of_a_group_at_4_bits_is_at_most_that_of_rounding_between_its_ends(kind):
    weight = weights_of(kind)
    groups = by_group(weight)
    least, greatest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    # Scale and minimum are bfloat16, and the grid covers the group: it may begin lower by a step of that dtype.
    step = ((greatest - least) + 2.0**-7 * least.abs()) / 15 * (1 + 2.0**-7)
    error = by_group(round_trip(weight, 4)) - groups
    assert bool((error.square().sum(-1) <= GROUP * (step[..., 0] / 2).square() * (1 + 1e-4)).all())


def test_codes_at_4_bits_are_the_nearest_of_their_grid():
    weight = weights_of("outliers")
    packed = pymoe.ops.quantize_weight(weight, 4)
    _, scale, minimum = unpack(packed)
    groups, came_back = by_group(weight), by_group(pymoe.ops.dequantize_weight(packed))
    scale, minimum = (ends[:, : weight.shape[1], :, None] for ends in (scale, minimum))
    within = groups.clamp(minimum, minimum + 15 * scale)  # a narrower grid does not reach the ends
    assert bool(((came_back - within).abs() <= scale * (0.5 + 1e-4)).all())


def test_the_search_beats_rounding_between_least_and_greatest():
    weight = normal(2, 256, 512)
    groups = by_group(weight)
    least = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - least) / 15
    plain = ((groups - least) / step).round() * step + least
    assert relative(round_trip(weight, 4) - weight, weight) < 0.92 * relative(plain - groups, groups)


@BITS
@pytest.mark.parametrize("value", [0.0, 1.0, -0.25, 3.5, 2.0**-80, -(2.0**100)])
def test_constant_weights_that_bfloat16_holds_come_back_exactly(value, bits):
    weight = torch.full((2, 3, 45), value)
    assert bool(((round_trip(weight, bits) - weight).abs() <= abs(value) * 2**-20).all())


@BACKENDS
@BITS
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_activations_move_by_at_most_a_32639th_of_their_blocks_largest(backend, bits, scale):
    x = normal(40, 300) * scale
    x[:, 7] *= 100
    integers, steps = round_rows(x)
    rounded = (integers.view(40, -1, BLOCK) * steps[:, :, None].double()).flatten(1)[:, :300]
    padded = torch.nn.functional.pad(x.abs(), (0, 84)).view(40, -1, BLOCK)
    largest = padded.amax(-1).repeat_interleave(BLOCK, dim=1)[:, :300]
    assert bool(((rounded - x.double()).abs() <= largest.double() / LARGEST_CODE).all())
    weight = backend.quantize_weight(normal(1, 50, 300, seed=1), bits)
    exact = rounded @ backend.dequantize_weight(weight)[0].double().T
    y = backend.quantized_linear(x, weight, offsets_of([40]))
    assert relative(y - exact, exact) < 1e-6


@BITS
def test_products_are_those_of_the_dequantised_weights_to_one_part_in_ten_thousand(bits):
    x, weight = normal(64, 1024), pymoe.ops.quantize_weight(normal(2, 96, 1024, seed=1), bits)
    offsets = offsets_of([24, 40])
    exact = pymoe.ops.grouped_linear(x.double(), pymoe.ops.dequantize_weight(weight).double(), offsets)
    assert relative(pymoe.ops.quantized_linear(x, weight, offsets) - exact, exact) < 1e-4


def test_bfloat16_values_near_their_blocks_largest_are_kept():
    x = (1 + torch.arange(128) / 128).bfloat16() * 2.0 ** (torch.arange(128) % 6)
    integers, steps = round_rows(x[None].bfloat16())
    assert_same_bits((integers * steps.double()).bfloat16(), x[None].bfloat16(), "activations")


@BACKENDS
@BITS
def test_a_row_does_not_depend_on_the_rows_around_it(backend, bits):
    """One row at a time goes another way through the kernel than many at once."""
    x, weight = normal(230, 200).bfloat16(), backend.quantize_weight(normal(1, 130, 200, seed=1), bits)
    together = backend.quantized_linear(x, weight, offsets_of([230]))
    for rows in (1, 2, 3, 5, 7, 60):
        some = backend.quantized_linear(x[11 : 11 + rows], weight, offsets_of([rows]))
        assert_same_bits(some, together[11 : 11 + rows], f"{rows} rows")


@BITS
def test_random_shapes(bits):
    random = torch.Generator().manual_seed(bits)

    def number(most):
        return int(torch.randint(0, most, (), generator=random))

    for _ in range(40):
        experts, outputs, inputs = 1 + number(5), number(150), number(280)
        counts = random_counts(number(40), experts, random)
        x = torch.randn(sum(counts) + number(3), inputs, generator=random).bfloat16()
        weight = torch.randn(experts, outputs, inputs, generator=random)
        bias = torch.randn(experts, outputs, generator=random).bfloat16() if number(2) else None
        packed = pymoe.ops.quantize_weight(weight, bits)
        assert_same_bits(packed.packed, pymoe.reference.quantize_weight(weight, bits).packed, "packed")
        y = pymoe.ops.quantized_linear(x, packed, offsets_of(counts), bias)
        expected = pymoe.reference.quantized_linear(x, packed, offsets_of(counts), bias)
        assert_same_bits(y, expected, f"E{experts} N{outputs} H{inputs} {counts}")


@BACKENDS
def test_a_nan_or_an_infinity_makes_its_row_nan_and_no_other(backend):
    x, weight = normal(3, 200), backend.quantize_weight(normal(1, 10, 200, seed=1), 8)
    expected = backend.quantized_linear(x, weight, offsets_of([3]))
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = x.clone()
        bad[1, 150] = value
        y = backend.quantized_linear(bad, weight, offsets_of([3]))
        assert bool(y[1].isnan().all())
        assert_same_bits(y[::2], expected[::2], "the other rows")


@BACKENDS
def test_no_backward_is_said_before_it_is_missed(backend):
    x, weight = normal(3, 20).requires_grad_(), backend.quantize_weight(normal(1, 10, 20), 8)
    with pytest.raises(ValueError, match=r"no backward, but x requires a gradient; call it under torch.no_grad\(\)"):
        backend.quantized_linear(x, weight, offsets_of([3]))
    with torch.no_grad():
        assert not backend.quantized_linear(x, weight, offsets_of([3])).requires_grad
    with torch.inference_mode():
        backend.quantized_linear(x, weight, offsets_of([3]))


@BACKENDS
def test_autocast_casts_rows_and_bias(backend):
    x, weight, bias = normal(3, 20), backend.quantize_weight(normal(1, 10, 20), 8), normal(1, 10)
    with torch.autocast("cpu", torch.bfloat16):
        y = backend.quantized_linear(x, weight, offsets_of([3]), bias)
    expected = backend.quantized_linear(x.bfloat16(), weight, offsets_of([3]), bias.bfloat16())
    assert_same_bits(y, expected, "y")


@pytest.mark.parametrize("offsets", [[0, 3, 2], [1, 2, 3], [0, 1, 2**31 - 1], [0, -2, 4], [-(2**31), 0, 0]], ids=str)
def test_raw_calls_refuse_offsets_out_of_order_or_range(offsets):
    weight = pymoe.ops.quantize_weight(normal(2, 10, 20), 8)
    with pytest.raises((IndexError, ValueError), match="quantized_linear: offsets"):
        torch.ops.pymoe.quantized_linear(
            normal(3, 20), weight.packed, torch.tensor(offsets, dtype=torch.int32), None, 8, 10
        )


def test_raw_calls_refuse_bytes_of_another_shape():
    weight = pymoe.ops.quantize_weight(normal(2, 10, 20), 8)
    call = torch.ops.pymoe.quantized_linear
    for packed, bits, outputs in ((weight.packed, 4, 10), (weight.packed, 8, 65), (weight.packed[:, :, 1:], 8, 10)):
        with pytest.raises(ValueError, match=r"quantized_linear: packed must"):
            call(normal(3, 20), packed, offsets_of([1, 2]), None, bits, outputs)
    for bits, outputs in ((3, 10), (8, -1)):
        with pytest.raises(ValueError, match=r"quantized_linear: (bits|output_features) must be"):
            call(normal(3, 20), weight.packed, offsets_of([1, 2]), None, bits, outputs)
