"""Does a call fit what was captured: kinds of leaves, sizes of tensors, and what the model's code asked of sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from pymoe.pipe.capture.arguments import Arguments, Like
from pymoe.pipe.capture.errors import is_library
from pymoe.pipe.capture.frozen import freeze
from pymoe.pipe.capture.snapshots import patched


@dataclass(frozen=True, eq=False)
class InputChecks:
    """Checks the leaves of a call. Sizes are numbers, and expressions of sympy in symbols for what is free."""

    arguments: Arguments
    sizes: dict[int, tuple[Any, ...]]
    """Of the leaves that are tensors, by number."""
    conditions: dict[Any, str]
    """What the captured path through the model's code requires of free sizes: expressions, and for each the line that
    asked, or nothing.
    """
    limits: dict[Any, tuple[int, int | None]]
    """The least and the greatest value of symbols."""
    fixed: dict[tuple[int, int], str]
    """By (leaf, dimension): the line that fixed the size."""

    def check(self, values: Sequence[Any]) -> None:
        """Raise ValueError, naming argument and dimension, for leaves that do not fit."""
        arguments = self.arguments
        if len(values) != len(arguments.names):
            raise ValueError(f"expected {len(arguments.names)} leaves, as in the capture, got {len(values)}")
        bound: dict[Any, tuple[int, str]] = {}
        later: list[tuple[Any, int, str]] = []
        for number, (name, example, value) in enumerate(zip(arguments.names, arguments.examples, values, strict=True)):
            if not isinstance(example, Like):
                _check_constant(name, example, value)
                continue
            _check_kind(name, example, value)
            for dim, (size, expected) in enumerate(zip(value.shape, self.sizes[number], strict=True)):
                if isinstance(expected, int) and size == expected:
                    continue
                words = f"dimension {dim} of {name}"
                if isinstance(expected, int):
                    why = self._why_fixed(number, dim, expected)
                    raise ValueError(f"{words}: expected {expected}, got {size} ({why})")
                if not expected.is_Symbol:
                    later.append((expected, size, words))
                elif expected not in bound:
                    bound[expected] = (size, words)
                elif bound[expected][0] != size:
                    other_size, other = bound[expected]
                    raise ValueError(f"{words}: expected {other_size}, as {other}, got {size}")
        if not later and not self.conditions and not self.limits:
            return
        numbers = {symbol: size for symbol, (size, _) in bound.items()}
        for expression, size, words in later:
            if (expected := _evaluate(expression, numbers)) is not None and int(expected) != size:
                raise ValueError(f"{words}: expected {self._words(expression, bound)} = {int(expected)}, got {size}")
        for expression, where in self.conditions.items():
            if (holds := _evaluate(expression, numbers)) is not None and not bool(holds):
                symbols = expression.free_symbols
                sizes = ", ".join(f"{words} = {size}" for symbol, (size, words) in bound.items() if symbol in symbols)
                raise ValueError(
                    f"the captured graph requires {self._words(expression, bound)}, got {sizes}"
                    + (f" ({where})" if where else "")
                )
        for symbol, (size, words) in bound.items():
            low, high = self.limits.get(symbol, (0, None))
            if size < low:
                raise ValueError(f"{words}: expected at least {low}, got {size}")
            if high is not None and size > high:
                raise ValueError(f"{words}: expected at most {high}, got {size}")

    def _why_fixed(self, number: int, dim: int, expected: int) -> str:
        if where := self.fixed.get((number, dim)):
            return f"fixed at {where}"
        if expected in (0, 1):
            return f"the example had {expected} there: capture with an example of at least 2"
        return "fixed by the capture"

    @staticmethod
    def _words(expression: Any, bound: dict[Any, tuple[int, str]]) -> str:
        text = str(expression)
        for symbol, (_, words) in sorted(bound.items(), key=lambda item: -len(str(item[0]))):
            text = text.replace(str(symbol), f"({words})")
        return text


def _check_kind(name: str, example: Like, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, as in the capture, got {value!r:.80}")
    if value.dim() != len(example.shape):
        raise ValueError(
            f"{name}: expected {len(example.shape)} dimensions, as in the capture, got the shape {tuple(value.shape)}"
        )
    if value.dtype != example.dtype and (kind := _kind(example.dtype)) != _kind(value.dtype):
        raise ValueError(f"{name}: expected a {kind} dtype, as in the capture, got {value.dtype}")


def _kind(dtype: torch.dtype) -> str:
    """Dtypes of one kind can stand for each other: a model may be moved to another precision."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "boolean" if dtype == torch.bool else "integer"


