"""Does a call fit what was captured? Kinds of leaves, sizes of tensors, and what the model's code asked of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["Condition", "Fits", "sizes_of"]


@dataclass(frozen=True)
class Condition:
    """What the captured path through the model's code takes for granted about free dimensions."""

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
class Fits:
    """Judges the leaves of a call."""

    leaves: tuple[Leaf, ...]
    conditions: tuple[Condition, ...]
    lower: dict[Any, int] = field(default_factory=dict)
    upper: dict[Any, int] = field(default_factory=dict)
    """Limits of symbols, where there are any."""
    fixed: dict[Any, str] = field(default_factory=dict)
    """By (leaf, dimension): the line that fixed the size."""

    def check(self, values: Sequence[Any]) -> None:
        """Raises ValueError, naming argument and dimension, for leaves that do not fit."""
        if len(values) != len(self.leaves):
            raise ValueError(f"the call has {len(values)} leaves, {len(self.leaves)} were captured")
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
                raise ValueError(f"{words} is {size}; it must be {self._words(expression, bound)} = {int(expected)}")
        for condition in self.conditions:
            if (holds := _evaluate(condition.expression, numbers)) is not None and not bool(holds):
                sizes = ", ".join(
                    f"{words} = {size}"
                    for symbol, (size, words) in bound.items()
                    if symbol in condition.expression.free_symbols
                )
                raise ValueError(
                    f"the captured graph holds where {self._words(condition.expression, bound)}, this call has {sizes}"
                    + (f" ({condition.where})" if condition.where else "")
                )
        for symbol, (size, words) in bound.items():
            if size < self.lower.get(symbol, size) or size > self.upper.get(symbol, size):
                low, high = self.lower.get(symbol), self.upper.get(symbol)
                limits = " and ".join(
                    text for text in (f"at least {low}" if low else "", f"at most {high}" if high else "") if text
                )
                raise ValueError(f"{words} is {size}; it must be {limits}")

    def _check_tensor(
        self, number: int, leaf: Leaf, value: Any, bound: dict[Any, tuple[int, str]], later: list[tuple[Any, int, str]]
    ) -> None:
        assert leaf.sizes is not None
        if not isinstance(value, Tensor):
            raise ValueError(f"{leaf.name} must be a tensor, as in the capture; it is {value!r:.80}")
        if value.dim() != len(leaf.sizes):
            raise ValueError(
                f"{leaf.name} must have {len(leaf.sizes)} dimensions, as in the capture; its shape is "
                f"{tuple(value.shape)}"
            )
        if kind(value.dtype) != kind(leaf.dtype):
            raise ValueError(f"{leaf.name} must be {kind(leaf.dtype)}, as in the capture; it is {value.dtype}")
        for dim, (size, expected) in enumerate(zip(value.shape, leaf.sizes, strict=True)):
            if isinstance(expected, int):
                if size != expected:
                    raise ValueError(self._fixed_size(number, leaf, dim, size, expected))
                continue
            words = f"dimension {dim} of {leaf.name}"
            if not expected.is_Symbol:
                later.append((expected, size, words))
            elif expected not in bound:
                bound[expected] = (size, words)
            elif bound[expected][0] != size:
                other_size, other = bound[expected]
                raise ValueError(f"{words} is {size}; it must equal {other}, which is {other_size}")

    def _fixed_size(self, number: int, leaf: Leaf, dim: int, size: int, expected: int) -> str:
        text = f"dimension {dim} of {leaf.name} is {size}; the capture fixed it to {expected}"
        if where := self.fixed.get((number, dim)):
            return f"{text} ({where})"
        if expected in (0, 1):
            return f"{text}, since the example had {expected} there: capture with an example of at least 2"
        return text

    @staticmethod
    def _words(expression: Any, bound: dict[Any, tuple[int, str]]) -> str:
        text = str(expression)
        for symbol, (_, words) in sorted(bound.items(), key=lambda item: -len(str(item[0]))):
            text = text.replace(str(symbol), f"({words})")
        return text


def kind(dtype: torch.dtype) -> str:
    """Dtypes of one kind can stand for each other: a model may be moved to another precision."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "boolean" if dtype == torch.bool else "integer"


def sizes_of(node: fx.Node) -> tuple[Any, ...]:
    """The sizes of a placeholder of an exported graph: numbers, and expressions of sympy."""
    return tuple(_plain(size) for size in node.meta["val"].shape)


def _plain(size: Any) -> Any:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


def _check_constant(leaf: Leaf, value: Any) -> None:
    expected = leaf.constant
    if value is expected or (type(value) is type(expected) and value == expected):
        return
    raise ValueError(
        f"{leaf.name} must be {expected!r:.80}, as in the capture; it is {value!r:.80}. What is not a tensor is a "
        "constant of the capture"
    )


def _evaluate(expression: Any, numbers: dict[Any, int]) -> Any:
    """The value of an expression, or None where it has symbols that no argument gives."""
    value = expression.xreplace(numbers) if hasattr(expression, "xreplace") else expression
    return None if getattr(value, "free_symbols", None) else value
