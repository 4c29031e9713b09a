"""Tests of what quantize_weight and quantized_linear promise: errors of weights and activations, and their
exactness.
"""

import pytest
import torch
from specs.comparison import assert_same_bits
from specs.quantized_weight import EVERY_FORMAT, FORMATS, in_format
from specs.samples import tied

import pymoe
from pymoe._common.types import GROUP, TILE, up
from pymoe.bench.operators import offsets_of, random_counts
from pymoe.reference.quantized_linear import BLOCK, LARGEST_CODE, round_rows
from pymoe.reference.quantized_weight import _pack_supers, _unpack_supers, power_of_two, unpack

pytestmark = pytest.mark.only_on("cpu")
BACKENDS = pytest.mark.parametrize("backend", [pymoe.ops, pymoe.reference], ids=["native", "reference"])
BITS = pytest.mark.parametrize("bits", [8, 4])
FORMS = pytest.mark.parametrize("form", EVERY_FORMAT.values(), ids=EVERY_FORMAT)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_trip(weight, bits):
    return pymoe.ops.dequantize_weight(pymoe.ops.quantize_weight(weight, bits))


def relative(error, values):
    return float(error.double().norm() / values.double().norm())


def by_group(weight):
    """Return the weights in groups, (..., groups, 32), the last group padded with the last weight."""
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
    if kind == "positive":
        weight = weight.abs() + 0.5
    elif kind == "negative":
        weight = -weight.abs() - 0.5
    elif kind == "far":
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


@pytest.mark.parametrize("kind", ["normal", "far", "outliers", "tied", "constant", "tiny", "positive", "negative"])
def test_the_error_of_a_group_at_4_bits_is_at_most_that_of_rounding_between_its_ends(kind):
    weight = weights_of(kind)
    groups = by_group(weight)
    least, greatest = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    packed = pymoe.ops.quantize_weight(weight, 4)
    _, factors, _, powers = _unpack_supers(packed.packed, 4)
    d, dmin = (factors * power_of_two(powers)[..., None, None])[:, : weight.shape[1], 0].unsqueeze(1).unbind(-1)
    # Scales and minima are rounded to the nearest multiple of their factors: a grid of 16 values moves by this much.
    moved = (dmin / 2 + 15 * d / 2).transpose(1, 2)
    most = (greatest - least)[..., 0] / 30 + moved
    error = by_group(pymoe.ops.dequantize_weight(packed)) - groups
    assert bool((error.square().sum(-1) <= GROUP * most.square() * (1 + 1e-3)).all())


def test_minima_at_4_bits_are_never_positive():
    for kind in ("normal", "positive", "negative", "far", "constant"):
        _, scale, minimum = unpack(pymoe.ops.quantize_weight(weights_of(kind), 4))
        assert bool((minimum <= 0).all())
        assert bool((scale >= 0).all())
        if kind in ("negative", "constant"):
            assert bool((minimum < 0).any())


def test_a_power_of_two_of_a_row_changes_only_the_power_at_4_bits():
    """Rows from 2**-99 to 2**100 lose nothing to the small range of float16."""
    weight = normal(1, 64, 600).clamp(-3.9, 3.9)
    exponents = torch.linspace(-80, 98, 64).round()
    expected, scaled = (pymoe.ops.quantize_weight(w, 4).packed for w in (weight, weight * 2.0 ** exponents[:, None]))
    assert torch.equal(scaled[..., TILE:], expected[..., TILE:])
    assert torch.equal(scaled[..., :TILE].float(), expected[..., :TILE] + exponents)
    assert relative(round_trip(weight * 2.0**-94, 4) * 2.0**94 - weight, weight) < 0.0725


def test_super_blocks_of_one_row_do_not_depend_on_each_other_at_4_bits():
    """Also the last one, which has fewer groups and inputs, and one that is 2**20 times smaller."""
    for inputs in (256, 288, 300, 545, 1000):
        weight = normal(2, 70, inputs, seed=inputs)
        weight[:, :, 256:512] *= 2.0**-20
        parts = [round_trip(part, 4) for part in weight.split(256, dim=2)]
        assert_same_bits(round_trip(weight, 4), torch.cat(parts, dim=2), f"{inputs} inputs")


def test_every_block_of_q4_k_is_held_bit_for_bit():
    """llama.cpp's dequantize_row_q4_K computes ``(d * s) * code - dmin * m`` in float32."""
    random = torch.Generator().manual_seed(0)
    sizes = 1, 64, 3
    factors = torch.randint(0, 1 << 16, (*sizes, 2), generator=random).to(torch.uint16).view(torch.float16)
    factors = torch.where(factors.isfinite(), factors, 0.5).float()
    fields = torch.randint(0, 64, (*sizes, 2, 8), generator=random).float()
    codes = torch.randint(0, 16, (*sizes, 8, 32), generator=random).float()
    scales, minima = (factors[..., None] * fields).unbind(3)
    expected = scales[..., None] * codes - minima[..., None]
    packed = _pack_supers(codes.flatten(2, 3), factors, fields, torch.full((1, 64), 127, dtype=torch.uint8))
    assert packed.shape[2] == 64 * (1 + 3 * 256 * 4.5 / 8)  # 4.5 bits a weight, and a byte a row
    weight = pymoe.ops.QuantizedWeight(packed, 4, 64, 768)
    assert torch.equal(pymoe.ops.dequantize_weight(weight), expected.flatten(2))
    for came_back, original in zip(_unpack_supers(packed, 24), (codes.flatten(2, 3), factors, fields), strict=False):
        assert torch.equal(came_back.float(), original)


