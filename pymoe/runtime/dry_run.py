"""A trial call that determines the schema of an expert's results; context managers that restore a module's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pymoe.runtime.batch_tensor_proto import DUMMY_BATCH_SIZE, BatchTensorProto
from pymoe.runtime.nested import nested_map
from pymoe.runtime.schema import tensor_protos


def infer_outputs_schema(
    expert: nn.Module,
    args_schema: Sequence[Any],
    kwargs_schema: Mapping[str, Any] | None = None,
    *,
    device: torch.device | None = None,
) -> Any:
    """Return the schema of the results of ``expert``, from one call with :data:`DUMMY_BATCH_SIZE` rows of zeros.

    The call runs in evaluation mode without gradients. Afterwards training flags and buffers are restored, and the
    states of random generators: torch's for the CPU and for the expert's GPUs, and those in attributes of the expert
    and its submodules. Lazy parameters stay initialised, and other attributes that the call changes are not restored.
    If other threads draw random numbers from torch's generators during the call, they may draw the same numbers again
    after it.

    Args:
        expert: the module to call.
        args_schema: nested structures of prototypes, one per positional argument.
        kwargs_schema: nested structures of prototypes, one per keyword argument.
        device: the device of the zeros, unless a prototype names a device.

    Raises:
        ValueError: the expert returned no tensor, or a tensor that does not have one row for each row of the inputs.
        Exception: any exception of the expert.
    """

    def zeros(leaf: Any) -> Any:
        if not isinstance(leaf, BatchTensorProto):
            return leaf
        return leaf.make_empty(DUMMY_BATCH_SIZE, device=leaf.device or device, requires_grad=False)

    args, kwargs = nested_map(zeros, (tuple(args_schema), dict(kwargs_schema or {})))
    with untouched(expert), torch.inference_mode(False), torch.no_grad():
        outputs = expert(*args, **kwargs)
    schema = nested_map(_proto_of_output, outputs)
    if not tensor_protos(schema):
        raise ValueError(f"{type(expert).__name__} must return tensors, got {outputs!r}")
    return schema


def _proto_of_output(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dim() == 0 or leaf.shape[0] != DUMMY_BATCH_SIZE:
        raise ValueError(
            f"every tensor that an expert returns must have one row for each row of its inputs: for "
            f"{DUMMY_BATCH_SIZE} rows it returned one of shape {tuple(leaf.shape)}"
        )
    return BatchTensorProto.from_tensor(leaf)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Run the block with ``module`` in evaluation mode; then restore training flags, buffers and random generators.

    Training flags are set one by one and not with ``eval()``, which some modules override to do more.
    """
    modules = list(module.modules())
    flags = [one.training for one in modules]
    generators = [value for one in modules for value in vars(one).values() if isinstance(value, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    with keep_buffers(module), torch.random.fork_rng(_gpus_of(module)):
        try:
            for one in modules:
                one.training = False
            yield
        finally:
            for one, flag in zip(modules, flags, strict=True):
                one.training = flag
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


@contextmanager
def keep_buffers(module: nn.Module, *, only_after_errors: bool = False) -> Iterator[None]:
    """After the block, restore every buffer of ``module`` and its submodules: the tensor object and its values.

    Lazy buffers are left out. With ``only_after_errors``, restore buffers only if the block raises an exception.
    """
    # Version counters do not show which buffers have changed: batch normalisation changes its running mean and variance
    # without increasing their counters. So all buffers are copied.
    kept = [
        (owner, name, buffer, None if buffer is None else buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is None or not is_lazy(buffer)
    ]
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if not (succeeded and only_after_errors):
            with torch.no_grad():
                for owner, name, buffer, copy in kept:
                    owner._buffers[name] = buffer
                    if buffer is not None and copy is not None:
                        buffer.copy_(copy)


def _gpus_of(module: nn.Module) -> list[int]:
    """Return the indices of the CUDA devices of the parameters and buffers of ``module``."""
    tensors = [*module.parameters(), *module.buffers()]
    return sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
