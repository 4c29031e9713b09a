"""Opaque calls: calls of autograd Functions and modules that a graph makes unchanged instead of tracing them.

``torch.export`` records the operators of a Function's forward and drops its backward, and it runs a module's Python
code only once. An opaque call is one node instead. The target of the node makes the call, with everything that belongs
to it: the Function's backward, the module's parameters, state and hooks. If such a call fails on fake tensors, it runs
on real ones to find the shapes of its results.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from pymoe._torch_private import pytree
from pymoe.pipe.auxiliary import keeps_counts
from pymoe.pipe.capture.errors import BoundaryInside, CaptureError
from pymoe.pipe.capture.external_values import is_within, users_hooks
from pymoe.pipe.capture.snapshots import attributes_restored, patched
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm
from pymoe.pipe.stages import FORWARD_HOOKS

COMPUTED_TYPES = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class OpaqueCall:
    """The target of a node for an opaque call, here of an autograd Function. Takes the computed leaves of the
    arguments, and returns a list of the computed leaves of the result. Leaves that are neither tensors nor sizes are
    constants of the call.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__ = name
        self.function = function
        """The function that is called, with its arguments and keywords."""
        self._constants: list[Any] = []
        self._spec: pytree.TreeSpec | None = None
        self._kept: list[int] = []

    def flatten_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Remember the structure of a call's arguments, and return their computed leaves."""
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._constants = [Computed if isinstance(leaf, COMPUTED_TYPES) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, COMPUTED_TYPES)]

    def flatten_result(self, result: Any) -> list[Any]:
        """Remember which leaves of a result are computed, and return them."""
        leaves = pytree.tree_leaves(result)
        self._kept = [number for number, leaf in enumerate(leaves) if isinstance(leaf, COMPUTED_TYPES)]
        return [leaves[number] for number in self._kept]

    def call(self, function: Callable[..., Any], computed: Sequence[Any]) -> list[Any]:
        """Call ``function`` in place of ``self.function``, with the arguments' computed leaves. Return the result's
        computed leaves.
        """
        assert self._spec is not None
        values = iter(computed)
        leaves = [next(values) if leaf is Computed else leaf for leaf in self._constants]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        results = pytree.tree_leaves(function(*args, **kwargs))
        return [results[number] for number in self._kept]

    def __call__(self, *computed: Any) -> list[Any]:
        return self.call(self.function, computed)

    def __repr__(self) -> str:
        return self.__name__


class Computed:
    """Stands for a leaf that the graph computes."""


class OpaqueModule(OpaqueCall):
    """A call of a module of the model, in the mode that the module has when the graph runs."""

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path.replace(".", "_") or "model", module)
        self.path = path
        """The module's qualified name in the model."""
        self.module = module


_running = threading.local()


def calling_as_a_whole(path: str) -> AbstractContextManager[None]:
    """Refuse stage boundaries in the block, in which an opaque call runs outside of the graph."""
    replacements: list[tuple[Any, str, Any]] = [(_running, "path", path)]
    if "torch.distributed.pipelining._IR" in sys.modules and hasattr(torch.ops.pippy, "_pipe_split"):
        replacements.append((torch.ops.pippy, "_pipe_split", refuse_boundary))  # torch's own pipe_split() calls it
    return patched(*replacements)


def refuse_boundary() -> None:
    """Raise BoundaryInside within an opaque call, because the boundary would be lost."""
    if (path := getattr(_running, "path", None)) is not None:
        raise BoundaryInside(path)