@BACKENDS
@pytest.mark.parametrize("exponent", [-100, -60, 0, 60, 97])
def test_products_at_4_bits_are_right_for_weights_of_every_size(backend, exponent):
    weight = backend.quantize_weight(normal(1, 70, 300, seed=1).clamp(-3.9, 3.9) * 2.0**exponent, 4)
    x = normal(9, 300) * 2.0 ** min(100, 20 - exponent)
    exact = x.double() @ backend.dequantize_weight(weight)[0].double().T
    assert relative(backend.quantized_linear(x, weight, offsets_of([9])) - exact, exact) < 1e-4


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
@pytest.mark.parametrize("value", [0.0, 1.0, -0.25, 3.5, 2.0**-80, -(2.0**-120), 2.0**100, -(2.0**100)])
def test_constant_weights_come_back_up_to_the_rounding_of_their_scale(value, bits):
    weight = torch.full((2, 3, 45), value)
    if bits == 8 and abs(value) < 2.0**-100:
        value = weight = weight * 0
    assert bool(((round_trip(weight, bits) - weight).abs() <= abs(value) * (2**-20 if bits == 8 else 2**-11)).all())


@BACKENDS
@pytest.mark.parametrize("form", [form for form in FORMATS.values() if "fp" not in form], ids=str)
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_activations_move_by_at_most_a_32639th_of_their_blocks_largest(backend, form, scale):
    x = normal(40, 300) * scale
    x[:, 7] *= 100
    integers, steps = round_rows(x)
    rounded = (integers.view(40, -1, BLOCK) * steps[:, :, None].double()).flatten(1)[:, :300]
    padded = torch.nn.functional.pad(x.abs(), (0, 84)).view(40, -1, BLOCK)
    largest = padded.amax(-1).repeat_interleave(BLOCK, dim=1)[:, :300]
    assert bool(((rounded - x.double()).abs() <= largest.double() / LARGEST_CODE).all())
    weight = backend.quantize_weight(normal(1, 50, 300, seed=1), *form)
    exact = rounded @ backend.dequantize_weight(weight)[0].double().T
    y = backend.quantized_linear(x, weight, offsets_of([40]))
    assert relative(y - exact, exact) < 1e-6


@FORMS
def test_products_are_those_of_the_dequantised_weights_to_one_part_in_ten_thousand(form):
    x, weight = normal(64, 1024), in_format(normal(2, 96, 1024, seed=1), *form)
    offsets = offsets_of([24, 40])
    exact = pymoe.ops.grouped_linear(x.double(), pymoe.ops.dequantize_weight(weight).double(), offsets)
    assert relative(pymoe.ops.quantized_linear(x, weight, offsets) - exact, exact) < 1e-4


def test_bfloat16_values_near_their_blocks_largest_are_kept():
    x = (1 + torch.arange(128) / 128).bfloat16() * 2.0 ** (torch.arange(128) % 6)
    integers, steps = round_rows(x[None].bfloat16())
    assert_same_bits((integers * steps.double()).bfloat16(), x[None].bfloat16(), "activations")


@BACKENDS
@FORMS
def test_a_row_does_not_depend_on_the_rows_around_it(backend, form):
    """The kernel has different code for one row and for many rows."""
    x, weight = normal(230, 200).bfloat16(), in_format(normal(1, 130, 200, seed=1), *form)
    together = backend.quantized_linear(x, weight, offsets_of([230]))
    for rows in (1, 2, 3, 5, 7, 60):
        some = backend.quantized_linear(x[11 : 11 + rows], weight, offsets_of([rows]))
        assert_same_bits(some, together[11 : 11 + rows], f"{rows} rows")


@FORMS
def test_random_shapes(form):
    random = torch.Generator().manual_seed(len(form) + form[0])

    def number(most):
        return int(torch.randint(0, most, (), generator=random))

    for _ in range(40):
        experts, outputs, inputs = 1 + number(5), number(150), number(280)
        counts = random_counts(number(40), experts, random)
        x = torch.randn(sum(counts) + number(3), inputs, generator=random).bfloat16()
        weight = torch.randn(experts, outputs, inputs, generator=random)
        bias = torch.randn(experts, outputs, generator=random).bfloat16() if number(2) else None
        packed = in_format(weight, *form, pymoe.ops)
        assert_same_bits(packed.packed, in_format(weight, *form).packed, "packed")
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
        with pytest.raises(ValueError, match=r"quantized_linear: (format|output_features) must be"):
            call(normal(3, 20), weight.packed, offsets_of([1, 2]), None, bits, outputs)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@BACKENDS
