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

__all__ = ["Turns", "taking_turns", "turns_of"]

Function = Callable[..., Sequence[Any]]


def taking_turns(functions: Sequence[Function], parts: Sequence[nn.Module]) -> list[Function]:
    """The functions of stages; those whose ``parts`` share layers that write to themselves run one at a time."""
    states = [{id(layer) for layer in part.modules() if layer._buffers or is_weighted(layer)} for part in parts]
    users = Counter(layer for state in states for layer in state)
    turns = Turns()
    return [
        _InTurn(function, turns) if any(users[layer] > 1 for layer in state) else function
        for function, state in zip(functions, states, strict=True)
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
    def __init__(self, function: Function, turns: Turns) -> None:
        self._function = function
        self.turns = turns

    def __call__(self, *values: Any) -> Sequence[Any]:
        with self.turns:
            return self._function(*values)
