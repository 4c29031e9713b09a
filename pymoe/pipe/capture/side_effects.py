"""What a model's code does to Python beside computing: it draws random numbers, and changes values outside of it."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from pymoe._torch_private import DisableTorchFunction, disable_current_modes
from pymoe.pipe.capture.errors import describe_line, is_users_file
from pymoe.pipe.capture.external_values import ExternalValue
from pymoe.pipe.capture.frozen import Snapshots


class _Watched:
    """A random generator, or a place outside of the model, as it is when this is made.

    Args:
        words: what happens when it changes, as the end of "it ...".
        watch: returns a function that tells the name of what has changed since, or None.
        restorer: returns a function that restores what is there now.
    """

    def __init__(
        self, words: str, watch: Callable[[], Callable[[], str | None]], restorer: Callable[[], Callable[[], None]]
    ) -> None:
        self._words = words
        self._watch, self._restorer = watch, restorer
        self._change, self._restore = watch(), restorer()

    def again(self) -> _Watched:
        return _Watched(self._words, self._watch, self._restorer)

    def words(self) -> str | None:
        """Return what has happened, if something has."""
        name = self._change()
        return None if name is None else self._words.format(name)

    def undo(self) -> None:
        if self._change() is not None:
            self._restore()


class SideEffects:
    """Watches random generators, and values outside of the model, from when it is made."""

    def __init__(self, external: Sequence[ExternalValue], own: Collection[int]) -> None:
        self._watched: list[_Watched] = []
        self._add_generator("draws random numbers from Python's `random`", random.getstate, random.setstate)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            words = "draws random numbers from numpy's global generator"
            self._add_generator(words, numpy.random.get_state, numpy.random.set_state)
        self._add_generator("draws real random numbers, or sets their seed", _torch_state, _set_torch_state)
        for place in external:
            value = place.value(None)
            self.add_object(place.label, value)
            if not isinstance(value, (nn.Module, torch.Tensor)):
                words = "changes {!r}, which is not a tensor of the model"
                self._watched.append(_Watched(words, partial(_watched, place, own), place.restorer))

    def add_object(self, name: str, value: Any) -> None:
        """Watch ``value`` if it is a random generator of the user's own."""
        words = f"draws random numbers from {name}"
        if isinstance(value, random.Random):
            self._add_generator(words, value.getstate, value.setstate)
        elif type(value).__module__.startswith("numpy.random"):
            if hasattr(value, "bit_generator"):
                bits = value.bit_generator
                self._add_generator(words, lambda: bits.state, lambda state: setattr(bits, "state", state))
            elif hasattr(value, "get_state"):
                self._add_generator(words, value.get_state, value.set_state)

    def words(self) -> list[str]:
        """Return what has happened, as the end of "it ..."."""
        return [words for watched in self._watched if (words := watched.words()) is not None]

    def undo(self) -> None:
        """Restore what has changed."""
        for watched in self._watched:
            watched.undo()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Undo what the block does, and never tell of it."""
        before = [watched.again() for watched in self._watched]
        try:
            yield
        finally:
            for watched in before:
                watched.undo()

    def _add_generator(self, words: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        def watch() -> Callable[[], str | None]:
            before = pickle.dumps(get())
            return lambda: None if pickle.dumps(get()) == before else ""

        self._watched.append(_Watched(words, watch, lambda: partial(put, get())))


def _watched(place: ExternalValue, own: Collection[int]) -> Callable[[], str | None]:
    return Snapshots([(place.label, place.value, "{}")], own, is_strict=False).change


def _torch_state() -> bytes:
    with DisableTorchFunction(), disable_current_modes():
        return bytes(torch.get_rng_state().numpy())


def _set_torch_state(state: bytes) -> None:
    with DisableTorchFunction(), disable_current_modes():
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class LineFinder:
    """Finds the line of the user's code after which something has happened: within ``with finder:``, every line is
    followed by the question whether it has. ``files`` count as the user's, too.
    """

    def __init__(self, has_happened: Callable[[], bool], files: Container[str] = ()) -> None:
        self.place: str | None = None
        """The line, by :func:`describe_line`, once it has happened."""
        self._has_happened = has_happened
        self._files = files
        self._last: tuple[str, int, str] | None = None
        self._before = sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        self._look()

    def _trace(self, frame: FrameType, event: str, value: Any) -> Any:
        file = frame.f_code.co_filename
        if event == "call" and file not in self._files and not is_users_file(file):
            return None
        self._look()
        if event == "line":
            self._last = file, frame.f_lineno, frame.f_code.co_name
        return self._trace

    def _look(self) -> None:
        if self.place is None and self._last is not None and self._has_happened():
            self.place = describe_line(*self._last)