def sizes_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the sizes of a placeholder of an exported graph: numbers, and expressions of sympy."""
    sizes = [size if isinstance(size, int) else size.node.expr for size in node.meta["val"].shape]
    return tuple(size if isinstance(size, int) or not size.is_number else int(size) for size in sizes)


def _check_constant(name: str, expected: Any, value: Any) -> None:
    if value is not expected and freeze(value) != freeze(expected):  # tells zeros apart by sign, and NaN is NaN
        raise ValueError(
            f"{name}: expected {expected!r:.80}, as in the capture, got {value!r:.80}: arguments other than "
            "tensors are constants of the capture"
        )


def _evaluate(expression: Any, numbers: dict[Any, int]) -> Any:
    """Return the value of an expression, or None where it has symbols that no argument gives."""
    value = expression.xreplace(numbers) if hasattr(expression, "xreplace") else expression
    return None if getattr(value, "free_symbols", None) else value


# Which conditions a capture makes, and where the model's code asks for them.

_TORCH = str(Path(torch.__file__).parent) + "/"
_CONVERSIONS = torch.__file__
_SYMBOLS = _TORCH + "fx/experimental/"
_LAYERS = (_TORCH + "nn/", _TORCH + "functional.py")
_TRIED = (2, 3, 4, 5, 7, 8, 16, 64, 1021, 2**20)


@contextmanager
def where_sizes_are_asked(environment: Any) -> Iterator[None]:
    """Note, within the block, the lines that ask a ``ShapeEnv``, if there is one, for :func:`conditions_asked`."""
    if environment is None:
        yield
        return
    environment.guards = _ShapeGuards(environment.guards)
    with patched((environment, "evaluate_sym_node", environment.guards.listening(environment.evaluate_sym_node))):
        yield


class _ShapeGuards(list[Any]):
    """The guards of a shape environment, and for each the line of the user's code that led to it."""

    def __init__(self, guards: Sequence[Any]) -> None:
        super().__init__(guards)
        self.places = [""] * len(guards)
        self.answers: list[tuple[Any, str]] = []
        """What the model's own code asked, whether or not the answer was known, as it was answered; and the lines."""

    def listening(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``evaluate``, which answers questions about sizes, but that those of the model's code are noted."""

        def listener(node: Any, *more: Any, **named: Any) -> Any:
            expression, answer = node.expr, evaluate(node, *more, **named)
            frame = sys._getframe(1)
            if _is_asked_by_model(frame):
                self.answers.append((_as_answered(expression, answer), _users_line(frame)))
            return answer

        return listener

    def append(self, guard: Any) -> None:
        super().append(guard)
        self.places.append(_users_line(sys._getframe(1)))


def _users_line(frame: FrameType | None) -> str:
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_asked_by_model(frame: FrameType | None) -> bool:
    """Return whether Python code of the model, or of ``torch.nn``, has made a ``bool`` or ``int`` of a size.

    Operators ask, too, as to whether to broadcast: but when the graph runs, they ask again.
    """
    converted = False
    while frame is not None and frame.f_code.co_filename.startswith((_CONVERSIONS, _SYMBOLS)):
        converted = converted or frame.f_code.co_filename == _CONVERSIONS
        frame = frame.f_back
    if frame is None or not converted:
        return False
    file = frame.f_code.co_filename
    return not file.startswith(_TORCH) or file.startswith(_LAYERS)


def _as_answered(expression: Any, answer: Any) -> Any:
    import sympy  # type: ignore[import-not-found, import-untyped]

    if isinstance(answer, bool) or answer in (sympy.true, sympy.false):
        return expression if answer else sympy.Not(expression)
    return sympy.Eq(expression, answer)


def conditions_asked(environment: Any) -> list[tuple[Any, str]]:
    """Return the conditions on sizes under which a graph was made, as expressions of sympy, and the lines that asked.

    Those of operators that hold for all sizes but 0 and 1 are left out.
    """
    guards = environment.guards
    if not isinstance(guards, _ShapeGuards):
        return [(guard.expr, "") for guard in guards]
    asked = [(guard.expr, place) for guard, place in zip(guards, guards.places, strict=True)]
    return guards.answers + [(expression, place) for expression, place in asked if not _holds_from_two(expression)]


def _holds_from_two(expression: Any) -> bool:
    """Return whether a condition holds for all sizes from 2 up, as far as trying some tells."""
    symbols = sorted(getattr(expression, "free_symbols", ()), key=str)
    if not symbols:
        return False
    for start in range(len(_TRIED)):
        sizes = {symbol: _TRIED[(start + place) % len(_TRIED)] for place, symbol in enumerate(symbols)}
        for tried in (sizes, dict.fromkeys(symbols, _TRIED[start])):
            value = expression.xreplace(tried)
            if getattr(value, "free_symbols", None) or not bool(value):
                return False
    return True
