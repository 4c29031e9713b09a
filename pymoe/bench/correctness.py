"""The correctness column: compares the native operator's results with the reference's, on the timed inputs.

A result that is promised to be exact is compared bit for bit, other results within a tolerance. Both comparisons name
the first element that differs, and treat special values as follows:

* a NaN equals every NaN, whatever its payload and sign, and nothing else;
* an infinity equals only itself, under a tolerance too;
* -0 and +0 differ bit for bit, and are equal under a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pymoe.bench.calls import BenchCase, Operator, Sample, gradients, widened

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """Return a bool tensor that marks equal bits (a NaN equals a NaN). Shapes and dtypes must be equal."""
    if not expected.is_floating_point():
        return actual == expected
    integer = INTEGER_OF_SIZE[expected.element_size()]
    return (actual.view(integer) == expected.view(integer)) | (actual.isnan() & expected.isnan())


def difference(what: str, got: Tensor, wanted: Tensor, tolerance: tuple[float, float] | None) -> str:
    """Return a description of the error in ``got``, named ``what``; "" if there is none.

    ``tolerance`` is (rtol, atol) for floating-point values; if it is None, every bit must agree.
    """
    for fact in ("shape", "dtype", "device"):
        seen, expected = getattr(got, fact), getattr(wanted, fact)
        if seen != expected:
            return f"{what}: {fact} is {seen}, expected {expected}"
    if tolerance is None or not wanted.is_floating_point():
        same = same_bits(got, wanted)
    else:
        rtol, atol = tolerance
        same = torch.isclose(got.double(), wanted.double(), rtol=rtol, atol=atol, equal_nan=True)
    if bool(same.all()):
        return ""
    index = tuple(same.logical_not().nonzero()[0].tolist())
    return (
        f"{what}: {int(same.logical_not().sum())} of {same.numel()} elements differ, first at {list(index)}: "
        f"got {got[index].item()!r}, expected {wanted[index].item()!r}"
    )


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison of native and reference results."""

    verdict: str
    """``"exact"``: every bit agrees; ``"close"``: within the tolerance; ``"WRONG"``; or ``"ERROR"``: a call failed."""
    max_error: float = 0.0
    """The largest absolute difference of finite values in outputs and gradients."""
    detail: str = ""
    """Description of the first difference, with values, or of the error; "" if there is none."""


def verify(operator: Operator, case: BenchCase, sample: Sample) -> Verdict:
    """Compare native and reference results on ``sample``: the outputs, and the gradients if the case measures a
    backward pass.

    Outputs that ``operator`` promises to be exact must agree bit for bit; other outputs and gradients must agree within
    its tolerance. Gradients of 16-bit dtypes are compared with the gradients of the reference in float32, as in the
    tests.
    """
    expected, expected_gradients = gradients(operator.reference, sample)
    actual, actual_gradients = gradients(operator.native, sample)
    if case.dtype.itemsize == 2 and expected_gradients:
        _, wide_gradients = gradients(operator.reference, widened(sample))
        expected_gradients = [
            wide.to(narrow.dtype) for wide, narrow in zip(wide_gradients, expected_gradients, strict=True)
        ]
    if len(actual) != len(expected):
        return Verdict("WRONG", detail=f"{len(actual)} outputs, the reference has {len(expected)}")
    tolerance = operator.tolerances.get(case.dtype, (0.0, 0.0))
    pairs = [*zip(actual, expected, strict=True), *zip(actual_gradients, expected_gradients, strict=True)]
    for i, (got, wanted) in enumerate(pairs):
        of_gradient = i >= len(actual)
        what = f"gradient {i - len(actual)}" if of_gradient else f"output {i}"
        exact = not of_gradient and operator.is_exact(i)
        if found := difference(what, got.detach(), wanted.detach(), None if exact else tolerance):
            return Verdict("WRONG", max_error(pairs), found)
    if all(bool(same_bits(got.detach(), wanted.detach()).all()) for got, wanted in pairs):
        return Verdict("exact")
    return Verdict("close", max_error(pairs))


def max_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the largest absolute difference between finite elements; infinity if shapes differ."""
    largest = 0.0
    for got, wanted in pairs:
        if got.shape != wanted.shape:
            return float("inf")
        difference = (got.detach().double() - wanted.detach().double()).abs()
        finite = difference[difference.isfinite()]
        largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
    return largest
