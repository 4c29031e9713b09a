"""Stages that share a layer with a state of its own run one at a time.

Stages run concurrently. Layers that several of them contain may share parameters freely, but what their forwards write
(running statistics, the scale of auxiliary losses) can be written by one thread at a time only.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pymoe._torch_private import NormBase
from pymoe.pipe.auxiliary import is_weighted
from pymoe.pipe.execution.graph import version_of

Function = Callable[..., Sequence[Any]]


def serialize_shared_layers(functions: Sequence[Function], parts: Sequence[nn.Module]) -> list[Function]:
    """Return the functions of stages, of which those whose ``parts`` share layers that write to themselves take turns.

    For most layers with buffers only a forward can tell whether it writes to them: the first in each mode, training and
    evaluation, decides. (A table of rotary embeddings that all stages share must not serialize them.)
    """
    states = [{id(layer): layer for layer in part.modules() if layer._buffers or is_weighted(layer)} for part in parts]
    users = Counter(key for state in states for key in state)
    lock = StageLock()
    shared = [[layer for key, layer in state.items() if users[key] > 1] for state in states]
    return [
        _Serialized(function, lock, part, layers) if layers else function
        for function, part, layers in zip(functions, parts, shared, strict=True)
    ]


def lock_of(function: Function) -> StageLock:
    """Return the lock that the function of a stage takes; a new one if it takes none."""
    return function.lock if isinstance(function, _Serialized) else StageLock()


def buffers_of(layers: Sequence[nn.Module]) -> list[tuple[nn.Module, str, torch.Tensor, int]]:
    """Return the buffers that the layers themselves have: whose, its name, the tensor, and its version."""
    buffers = [(layer, *named) for layer in layers for named in layer._buffers.items()]
    return [(layer, name, tensor, version_of(tensor)) for layer, name, tensor in buffers if tensor is not None]


def has_changed(layer: nn.Module, name: str, tensor: torch.Tensor, version: int) -> bool:
    """Return whether a buffer may have been changed or replaced since :func:`buffers_of`."""
    # The kernels of batch norms change statistics behind the version counter's back.
    unseen = isinstance(layer, NormBase) and layer.training
    return unseen or layer._buffers.get(name) is not tensor or version_of(tensor) != version


class StageLock:
    """A reentrant lock. That of a copied pipe is its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return StageLock, ()


class _Serialized:
    def __init__(self, function: Function, lock: StageLock, part: nn.Module, shared: list[nn.Module]) -> None:
        self.lock = lock
        self._function = function
        self._part = part
        self._shared = shared
        self._read_only: set[bool] = set()  # modes in which forwards do not write

    def __call__(self, *values: Any) -> Sequence[Any]:
        training = self._part.training
        if training in self._read_only:
            return self._function(*values)
        with self.lock:
            before = buffers_of(self._shared)
            result = self._function(*values)
            # Auxiliary losses that are weighted have no buffer.
            writes = any(map(is_weighted, self._shared)) or any([has_changed(*buffer) for buffer in before])
            if not writes and len(buffers_of(self._shared)) == len(before):
                self._read_only.add(training)
            return result
