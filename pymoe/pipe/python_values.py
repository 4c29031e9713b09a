"""Looks into Python values where looking can fail: cells of closures and slots; and tells arrays of numpy.

Two walks over all that values hold use it. The one of a capture (``capture/contents.py``) compares values of any class
by contents, at any depth, to notice that a graph has become invalid. The one of a stage (``execution/held_values.py``)
compares identities before and after every forward, in microseconds, and finds what it can put back.
"""

from __future__ import annotations

import enum
import sys
from typing import Any


class _Missing(enum.Enum):
    MISSING = enum.auto()


MISSING = _Missing.MISSING
"""Stands for an attribute, a variable or an item that does not exist."""


def value_in_cell(cell: Any, missing: Any = MISSING) -> Any:
    """Return what a cell of a closure holds; ``missing`` for a variable that has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return missing


def value_in_slot(slot: Any, value: Any) -> Any:
    """Return what an object has in a slot, given as a member of its class; ``MISSING`` if nothing was assigned."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return MISSING


def is_numpy_array(value: Any) -> bool:
    """Return whether a value is an array of numpy, which is not imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
