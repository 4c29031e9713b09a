"""Values of Python that code may have read, in a form that tells later whether they are still what they were."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import torch
from torch import nn

from pymoe.pipe.capture.errors import is_users_file

__all__ = ["MANY", "by_value", "freeze", "is_immutable", "is_plain", "is_users_object"]

_SCALARS = (int, complex, str, bytes, bool, type(None), type(...), enum.Enum, range, slice)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.Tensor, nn.Module)
MANY = 256
"""Of what a container holds beyond that, only the container itself and its length are compared."""
_DEPTH = 4


class Same:
    """Equal to another one of the very same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def is_plain(value: Any) -> bool:
    """Whether it is a number, a string, None and the like, or a list, tuple, dictionary or set."""
    return isinstance(value, (*_SCALARS, float, *_OF_TORCH, *_CONTAINERS))


def is_users_object(value: Any) -> bool:
    """Whether it is an object with attributes of its own, of a class that no package has made."""
    kind = type(value)
    if kind.__module__ in ("builtins", "torch") or isinstance(value, (*_CODE, type)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and (kind is types.SimpleNamespace or _is_users(kind))


def _is_users(kind: type) -> bool:
    home = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"
    return is_users_file(home) or kind.__module__ == "__main__"


def is_immutable(value: Any) -> bool:
    """Whether the same object is always the same value."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_immutable, value))
    return isinstance(value, (*_SCALARS, float, *_OF_TORCH, type, *_CODE))


def freeze(value: Any) -> Any:
    """Something that equals what this function makes later of the same value, and of no other.

    Scalars are compared by type and value, containers by what is in them, objects by identity and by the attributes
    that an instance has of its own; functions, modules and tensors by identity alone. So is what comes after the first
    thousand values within one.
    """
    return _freeze(value, _DEPTH, [1000])


def _freeze(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if isinstance(value, float):
        return type(value), float(value).hex()  # all NaN are one, the zeros are two
    if isinstance(value, slice):
        return slice, _freeze((value.start, value.stop, value.step), depth, left)
    if isinstance(value, (*_SCALARS, *_OF_TORCH)):
        return type(value), value
    if isinstance(value, _CONTAINERS):
        if len(value) > MANY or depth == 0 or left[0] < 0:
            return Same(value), len(value)
        if isinstance(value, dict):
            items = [(_freeze(key, 1, left), _freeze(item, depth - 1, left)) for key, item in value.items()]
            return type(value), tuple(items)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(_freeze(item, depth - 1, left) for item in value)
        return type(value), tuple([_freeze(item, depth - 1, left) for item in value])
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)) and value.nbytes <= 8 * MANY:
        return type(value), str(value.dtype), value.shape, value.tobytes()
    own = None if isinstance(value, (*_CODE, type)) else getattr(value, "__dict__", None) or _in_slots(value)
    if not own or not isinstance(own, dict) or depth == 0 or left[0] < 0 or type(value).__module__.startswith("torch."):
        return Same(value)
    return Same(value), _freeze(own, depth - 1, left)


def _in_slots(value: Any) -> dict[str, Any]:
    """The attributes of an object whose class, as dataclasses with ``slots=True``, has a place for each; of the
    user's classes, since those of packages keep there what they have computed (``pathlib.Path`` its text).
    """
    kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind) and _is_users(kind)]
    names = [
        name for kind in kinds for name, member in vars(kind).items() if type(member) is types.MemberDescriptorType
    ]
    return {name: getattr(value, name, None) for name in names}


def by_value(frozen: Any) -> bool:
    """Whether nothing in it is compared by identity."""
    if isinstance(frozen, (tuple, frozenset)):
        return all(map(by_value, frozen))
    return not isinstance(frozen, Same)
