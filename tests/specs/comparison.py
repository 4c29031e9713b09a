"""Assertions that two tensors are equal or close, which report where and by how much the tensors differ.

They compare as :mod:`pymoe.bench.correctness` does, also special values, and report more details.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe.bench.correctness import INTEGER_OF_SIZE, same_bits


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the distance of two values in representable numbers, int64; 0 for two NaNs and for -0 and +0.

    The distance of NaN and a number is the largest int64. Infinity is next to the largest finite number.
    """
    integer = INTEGER_OF_SIZE[expected.element_size()]
    lowest = torch.iinfo(integer).min

    def ordered(value: Tensor) -> Tensor:
        bits = value.view(integer).to(torch.int64)
        return torch.where(bits < 0, lowest - bits, bits)

    a, b = ordered(actual), ordered(expected)
    largest = torch.iinfo(torch.int64).max
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    distance = high - low
    distance = torch.where(distance < 0, largest, distance)  # fp64 of opposite signs can pass 2**63
    nan_a, nan_b = actual.isnan(), expected.isnan()
    return torch.where(nan_a & nan_b, 0, torch.where(nan_a | nan_b, largest, distance))


def assert_same_form(actual: Any, expected: Any, what: str = "result") -> None:
    """Raise AssertionError unless both are tensors of the same shape, dtype and device."""
    for side, value in (("actual", actual), ("expected", expected)):
        assert isinstance(value, Tensor), f"{what}: {side} is a {type(value).__name__}, not a tensor"
    for fact in ("shape", "dtype", "device"):
        seen, wanted = getattr(actual, fact), getattr(expected, fact)
        assert seen == wanted, f"{what}: {fact} is {seen}, expected {wanted}"


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Raise AssertionError, naming the first differing element, unless all agree bit for bit (NaN with NaN)."""
    assert_same_form(actual, expected, what)
    different = ~same_bits(actual.detach(), expected.detach())
    if not bool(different.any()):
        return
    index = _first(different)
    message = (
        f"{what}: {int(different.sum())} of {different.numel()} elements differ, first at {list(index)}: "
        f"got {_show(actual, index)}, expected {_show(expected, index)}"
    )
    if expected.is_floating_point():
        ulps = ulp_distance(actual.detach()[index], expected.detach()[index])
        message += f" ({int(ulps)} ulp apart; the largest distance is {int(_ulps_at(different, actual, expected))} ulp)"
    raise AssertionError(message)


def assert_close(
    actual: Tensor, expected: Tensor, tolerance: tuple[float, float] = (0.0, 0.0), what: str = "result"
) -> None:
    """Raise AssertionError, naming the worst element, unless |actual - expected| <= atol + rtol * |expected|.

    Args:
        actual: what was computed; integers and bools must be equal.
        expected: of the same shape and dtype.
        tolerance: (rtol, atol).
        what: names the pair in the message.
    """
    if isinstance(expected, Tensor) and not expected.is_floating_point():
        assert_same_bits(actual, expected, what)
        return
    assert_same_form(actual, expected, what)
    rtol, atol = tolerance
    a, b = actual.detach().double(), expected.detach().double()
    allowed = atol + rtol * b.abs()
    ordinary = a.isfinite() & b.isfinite()
    error = torch.where(ordinary, (a - b).abs(), 0.0)
    bad = torch.where(ordinary, error > allowed, (a != b) & ~(a.isnan() & b.isnan()))
    if not bool(bad.any()):
        return
    special = bad & ~ordinary
    if bool(special.any()):
        index, size = _first(special), "only one of them is that special value"
    else:
        excess = torch.where(bad, error / allowed.clamp(min=torch.finfo(torch.float64).tiny), -1.0)
        index = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        size = f"off by {float(error[index]):.3g}, allowed {float(allowed[index]):.3g}"
    raise AssertionError(
        f"{what}: {int(bad.sum())} of {bad.numel()} elements are off (rtol {rtol:g}, atol {atol:g}), worst at "
        f"{list(index)}: got {_show(actual, index)}, expected {_show(expected, index)} ({size})"
    )


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _ulps_at(mask: Tensor, actual: Tensor, expected: Tensor) -> Tensor:
    return ulp_distance(actual.detach()[mask], expected.detach()[mask]).max()


def _show(tensor: Tensor, index: tuple[int, ...]) -> str:
    value = tensor.detach()[index].item()
    return value.hex() + f" = {value!r}" if isinstance(value, float) else repr(value)
