"""Reads variables that may have no value (cells of closures, slots), and recognises numpy arrays, random number
generators of Python and numpy, and modules whose code is assumed not to change.

Two recursive walks over values use this module. ``capture/contents.py`` compares values of any class by contents, at
any depth, to notice that a captured graph has become invalid. ``execution/held_values.py`` compares identities before
and after forwards of a stage, in microseconds, and finds what can be restored.
"""

from __future__ import annotations

import enum
import pickle
import random
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple


class _Missing(enum.Enum):
    MISSING = enum.auto()


MISSING = _Missing.MISSING
"""Stands for an attribute, a variable or an item that does not exist."""


def value_in_cell(cell: Any, missing: Any = MISSING) -> Any:
    """Return the contents of a closure's cell; ``missing`` if its variable has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return missing


def held_by(function: FunctionType) -> list[Any]:
    """Return the values in a function's closure, and the defaults of its arguments."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = [value_in_cell(cell) for name, cell in cells if name != "__class__"]  # the cell that super() uses
    return [*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def value_in_slot(slot: Any, value: Any) -> Any:
    """Return what the object ``value`` has in ``slot``, a member of its class; ``MISSING`` if nothing was assigned."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return MISSING


def is_numpy_array(value: Any) -> bool:
    """Return whether a value is a numpy array, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


class ForeignGenerator(NamedTuple):
    """Gives a random number generator of Python or numpy the methods of torch's generators."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]


def foreign_generator(value: Any) -> ForeignGenerator | None:
    """Return a :class:`ForeignGenerator` for a random generator of Python or numpy; None for any other value.

    ``SystemRandom`` has no state, so None is returned for it, too.
    """
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else ForeignGenerator(value.getstate, value.setstate)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    if isinstance(value, numpy_random.RandomState):
        return ForeignGenerator(
            lambda: pickle.dumps(value.get_state(legacy=False)), lambda state: value.set_state(pickle.loads(state))
        )
    bits = value.bit_generator if isinstance(value, numpy_random.Generator) else value
    if not isinstance(bits, numpy_random.BitGenerator):
        return None
    return ForeignGenerator(lambda: pickle.dumps(bits.state), lambda state: setattr(bits, "state", pickle.loads(state)))


def is_installed(module: str) -> bool:
    """Return whether a Python module, given by name, is part of Python, torch, numpy or pymoe. Code of such modules is
    assumed not to change.
    """
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package in ("builtins", "torch", "numpy", "pymoe")
