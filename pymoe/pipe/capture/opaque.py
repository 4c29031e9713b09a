"""Calls that a graph makes as they are: autograd Functions, and modules that have to run themselves.

``torch.export`` records the operators of a Function's forward and forgets its backward, and it runs a module's code
once and for all. A call that is opaque is one node instead, whose target makes the call, with all that belongs to it:
the Function's backward, the module's parameters, its state, its hooks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from pymoe.pipe.capture.errors import BoundaryInside

__all__ = [
    "COMPUTED",
    "OpaqueCall",
    "OpaqueFunction",
    "OpaqueModule",
    "no_boundary_here",
    "opaque_modules",
    "running_in_one_piece",
]

COMPUTED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class OpaqueCall:
    """The target of a node: takes the leaves of the arguments that are computed, returns a list of those of the result.

    Leaves that are neither tensors nor sizes are constants of the call.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__ = name
        self.function = function
        """What is called with arguments and keywords."""
        self._constants: list[Any] = []
        self._spec: _pytree.TreeSpec | None = None
        self._kept: list[int] = []

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Remember the form of a call, and return its computed leaves."""
        leaves, self._spec = _pytree.tree_flatten((args, kwargs))
        self._constants = [_Computed if isinstance(leaf, COMPUTED) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, COMPUTED)]

    def give(self, result: Any) -> list[Any]:
        """Remember which leaves of a result are computed, and return them."""
        leaves = _pytree.tree_leaves(result)
        self._kept = [number for number, leaf in enumerate(leaves) if isinstance(leaf, COMPUTED)]
        return [leaves[number] for number in self._kept]

    def arguments(self, computed: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call from their computed leaves."""
        assert self._spec is not None
        values = iter(computed)
        leaves = [next(values) if leaf is _Computed else leaf for leaf in self._constants]
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def __call__(self, *computed: Any) -> list[Any]:
        args, kwargs = self.arguments(computed)
        leaves = _pytree.tree_leaves(self.function(*args, **kwargs))
        return [leaves[number] for number in self._kept]

    def __repr__(self) -> str:
        return self.__name__


class _Computed:
    """Stands for a leaf that the graph computes."""


class OpaqueFunction(OpaqueCall):
    """A call of an autograd Function."""

    def __init__(self, kind: type[torch.autograd.Function]) -> None:
        super().__init__(kind.__name__, kind.apply)
        self.kind = kind


class OpaqueModule(OpaqueCall):
    """A call of a module of the model, in whatever mode that is when the graph runs."""

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path.replace(".", "_") or "model", module)
        self.path = path
        """Its qualified name in the model."""
        self.module = module


def opaque_modules(graph: fx.Graph) -> Iterator[OpaqueModule]:
    """The modules that a graph calls, also within its regions, call by call."""
    for node in graph.nodes:
        if isinstance(node.target, OpaqueModule):
            yield node.target
        elif isinstance(inner := getattr(node.target, "graph", None), fx.GraphModule):
            yield from opaque_modules(inner.graph)


_now = threading.local()


@contextmanager
def running_in_one_piece(path: str) -> Iterator[None]:
    """While an opaque call runs beside a graph."""
    before, _now.path = getattr(_now, "path", None), path
    torchs = sys.modules.get("torch.distributed.pipelining._IR")
    operators = vars(torch.ops.pippy) if torchs is not None else {}
    split = operators.get("_pipe_split")
    try:
        if split is not None:  # what torch's own pipe_split() calls
            operators["_pipe_split"] = no_boundary_here
        yield
    finally:
        _now.path = before
        if split is not None:
            operators["_pipe_split"] = split


def no_boundary_here() -> None:
    """Raises BoundaryInside within such a call, where a boundary would be lost."""
    if (path := getattr(_now, "path", None)) is not None:
        raise BoundaryInside(path)
