"""Checks of the arguments of a simulation, with messages like those in :mod:`pymoe.reference.checks`."""

from __future__ import annotations

from pymoe.nn.options import check_number
from pymoe.reference import checks

choice = checks.choice


def at_least(owner: str, argument: str, value: object, low: int, high: int | None = None) -> None:
    """Raise unless ``value`` is an int from ``low`` to ``high``; None means no upper end."""
    rule = f"at least {low}" if high is None else f"in {low}..{high}"
    checks.integer(owner, argument, value, low, high, rule)


def positive(owner: str, argument: str, value: object) -> None:
    """Raise unless ``value`` is a finite number above 0."""
    check_number(owner, argument, value, above=0)


def not_negative(owner: str, argument: str, value: object) -> None:
    """Raise unless ``value`` is a finite number of at least 0."""
    check_number(owner, argument, value, minimum=0)
