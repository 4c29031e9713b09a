"""Snapshots of Python values: to tell later whether they have changed, or to restore them."""

from __future__ import annotations

import enum
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pymoe.pipe.capture.errors import is_users_file

CONSTANTS = (
    *(int, float, complex, str, bytes, enum.Enum, slice, range, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of values that are always the same: numbers, strings, None and the like."""
CONTAINERS = (list, tuple, dict, set, frozenset)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.Tensor, nn.Module)
_MAX_ITEMS = 256
"""Of a longer container only the identity and the length are compared."""
_MAX_DEPTH = 4
_MAX_VALUES = 1000


class _Missing(enum.Enum):
    MISSING = enum.auto()


MISSING = _Missing.MISSING
"""Stands for an attribute, or a variable of the environment, that does not exist."""


class Same:
    """Equal to another one of the very same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def is_users_object(value: Any) -> bool:
    """Return whether a value is an object with attributes whose class does not come from a package."""
    kind = type(value)
    if kind.__module__ in ("builtins", "torch") or isinstance(value, (*_CODE, type)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and (kind is types.SimpleNamespace or _is_users(kind))


def _is_users(kind: type) -> bool:
    home = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"
    return is_users_file(home) or kind.__module__ == "__main__"


def is_immutable(value: Any) -> bool:
    """Return whether the same object always has the same value."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_immutable, value))
    return isinstance(value, (*CONSTANTS, type, *_CODE))


def freeze(value: Any) -> Any:
    """Return something that equals what this function makes later of the same value, and of no other.

    Scalars are compared by type and value, containers by their items, objects by identity and by their own attributes;
    functions, modules and tensors by identity alone. So is what comes after the first thousand values within one.
    """
    return _freeze(value, _MAX_DEPTH, [_MAX_VALUES])


def _freeze(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if isinstance(value, float):
        return type(value), float(value).hex()  # all NaN are one, the zeros are two
    if isinstance(value, slice):
        return slice, _freeze((value.start, value.stop, value.step), depth, left)
    if isinstance(value, CONSTANTS):
        return type(value), value
    is_too_much = depth == 0 or left[0] < 0
    if isinstance(value, CONTAINERS):
        if len(value) > _MAX_ITEMS or is_too_much:
            return Same(value), len(value)
        if isinstance(value, dict):
            items = [(_freeze(key, 1, left), _freeze(item, depth - 1, left)) for key, item in value.items()]
            return type(value), tuple(items)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(_freeze(item, depth - 1, left) for item in value)
        return type(value), tuple([_freeze(item, depth - 1, left) for item in value])
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)) and value.nbytes <= 8 * _MAX_ITEMS:
        return type(value), str(value.dtype), value.shape, value.tobytes()
    own = None if isinstance(value, (*_CODE, type)) else getattr(value, "__dict__", None) or _in_slots(value)
    if not own or not isinstance(own, dict) or is_too_much or type(value).__module__.startswith("torch."):
        return Same(value)
    return Same(value), _freeze(own, depth - 1, left)


def _in_slots(value: Any) -> dict[str, Any]:
    """Return the attributes in ``__slots__``, but of the user's classes alone: those of packages keep there what they
    have computed (``pathlib.Path`` its text).
    """
    kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind) and _is_users(kind)]
    members = [(name, member) for kind in kinds for name, member in vars(kind).items()]
    return {name: getattr(value, name, None) for name, member in members if type(member) is types.MemberDescriptorType}


def is_by_value(frozen: Any) -> bool:
    """Return whether nothing in a frozen value is compared by identity."""
    if isinstance(frozen, (tuple, frozenset)):
        return all(map(is_by_value, frozen))
    return not isinstance(frozen, Same)


class _Contents(NamedTuple):
    """A container, and a copy of what it held."""

    name: str
    container: Any
    copy: Any

    def changes(self) -> list[str]:
        """Return the names of what has changed: of a dictionary the keys, else the container."""
        now, before = self.container, self.copy
        if isinstance(now, dict):
            keys = [key for key in {**before, **now} if now.get(key, MISSING) is not before.get(key, MISSING)]
            return [f"{self.name}.{key}".lstrip(".") for key in keys]
        if isinstance(now, set):
            return [] if now == before else [self.name]
        is_same = len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
        return [] if is_same else [self.name]

    def restore(self) -> None:
        if isinstance(self.container, list):
            self.container[:] = self.copy
        else:
            self.container.clear()
            self.container.update(self.copy)


class Changes(list[str]):
    """The names of the attributes that a block has changed, once it is over."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, _Contents] = {}

    def remember(self, container: Any, name: str, max_items: float = math.inf) -> None:
        """Remember what a container holds now, and those in it, at any depth but within longer ones."""
        if id(container) in self._memory:
            return
        inner: list[tuple[str, Any]] = []
        if isinstance(container, dict):
            self._memory[id(container)] = _Contents(name, container, dict(container))
            inner = [(f"{name}.{key}".lstrip("."), value) for key, value in container.items()]
        elif isinstance(container, (list, tuple)):
            if isinstance(container, list):
                self._memory[id(container)] = _Contents(name, container, list(container))
            inner = [(name, value) for value in container]
        elif isinstance(container, set):
            self._memory[id(container)] = _Contents(name, container, set(container))
        elif is_users_object(container):
            inner = [(name, container.__dict__)]
        for label, value in inner if len(inner) <= max_items else ():
            self.remember(value, label, max_items)

    def now(self) -> list[str]:
        """Return the names of those that it has changed so far."""
        return [name for contents in self._memory.values() for name in contents.changes()]

    def restore(self) -> None:
        """Undo the changes, and note their names."""
        for contents in self._memory.values():
            if names := contents.changes():
                contents.restore()
                self += names


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[Changes]:
    """Restore, after the block, the attributes of all modules of ``model``: they are the objects that they were, and
    lists, dicts, sets and objects of the user's classes among them, at any depth, hold what they held. Changes inside
    tensors and other objects stay.
    """
    changes = Changes()
    for path, module in model.named_modules():
        changes.remember(module.__dict__, path)
    try:
        yield changes
    finally:
        changes.restore()


def restorer(value: Any) -> Callable[[], None]:
    """Return a function that restores what a container, or an object of the user's, holds now, at any depth but within
    containers of more than 256 items.
    """
    changes = Changes()
    changes.remember(value, "", _MAX_ITEMS)
    return changes.restore


@contextmanager
def patched(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of classes and modules, given as (owner, name, value), during the block."""
    before = [(owner, name, vars(owner).get(name, MISSING)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is not MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
