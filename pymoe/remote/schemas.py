"""Schemas of experts as data: what :meth:`~pymoe.runtime.ExpertBackend.get_info` says, for another machine."""

from __future__ import annotations

from typing import Any

from pymoe.remote.encodings import DTYPES, LONGEST_DIMENSION, MOST_DIMENSIONS, dtype_name
from pymoe.remote.trees import from_tree, to_tree
from pymoe.runtime.batch_tensor_proto import BatchTensorProto


def write_schema(name: str, schema: Any) -> Any:
    """Return a schema of the expert ``name`` as data.

    Raises:
        TypeError: a constant or a container that other machines could not have, or a dtype that cannot be sent.
    """

    def write(leaf: Any, where: str) -> Any:
        if not isinstance(leaf, BatchTensorProto):
            raise TypeError(
                f"ExpertServer: the schema of {name!r} holds a {type(leaf).__name__}, which cannot be described to "
                f"other machines: expected prototypes, numbers, strings and None in lists, tuples and dicts"
            )
        return [dtype_name(leaf.dtype), list(leaf.size)]

    return to_tree(schema, write)


def read_schema(tree: Any) -> Any:
    """Undo :func:`write_schema`, but for devices and what else concerns one machine. Raises ValueError."""
    return from_tree(tree, _read_proto)


def _read_proto(leaf: Any) -> BatchTensorProto:
    if not isinstance(leaf, list) or len(leaf) != 2 or not isinstance(leaf[0], str) or not isinstance(leaf[1], list):
        raise ValueError(f"expected [dtype, shape], got {leaf!r}")
    name, size = leaf
    if name not in DTYPES or len(size) >= MOST_DIMENSIONS:
        raise ValueError(f"expected a dtype and at most {MOST_DIMENSIONS - 1} dimensions of a row, got {leaf!r}")
    if not all(type(length) is int and 0 <= length <= LONGEST_DIMENSION for length in size):
        raise ValueError(f"expected lengths of dimensions, got {size!r}")
    return BatchTensorProto(*size, dtype=DTYPES[name])
