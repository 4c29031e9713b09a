"""Restores Python values: attributes of modules, what containers hold, and what is replaced for a while."""

from __future__ import annotations

import array
import copy
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from pymoe.pipe.capture.contents import MISSING, SCALARS, contents, is_users_object


class _Contents(NamedTuple):
    """A container, and a copy of what it held."""

    name: str
    container: Any
    before: Any

    def changes(self) -> list[str]:
        """Return the names of what has changed: of a dictionary the keys, else the container."""
        now, before = self.container, self.before
        if isinstance(now, dict):
            keys = [key for key in {**before, **now} if now.get(key, MISSING) is not before.get(key, MISSING)]
            return [f"{self.name}.{key}".lstrip(".") for key in keys]
        if isinstance(now, set):
            return [] if now == before else [self.name]
        if is_array(now):
            return [] if bytes(now) == bytes(before) else [self.name]
        is_same = len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
        return [] if is_same else [self.name]

    def restore(self) -> None:
        if isinstance(self.container, list) or is_array(self.container):
            self.container[:] = self.before
        elif isinstance(self.container, deque):
            self.container.clear()
            self.container.extend(self.before)
        else:
            self.container.clear()
            self.container.update(self.before)


def is_array(value: Any) -> bool:
    """Return whether a value holds numbers that are no objects, in one dimension at least."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, (bytearray, array.array)):
        return True
    return numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0 and not value.dtype.hasobject


class Changes(list[str]):
    """The names of the attributes that a block has changed, once it is over."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, _Contents] = {}

    def remember(self, container: Any, name: str) -> None:
        """Remember what a container holds now, and those in it, at any depth."""
        queue = [(name, container)]
        for name, container in queue:
            if id(container) in self._memory or type(container) in SCALARS:
                continue
            copied: Any = None
            if isinstance(container, dict):
                copied = dict(container)
                queue += [(f"{name}.{key}".lstrip("."), value) for key, value in container.items()]
            elif isinstance(container, (list, tuple, deque)):
                copied = None if isinstance(container, tuple) else list(container)
                queue += [(name, value) for value in container]
            elif isinstance(container, set):
                copied = set(container)
            elif is_array(container):
                copied = copy.copy(container)
            elif is_users_object(container):
                queue.append((name, container.__dict__))
            elif isinstance(container, (types.FunctionType, types.MethodType, functools.partial)):
                queue += [(name, held) for held in contents(container) if not isinstance(held, type)]
            if copied is not None:
                self._memory[id(container)] = _Contents(name, container, copied)

    def now(self) -> list[str]:
        """Return the names of those that it has changed so far."""
        return [name for each in self._memory.values() for name in each.changes()]

    def restore(self) -> None:
        """Undo the changes, and note their names."""
        for each in self._memory.values():
            if names := each.changes():
                each.restore()
                self += names


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[Changes]:
    """Restore, after the block, the attributes of all modules of ``model``: they are the objects that they were, and
    lists, dicts, sets, arrays and objects of the user's classes among them, at any depth, hold what they held. Changes
    inside tensors and other objects stay.
    """
    changes = Changes()
    for path, module in model.named_modules():
        changes.remember(module.__dict__, path)
    try:
        yield changes
    finally:
        changes.restore()


def restorer(value: Any) -> Callable[[], None]:
    """Return a function that restores what a container, or an object of the user's, holds now, at any depth."""
    changes = Changes()
    changes.remember(value, "")
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
