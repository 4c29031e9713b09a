"""What a model's code does to Python beside computing: it draws random numbers, and changes values outside of it."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from pymoe._torch_private import DisableTorchFunction, disable_current_modes
from pymoe.pipe.capture.errors import describe_line, is_users_file
from pymoe.pipe.capture.external_values import ExternalValue
from pymoe.pipe.capture.snapshots import freeze, restorer

__all__ = ["LineFinder", "SideEffects"]


class _Generator:
    """A random generator that is watched."""

    def __init__(self, words: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.words = words
        self.save, self.restore = get, put

    def frozen(self) -> Any:
        return pickle.dumps(self.save())


class _External:
    """A place outside of the model whose value is watched."""

    def __init__(self, place: ExternalValue) -> None:
        self.words = f"changes {place.label!r}, which is not a tensor of the model"
        self._place = place

    def frozen(self) -> Any:
        return freeze(self._place.value())

    def save(self) -> Any:
        value = self._place.value()
        return value, restorer(value)

    def restore(self, saved: Any) -> None:
        value, restore_contents = saved
        self._place.assign(value)
        restore_contents()


class SideEffects:
    """Watches random generators, and values outside of the model, from when it is made."""

    def __init__(self, external: Sequence[ExternalValue]) -> None:
        self._watched: list[tuple[_Generator | _External, Any, Any]] = []  # what it was, to be restored and compared
        self._add(_Generator("draws random numbers from Python's `random`", random.getstate, random.setstate))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            get, put = numpy.random.get_state, numpy.random.set_state
            self._add(_Generator("draws random numbers from numpy's global generator", get, put))
        self._add(_Generator("draws real random numbers, or sets their seed", _torch_state, _set_torch_state))
        for place in external:
            value = place.value()
            self.add_object(place.label, value)
            if not isinstance(value, (nn.Module, torch.Tensor)):
                self._add(_External(place))

    def add_object(self, name: str, value: Any) -> None:
        """Watch ``value`` if it is a random generator of the user's own."""
        words = f"draws random numbers from {name}"
        if isinstance(value, random.Random):
            self._add(_Generator(words, value.getstate, value.setstate))
        elif type(value).__module__.startswith("numpy.random"):
            if hasattr(value, "bit_generator"):
                bits = value.bit_generator
                self._add(_Generator(words, lambda: bits.state, lambda state: setattr(bits, "state", state)))
            elif hasattr(value, "get_state"):
                self._add(_Generator(words, value.get_state, value.set_state))

    def words(self) -> list[str]:
        """Return what has happened, as the end of "it ..."."""
        return [watched.words for watched, _, frozen in self._watched if watched.frozen() != frozen]

    def undo(self) -> None:
        """Restore what has changed."""
        _restore(self._watched)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Undo what the block does, and never tell of it."""
        before = [(watched, watched.save(), watched.frozen()) for watched, _, _ in self._watched]
        try:
            yield
        finally:
            _restore(before)

    def _add(self, watched: _Generator | _External) -> None:
        self._watched.append((watched, watched.save(), watched.frozen()))


def _restore(before: Sequence[tuple[_Generator | _External, Any, Any]]) -> None:
    for watched, saved, frozen in before:
        if watched.frozen() != frozen:
            watched.restore(saved)


def _torch_state() -> bytes:
    with DisableTorchFunction(), disable_current_modes():
        return bytes(torch.get_rng_state().numpy())


def _set_torch_state(state: bytes) -> None:
    with DisableTorchFunction(), disable_current_modes():
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class LineFinder:
    """Finds the line of the user's code after which something has happened: within ``with finder:``, every line is
    followed by the question whether it has.

    Args:
        has_happened: the question.
        files: of packages that count as the user's, those of the model.
    """

    def __init__(self, has_happened: Callable[[], bool], files: Container[str] = ()) -> None:
        self.place: str | None = None
        """The line, by :func:`describe_line`, once it has happened."""
        self._has_happened = has_happened
        self._files = files
        self._last: tuple[str, int, str] | None = None
        self._before: Any = None

    def __enter__(self) -> LineFinder:
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        self._look()

    def _on_call(self, frame: FrameType, event: str, value: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in self._files and not is_users_file(file):
            return None
        self._look()
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, value: Any) -> Any:
        self._look()
        if event == "line":
            self._last = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        return self._on_line

    def _look(self) -> None:
        if self.place is None and self._last is not None and self._has_happened():
            self.place = describe_line(*self._last)
