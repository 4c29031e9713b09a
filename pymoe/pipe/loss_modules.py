"""Finds the modules that a loss function is made of, so that they are treated as layers of the stage that calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

MOST_ITEMS = 256
"""Of a container in which modules are looked for."""


def modules_of(loss_fn: Callable[..., Any] | None, layers: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Return the modules that a function holds or names, each once.

    Of a module that contains some of the ``layers`` of a model (the model, say), only what the code names counts.

    They are found in modules, methods, partial functions, closures, defaults, globals, attributes of objects, and
    functions that those call, as far as the code names them. What it looks up by other means is not found.
    """
    of_model = {id(part) for layer in layers for part in layer.modules()}
    found: dict[int, nn.Module] = {}
    seen: dict[Any, Any] = {}
    todo: list[tuple[Any, frozenset[str]]] = [(loss_fn, frozenset())]
    while todo:
        value, names = todo.pop()
        if isinstance(value, nn.Module) and (id(value) in of_model or of_model.isdisjoint(map(id, value.modules()))):
            found[id(value)] = value
            continue
        is_method = isinstance(value, MethodType)
        key = (id(value.__func__), id(value.__self__)) if is_method else (id(value), names)
        if key not in seen:
            seen[key] = value  # which keeps it, and so its id
            todo += _held(value, names)
    return tuple(found.values())


def _held(value: Any, names: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
    """Yield what ``value`` is made of, and which attributes the code that has it names."""
    if isinstance(value, partial):
        yield from ((one, names) for one in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        code = frozenset(_names(getattr(value.__func__, "__code__", None)))
        yield from ((value.__func__, names), (value.__self__, code))
    elif isinstance(value, FunctionType):
        if value.__module__ and value.__module__.partition(".")[0] == "torch":
            return
        code = frozenset(_names(value.__code__))
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        named = [value.__globals__[name] for name in code if name in value.__globals__]
        held = [*cells, *named, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            held.append(wrapped)
        yield from ((one, code) for one in held)
    elif isinstance(value, (tuple, list, dict)) and len(value) <= MOST_ITEMS:
        yield from ((one, names) for one in (value.values() if isinstance(value, dict) else value))
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        call = type(value).__call__ if callable(value) else None
        names |= frozenset(_names(getattr(call, "__code__", None)))
        attributes = {**vars(value), **getattr(value, "_modules", {})}
        yield from ((attributes[name], names) for name in names if name in attributes)
        methods = [getattr(type(value), name, None) for name in names - attributes.keys()]
        yield from ((MethodType(method, value), names) for method in methods if isinstance(method, FunctionType))
        if isinstance(call, FunctionType):
            yield call, names


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)
