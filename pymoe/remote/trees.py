"""Nested structures as JSON: schemas on the wire, states of optimizers in checkpoints.

Containers are tagged, since JSON knows neither tuples nor keys that are no strings: ``{"tuple": [...]}``, ``{"list":
[...]}``, ``{"dict": [[key, value], ...]}``. Numbers, strings, booleans and None stand for themselves, and any other
leaf for what the caller makes of it, tagged ``{"leaf": ...}``. Nothing is ever imported or called by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_DEPTH = 64
_PLAIN = (bool, int, float, str)


def to_tree(structure: Any, write: Callable[[Any, str], Any], where: str = "", depth: int = MOST_DEPTH) -> Any:
    """Return ``structure`` as what JSON can hold; ``write`` returns that for leaves of other types, given the leaf and
    its place: keys and indices, joined by dots.

    Raises:
        TypeError: by ``write``; a container or key that cannot be told by JSON, as a named tuple; or more containers
            inside each other than :func:`from_tree` takes.
    """
    if structure is None or type(structure) in _PLAIN:
        return structure
    if depth == 0:
        raise TypeError(f"{where}: expected at most {MOST_DEPTH} containers inside each other, got more")
    if isinstance(structure, dict):
        for key in structure:
            if key is not None and type(key) not in _PLAIN:
                owner = where or "pymoe.remote"
                raise TypeError(f"{owner}: expected strings or numbers as keys, got {type(key).__name__}")
        return {"dict": [[key, to_tree(one, write, _inside(where, key), depth - 1)] for key, one in structure.items()]}
    if type(structure) in (list, tuple):
        members = [to_tree(one, write, _inside(where, place), depth - 1) for place, one in enumerate(structure)]
        return {type(structure).__name__: members}
    return {"leaf": write(structure, where)}


def _inside(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def from_tree(tree: Any, read: Callable[[Any], Any], depth: int = MOST_DEPTH) -> Any:
    """Undo :func:`to_tree`; ``read`` undoes ``write``.

    Raises:
        ValueError: something that :func:`to_tree` does not write, or by ``read``.
    """
    if tree is None or type(tree) in _PLAIN:
        return tree
    if depth == 0 or not isinstance(tree, dict) or len(tree) != 1:
        raise ValueError(f"pymoe.remote: expected a tagged container, got {type(tree).__name__}")
    ((tag, value),) = tree.items()
    if tag == "leaf":
        return read(value)
    if not isinstance(value, list):
        raise ValueError(f"pymoe.remote: expected a list behind {tag!r}, got {type(value).__name__}")
    if tag == "list":
        return [from_tree(one, read, depth - 1) for one in value]
    if tag == "tuple":
        return tuple(from_tree(one, read, depth - 1) for one in value)
    if tag == "dict" and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        keys = [key for key, _ in value]
        if all(key is None or type(key) in _PLAIN for key in keys):
            return {key: from_tree(one, read, depth - 1) for key, one in value}
    raise ValueError(f"pymoe.remote: there is no container {tag!r}")
