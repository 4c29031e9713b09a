"""A block that leaves a model as it was, whatever happens in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pymoe.pipe.capture.plain import is_users_object

__all__ = ["Changes", "contents_of", "untouched"]

_Changed = Callable[[bool], list[str]]
"""Names what has changed, and restores it if it is told to."""


class Changes(list[str]):
    """The names of the attributes that a block has changed, once it is over."""

    def __init__(self, watched: list[_Changed]) -> None:
        super().__init__()
        self._watched = watched

    def now(self) -> list[str]:
        """Those that it has changed so far."""
        return [name for changed in self._watched for name in changed(False)]

    def restore(self) -> None:
        """Undo the changes, and note their names."""
        for changed in self._watched:
            self += changed(True)


@contextmanager
def untouched(model: nn.Module) -> Iterator[Changes]:
    """After the block all attributes of all modules are the objects that they were, and lists, dicts and sets among
    them, and what objects of the user's classes have as attributes (at any depth), hold what they held. Changes inside
    of tensors and of other objects stay.

    Yields a list that holds, after the block, the names of the attributes that it changed.
    """
    memory: dict[int, _Changed] = {}
    for path, module in model.named_modules():
        _remember(module.__dict__, path, memory)
    changes = Changes(list(memory.values()))
    try:
        yield changes
    finally:
        changes.restore()


def contents_of(value: Any, many: int) -> Callable[[], None]:
    """What puts back what a container, or an object of the user's, holds now, at any depth.

    Args:
        value: anything.
        many: of a container with more items than that, what is in these is left alone.
    """
    memory: dict[int, _Changed] = {}
    _remember(value, "", memory, many)

    def restore() -> None:
        for changed in memory.values():
            changed(True)

    return restore


def _remember(container: Any, name: str, memory: dict[int, _Changed], many: float = math.inf) -> None:
    """Put into ``memory`` what tells whether a container, and those in it, have changed, and restores them."""
    if id(container) in memory:
        return
    if isinstance(container, dict):
        pairs = list(container.items())
        memory[id(container)] = lambda restore: _restore_dict(container, pairs, name, restore)
        for key, value in pairs if len(pairs) <= many else ():
            _remember(value, f"{name}.{key}".lstrip("."), memory, many)
    elif isinstance(container, list):
        values = list(container)
        memory[id(container)] = lambda restore: _restore_list(container, values, name, restore)
        for value in values if len(values) <= many else ():
            _remember(value, name, memory, many)
    elif isinstance(container, tuple):
        for value in container if len(container) <= many else ():
            _remember(value, name, memory, many)
    elif isinstance(container, set):
        members = set(container)
        memory[id(container)] = lambda restore: _restore_set(container, members, name, restore)
    elif is_users_object(container):
        _remember(container.__dict__, name, memory, many)


def _restore_dict(container: dict[Any, Any], pairs: list[tuple[Any, Any]], name: str, restore: bool) -> list[str]:
    before = dict(pairs)
    missing = object()
    keys = [key for key in {**before, **container} if container.get(key, missing) is not before.get(key, missing)]
    if restore and (keys or len(before) != len(container)):
        container.clear()
        container.update(pairs)
    return [f"{name}.{key}".lstrip(".") for key in keys]


def _restore_list(container: list[Any], values: list[Any], name: str, restore: bool) -> list[str]:
    if len(container) == len(values) and all(now is old for now, old in zip(container, values, strict=True)):
        return []
    if restore:
        container[:] = values
    return [name]


def _restore_set(container: set[Any], members: set[Any], name: str, restore: bool) -> list[str]:
    if container == members:
        return []
    if restore:
        container.clear()
        container.update(members)
    return [name]