def test_mxfp4_weights_stand_for_what_the_standard_says(backend):
    """Test all codes with all scales against OCP Microscaling Formats 1.0, in float64 and then in float32."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    weights = backend.dequantize_weight(backend.pack_weight(codes | codes.flip(3) << 4, scales))
    expected = torch.stack([E2M1, E2M1.flip(0)], dim=1).flatten() * 2.0 ** (scales.double() - 127)
    expected[:, 255] = torch.nan
    assert_same_bits(weights, expected.float(), "weights")


@BACKENDS
def test_stored_mxfp4_weights_come_back_byte_by_byte(backend):
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (3, 130, 5, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(256, (3, 130, 5), dtype=torch.uint8, generator=random)
    weight = backend.pack_weight(codes, scales)
    assert weight.packed.nbytes == 3 * 192 * 5 * 17  # 4.25 bits a weight, of whole tiles
    assert (weight.bits, weight.output_features, weight.input_features, weight.format) == (4, 130, 160, "mxfp")
    for came_back, original in zip(backend.unpack_weight(weight), (codes, scales), strict=True):
        assert torch.equal(came_back, original)


@BACKENDS
def test_mxfp4_rounds_as_the_standard_says(backend):
    """The standard's section 6.3 demands a scale from the largest exponent, the nearest value, ties to even, and no
    overflow past 6.
    """
    weight = normal(2, 70, 96) * 2.0 ** torch.randint(-60, 60, (2, 70, 1))
    middles = [value + more for value in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0) for more in (0.0, 1e-6, -1e-6)]
    weight[0, 0, :30] = torch.tensor([*middles, 0.0, -0.0, 7.99, -7.99, 6.5, -0.25, -0.75, -1.25, -5.0])
    weight[0, 0, 30:32] = 1.0
    codes, scales = backend.unpack_weight(backend.quantize_weight(weight, 4, "mxfp"))
    groups = weight.unflatten(2, (3, 32)).double()
    exponent = groups.abs().amax(3).log2().floor() - 2
    assert torch.equal(scales.double() - 127, exponent)
    scaled = groups / 2.0 ** exponent[..., None]
    far = (scaled.abs()[..., None] - E2M1[:8].double()).abs()
    nearest = far.amin(-1, keepdim=True)
    even = torch.tensor([0, 1] * 4)
    expected = (far != nearest).int() * 2 + even  # prefers the nearest, then an even code, then the lowest
    expected = expected.argmin(-1) | groups.signbit().int() << 3
    assert torch.equal(torch.stack([codes & 15, codes >> 4], dim=4).flatten(3).long(), expected.long())


@BACKENDS
def test_mxfp4_weights_are_kept_when_they_are_rounded_again(backend):
    """The claim holds for groups that contain a 4 or a 6; the scale of other groups could be smaller."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (2, 65, 3, 16), dtype=torch.uint8, generator=random)
    codes[..., 7] = 0x6F
    scales = torch.randint(1, 220, (2, 65, 3), dtype=torch.uint8, generator=random)
    weight = backend.pack_weight(codes, scales)
    again = backend.quantize_weight(backend.dequantize_weight(weight), 4, "mxfp")
    assert_same_bits(again.packed, weight.packed, "packed")


@BACKENDS
def test_a_scale_that_is_nan_makes_its_output_nan_and_no_other(backend):
    x, weight = normal(3, 128), backend.quantize_weight(normal(1, 70, 128), 4, "mxfp")
    expected = backend.quantized_linear(x, weight, offsets_of([3]))
    codes, scales = backend.unpack_weight(weight)
    scales[0, 5, 2] = 255
    codes[0, 5, 2] = 0
    y = backend.quantized_linear(x, backend.pack_weight(codes, scales), offsets_of([3]))
    assert bool(y[:, 5].isnan().all())
    others = torch.arange(70) != 5
    assert_same_bits(y[:, others], expected[:, others], "the other outputs")


@BACKENDS
@pytest.mark.parametrize("scale", [0, 1, 20, 127, 227])
def test_mxfp4_products_are_right_for_scales_of_every_size(backend, scale):
    codes = torch.randint(256, (1, 70, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    weight = backend.pack_weight(codes, torch.full((1, 70, 4), scale, dtype=torch.uint8))
    x = normal(9, 128) * 2.0 ** min(100, 127 - scale)
    exact = x.double() @ backend.dequantize_weight(weight)[0].double().T
    assert relative(backend.quantized_linear(x, weight, offsets_of([9])) - exact, exact) < 1e-4


@pytest.mark.parametrize("place", ["cpu", "meta"])  # "device" is the suite's own
@pytest.mark.parametrize("number", [0, 5, 10, 24])
def test_numbers_that_name_no_format_are_refused_also_without_memory(number, place):
    with pytest.raises(ValueError, match=f"quantize_weight: format must be 8, 4, 14 or 18, got {number}"):
        torch.ops.pymoe.quantize_weight(torch.zeros(1, 2, 32, device=place), number)
