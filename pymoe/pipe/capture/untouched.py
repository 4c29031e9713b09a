"""A block that leaves a model as it was, whatever happens in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["untouched"]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """After the block all attributes of all modules are the objects that they were, and lists, dicts and sets among
    them (at any depth) hold what they held. Changes inside of tensors and of other objects stay.
    """
    modules = list(model.modules())
    memory: dict[int, Callable[[], None]] = {}
    for module in modules:
        _remember(module.__dict__, memory)
    restore = list(memory.values())
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def _remember(container: Any, memory: dict[int, Callable[[], None]]) -> None:
    if id(container) in memory:
        return
    if isinstance(container, dict):
        pairs = list(container.items())
        memory[id(container)] = lambda: _restore_dict(container, pairs)
        for _, value in pairs:
            _remember(value, memory)
    elif isinstance(container, list):
        values = list(container)
        memory[id(container)] = lambda: _restore_list(container, values)
        for value in values:
            _remember(value, memory)
    elif isinstance(container, set):
        members = set(container)
        memory[id(container)] = lambda: _restore_set(container, members)


def _restore_dict(container: dict[Any, Any], pairs: list[tuple[Any, Any]]) -> None:
    now = container.items()
    if len(now) == len(pairs) and all(
        key is old_key and value is old for (key, value), (old_key, old) in zip(now, pairs, strict=True)
    ):
        return
    container.clear()
    container.update(pairs)


def _restore_list(container: list[Any], values: list[Any]) -> None:
    if len(container) != len(values) or any(now is not old for now, old in zip(container, values, strict=True)):
        container[:] = values


def _restore_set(container: set[Any], members: set[Any]) -> None:
    if container != members:
        container.clear()
        container.update(members)
