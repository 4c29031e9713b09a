"""Functions for nested structures: tuples, lists, named tuples and dicts that contain each other and leaves.

A leaf is any other object: a tensor, a prototype, a number, None. The leaves have an order: items of a sequence are
taken in their order, and values of a dict in the order of the **sorted keys**, so that equal dicts have equal lists of
leaves. Keys that cannot be compared are sorted by the name of their type, then by their repr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

_MISSING: Any = object()


def nested_flatten(structure: Any) -> list[Any]:
    """Return the leaves of ``structure``, in order."""
    leaves: list[Any] = []
    _collect(structure, leaves)
    return leaves


def nested_pack(flat: Iterable[Any], structure: Any) -> Any:
    """Return a copy of ``structure`` with its leaves replaced by those in ``flat``; the inverse of
    :func:`nested_flatten`.

    A dict of the result has the same order of keys as the dict in ``structure``, and the same type if the type can be
    made from a dict.

    Raises:
        ValueError: ``flat`` has fewer or more leaves than ``structure``.
    """
    leaves = list(flat)
    count = len(nested_flatten(structure))
    if len(leaves) != count:
        raise ValueError(f"nested_pack: the structure has {count} leaves, got {len(leaves)}")
    iterator = iter(leaves)
    return _rebuild(structure, lambda _: next(iterator))


def nested_map(function: Callable[..., Any], structure: Any = _MISSING, *others: Any) -> Any:
    """Return a copy of ``structure`` with each leaf replaced by ``function(leaf, *corresponding leaves of others)``.

    Raises:
        TypeError: no structure was given. For a function that takes only structures, use
            ``functools.partial(nested_map, function)``.
        ValueError: the structures differ (see :func:`nested_compare`).
    """
    if structure is _MISSING:
        raise TypeError(
            "nested_map: expected a structure; functools.partial(nested_map, function) makes a function of one"
        )
    for other in others:
        if not nested_compare(structure, other):
            raise ValueError(f"nested_map: {structure!r} and {other!r} differ in structure")
    columns: list[Iterator[Any]] = [iter(nested_flatten(other)) for other in others]
    return _rebuild(structure, lambda leaf: function(leaf, *(next(column) for column in columns)))


def nested_compare(first: Any, second: Any) -> bool:
    """Return whether both structures have the same kinds of containers, with the same lengths and keys.

    Leaves may differ. Lists, tuples and each type of named tuple are different kinds. All dicts, including those of
    subclasses, are of the same kind.
    """
    if _kind(first) is not _kind(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(nested_compare(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(nested_compare, first, second))
    return True


def _kind(structure: Any) -> Any:
    """Return a type that stands for the kind of the container (see :func:`nested_compare`); return None for a leaf."""
    if isinstance(structure, dict):
        return dict
    if isinstance(structure, list):
        return list
    if isinstance(structure, tuple):
        return type(structure) if hasattr(structure, "_fields") else tuple
    return None


def sorted_keys(mapping: dict[Any, Any]) -> list[Any]:
    """Return the keys of ``mapping`` in the order in which :func:`nested_flatten` takes its values."""
    try:
        return sorted(mapping)
    except TypeError:
        return sorted(mapping, key=lambda key: (type(key).__qualname__, repr(key)))


def _collect(structure: Any, leaves: list[Any]) -> None:
    if isinstance(structure, dict):
        for key in sorted_keys(structure):
            _collect(structure[key], leaves)
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            _collect(item, leaves)
    else:
        leaves.append(structure)


def _rebuild(structure: Any, make_leaf: Callable[[Any], Any]) -> Any:
    if isinstance(structure, dict):
        made = {key: _rebuild(structure[key], make_leaf) for key in sorted_keys(structure)}
        in_order = {key: made[key] for key in structure}
        if type(structure) is dict:
            return in_order
        try:
            return type(structure)(in_order)
        except TypeError:  # for example a defaultdict, whose first argument is not a mapping
            return in_order
    if isinstance(structure, (list, tuple)):
        items = [_rebuild(item, make_leaf) for item in structure]
        if isinstance(structure, list):
            return items
        make: Callable[[Iterable[Any]], Any] = getattr(type(structure), "_make", tuple)  # named tuples have _make()
        return make(items)
    return make_leaf(structure)
