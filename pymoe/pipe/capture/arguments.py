"""The arguments of a call as a flat list of leaves, their names, and which of their dimensions are free."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pymoe._torch_private import pytree
from pymoe.pipe.capture.contents import CONSTANTS
from pymoe.pipe.capture.errors import CaptureError


class Like(NamedTuple):
    """What a capture needs of an example tensor: not its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Like:
        return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def make(self) -> Tensor:
        """Return another example, of any values."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


PYTREE_HINT = (
    "tensors, numbers, strings, None, and lists, tuples and dicts of them; register other classes with "
    "torch.utils._pytree.register_pytree_node or register_dataclass"
)
"""What may be an argument or a result."""


class _Slot:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "*"


class Arguments:
    """How the arguments of a model's ``forward`` were given when it was captured.

    Calls may give them otherwise: by name or by position, in another order, with or without those that equal their
    defaults.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._signature = inspect.signature(forward)
        paths, self.spec = pytree.tree_flatten_with_path((args, kwargs))
        positions = self._positions(len(args))
        self.names = [_name(path, positions) for path, _ in paths]
        self.examples: list[Any] = [Like.of(leaf) if isinstance(leaf, Tensor) else leaf for _, leaf in paths]
        """The leaves of the example; in place of tensors what they are like."""
        for name, leaf in zip(self.names, self.examples, strict=True):
            if not isinstance(leaf, Like) and not isinstance(leaf, CONSTANTS):
                raise CaptureError(
                    f"the model cannot be captured: its argument {name} is a {type(leaf).__name__}, expected "
                    f"{PYTREE_HINT}"
                )

    def example(self, call: Sequence[Any] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return an example call, ``(args, kwargs)``; where the leaves of another ``call`` are tensors, or tell what
        those are like, they say which dtypes its tensors have, and which of them require gradients.
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
        """Return the leaves of a call, in the order of ``names``.

        Raises:
            TypeError: the call's signature, or the structure of an argument, differs from the captured one.
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
        """Return the names of the first ``count`` positional arguments, and possibly of more."""
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
"""A way to capture a model: for every tensor leaf which dimensions are free, as for ``torch.export.export``; and
whether these may be 0 or 1 as well.
"""


def trials(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Iterator[Trial]:
    """Yield what to try, one after the other.

    With ``dynamic_shapes``, in the form of ``torch.export.export``, that alone. Otherwise all dimensions free, the
    first of each tensor, none; but not where the example has 0 or 1, for which torch takes another path.
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
        # Arguments collected by **kwargs may stand beside the named ones.
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
