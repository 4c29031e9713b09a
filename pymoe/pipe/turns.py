"""Stages that share a layer with a state of its own take turns.

Stages work at the same time. Layers that are in several of them may share parameters freely, but what their forwards
write (running statistics, the scale of auxiliary losses) can be written by one thread at a time only.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pymoe.pipe.auxiliary import is_weighted

__all__ = ["taking_turns"]

Function = Callable[..., Sequence[Any]]


def taking_turns(functions: Sequence[Function], parts: Sequence[nn.Module]) -> list[Function]:
    """The functions of stages; those whose ``parts`` share layers that write to themselves run one at a time."""
    states = [{id(layer) for layer in part.modules() if layer._buffers or is_weighted(layer)} for part in parts]
    users = Counter(layer for state in states for layer in state)
    lock = _Lock()
    return [
        _Turn(function, lock) if any(users[layer] > 1 for layer in state) else function
        for function, state in zip(functions, states, strict=True)
    ]


class _Lock:
    """Those of a copied pipe are its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        return _Lock, ()


class _Turn:
    def __init__(self, function: Function, lock: _Lock) -> None:
        self._function = function
        self._lock = lock

    def __call__(self, *values: Any) -> Sequence[Any]:
        with self._lock.lock:
            return self._function(*values)
