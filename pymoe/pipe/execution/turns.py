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
from torch.nn.modules.batchnorm import _NormBase

from pymoe.pipe.auxiliary import is_weighted
from pymoe.pipe.execution.values import version_of

__all__ = ["Turns", "taking_turns", "turns_of"]

Function = Callable[..., Sequence[Any]]


def taking_turns(functions: Sequence[Function], parts: Sequence[nn.Module]) -> list[Function]:
    """The functions of stages; those whose ``parts`` share layers that write to themselves run one at a time.

    Of most layers with buffers only a forward can tell whether it writes to them: the first in each mode, training and
    evaluation, decides. (A table of rotary embeddings that all stages share must not keep them from each other.)
    """
    states = [{id(layer): layer for layer in part.modules() if layer._buffers or is_weighted(layer)} for part in parts]
    users = Counter(key for state in states for key in state)
    turns = Turns()
    shared = [[layer for key, layer in state.items() if users[key] > 1] for state in states]
    return [
        _InTurn(function, turns, part, layers) if layers else function
        for function, part, layers in zip(functions, parts, shared, strict=True)
    ]


def turns_of(function: Function) -> Turns:
    """Those that the function of a stage takes."""
    return function.turns if isinstance(function, _InTurn) else Turns()


class Turns:
    """``with turns:`` one thread at a time, which may ask again. Those of a copied pipe are its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return Turns, ()


class _InTurn:
    def __init__(self, function: Function, turns: Turns, part: nn.Module, shared: list[nn.Module]) -> None:
        self._function = function
        self.turns = turns
        self._part = part
        self._shared = shared
        self._leave_alone: set[bool] = set()  # modes in which forwards do not write

    def __call__(self, *values: Any) -> Sequence[Any]:
        training = self._part.training
        if training in self._leave_alone:
            return self._function(*values)
        with self.turns:
            before = self._contents()
            result = self._function(*values)
            if not self._writes_unseen() and self._contents() == before:
                self._leave_alone.add(training)
            return result

    def _contents(self) -> list[tuple[int, int]]:
        buffers = [buffer for layer in self._shared for buffer in layer._buffers.values() if buffer is not None]
        return [(id(buffer), version_of(buffer)) for buffer in buffers]

    def _writes_unseen(self) -> bool:
        """Batch norms change their statistics without a word to the version counter; what is weighted has no buffer."""
        return any([is_weighted(layer) or (isinstance(layer, _NormBase) and layer.training) for layer in self._shared])
