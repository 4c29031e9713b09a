"""Checks of options that are numbers of seconds, in Python and on command lines."""

from __future__ import annotations

import argparse
import math
import threading
from typing import Any


def check_seconds(
    what: str, seconds: Any, *, positive: bool = False, finite: bool = False, least: float = 0.0
) -> float:
    """Return ``seconds`` if it is a number in the range that the other arguments define, else raise.

    Args:
        what: name of the option in messages.
        seconds: the value to check.
        positive: require a value above 0.
        finite: refuse infinity.
        least: smallest allowed value, unless ``positive``. Pass minus infinity if ``seconds`` is the time until a
            deadline, which may have passed.

    Raises:
        TypeError: ``seconds`` is not a number.
        ValueError: ``seconds`` is NaN or out of range.
    """
    kinds = ["positive"] * positive + ["finite"] * finite
    a_number = f"a{''.join(f', {kind}' for kind in kinds)[1:]} number of seconds"
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{what} must be {a_number}, got {seconds!r}")
    too_small = seconds <= 0 if positive else seconds < least
    if math.isnan(seconds) or too_small or (finite and math.isinf(seconds)):
        at_least = "" if positive or least == -math.inf else f", at least {least:g}"
        raise ValueError(f"{what} must be {a_number}{at_least}, got {seconds!r}")
    return seconds


def parse_seconds(text: str) -> float:
    """Parse a number of seconds from a command line, as an argparse type.

    Raises:
        ArgumentTypeError: the text is not a number above 0 and at most ``threading.TIMEOUT_MAX``.
    """
    try:
        seconds = check_seconds("", float(text), positive=True)
    except ValueError:
        seconds = math.inf
    if seconds > threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return seconds
