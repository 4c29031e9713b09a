"""Does a call fit what was captured: kinds of leaves, sizes of tensors, and what the model's code asked of sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from pymoe.pipe.capture.errors import is_library

__all__ = ["Condition", "InputChecks", "Leaf", "conditions_asked", "sizes_of", "where_sizes_are_asked"]


@dataclass(frozen=True)
class Condition:
    """What the captured path through the model's code requires of free dimensions."""

    expression: Any
    """A truth value of sympy, in the symbols of free dimensions."""
    where: str
    """The line that asked, or nothing."""


@dataclass(frozen=True)
class Leaf:
    """One argument as it was captured."""

    name: str
    constant: Any = None
    """Its value, if it is not a tensor."""
    sizes: tuple[Any, ...] | None = None
    """Of a tensor: numbers, and expressions of sympy for what is free."""
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, eq=False)
class InputChecks:
    """Checks the leaves of a call."""

    leaves: tuple[Leaf, ...]
    conditions: tuple[Condition, ...]
    lower: dict[Any, int] = field(default_factory=dict)
    upper: dict[Any, int] = field(default_factory=dict)
    """Limits of symbols, where there are any."""
    fixed: dict[Any, str] = field(default_factory=dict)
    """By (leaf, dimension): the line that fixed the size."""

    def check(self, values: Sequence[Any]) -> None:
        """Raise ValueError, naming argument and dimension, for leaves that do not fit."""
        if len(values) != len(self.leaves):
            raise ValueError(f"expected {len(self.leaves)} leaves, as in the capture, got {len(values)}")
        bound: dict[Any, tuple[int, str]] = {}
        later: list[tuple[Any, int, str]] = []
        for number, (leaf, value) in enumerate(zip(self.leaves, values, strict=True)):
            if leaf.sizes is None:
                _check_constant(leaf, value)
            else:
                self._check_tensor(number, leaf, value, bound, later)
        if not later and not self.conditions and not self.lower and not self.upper:
            return
        numbers = {symbol: size for symbol, (size, _) in bound.items()}
        for expression, size, words in later:
            if (expected := _evaluate(expression, numbers)) is not None and int(expected) != size:
                raise ValueError(f"{words}: expected {self._words(expression, bound)} = {int(expected)}, got {size}")
        for condition in self.conditions:
            if (holds := _evaluate(condition.expression, numbers)) is not None and not bool(holds):
                symbols = condition.expression.free_symbols
                sizes = ", ".join(f"{words} = {size}" for symbol, (size, words) in bound.items() if symbol in symbols)
                raise ValueError(
                    f"the captured graph requires {self._words(condition.expression, bound)}, got {sizes}"
                    + (f" ({condition.where})" if condition.where else "")
                )
        for symbol, (size, words) in bound.items():
            low, high = self.lower.get(symbol), self.upper.get(symbol)
            if low is not None and size < low:
                raise ValueError(f"{words}: expected at least {low}, got {size}")
            if high is not None and size > high:
                raise ValueError(f"{words}: expected at most {high}, got {size}")

    def _check_tensor(
        self, number: int, leaf: Leaf, value: Any, bound: dict[Any, tuple[int, str]], later: list[tuple[Any, int, str]]
    ) -> None:
        assert leaf.sizes is not None
        if not isinstance(value, Tensor):
            raise ValueError(f"{leaf.name}: expected a tensor, as in the capture, got {value!r:.80}")
        if value.dim() != len(leaf.sizes):
            raise ValueError(
                f"{leaf.name}: expected {len(leaf.sizes)} dimensions, as in the capture, got the shape "
                f"{tuple(value.shape)}"
            )
        if _kind(value.dtype) != _kind(leaf.dtype):
            raise ValueError(f"{leaf.name}: expected a {_kind(leaf.dtype)} dtype, as in the capture, got {value.dtype}")
        for dim, (size, expected) in enumerate(zip(value.shape, leaf.sizes, strict=True)):
            words = f"dimension {dim} of {leaf.name}"
            if isinstance(expected, int):
                if size != expected:
                    why = self._why_fixed(number, dim, expected)
                    raise ValueError(f"{words}: expected {expected}, got {size} ({why})")
            elif not expected.is_Symbol:
                later.append((expected, size, words))
            elif expected not in bound:
                bound[expected] = (size, words)
            elif bound[expected][0] != size:
                other_size, other = bound[expected]
                raise ValueError(f"{words}: expected {other_size}, as {other}, got {size}")

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


def _check_constant(leaf: Leaf, value: Any) -> None:
    expected = leaf.constant
    if not (value is expected or (type(value) is type(expected) and value == expected)):
        raise ValueError(
            f"{leaf.name}: expected {expected!r:.80}, as in the capture, got {value!r:.80}: arguments other than "
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
    """Note, within the block, the lines that ask a shape environment of ``torch.export``, for :func:`conditions_asked`.

    Args:
        environment: a ``ShapeEnv``, or None.
    """
    if environment is not None:
        environment.guards = _ShapeGuards(environment.guards)
        environment.evaluate_sym_node = environment.guards.listening(environment.evaluate_sym_node)
    try:
        yield
    finally:
        if environment is not None:
            del environment.evaluate_sym_node


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