class RealModule:
    """A module, and the parameters and buffers that it has when this object is made; they may be replaced later."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._tensors = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]

    def copy(self) -> nn.Module:
        """Return a copy of the module with copies of these parameters and buffers."""
        with attributes_restored(self.module):
            for part, parameters, buffers in self._tensors:
                part.__dict__["_compiled_call_impl"] = None
                part._parameters.update(parameters)
                part._buffers.update(buffers)
            without_boundaries(self.module)
            return copy.deepcopy(self.module)


def without_boundaries(module: nn.Module) -> None:
    """Remove the stage boundaries from a module's hooks, because they are run outside of the module's call."""
    for kind in FORWARD_HOOKS:
        hooks = module.__dict__[kind]
        kept = [(key, hook) for key, hook in hooks.items() if not getattr(hook, "is_boundary", False)]
        module.__dict__[kind] = OrderedDict(kept)


Opaque = Iterable[type[nn.Module] | str]
"""Types of modules, and qualified names."""


def must_be_opaque(model: nn.Module, opaque: Opaque, path: str) -> bool:
    """Return whether a module is opaque for other reasons than its forward hooks or changed attributes."""
    return is_within(path, choose_opaque(model, opaque, opened={name for name, _ in model.named_modules()}, closed=()))


def choose_opaque(
    model: nn.Module, opaque: Opaque, opened: Collection[str], closed: Collection[str]
) -> dict[str, RealModule]:
    """Return the outermost opaque modules of a model, by qualified name.

    These are the modules in ``opaque``; modules with other effects than their output: layers of ``pymoe.nn`` that count
    or inject losses, deferred batch norms, modules with hooks (except for the model itself, and for modules with
    boundaries inside, ``opened``), modules whose forward changes their attributes (``closed``); and recurrent layers,
    whose graph would be valid for one length only.

    Raises:
        TypeError: an entry of ``opaque`` is neither a type of modules nor a name.
        ValueError: an entry of ``opaque`` names a module that the model does not have.
        CaptureError: the whole model would have to be opaque.
    """
    types: list[type] = []
    paths: set[str] = set()
    modules = dict(model.named_modules(remove_duplicate=False))
    for entry in [opaque] if isinstance(opaque, (str, type)) else opaque:
        if isinstance(entry, str):
            if entry not in modules:
                raise ValueError(f"opaque: the model has no module {entry!r}")
            paths.add(entry)
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            types.append(entry)
        else:
            raise TypeError(f"opaque: expected types of modules or qualified names, got {entry!r}")
    if _has_backward_hooks(model) and "" not in paths:
        raise CaptureError(
            "the model cannot be captured: it has backward hooks of its own, which a graph would lose. Register them "
            "on its layers, or on the parameters"
        )
    chosen: dict[str, RealModule] = {}
    for path, module in model.named_modules():
        if is_within(path, chosen) or "" in chosen:
            continue
        named = any(modules[name] is module for name in paths)
        if named or isinstance(module, tuple(types)) or _runs_itself(path, module, opened, closed):
            chosen[path] = RealModule(module)
    return chosen


def _runs_itself(path: str, module: nn.Module, opened: Collection[str], closed: Collection[str]) -> bool:
    if isinstance(module, (DeferredBatchNorm, nn.RNNBase)) or keeps_counts(module) or _has_backward_hooks(module):
        return True
    if not path or path in opened:
        return False
    return path in closed or any(True for _ in users_hooks(module))


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


# Shapes of what an opaque call returns.


def infer_by_running(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fake_mode: Any
) -> Any:
    """Return the fake result of ``function`` for fake arguments, inferred from results for real arguments of two sizes.

    Every dimension of the results must be a number, a free dimension of the arguments, a product of two such
    dimensions, or a multiple or fraction of these.

    Raises:
        CaptureError: a dimension is something else.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    free = {size.node.expr: size for size in symbolic_sizes(leaves) if not size.node.expr.is_number}
    sizes = list(free.values())
    hints = {symbol: _hint(size, symbol) for size in sizes for symbol in sorted(size.node.expr.free_symbols, key=str)}
    first, form = _run(function, leaves, spec, hints)
    others, second = hints, first
    for trial in _other_sizes(hints):
        sizes_now = {**others, **trial}
        try:
            second, _ = _run(function, leaves, spec, sizes_now)
        except Exception:  # the function does not accept these sizes together
            continue
        others = sizes_now
        _settle([size for size in sizes if size.node.expr in trial and len(set(trial.values())) < len(trial)])
        if len(trial) == len(hints):
            break
    for size in sizes:
        if _value(size, others) == _value(size, hints):
            _settle([size, _value(size, hints)])
    known = [(size, _value(size, hints), _value(size, others)) for size in sizes]
    known = [(size, one, two) for size, one, two in known if one != two]
    known += [(one[0] * two[0], one[1] * two[1], one[2] * two[2]) for one, two in combinations(known, 2)]
    grad = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves) or _trains(function)
    grad = grad and torch.is_grad_enabled()
    return pytree.tree_unflatten(
        [_fake(one, two, known, grad, fake_mode) for one, two in zip(first, second, strict=True)], form
    )


