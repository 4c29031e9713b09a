"""Hides the records of tests' layers from pipes, so that recomputations do not restore them as the model's state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

_values: list[Any] = []


def unseen(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value, which a global holds."""
    _values.append(value)
    return partial(_value, len(_values) - 1)


def _value(number: int) -> Any:
    return _values[number]
