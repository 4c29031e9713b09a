"""The correctness column: does the native operator return what the reference returns, on the inputs that are timed?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from pymoe.testing.calls import gradients, widened
from pymoe.testing.compare import assert_close, assert_same_bits, same_bits
from pymoe.testing.spec import BenchCase, OpSpec, Sample
from pymoe.testing.verify import is_exact


@dataclass(frozen=True)
class Verdict:
    """What a comparison of two results found."""

    verdict: str
    """``"exact"``: every bit agrees; ``"close"``: within the tolerance; ``"WRONG"``; ``"ERROR"``: a call failed."""
    max_error: float = 0.0
    """The largest absolute difference of finite values in outputs and gradients."""
    detail: str = ""
    """What is wrong: the first broken rule, with values."""

    @property
    def good(self) -> bool:
        """Is the result what it should be?"""
        return self.verdict in ("exact", "close")

    def __str__(self) -> str:
        return f"close {self.max_error:.0e}" if self.verdict == "close" else self.verdict


def verify(spec: OpSpec, case: BenchCase, sample: Sample) -> Verdict:
    """Call native and reference on ``sample`` and compare outputs, and gradients if the case times them.

    An output that ``spec`` promises exactly must agree bit for bit; others, and gradients, within its tolerance. The
    gradients of 16-bit dtypes are compared with those of the reference in float32, as the test suite does.
    """
    expected, expected_gradients = gradients(spec.reference, sample)
    actual, actual_gradients = gradients(spec.native, sample)
    if case.dtype.itemsize == 2 and expected_gradients:
        _, wide_gradients = gradients(spec.reference, widened(sample))
        expected_gradients = [
            wide.to(narrow.dtype) for wide, narrow in zip(wide_gradients, expected_gradients, strict=True)
        ]
    if len(actual) != len(expected):
        return Verdict("WRONG", detail=f"{len(actual)} outputs, the reference has {len(expected)}")
    tolerance = spec.tolerances.get(case.dtype, (0.0, 0.0))
    pairs = [*zip(actual, expected, strict=True), *zip(actual_gradients, expected_gradients, strict=True)]
    try:
        for i, (got, wanted) in enumerate(pairs):
            if i >= len(actual):
                assert_close(got, wanted, tolerance, f"gradient {i - len(actual)}")
            elif is_exact(spec, i):
                assert_same_bits(got, wanted, f"output {i}")
            else:
                assert_close(got, wanted, tolerance, f"output {i}")
    except AssertionError as error:
        return Verdict("WRONG", max_error(pairs), str(error))
    exact = all(bool(same_bits(got.detach(), wanted.detach()).all()) for got, wanted in pairs)
    return Verdict("exact") if exact else Verdict("close", max_error(pairs))


def max_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest absolute difference between finite elements; infinite where shapes differ."""
    largest = 0.0
    for got, wanted in pairs:
        if got.shape != wanted.shape:
            return float("inf")
        difference = (got.detach().double() - wanted.detach().double()).abs()
        finite = difference[difference.isfinite()]
        largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
    return largest
