"""A block that leaves a model as it was, whatever happens in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["untouched"]

_Restore = Callable[[], list[str]]


@contextmanager
def untouched(model: nn.Module) -> Iterator[list[str]]:
    """After the block all attributes of all modules are the objects that they were, and lists, dicts and sets among
    them (at any depth) hold what they held. Changes inside of tensors and of other objects stay.

    Yields a list that holds, after the block, the names of the attributes that it changed.
    """
    memory: dict[int, _Restore] = {}
    for path, module in model.named_modules():
        _remember(module.__dict__, path, memory)
    restore = list(memory.values())
    changed: list[str] = []
    try:
        yield changed
    finally:
        for put_back in restore:
            changed += put_back()


def _remember(container: Any, name: str, memory: dict[int, _Restore]) -> None:
    """Put into ``memory`` what restores a container, and those in it, and tells what had changed."""
    if id(container) in memory:
        return
    if isinstance(container, dict):
        pairs = list(container.items())
        memory[id(container)] = lambda: _restore_dict(container, pairs, name)
        for key, value in pairs:
            _remember(value, f"{name}.{key}".lstrip("."), memory)
    elif isinstance(container, list):
        values = list(container)
        memory[id(container)] = lambda: _restore_list(container, values, name)
        for value in values:
            _remember(value, name, memory)
    elif isinstance(container, set):
        members = set(container)
        memory[id(container)] = lambda: _restore_set(container, members, name)


def _restore_dict(container: dict[Any, Any], pairs: list[tuple[Any, Any]], name: str) -> list[str]:
    before = dict(pairs)
    missing = object()
    keys = [key for key in {**before, **container} if container.get(key, missing) is not before.get(key, missing)]
    if keys or len(before) != len(container):
        container.clear()
        container.update(pairs)
    return [f"{name}.{key}".lstrip(".") for key in keys]


def _restore_list(container: list[Any], values: list[Any], name: str) -> list[str]:
    if len(container) == len(values) and all(now is old for now, old in zip(container, values, strict=True)):
        return []
    container[:] = values
    return [name]


def _restore_set(container: set[Any], members: set[Any], name: str) -> list[str]:
    if container == members:
        return []
    container.clear()
    container.update(members)
    return [name]