def _hint(size: Any, symbol: Any) -> int:
    """Return the value of a symbol in the example."""
    environment = size.node.shape_env
    values = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    return int(values[symbol])


def _other_sizes(hints: dict[Any, int]) -> Iterator[dict[Any, int]]:
    """Yield sizes to try in place of ``hints``: all changed, one changed, and equal ones changed together."""
    others = {symbol: hint * (number + 2) for number, (symbol, hint) in enumerate(hints.items())}
    yield others
    for symbol, other in others.items():
        yield {symbol: other}
    for hint in dict.fromkeys(hints.values()):
        alike = [symbol for symbol in hints if hints[symbol] == hint]
        if len(alike) > 1:
            yield dict.fromkeys(alike, others[alike[0]])


def _settle(sizes: list[Any]) -> None:
    """Make the capture require that the ``sizes`` are equal: comparing them adds a guard."""
    for size in sizes[1:]:
        assert bool(sizes[0] == size)


def symbolic_sizes(leaves: list[Any]) -> Iterator[Any]:
    """Yield the symbolic sizes among leaves, and in the shapes of tensors among them."""
    for leaf in leaves:
        for size in leaf.shape if isinstance(leaf, Tensor) else [leaf]:
            if isinstance(size, torch.SymInt):
                yield size


def _run(function: Callable[..., Any], leaves: list[Any], spec: Any, numbers: dict[Any, int]) -> tuple[list[Any], Any]:
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        args, kwargs = pytree.tree_unflatten([_real(leaf, numbers) for leaf in leaves], spec)
        return pytree.tree_flatten(function(*args, **kwargs))


def _real(leaf: Any, numbers: dict[Any, int]) -> Any:
    if isinstance(leaf, torch.SymInt):
        return _value(leaf, numbers)
    if not isinstance(leaf, Tensor):
        return leaf
    return example_tensor([_value(size, numbers) for size in leaf.shape], leaf)


def example_tensor(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor with the dtype and device of ``like``: random floats, or zeros, which are valid indices."""
    make = torch.rand if like.is_floating_point() or like.is_complex() else torch.zeros
    return make(shape, dtype=like.dtype, device=like.device)


def _value(size: Any, numbers: dict[Any, int]) -> int:
    if isinstance(size, int):
        return size
    value = size.node.expr.xreplace(numbers)
    return int(size.node.hint) if getattr(value, "free_symbols", None) else int(value)


def _fake(one: Any, two: Any, known: list[tuple[Any, int, int]], grad: bool, fake_mode: Any) -> Any:
    if isinstance(one, Tensor):
        if one.dim() != two.dim():
            raise CaptureError(
                "the number of dimensions of what an opaque call returns depends on the sizes of its arguments"
            )
        shape = [_size(a, b, known) for a, b in zip(one.shape, two.shape, strict=True)]
        with fake_mode:
            made = torch.empty(shape, dtype=one.dtype, device=one.device)
        return made.requires_grad_(grad and (one.is_floating_point() or one.is_complex()))
    return _size(one, two, known) if type(one) is int else one


def _size(one: int, two: int, known: list[tuple[Any, int, int]]) -> Any:
    if one == two:
        return one
    for size, a, b in known:
        if (a, b) == (one, two):
            return size
    for size, a, b in known:
        if a and one % a == 0 and one // a * b == two:
            return size * (one // a)
        if one and a % one == 0 and a // one * two == b:
            return size // (a // one)
    shown = ", ".join(f"{a} and {b}" for _, a, b in known)
    raise CaptureError(
        f"an opaque call returns a dimension of {one} or {two} where free dimensions of its arguments are {shown}: "
        "sizes of results must follow from sizes of arguments"
    )


def _trains(function: Any) -> bool:
    return isinstance(function, nn.Module) and any(parameter.requires_grad for parameter in function.parameters())
