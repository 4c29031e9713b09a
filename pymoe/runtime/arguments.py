"""What somebody calls a served expert with, as the flat tensors of a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pymoe._torch_private import is_any_autocast_enabled
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.nested import nested_compare, nested_flatten, sorted_keys
from pymoe.runtime.schema import tensor_protos


class Arguments:
    """The arguments of what is called ``name``, by its ``forward_schema`` (``(args_schema, kwargs_schema)``)."""

    def __init__(self, name: str, forward_schema: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.name = name
        self._structure = forward_schema
        args_schema, kwargs_schema = forward_schema
        self._protos = nested_flatten(forward_schema)
        self._tensor_protos = tensor_protos(forward_schema)
        self._one_tensor = not kwargs_schema and len(args_schema) == 1 and isinstance(args_schema[0], BatchTensorProto)
        self._anywhere = [
            (place, proto.replace(device=None))
            for place, proto in enumerate(self._protos)
            if isinstance(proto, BatchTensorProto)
        ]
        self._has_constants = len(self._tensor_protos) < len(self._protos)

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The flat inputs, under autocast in the dtypes of the schema. What is wrong with a tensor a pool says.

        Raises:
            TypeError: arguments that the schema does not have, or a tensor for a constant.
            ValueError: another value than the schema's constant.
        """
        if self._one_tensor and len(args) == 1 and not kwargs:
            flat = [args[0]]
        else:
            self._check_names(args, kwargs)
            if not nested_compare((args, kwargs), self._structure):
                raise TypeError(f"{self.name}: the arguments must be built like {self._structure!r}")
            flat = nested_flatten((args, kwargs))
            if self._has_constants:
                self._check_constants(flat)
                pairs = zip(flat, self._protos, strict=True)
                flat = [leaf for leaf, proto in pairs if isinstance(proto, BatchTensorProto)]
        if is_any_autocast_enabled():  # in all of torch's public ways one names a device
            return [under_autocast(tensor, proto) for tensor, proto in zip(flat, self._tensor_protos, strict=True)]
        return flat

    def _check_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args_schema, kwargs_schema = self._structure
        if len(args) != len(args_schema):
            raise TypeError(f"{self.name} takes {len(args_schema)} positional arguments, got {len(args)}")
        if kwargs.keys() != kwargs_schema.keys():
            raise TypeError(f"{self.name} takes the keyword arguments {sorted(kwargs_schema)}, got {sorted(kwargs)}")

    def _check_constants(self, leaves: Sequence[Any]) -> None:
        for place, (leaf, proto) in enumerate(zip(leaves, self._protos, strict=True)):
            if leaf is proto or isinstance(proto, BatchTensorProto):
                continue
            if isinstance(leaf, Tensor):
                name = list(_names(self._structure))[place]
                raise TypeError(f"{self.name}: {name} is the constant {proto!r} in the schema, got a tensor")
            if not _equal(leaf, proto):
                name = list(_names(self._structure))[place]
                raise ValueError(f"{self.name}: {name} is the constant {proto!r} in the schema, got {leaf!r}")

    def check_tensors(self, tensors: Sequence[Any]) -> int:
        """The number of rows of the flat inputs, for who does not leave the checks to a pool.

        Raises:
            TypeError: something that is no tensor, or of another dtype than the schema's.
            ValueError: another shape, or different numbers of rows.
        """
        for (place, proto), tensor in zip(self._anywhere, tensors, strict=True):
            if not proto.matches(tensor):
                proto.check(tensor, f"{self.name}: {list(_names(self._structure))[place]}")
        rows = [len(tensor) for tensor in tensors]
        if len(set(rows)) > 1:
            raise ValueError(f"{self.name}: all tensors must have as many rows, got {rows}")
        return rows[0]


def _names(structure: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[str]:
    """What the leaves of ``(args, kwargs)`` are called, in order: ``args[0]``, ``mask``, ``mask['a'][1]``."""

    def inside(name: str, item: Any) -> Iterator[str]:
        if isinstance(item, dict):
            for key in sorted_keys(item):
                yield from inside(f"{name}[{key!r}]", item[key])
        elif isinstance(item, (list, tuple)):
            for i, part in enumerate(item):
                yield from inside(f"{name}[{i}]", part)
        else:
            yield name

    args, kwargs = structure
    yield from inside("args", args)
    for key in sorted_keys(kwargs):
        yield from inside(key, kwargs[key])


def _equal(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except Exception:  # arrays, and whatever else does not say yes or no
        return False


def under_autocast(tensor: Any, proto: BatchTensorProto) -> Any:
    """In the dtype of ``proto``, as autocast does it for an operation that has a dtype of its own; else as it is."""
    if not (isinstance(tensor, Tensor) and tensor.is_floating_point() and proto.dtype.is_floating_point):
        return tensor
    return tensor.to(proto.dtype) if torch.is_autocast_enabled(tensor.device.type) else tensor
