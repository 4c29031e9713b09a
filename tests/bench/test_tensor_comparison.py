"""Tests that the comparisons of tensors detect and name the differences that they promise to detect."""

import math

import pytest
import torch
from specs.comparison import assert_close, assert_same_bits, ulp_distance
from specs.samples import layouts, special_values

from pymoe.bench.correctness import difference
from pymoe.bench.operators import uniform

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values_equal_themselves(dtype):
    values = special_values(dtype)
    assert_same_bits(values.clone(), values)
    assert_close(values.clone(), values)
    assert int(ulp_distance(values.clone(), values).max()) == 0


def test_nan_payload_and_sign_do_not_count():
    payloads = torch.tensor([0x7FC00000, 0x7FC00001, -0x00400000, 0x7F800001], dtype=torch.int64)
    nans = payloads.to(torch.int32).view(torch.float32)
    assert bool(nans.isnan().all())
    assert_same_bits(nans, torch.full((4,), math.nan))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("actual", "expected"), [(0.0, -0.0), (math.nan, 1.0), (1.0, math.nan), (math.inf, -math.inf), (1.0, 1.5)]
)
def test_different_bits_are_reported(dtype, actual, expected):
    got, wanted = torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
    got[1, 2], wanted[1, 2] = actual, expected
    with pytest.raises(AssertionError, match=r"thing: 1 of 6 elements differ, first at \[1, 2\]"):
        assert_same_bits(got, wanted, "thing")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(math.inf, 1e30), (1e30, math.inf), (math.nan, 0.0), (0.0, math.nan), (-math.inf, math.inf)],
)
def test_tolerance_never_covers_a_special_value(actual, expected):
    with pytest.raises(AssertionError, match=r"worst at \[1\]"):
        assert_close(torch.tensor([0.0, actual]), torch.tensor([0.0, expected]), (1e30, 1e30))


def test_worst_element_is_named():
    expected = torch.tensor([1.0, 100.0, 1.0])
    actual = expected + torch.tensor([0.0, 1.0, 0.5])
    with pytest.raises(AssertionError, match=r"2 of 3 .* worst at \[2\].*off by 0.5, allowed 0.001"):
        assert_close(actual, expected, (1e-3, 0.0))
    assert_close(actual, expected, (0.5, 0.0))


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), [0.0, 0.0], None])
def test_another_form_is_an_error(other):
    for compare in (assert_same_bits, assert_close):
        with pytest.raises(AssertionError, match="thing: "):
            compare(other, torch.zeros(2), what="thing")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_neighbours_are_one_ulp_apart(dtype):
    values = torch.tensor([-1.0, -torch.finfo(dtype).smallest_normal, 0.0, 1.0, torch.finfo(dtype).max], dtype=dtype)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    away_from_zero = (values.view(integer) + 1).view(dtype)
    assert ulp_distance(away_from_zero, values).tolist() == [1] * 5
    assert int(ulp_distance(torch.tensor(-0.0, dtype=dtype), torch.tensor(0.0, dtype=dtype))) == 0
    tiny = away_from_zero[2]
    assert int(ulp_distance(tiny, -tiny)) == 2
    assert int(ulp_distance(values[4], -values[4])) > 2**14


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (0, 4), (3, 0), (1, 1)], ids=str)
def test_layouts_hold_the_same_values(dtype, shape):
    value = uniform(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), scale=99).to(dtype)
    names = []
    for name, view in layouts(value):
        assert_same_bits(view, value, name)
        names.append(name)
    assert len(set(names)) == len(names) >= 3
    if value.numel() > 5:
        assert any(not view.is_contiguous() for _, view in layouts(value))


@pytest.mark.parametrize("tolerance", [None, (0.0, 0.0), (1e-2, 1e-3)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_benchmark_finds_what_the_assertions_find(dtype, tolerance):
    values = special_values(dtype)
    near = (values.double() * 1.005).to(dtype)
    for got, wanted in [(a, b) for a in torch.cat((values, near)) for b in values]:
        try:
            assert_same_bits(got, wanted) if tolerance is None else assert_close(got, wanted, tolerance)
            right = True
        except AssertionError:
            right = False
        assert (difference("it", got, wanted, tolerance) == "") == right, (got, wanted)
