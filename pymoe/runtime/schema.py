"""Converts the arguments and results of a served expert to flat sequences of tensors, and back.

The requests and results of pools are flat. Their order is that of :func:`~pymoe.runtime.nested_flatten`: positional
arguments, then keyword arguments sorted by name. A request is checked in two steps:
:meth:`RequestSchema.flatten_arguments` checks the structure of the arguments, and the pool checks the tensors when the
request is submitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pymoe._torch_private import is_any_autocast_enabled
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.nested import nested_compare, nested_flatten, nested_map, nested_pack, sorted_keys


def to_schema(structure: Any) -> Any:
    """Return ``structure`` with every tensor replaced by its prototype.

    Other leaves are kept: prototypes, and constants, which must be the same in every request.
    """
    return nested_map(lambda leaf: BatchTensorProto.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, structure)


def as_arguments(args_schema: Sequence[Any] | None) -> tuple[Any, ...]:
    """Return ``args_schema`` as a tuple with one entry per argument; a single prototype or tensor is one argument."""
    return (args_schema,) if isinstance(args_schema, (BatchTensorProto, Tensor)) else tuple(args_schema or ())


def tensor_protos(schema: Any) -> tuple[BatchTensorProto, ...]:
    """Return the prototypes among the leaves of ``schema``, in order."""
    return tuple(leaf for leaf in nested_flatten(schema) if isinstance(leaf, BatchTensorProto))


class RequestSchema:
    """Converts arguments and outputs of the expert ``name`` between their structures and flat tensors.

    The leaves of the schemas are prototypes or constants. For arguments that are all tensors, and for an output that is
    one tensor, there are faster paths, because the general ones take longer than many experts need for a row.

    Attributes:
        inputs: the prototypes of the flat inputs, without a device: the client chooses the device of a tensor.
        outputs: the prototypes of the tensors among the flat outputs, without a device.
    """

    def __init__(
        self, name: str, forward_schema: tuple[Sequence[Any], Mapping[str, Any]], outputs_schema: Any = None
    ) -> None:
        self.name = name
        args_schema, kwargs_schema = tuple(forward_schema[0]), dict(forward_schema[1])
        self._arguments = (args_schema, kwargs_schema)
        self._argument_leaves = nested_flatten(self._arguments)
        self.inputs = _anywhere(self._arguments)
        self._has_constants = len(self.inputs) < len(self._argument_leaves)
        self._keywords = sorted_keys(kwargs_schema)
        each = [*args_schema, *kwargs_schema.values()]
        self._flat_arguments = all(isinstance(argument, BatchTensorProto) for argument in each)
        self._one_argument = self._flat_arguments and len(args_schema) == 1 and not kwargs_schema
        self._outputs = outputs_schema
        self._output_leaves = nested_flatten(outputs_schema)
        self.outputs = _anywhere(outputs_schema)
        self._is_tensor = [isinstance(leaf, BatchTensorProto) for leaf in self._output_leaves]
        self._expected = [
            (index, leaf.size, leaf.dtype)
            for index, leaf in enumerate(self._output_leaves)
            if isinstance(leaf, BatchTensorProto)
        ]
        self._one_output = isinstance(outputs_schema, BatchTensorProto)

    # --- arguments ---

    def flatten_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the flat inputs, cast to the schema's dtypes under autocast. The pool checks the tensors later.

        Raises:
            TypeError: the arguments have another structure than the schema, or a tensor is given for a constant.
            ValueError: a value differs from the constant in the schema.
        """
        if self._one_argument and len(args) == 1 and not kwargs:
            flat = [args[0]]
        else:
            self._check_structure(args, kwargs)
            flat = nested_flatten((args, kwargs))
            if self._has_constants:
                self._check_constants(flat)
                leaves = zip(flat, self._argument_leaves, strict=True)
                flat = [leaf for leaf, proto in leaves if isinstance(proto, BatchTensorProto)]
        if is_any_autocast_enabled():  # torch's public functions check only one type of device
            return [under_autocast(tensor, proto) for tensor, proto in zip(flat, self.inputs, strict=True)]
        return flat

    def pack_arguments(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the positional and keyword arguments that correspond to the flat inputs."""
        if self._flat_arguments:
            if not self._keywords:
                return tensors, {}
            count = len(self._arguments[0])
            return tensors[:count], dict(zip(self._keywords, tensors[count:], strict=True))
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, BatchTensorProto) else leaf for leaf in self._argument_leaves]
        args, kwargs = nested_pack(leaves, self._arguments)
        return args, kwargs

    def check_inputs(self, tensors: Sequence[Any]) -> int:
        """Check the flat inputs and return their number of rows, for callers that read the tensors before a pool does.

        Raises:
            TypeError: an input is not a tensor, or has another dtype than in the schema.
            ValueError: an input has another shape than in the schema, or inputs have different numbers of rows.
        """
        for place, (tensor, proto) in enumerate(zip(tensors, self.inputs, strict=True)):
            if not proto.matches(tensor):
                names = [name for name, leaf in self._named_leaves() if isinstance(leaf, BatchTensorProto)]
                proto.check(tensor, f"{self.name}: {names[place]}")
        rows = [len(tensor) for tensor in tensors]
        if len(set(rows)) > 1:
            raise ValueError(f"{self.name}: all tensors must have as many rows as the first, got {rows}")
        return rows[0]

    def check_count(self, what: str, tensors: Sequence[Any], expected: int) -> None:
        """Raise ValueError unless there are ``expected`` tensors and the first one has a dimension for its rows.

        ``what`` names the pass in the message.
        """
        if len(tensors) != expected:
            raise ValueError(f"{self.name}: {what} takes {expected} tensors, got {len(tensors)}")
        if tensors[0].dim() == 0:
            raise ValueError(f"{self.name}: the first dimension of an input counts rows, got one of shape ()")

    def _check_structure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args_schema, kwargs_schema = self._arguments
        if len(args) != len(args_schema):
            raise TypeError(f"{self.name}: expected {len(args_schema)} positional arguments, got {len(args)}")
        if kwargs.keys() != kwargs_schema.keys():
            raise TypeError(f"{self.name}: expected the keyword arguments {self._keywords}, got {sorted(kwargs)}")
        if not nested_compare((args, kwargs), self._arguments):
            raise TypeError(f"{self.name}: the arguments must have the structure {self._arguments!r}")

    def _check_constants(self, leaves: Sequence[Any]) -> None:
        for place, (leaf, constant) in enumerate(zip(leaves, self._argument_leaves, strict=True)):
            if leaf is constant or isinstance(constant, BatchTensorProto):
                continue
            is_tensor = isinstance(leaf, Tensor)
            if not is_tensor and _equal(leaf, constant):
                continue
            name = [name for name, _ in self._named_leaves()][place]
            error, shown = (TypeError, "a tensor") if is_tensor else (ValueError, repr(leaf))
            raise error(f"{self.name}: {name} is the constant {constant!r} in the schema, got {shown}")

    def _named_leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield the leaves of the arguments in order, each with its name: ``args[0]``, ``mask``, ``mask['a'][1]``."""

        def inside(name: str, item: Any) -> Iterator[tuple[str, Any]]:
            if isinstance(item, dict):
                for key in sorted_keys(item):
                    yield from inside(f"{name}[{key!r}]", item[key])
            elif isinstance(item, (list, tuple)):
                for i, part in enumerate(item):
                    yield from inside(f"{name}[{i}]", part)
            else:
                yield name, item

        args, kwargs = self._arguments
        yield from inside("args", args)
        for key in self._keywords:
            yield from inside(key, kwargs[key])

    # --- outputs ---

    def flatten_outputs(self, outputs: Any) -> tuple[Any, ...]:
        """Return the leaves of the expert's result. Raise ValueError if it does not match the schema."""
        if self._one_output and isinstance(outputs, Tensor):
            leaves: tuple[Any, ...] = (outputs,)
        else:
            leaves = tuple(nested_flatten(outputs))
            same_kinds = [isinstance(leaf, Tensor) for leaf in leaves] == self._is_tensor
            if not (same_kinds and nested_compare(outputs, self._outputs)):
                shown = nested_map(_shown, outputs)
                raise ValueError(f"{self.name}: outputs_schema expects {self._outputs!r}, got {shown!r}")
        for index, size, dtype in self._expected:
            if leaves[index].shape[1:] != size or leaves[index].dtype is not dtype:
                self._refuse_output(index, leaves[index], size, dtype)
        return leaves

    def _refuse_output(self, index: int, output: Tensor, size: torch.Size, dtype: torch.dtype) -> None:
        shape = ", ".join(["rows", *map(str, size)])
        raise ValueError(
            f"{self.name}: outputs_schema expects shape ({shape}) and dtype {dtype} for output {index}, got "
            f"shape {tuple(output.shape)} and dtype {output.dtype}"
        )

    def pack_outputs(self, leaves: Sequence[Any]) -> Any:
        """Return the expert's result with these leaves; the inverse of :meth:`flatten_outputs`."""
        return leaves[0] if self._one_output else nested_pack(leaves, self._outputs)

    def output_tensors(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return the tensors among the flat outputs."""
        return [leaf for leaf, is_tensor in zip(leaves, self._is_tensor, strict=True) if is_tensor]

    def empty_outputs(self, device: torch.device) -> tuple[Any, ...]:
        """Return the flat outputs for a request with 0 rows."""
        return tuple(
            leaf.make_empty(0, device=device, requires_grad=False) if isinstance(leaf, BatchTensorProto) else leaf
            for leaf in self._output_leaves
        )


def under_autocast(tensor: Any, proto: BatchTensorProto) -> Any:
    """Cast ``tensor`` to the dtype of ``proto`` if autocast is on for its device and both dtypes are floating-point.

    Otherwise return it unchanged.
    """
    if not (isinstance(tensor, Tensor) and tensor.is_floating_point() and proto.dtype.is_floating_point):
        return tensor
    return tensor.to(proto.dtype) if torch.is_autocast_enabled(tensor.device.type) else tensor


def _anywhere(schema: Any) -> tuple[BatchTensorProto, ...]:
    return tuple(proto.replace(device=None) for proto in tensor_protos(schema))


def _equal(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except Exception:  # the comparison has no single truth value, as for arrays
        return False


def _shown(leaf: Any) -> Any:
    return f"tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else leaf
