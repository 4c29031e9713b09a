"""Tests of symmetric weights: their values, the codes and scales of other programs, and products."""

import pytest
import torch
from specs.comparison import assert_same_bits
from specs.quantized_linear import check_products_with_one_input

import pymoe
from pymoe.bench.operators import offsets_of

pytestmark = pytest.mark.only_on("cpu")
BACKENDS = pytest.mark.parametrize("backend", [pymoe.ops, pymoe.reference], ids=["native", "reference"])
GROUP = 16
"""Inputs that share a scale."""


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(experts, outputs, inputs, seed=0):
    """Return codes, and scales of both signs."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (experts, outputs, inputs), generator=random, dtype=torch.int8)
    return codes, torch.randn(experts, outputs, -(-inputs // GROUP), generator=random)


@BACKENDS
def test_every_code_stands_for_scale_times_code_rounded_once(backend):
    """All codes, with scales of all sizes down to subnormal ones. Products are exact in float64."""
    codes = torch.arange(-128, 128).to(torch.int8).repeat(1, 1000, 1)
    scales = normal(1, 1000, 256 // GROUP) * 2.0 ** torch.linspace(-148, 100, 1000)[:, None]
    exact = scales.double().repeat_interleave(GROUP, dim=2) * codes
    assert_same_bits(backend.dequantize_weight(backend.pack_weight(codes, scales)), exact.float(), "weights")


@BACKENDS
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (70, 45), (130, 257), (256, 128), (64, 16), (3, 17), (0, 40), (3, 0)]
)
def test_stored_weights_come_back_byte_by_byte(backend, outputs, inputs):
    """Inputs are padded to 32, which is two groups."""
    codes, scales = stored(3, outputs, inputs)
    scales[0, :1, :1] = torch.nan
    weight = backend.pack_weight(codes, scales)
    assert weight[1:] == (8, outputs, inputs, "symmetric", 0)
    assert backend.dequantize_weight(weight).shape == (3, outputs, inputs)
    for came, part in zip(backend.unpack_weight(weight), (codes, scales), strict=True):
        assert came.is_contiguous()
        assert came.dtype == part.dtype
        assert_same_bits(came, part, "part")


def test_the_layout_is_the_one_that_the_module_describes():
    """Kernels, and files, depend on it. A weight takes 10 bits."""
    codes, scales = stored(1, 64, 80)
    packed = pymoe.ops.pack_weight(codes, scales).packed[0, 0]
    assert len(packed) == 64 * 96 * 10 / 8
    at = 0
    for group in range(scales.shape[2]):
        assert_same_bits(packed[at : at + 256].view(torch.float32), scales[0, :, group], "scales")
        some = codes[0, :, group * GROUP : (group + 1) * GROUP].T.flatten()
        assert torch.equal(packed[at + 256 : at + 256 + 64 * GROUP].view(torch.int8), some)
        at += 256 + 64 * GROUP
    assert not packed[at:].any()


@BACKENDS
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (70, 45), (130, 257), (129, 384), (64, 160), (3, 33)])
@pytest.mark.parametrize("rows", [3, 30])
def test_products_are_those_of_the_weights_in_float32(backend, outputs, inputs, rows):
    codes, scales = stored(1, outputs, inputs)
    x = normal(rows, inputs)
    weights = (scales.double()[:, :, torch.arange(inputs) // GROUP] * codes)[0].T
    exact, size = x.double() @ weights, x.double().abs() @ weights.abs()
    y = backend.quantized_linear(x, backend.pack_weight(codes, scales), offsets_of([rows]))
    assert bool(((y - exact).abs() <= size * 2.0**-24 * (min(inputs, 128) + inputs / 128 + 3)).all())


@BACKENDS
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 40])
@pytest.mark.parametrize("flush", [False, True], ids=["", "flush"])
def test_products_with_one_input_are_the_weights(backend, rows, flush):
    """Few rows and many go two ways through the kernel. A thread that flushes subnormal numbers keeps them here."""
    codes, scales = stored(1, 70, 160)
    weight = backend.pack_weight(codes, scales * 2.0 ** torch.linspace(-146, 30, 70)[:, None])
    weights = backend.dequantize_weight(weight)[0]
    places = 0, 3, 15, 16, 31, 32, 127, 128, 159
    check_products_with_one_input(backend, weight, weights, rows, places, flush and backend is pymoe.ops)


@BACKENDS
@pytest.mark.parametrize("rows", [2, 30])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_scale_that_is_not_finite_spoils_its_output_and_no_other(backend, rows, value):
    codes, scales = stored(1, 70, 200)
    x = normal(rows, 200)
    expected = backend.quantized_linear(x, backend.pack_weight(codes, scales), offsets_of([rows]))
    scales[0, 5, 1] = scales[0, 69, 12] = value
    y = backend.quantized_linear(x, backend.pack_weight(codes, scales), offsets_of([rows]))
    assert not y[:, [5, 69]].isfinite().any()
    others = [i for i in range(70) if i not in (5, 69)]
    assert_same_bits(y[:, others], expected[:, others], "the other outputs")


def test_layers_of_the_meta_device_have_its_sizes():
    for inputs in (1, 16, 17, 45):
        whole = pymoe.ops.pack_weight(*stored(2, 70, inputs))
        for backend in (pymoe.ops, pymoe.reference):
            empty = backend.quantize_weight(torch.empty(2, 70, inputs, device="meta"), 8, "symmetric")
            assert empty.packed.shape == whole.packed.shape
            assert empty[1:] == whole[1:]
