"""The flat tuples of tensors that pools carry, and the arguments and outputs of an expert that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.nested import nested_compare, nested_flatten, nested_map, nested_pack, sorted_keys

# More is looked at for every batch here than seems necessary, but what is usual (tensors as arguments, one tensor as
# the output) takes a shortcut: the rest of this file costs more than many an expert of one row.


class Signature:
    """How an expert called ``name`` is called, made from its schemas once."""

    def __init__(self, name: str, args_schema: tuple[Any, ...], kwargs_schema: dict[str, Any], outputs: Any) -> None:
        self.name = name
        self._inputs = (args_schema, kwargs_schema)
        self._input_leaves = nested_flatten(self._inputs)
        self._outputs = outputs
        self._output_leaves = nested_flatten(outputs)
        self._is_tensor = [isinstance(leaf, BatchTensorProto) for leaf in self._output_leaves]
        self._one_tensor = isinstance(outputs, BatchTensorProto)
        self.any_dtype = False  # set when the expert was converted to another dtype than it had with its schema
        self._expected = [
            (index, leaf.size, leaf.dtype)
            for index, leaf in enumerate(self._output_leaves)
            if isinstance(leaf, BatchTensorProto)
        ]
        if self._one_tensor:
            ((_, self._only_size, self._only_dtype),) = self._expected
        self._num_args = len(args_schema)
        self._keywords = sorted_keys(kwargs_schema)
        arguments = [*args_schema, *kwargs_schema.values()]
        self._flat_arguments = all(isinstance(argument, BatchTensorProto) for argument in arguments)
        self.num_inputs = sum(isinstance(leaf, BatchTensorProto) for leaf in self._input_leaves)
        self.num_output_tensors = sum(self._is_tensor)

    def check_count(self, what: str, tensors: Sequence[Any], expected: int) -> None:
        """Raise ValueError unless there are as many as ``what`` takes, the first with rows."""
        if len(tensors) != expected:
            raise ValueError(f"{self.name}: {what} takes {expected} tensors, got {len(tensors)}")
        if tensors[0].dim() == 0:
            raise ValueError(f"{self.name}: the first dimension of an input counts rows, got one of shape ()")

    def pack_inputs(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Positional and keyword arguments of the expert."""
        if self._flat_arguments:
            if not self._keywords:
                return tensors, {}
            return tensors[: self._num_args], dict(zip(self._keywords, tensors[self._num_args :], strict=True))
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, BatchTensorProto) else leaf for leaf in self._input_leaves]
        args, kwargs = nested_pack(leaves, self._inputs)
        return args, kwargs

    def flatten_outputs(self, outputs: Any) -> tuple[Any, ...]:
        """The leaves of what the expert returned. Raises ValueError if the schema says something else."""
        if self._one_tensor and isinstance(outputs, Tensor):
            if outputs.shape[1:] != self._only_size or outputs.dtype is not self._only_dtype:
                self._refuse(0, outputs)
            return (outputs,)
        leaves = tuple(nested_flatten(outputs))
        same_kinds = [isinstance(leaf, Tensor) for leaf in leaves] == self._is_tensor
        if not (same_kinds and nested_compare(outputs, self._outputs)):
            raise ValueError(
                f"{self.name}: by its schema the expert returns {self._outputs!r}, got {nested_map(_shown, outputs)!r}"
            )
        for index, size, dtype in self._expected:
            if leaves[index].shape[1:] != size or leaves[index].dtype is not dtype:
                self._refuse(index, leaves[index])
        return leaves

    def _refuse(self, index: int, output: Tensor) -> None:
        _, size, dtype = next(one for one in self._expected if one[0] == index)
        if self.any_dtype and output.shape[1:] == size:
            return
        shape = ", ".join(["rows", *map(str, size)])
        raise ValueError(
            f"{self.name}: by outputs_schema, output {index} of the expert has shape ({shape}) and dtype {dtype}; it "
            f"returned one of shape {tuple(output.shape)} and dtype {output.dtype}"
        )

    def pack_outputs(self, leaves: Sequence[Any]) -> Any:
        """Undoes :meth:`flatten_outputs`."""
        return leaves[0] if self._one_tensor else nested_pack(leaves, self._outputs)

    def tensors(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The tensors among the flat outputs."""
        return [leaf for leaf, is_tensor in zip(leaves, self._is_tensor, strict=True) if is_tensor]

    def empty_outputs(self, device: torch.device) -> tuple[Any, ...]:
        """The flat outputs for no rows."""
        return tuple(
            leaf.make_empty(0, device=device, requires_grad=False) if isinstance(leaf, BatchTensorProto) else leaf
            for leaf in self._output_leaves
        )


def _shown(leaf: Any) -> Any:
    return f"tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else leaf
