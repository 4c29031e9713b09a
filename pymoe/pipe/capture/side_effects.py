"""What a model's code does to Python beside computing: draws from random generators, changes of values outside."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pymoe.pipe.capture.outside import Outside
from pymoe.pipe.capture.plain import MANY, freeze
from pymoe.pipe.capture.untouched import contents_of

__all__ = ["SideEffects"]


class _State(NamedTuple):
    words: str
    get: Callable[[], Any]
    put: Callable[[Any], None]
    copy: Callable[[Any], Any]
    freeze: Callable[[Any], Any]
    before: Any
    frozen: Any

    def has_changed(self, frozen: Any) -> bool:
        return bool(self.freeze(self.get()) != frozen)


class SideEffects:
    """Watches states from when it is made. After :meth:`put_back` they are what they were."""

    def __init__(self, outside: Sequence[Outside]) -> None:
        self._states: list[_State] = []
        self._ids: set[int] = set()
        self._add("draws random numbers from Python's `random`", random.getstate, random.setstate)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            generator = numpy.random
            self._add("draws random numbers from numpy's", generator.get_state, generator.set_state)
        self._add("draws real random numbers, or sets their seed", _torch_state, _set_torch_state)
        for place in outside:
            self._add_outside(place)

    def add_object(self, name: str, value: Any) -> None:
        """Watch a random generator of the user's own."""
        if isinstance(value, random.Random):
            self._add(f"draws random numbers from {name}", value.getstate, value.setstate)
        elif type(value).__module__.startswith("numpy.random"):
            if hasattr(value, "bit_generator"):
                bits = value.bit_generator
                self._add(
                    f"draws random numbers from {name}", lambda: bits.state, lambda state: setattr(bits, "state", state)
                )
            elif hasattr(value, "get_state"):
                self._add(f"draws random numbers from {name}", value.get_state, value.set_state)

    def words(self) -> list[str]:
        """What has happened, as the end of "it ..."."""
        return [state.words for state in self._states if state.has_changed(state.frozen)]

    def put_back(self) -> None:
        """Undo it."""
        for state in self._states:
            if state.has_changed(state.frozen):
                state.put(state.before)

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """What the block does is undone, and never was."""
        kept = [(state, state.copy(value := state.get()), state.freeze(value)) for state in self._states]
        try:
            yield
        finally:
            for state, value, frozen in kept:
                if state.has_changed(frozen):
                    state.put(value)

    def _add(self, words: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        before = get()
        self._states.append(_State(words, get, put, lambda state: state, pickle.dumps, before, pickle.dumps(before)))

    def _add_outside(self, place: Outside) -> None:
        value = place.value()
        self.add_object(place.label, value)
        if isinstance(value, (nn.Module, torch.Tensor)):
            return

        def put(kept: tuple[Any, Callable[[], None]]) -> None:
            before, restore = kept
            if place.key is None:
                place.where.cell_contents = before
            else:
                place.where[place.key] = before
            restore()

        def copy(now: Any) -> tuple[Any, Callable[[], None]]:
            return now, contents_of(now, MANY)

        words = f"changes {place.label!r}, which is none of its tensors"
        self._states.append(_State(words, place.value, put, copy, freeze, copy(value), freeze(value)))


def _torch_state() -> bytes:
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return bytes(torch.get_rng_state().numpy())


def _set_torch_state(state: bytes) -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
