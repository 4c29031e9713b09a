"""IEEE arithmetic from its definition, in whole numbers, with which the interpreter's arithmetic is compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """A binary format with this many bits of exponent and fraction."""

    exponent: int
    fraction: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.fraction)

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.fraction

    def is_nan(self, bits: int) -> bool:
        return bits & ~self.sign > self.infinity

    def value(self, bits: int) -> Fraction | float:
        """Return the number that the bits stand for; an infinity or NaN as a float."""
        sign = -1 if bits & self.sign else 1
        magnitude = bits & (self.sign - 1)
        if magnitude >= self.infinity:
            return sign * math.inf if magnitude == self.infinity else math.nan
        exponent, fraction = divmod(magnitude, 1 << self.fraction)
        if exponent > 0:
            fraction += 1 << self.fraction
        return sign * Fraction(fraction) * Fraction(2) ** (max(exponent, 1) - self.bias - self.fraction)

    def round(self, exact: Fraction, negative_zero: bool = False) -> int:
        """Return the bits of the nearest number; in a tie, the number whose last bit is 0."""
        if exact == 0:
            return self.sign if negative_zero else 0
        sign = self.sign if exact < 0 else 0
        magnitude = abs(exact)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if Fraction(2) ** exponent > magnitude:
            exponent -= 1
        exponent = max(exponent, 1 - self.bias)
        units = round(magnitude / Fraction(2) ** (exponent - self.fraction))  # Python rounds halves to even
        bits = ((exponent + self.bias - 1) << self.fraction) + units
        return sign | min(bits, self.infinity)


SINGLE, DOUBLE, HALF, BFLOAT = Format(8, 23), Format(11, 52), Format(5, 10), Format(8, 7)
