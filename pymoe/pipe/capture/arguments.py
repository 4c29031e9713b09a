"""Describes the arguments of a call, as a flat list of leaves with names and free dimensions, and checks that a later
call fits the capture: kinds of leaves, sizes of tensors, and conditions on sizes that the model's code has tested.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pymoe._torch_private import pytree
from pymoe.pipe.capture.contents import CONSTANTS
from pymoe.pipe.capture.errors import CaptureError, is_library
from pymoe.pipe.capture.snapshots import freeze, patched


class Like(NamedTuple):
    """Describes an example tensor, except for its values, which a capture does not need."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Like:
        return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def make(self) -> Tensor:
        """Return a new tensor that fits the description, with uninitialised values."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


PYTREE_HINT = (
    "tensors, numbers, strings, None, and lists, tuples and dicts of them; register other classes with "
    "torch.utils._pytree.register_pytree_node or register_dataclass"
)
"""Describes, for messages, the values that may be arguments or results of a captured model."""


class _Slot:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "*"


class Arguments:
    """Describes how arguments were passed to a model's ``forward`` in the capture. Calls may pass them differently: by
    name or position, in another order, with or without arguments that equal their defaults.

    Raises:
        CaptureError: a leaf of the arguments is neither a tensor nor of a class in ``CONSTANTS``.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._signature = inspect.signature(forward)
        paths, self.spec = pytree.tree_flatten_with_path((args, kwargs))
        positions = self._positions(len(args))
        self.names = [_name(path, positions) for path, _ in paths]
        self.examples: list[Any] = [Like.of(leaf) if isinstance(leaf, Tensor) else leaf for _, leaf in paths]
        """The leaves of the example, with a :class:`Like` in place of each tensor."""
        for name, leaf in zip(self.names, self.examples, strict=True):
            if not isinstance(leaf, Like) and not isinstance(leaf, CONSTANTS):
                raise CaptureError(
                    f"the model cannot be captured: its argument {name} is a {type(leaf).__name__}, expected "
                    f"{PYTREE_HINT}"
                )

    def example(self, call: Sequence[Any] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return an example call, ``(args, kwargs)``, with new tensors.

        The tensors have the dtypes and ``requires_grad`` of ``call``, the leaves of another call; or of the capture's
        example, if ``call`` is empty.
        """
        leaves = []
        for leaf, other in zip(self.examples, call or self.examples, strict=True):
            if isinstance(leaf, Like):
                kind = other if isinstance(other, (Tensor, Like)) else leaf
                leaf = leaf._replace(dtype=kind.dtype, requires_grad=kind.requires_grad).make()
            leaves.append(leaf)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves of a call of the model, in the order of ``names``.

        Raises:
            TypeError: the call's signature, or the structure of an argument, differs from the captured one; or an
                argument that had its default in the capture has another value.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec == self.spec:
            return leaves
        example_args, example_kwargs = pytree.tree_unflatten([_Slot(n) for n in range(len(self.names))], self.spec)
        bound, given_bound = self._bound(example_args, example_kwargs), self._bound(args, kwargs)
        expected, expected_spec = pytree.tree_flatten(bound)
        given, given_spec = pytree.tree_flatten_with_path(given_bound)
        if given_spec != expected_spec:
            names, given_names = self._describe(example_args, example_kwargs), self._describe(args, kwargs)
            if names != given_names:
                raise TypeError(f"signature differs from the captured one: expected {names}, got {given_names}")
            for name, value in bound.items():
                shapes = [str(pytree.tree_map(lambda leaf: _Slot(0), one)) for one in (value, given_bound[name])]
                if shapes[0] != shapes[1]:
                    raise TypeError(
                        f"{name}: structure differs from the captured one: expected {shapes[0]}, got {shapes[1]}"
                    )
            raise TypeError("the structure of an argument differs from the captured one")
        leaves = [None] * len(self.names)
        for slot, (path, value) in zip(expected, given, strict=True):
            if isinstance(slot, _Slot):
                leaves[slot.number] = value
            elif not (slot is value or (type(slot) is type(value) and slot == value)):
                first: Any = path[0]
                name = str(first.key) + pytree.keystr(path[1:])
                raise TypeError(
                    f"{name}: expected the default of the capture, {slot!r}, got {value!r}: capture with an example of "
                    "it"
                )
        return leaves

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        rest = {
            name: dict(sorted(value.items()))
            for name, value in bound.arguments.items()
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        }
        return {**bound.arguments, **rest}

    def _describe(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        return f"({', '.join([*self._positions(len(args))[: len(args)], *kwargs])})"

    def _positions(self, count: int) -> list[str]:
        """Return the names of at least the first ``count`` positional arguments."""
        names: list[str] = []
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                names += [f"{name}[{n}]" for n in range(count - len(names))]
            elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
                names.append(name)
        return names + [f"argument {n}" for n in range(len(names), count)]


def _name(path: tuple[Any, ...], positions: list[str]) -> str:
    which, key, *rest = path
    first = positions[key.idx] if which.idx == 0 else str(key.key)
    return first + pytree.keystr(tuple(rest))


Trial = tuple[tuple[Any, ...], bool]
"""A way to capture a model: the free dimensions of every tensor leaf, as for ``torch.export.export``, and whether their
sizes may also be 0 or 1.
"""


def trials(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Iterator[Trial]:
    """Yield the ways to capture a model, in the order in which they are to be tried.

    With ``dynamic_shapes``, in the form of ``torch.export.export``, only the dimensions that it specifies are free.
    Without it, first all dimensions are free, then the first dimension of each tensor, then none; but dimensions of
    size 0 or 1 in the example are never free, because torch takes another path for these sizes. If dimensions are free,
    sizes 0 and 1 are first allowed and then not.
    """
    from torch.export import Dim

    if dynamic_shapes is not None:
        given = tuple(_given(forward, args, kwargs, dynamic_shapes))
        yield from ((given, True), (given, False))
        return
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    free = [[dim for dim, size in enumerate(tensor.shape) if size > 1] for tensor in tensors]
    first = [[dim for dim in dims if dim == 0] for dims in free]
    none: list[list[int]] = [[] for _ in tensors]
    for dims, any_size in ((free, True), (free, False), (first, True), (first, False), (none, False)):
        yield tuple(dict.fromkeys(some, Dim.AUTO) for some in dims), any_size


def _given(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> Iterator[Any]:
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    if not isinstance(shapes, Mapping):
        if len(shapes) != len(bound):
            raise ValueError(f"dynamic_shapes: expected {len(bound)} entries, for {list(bound)}, got {len(shapes)}")
        shapes = dict(zip(bound, shapes, strict=True))
    by_id: dict[int, Any] = {}
    for name, value in bound.items():
        spec = shapes.get(name)
        # Shapes for arguments that **kwargs collects may be at the same level as shapes for named arguments.
        if name not in shapes and isinstance(value, dict) and all(key in shapes for key in value):
            spec = {key: shapes[key] for key in value}
        by_id.update((id(leaf), of_leaf) for leaf, of_leaf in _pairs(value, spec, name))
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            yield by_id[id(leaf)]


def _pairs(value: Any, spec: Any, name: str) -> Iterator[tuple[Tensor, Any]]:
    if isinstance(value, Tensor):
        yield value, {} if spec is None else spec
    elif spec is None:
        yield from ((leaf, {}) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    elif isinstance(value, Mapping) and isinstance(spec, Mapping):
        for key, part in value.items():
            yield from _pairs(part, spec.get(key), f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)) and isinstance(spec, Sequence) and len(spec) == len(value):
        for number, part in enumerate(value):
            yield from _pairs(part, spec[number], f"{name}[{number}]")
    else:
        raise ValueError(f"dynamic_shapes: expected the structure of the argument {name}, got {spec!r}")


# Checks of later calls.


@dataclass(frozen=True, eq=False)
class InputChecks:
    """Checks the leaves of a call. Expected sizes are numbers, or sympy expressions whose symbols are free sizes."""

    arguments: Arguments
    sizes: dict[int, tuple[Any, ...]]
    """The sizes of every leaf that is a tensor, by the number of the leaf."""
    conditions: dict[Any, str]
    """Conditions on free sizes under which the model's code takes the captured path: expressions, each with the line of
    code that tested it, if known.
    """
    limits: dict[Any, tuple[int, int | None]]
    """The smallest and largest value of each symbol that has limits; None: there is no upper limit."""
    fixed: dict[tuple[int, int], str]
    """The line of code that fixed a size, by (leaf, dimension)."""

    def check(self, values: Sequence[Any]) -> None:
        """Raise ValueError if the leaves ``values`` do not fit; the message says which argument or size does not."""
        arguments = self.arguments
        if len(values) != len(arguments.names):
            raise ValueError(f"expected {len(arguments.names)} leaves, as in the capture, got {len(values)}")
        bound: dict[Any, tuple[int, str]] = {}
        later: list[tuple[Any, int, str]] = []
        for number, (name, example, value) in enumerate(zip(arguments.names, arguments.examples, values, strict=True)):
            if not isinstance(example, Like):
                # freeze() distinguishes 0.0 from -0.0, and all NaN are equal.
                if value is not example and freeze(value) != freeze(example):
                    raise ValueError(
                        f"{name}: expected {example!r:.80}, as in the capture, got {value!r:.80}: arguments other than "
                        "tensors are constants of the capture"
                    )
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
    """Return the kind of a dtype. Calls may use other dtypes of the same kind, as the model's precision may change."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "boolean" if dtype == torch.bool else "integer"


def sizes_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the sizes of a placeholder of an exported graph: numbers, or sympy expressions."""
    sizes = [size if isinstance(size, int) else size.node.expr for size in node.meta["val"].shape]
    return tuple(size if isinstance(size, int) or not size.is_number else int(size) for size in sizes)


def _evaluate(expression: Any, numbers: dict[Any, int]) -> Any:
    """Return the value of an expression, or None if it has symbols that no argument defines."""
    value = expression.xreplace(numbers) if hasattr(expression, "xreplace") else expression
    return None if getattr(value, "free_symbols", None) else value


# Conditions of a capture, and where the model's code tests them.

_TORCH = str(Path(torch.__file__).parent) + "/"
_CONVERSIONS = torch.__file__
_SYMBOLS = _TORCH + "fx/experimental/"
_LAYERS = (_TORCH + "nn/", _TORCH + "functional.py")
_TRIED = (2, 3, 4, 5, 7, 8, 16, 64, 1021, 2**20)


@contextmanager
def where_sizes_are_asked(environment: Any) -> Iterator[None]:
    """Within the block, record which lines of code test sizes in ``environment``, a ``ShapeEnv`` or None.

    :func:`conditions_asked` returns the record.
    """
    if environment is None:
        yield
        return
    environment.guards = _ShapeGuards(environment.guards)
    with patched((environment, "evaluate_sym_node", environment.guards.listening(environment.evaluate_sym_node))):
        yield


class _ShapeGuards(list[Any]):
    """The guards of a shape environment, and for each guard the line of the user's code that led to it."""

    def __init__(self, guards: Sequence[Any]) -> None:
        super().__init__(guards)
        self.places = [""] * len(guards)
        self.answers: list[tuple[Any, str]] = []
        """Conditions that the model's own code has tested, each with its line; a condition that was false is negated.
        Conditions whose answer torch already knew are included, although torch adds no guards for them.
        """

    def listening(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``evaluate``, torch's evaluation of a symbolic condition on sizes, so that conditions that the model's
        own code evaluates are recorded in ``answers``.
        """
        import sympy  # type: ignore[import-not-found, import-untyped]

        def listener(node: Any, *more: Any, **named: Any) -> Any:
            expression, answer = node.expr, evaluate(node, *more, **named)
            frame = sys._getframe(1)
            if _is_asked_by_model(frame):
                if not isinstance(answer, bool) and answer not in (sympy.true, sympy.false):
                    expression = sympy.Eq(expression, answer)
                elif not answer:
                    expression = sympy.Not(expression)
                self.answers.append((expression, _users_line(frame)))
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
    """Return whether ``frame`` evaluates a size or a condition because the model's code or ``torch.nn`` has converted
    it to a Python number or bool.

    Operators also test sizes (to broadcast, for example), but they repeat the test whenever the graph runs, so the
    capture need not record it.
    """
    converted = False
    while frame is not None and frame.f_code.co_filename.startswith((_CONVERSIONS, _SYMBOLS)):
        converted = converted or frame.f_code.co_filename == _CONVERSIONS
        frame = frame.f_back
    if frame is None or not converted:
        return False
    file = frame.f_code.co_filename
    return not file.startswith(_TORCH) or file.startswith(_LAYERS)


def conditions_asked(environment: Any) -> list[tuple[Any, str]]:
    """Return the conditions on sizes under which a graph is valid: pairs of a sympy expression and the line that tested
    it, or "" if that line is not known.

    Conditions that operators have tested are left out if they hold for all sizes in ``_TRIED``, which are at least 2.
    """
    guards = environment.guards
    if not isinstance(guards, _ShapeGuards):
        return [(guard.expr, "") for guard in guards]
    asked = [(guard.expr, place) for guard, place in zip(guards, guards.places, strict=True)]
    return guards.answers + [(expression, place) for expression, place in asked if not _holds_from_two(expression)]


def _holds_from_two(expression: Any) -> bool:
    """Return whether a condition on free sizes holds for all tried combinations of the sizes in ``_TRIED``."""
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
