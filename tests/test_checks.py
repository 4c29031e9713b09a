"""Tests that all options in seconds accept and refuse the same values."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest

from pymoe._common.seconds import check_seconds, parse_seconds


def test_numbers_of_seconds_are_returned_as_they_are() -> None:
    for seconds in (0, 0.5, 3, math.inf):
        assert check_seconds("x", seconds) is seconds
    assert check_seconds("x", -1, least=-math.inf) == -1
    assert check_seconds("x", 2, positive=True, finite=True) == 2


@pytest.mark.parametrize("seconds", ["1", None, True, 1j, [1]])
def test_a_value_of_another_type_is_a_type_error(seconds: Any) -> None:
    with pytest.raises(TypeError, match=r"^connect: timeout must be a positive, finite number of seconds, got"):
        check_seconds("connect: timeout", seconds, positive=True, finite=True)


@pytest.mark.parametrize(
    ("seconds", "options", "message"),
    [
        (-1, {}, "x must be a number of seconds, at least 0, got -1"),
        (math.nan, {}, "x must be a number of seconds, at least 0, got nan"),
        (0, {"positive": True}, "x must be a positive number of seconds, got 0"),
        (math.nan, {"positive": True}, "x must be a positive number of seconds, got nan"),
        (math.inf, {"finite": True}, "x must be a finite number of seconds, at least 0, got inf"),
        (math.nan, {"least": -math.inf}, "x must be a number of seconds, got nan"),
    ],
)
def test_a_number_out_of_range_is_a_value_error(seconds: float, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_seconds("x", seconds, **options)


def test_seconds_of_a_command_line_are_positive_and_can_be_waited_for() -> None:
    assert parse_seconds("0.5") == 0.5
    for text in ("0", "-1", "nan", "inf", "1e300", "soon", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"expected a positive number of seconds, got '{text}'"):
            parse_seconds(text)
