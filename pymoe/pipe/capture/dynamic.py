"""Which dimensions of the inputs stay free: for every leaf what ``torch.export`` is told."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree

__all__ = ["Trial", "trials"]


@dataclass(frozen=True)
class Trial:
    """A way to capture a model."""

    shapes: list[Any]
    """For every tensor leaf which dimensions are free."""
    any_size: bool
    """Whether these may be 0 or 1 as well."""


def trials(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Iterator[Trial]:
    """What to try, one after the other.

    With ``dynamic_shapes``, in the form of ``torch.export.export``, that alone. Otherwise all dimensions free, the
    first of each tensor, none; but not where the example has 0 or 1, for which torch takes another path.
    """
    from torch.export import Dim

    if dynamic_shapes is not None:
        given = list(_given(forward, args, kwargs, dynamic_shapes))
        yield Trial(given, True)
        yield Trial(given, False)
        return
    tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    free = [[dim for dim, size in enumerate(tensor.shape) if size > 1] for tensor in tensors]
    first = [[dim for dim in dims if dim == 0] for dims in free]
    none: list[list[int]] = [[] for _ in tensors]
    for dims, any_size in ((free, True), (free, False), (first, True), (first, False), (none, False)):
        yield Trial([dict.fromkeys(some, Dim.AUTO) for some in dims], any_size)


def _given(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> Iterator[Any]:
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    if not isinstance(shapes, Mapping):
        if len(shapes) != len(bound):
            raise ValueError(f"dynamic_shapes has {len(shapes)} entries for {len(bound)} arguments: {list(bound)}")
        shapes = dict(zip(bound, shapes, strict=True))
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        # Arguments collected by **kwargs may stand beside the named ones.
        if name not in shapes and isinstance(value, dict) and all(key in shapes for key in value):
            flat[name] = {key: shapes[key] for key in value}
        else:
            flat[name] = shapes.get(name)
    by_id: dict[int, Any] = {}
    for name, value in bound.items():
        for leaf, spec in _pairs(value, flat[name], name):
            by_id[id(leaf)] = spec
    for leaf in _pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            yield by_id[id(leaf)]


def _pairs(value: Any, spec: Any, name: str) -> Iterator[tuple[Tensor, Any]]:
    if isinstance(value, Tensor):
        yield value, {} if spec is None else spec
    elif spec is None:
        for leaf in _pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield leaf, {}
    elif isinstance(value, Mapping) and isinstance(spec, Mapping):
        for key, part in value.items():
            yield from _pairs(part, spec.get(key), f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)) and isinstance(spec, Sequence) and len(spec) == len(value):
        for number, part in enumerate(value):
            yield from _pairs(part, spec[number], f"{name}[{number}]")
    else:
        raise ValueError(f"dynamic_shapes does not have the form of the argument {name}")
