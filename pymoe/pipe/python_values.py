"""Reads Python values whose reading can fail (cells of closures, slots), and recognises numpy arrays.

Two walks over values and everything in them use this module. A capture's walk (``capture/contents.py``) compares values
of any class by contents, at any depth, to notice that a graph has become invalid. A stage's walk
(``execution/held_values.py``) compares identities before and after every forward, in microseconds, and finds what it
can put back.
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
    """Return the contents of a closure's cell; ``missing`` for a variable that has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return missing


def value_in_slot(slot: Any, value: Any) -> Any:
    """Return the value of an object's slot, given as a member of its class; ``MISSING`` if nothing was assigned."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return MISSING


def is_numpy_array(value: Any) -> bool:
    """Return whether a value is a numpy array, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
