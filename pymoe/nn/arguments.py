"""Checks of constructor arguments; messages name layer, argument, rule and what was seen."""

from __future__ import annotations

import sys

from pymoe.reference import checks

BACKENDS = ("native", "reference")


def size(layer: str, argument: str, value: object) -> None:
    """``value`` must be an int of at least 1."""
    checks.integer(layer, argument, value, 1, None, "at least 1")


def number(
    layer: str, argument: str, value: object, *, minimum: float | None = None, above: float | None = None
) -> None:
    """``value`` must be a finite real number, at least ``minimum`` or greater than ``above`` where one is given."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{layer}: {argument} must be a float, got {type(value).__name__}")
    rule = "finite"
    if minimum is not None:
        rule = f"finite and at least {minimum:g}"
    elif above is not None:
        rule = f"finite and greater than {above:g}"
    low = minimum is not None and value < minimum
    finite = -sys.float_info.max <= value <= sys.float_info.max  # an int may be too large for a float
    if not finite or low or (above is not None and value <= above):
        raise ValueError(f"{layer}: {argument} must be {rule}, got {value}")


def flag(layer: str, argument: str, value: object) -> None:
    """``value`` must be a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{layer}: {argument} must be a bool, got {type(value).__name__}")


def backend(layer: str, value: object) -> None:
    """``value`` must name a set of operators."""
    checks.choice(layer, "backend", value, BACKENDS)


def floating_dtype(layer: str, value: object) -> None:
    """``value`` must be one of the four floating dtypes, or ``None`` for torch's default."""
    if value is not None and value not in checks.FLOATING:
        raise TypeError(f"{layer}: dtype must be float32, float64, bfloat16 or float16, got {value}")
