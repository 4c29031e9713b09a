"""Opaque calls: calls of autograd Functions and modules that a graph makes unchanged instead of tracing them.

``torch.export`` records the operators of a Function's forward and drops its backward, and it runs a module's Python
code only once. An opaque call is a single node instead. The target of the node makes the call, with the Function's
backward, or the module's parameters, state and hooks. If the call fails on fake tensors during the capture, it is run
on real ones to find the shapes of its results.

Calls are intercepted while ``torch.export`` runs a model. Calls that a graph would lose are refused. Calls of autograd
Functions are also intercepted through names that were bound before, as in ``cubed = Cubed.apply``. ``apply`` need not
go through Python: from torch 2.15 on it is C code, so replacing ``apply`` would miss bound names. But in every version
``apply`` reads attributes of the class, and these reads are intercepted: ``_backward_cls``, while the caller's grad
mode is still set, then ``forward``, then ``setup_context`` if the class has one.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import (
    DisableTorchFunction,
    FakeTensor,
    FunctionMeta,
    HigherOrderOperator,
    SingleLevelFunction,
    detect_fake_mode,
    disable_current_modes,
    get_current_function_mode_stack,
    pytree,
    set_grad_enabled,
)
from pymoe.pipe.capture.arguments import where_sizes_are_asked
from pymoe.pipe.capture.errors import BoundaryInside, CaptureError
from pymoe.pipe.capture.external_values import is_boundary, is_within, users_hooks
from pymoe.pipe.capture.guards import ReadRecorder
from pymoe.pipe.capture.snapshots import attributes_restored, patched
from pymoe.pipe.context import keeps_counts
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm
from pymoe.pipe.stages import FORWARD_HOOKS

COMPUTED_TYPES = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class OpaqueCall:
    """The target of a node that calls an autograd Function or, in a subclass, a module.

    It takes the computed leaves of the arguments, and returns a list of the computed leaves of the result. Leaves that
    are neither tensors nor sizes are constants of the call.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__ = name
        self.function = function
        """The function that is called; it takes positional and keyword arguments, not leaves."""
        self._constants: list[Any] = []
        self._spec: pytree.TreeSpec | None = None
        self._kept: list[int] = []

    def flatten_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Remember the structure of a call's arguments, and return their computed leaves."""
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._constants = [Computed if isinstance(leaf, COMPUTED_TYPES) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, COMPUTED_TYPES)]

    def flatten_result(self, result: Any) -> list[Any]:
        """Remember which leaves of a result are computed, and return these leaves."""
        leaves = pytree.tree_leaves(result)
        self._kept = [number for number, leaf in enumerate(leaves) if isinstance(leaf, COMPUTED_TYPES)]
        return [leaves[number] for number in self._kept]

    def call(self, function: Callable[..., Any], computed: Sequence[Any]) -> list[Any]:
        """Call ``function`` with arguments made of the leaves ``computed`` and the constants of the call. Return the
        result's computed leaves.
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
    """Marks a leaf that the graph computes, in a list in which the other leaves are constants."""


class OpaqueModule(OpaqueCall):
    """A call of a module of the model, in the mode that the module has when the graph runs."""

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path.replace(".", "_") or "model", module)
        self.path = path
        """The module's qualified name in the model."""
        self.module = module


_running = threading.local()


def calling_as_a_whole(path: str) -> AbstractContextManager[None]:
    """Refuse stage boundaries in the block: it runs an opaque call, outside of the graph, so they would be lost."""
    replacements: list[tuple[Any, str, Any]] = [(_running, "path", path)]
    if "torch.distributed.pipelining._IR" in sys.modules and hasattr(torch.ops.pippy, "_pipe_split"):
        replacements.append((torch.ops.pippy, "_pipe_split", refuse_boundary))  # called by torch's pipe_split()
    return patched(*replacements)


def refuse_boundary() -> None:
    """Raise BoundaryInside if an opaque call is running, in which a boundary would be lost."""
    if (path := getattr(_running, "path", None)) is not None:
        raise BoundaryInside(path)


class RealModule:
    """Keeps a module together with the parameters and buffers that it has when this object is made."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._tensors = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]

    def copy(self) -> nn.Module:
        """Return a copy of the module with copies of the kept parameters and buffers, and without stage boundaries."""
        with attributes_restored(self.module):
            for part, parameters, buffers in self._tensors:
                part.__dict__["_compiled_call_impl"] = None
                part._parameters.update(parameters)
                part._buffers.update(buffers)
            without_boundaries(self.module)
            return copy.deepcopy(self.module)


def without_boundaries(module: nn.Module) -> None:
    """Remove the stage boundaries from a module's hooks. The caller must restore the hooks."""
    for kind in FORWARD_HOOKS:
        hooks = module.__dict__[kind]
        module.__dict__[kind] = OrderedDict((key, hook) for key, hook in hooks.items() if not is_boundary(hook))


Opaque = Iterable[type[nn.Module] | str]
"""Types of modules, and qualified names."""


def must_be_opaque(model: nn.Module, opaque: Opaque, path: str) -> bool:
    """Return whether the module at ``path`` is opaque even with stage boundaries inside, or is in such a module."""
    return is_within(path, choose_opaque(model, opaque, opened={name for name, _ in model.named_modules()}, closed=()))


def choose_opaque(
    model: nn.Module, opaque: Opaque, opened: Collection[str], closed: Collection[str]
) -> dict[str, RealModule]:
    """Return the outermost opaque modules of a model, by qualified name.

    These are the modules in ``opaque``; layers of ``pymoe.nn`` that count or inject losses; deferred batch norms;
    modules with backward hooks; recurrent layers, whose graph would be valid for one length only; modules with forward
    hooks; and modules whose forward changes their attributes (``closed``). The last two kinds exclude the model itself
    and modules with boundaries inside (``opened``).

    Raises:
        TypeError: an entry of ``opaque`` is neither a type of modules nor a name.
        ValueError: an entry of ``opaque`` names a module that the model does not have.
        CaptureError: the model itself has backward hooks, and ``opaque`` does not name it.
    """
    types: list[type] = []
    paths: set[str] = set()
    modules = dict(model.named_modules(remove_duplicate=False))

    def runs_itself(path: str, module: nn.Module) -> bool:
        if isinstance(module, (DeferredBatchNorm, nn.RNNBase)) or keeps_counts(module) or _has_backward_hooks(module):
            return True
        return bool(path) and path not in opened and (path in closed or any(True for _ in users_hooks(module)))

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
        if named or isinstance(module, tuple(types)) or runs_itself(path, module):
            chosen[path] = RealModule(module)
    return chosen


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


# Shapes of the results of opaque calls.


def infer_by_running(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fake_mode: Any
) -> Any:
    """Return the fake result of ``function`` for fake arguments, inferred from results for two sets of real sizes.

    Every dimension of the results must be a constant, a free dimension of the arguments, a product of two free
    dimensions, or a multiple or fraction of a free dimension or of such a product.

    Raises:
        CaptureError: a result has a dimension of another form, or a number of dimensions that depends on the sizes.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    sizes = list({size.node.expr: size for size in symbolic_sizes(leaves) if not size.node.expr.is_number}.values())
    hints: dict[Any, int] = {}  # the values of symbols in the example
    for size in sizes:
        environment = size.node.shape_env
        values = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
        hints.update((symbol, int(values[symbol])) for symbol in sorted(size.node.expr.free_symbols, key=str))
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
    trained = [*leaves, *(function.parameters() if isinstance(function, nn.Module) else ())]
    grad = torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in trained)
    return pytree.tree_unflatten(
        [_fake(one, two, known, grad, fake_mode) for one, two in zip(first, second, strict=True)], form
    )


def _other_sizes(hints: dict[Any, int]) -> Iterator[dict[Any, int]]:
    """Yield sizes to try in place of ``hints``: all changed, each changed alone, and equal ones changed together."""
    others = {symbol: hint * (number + 2) for number, (symbol, hint) in enumerate(hints.items())}
    yield others
    for symbol, other in others.items():
        yield {symbol: other}
    for hint in dict.fromkeys(hints.values()):
        alike = [symbol for symbol in hints if hints[symbol] == hint]
        if len(alike) > 1:
            yield dict.fromkeys(alike, others[alike[0]])


def _settle(sizes: list[Any]) -> None:
    """Make the capture require that the ``sizes`` are equal, by comparing them, which adds a guard."""
    for size in sizes[1:]:
        assert bool(sizes[0] == size)


def symbolic_sizes(leaves: list[Any]) -> Iterator[Any]:
    """Yield the symbolic sizes among ``leaves``, and in the shapes of the tensors among them."""
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
    """Return a tensor with the dtype and device of ``like``: random numbers, or zeros (valid indices) for integers."""
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


Held = dict[int, Tensor]
"""Real tensors that require gradients, by address. torch.export detaches those that are not registered in a module, so
the captured graph takes these from here.
"""


def _hold(values: Any, held: Held) -> None:
    """Record in ``held`` the real tensors that require gradients among ``values``, the arguments of a call."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, FakeTensor):
            held[leaf.data_ptr()] = leaf


# Opaque calls.


class _OpaqueMarker(HigherOrderOperator):
    def __call__(self, number: int, *values: Any) -> Any:
        return super().__call__(number, *values)


OPAQUE_CALL = _OpaqueMarker("pymoe_opaque_call")
"""The operator that stands for opaque calls in an exported graph. It takes the number of a call and the computed leaves
of the call's arguments."""


_Call = Callable[..., Any]

_OF_OPERATORS = "torch._library.autograd"
"""The module in which torch creates Functions for custom operators. These Functions are not intercepted, because graphs
contain the operators themselves.
"""


class OpaqueCalls:
    """The opaque calls on this thread. Each adds a node to the graph and runs within ``outside()``."""

    def __init__(self, outside: Callable[[], AbstractContextManager[Any]]) -> None:
        self.calls: list[OpaqueCall] = []
        """The calls, indexed by the numbers in the nodes."""
        self.held: Held = {}
        self._outside = outside
        self._thread = threading.get_ident()
        self._inside = False

    @contextmanager
    def intercepted(self, modules: Mapping[str, RealModule]) -> Iterator[None]:
        """In the block, intercept calls of ``modules`` and autograd Functions. Needs :func:`attributes_restored`."""
        for path, module in modules.items():
            module.module.__dict__["_compiled_call_impl"] = self._module_call(path, module)
        segments = torch.utils.checkpoint.CheckpointFunction
        apply = segments.apply

        # Call segments of checkpoints directly, so that the graph contains their operators.
        def call_segment(segment: _Call, preserve: bool, *values: Any) -> Any:
            return segment(*values) if self._is_on() else apply(segment, preserve, *values)

        def record(function: Any, apply: _Call, args: tuple[Any, ...]) -> Any:
            return self._record(OpaqueCall(function.__name__, apply), apply, lambda: apply, args, {})

        def is_asked(function: type) -> bool:
            return self._is_on() and type.__getattribute__(function, "__module__") != _OF_OPERATORS

        functions = FunctionCalls(record, is_asked)
        with patched((segments, "apply", staticmethod(call_segment))), functions.intercepted():
            yield

    def _is_on(self) -> bool:
        return threading.get_ident() == self._thread and not self._inside

    def _module_call(self, path: str, real: RealModule) -> Callable[..., Any]:
        """Return the function that is called in place of the opaque module ``real``, whose name is ``path``."""
        module = real.module

        def run(*args: Any, **kwargs: Any) -> Any:
            with attributes_restored(module):
                without_boundaries(module)
                return module._call_impl(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on():
                return run(*args, **kwargs)
            # Stage boundaries among the hooks run outside of the opaque call, in which they would be lost.
            for hook in [hook for hook in module._forward_pre_hooks.values() if is_boundary(hook)]:
                hook()
            # Recurrent layers run on real tensors: with fake tensors, sizes that should be free would become constants.
            through = None if isinstance(module, nn.RNNBase) else run
            result = self._record(OpaqueModule(path, module), through, real.copy, args, kwargs)
            for hook in [hook for hook in module._forward_hooks.values() if is_boundary(hook)]:
                hook()
            return result

        return call

    def _record(self, call: OpaqueCall, run: _Call | None, real: Callable[[], _Call], args: Any, kwargs: Any) -> Any:
        """Add a node for the call, and return the call's fake result, which becomes the value of the node. The result
        comes from ``run`` with fake arguments; if ``run`` is None or fails, from ``real()`` with real arguments.
        """
        from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

        mode = get_proxy_mode()
        assert mode is not None
        leaves = call.flatten_arguments(args, kwargs)
        _hold(leaves, self.held)
        path = call.path if isinstance(call, OpaqueModule) else call.__name__
        with self._outside(), calling_as_a_whole(path):
            result = self._fake_result(run, real, args, kwargs)
        values = call.flatten_result(result)
        tracer: Any = mode.tracer
        proxies = [tracer.unwrap_proxy(leaf) for leaf in leaves]
        number = len(self.calls)
        self.calls.append(call)
        proxy = tracer.create_proxy("call_function", OPAQUE_CALL, (number, *proxies), {}, name=call.__name__)
        track_tensor_tree(values, proxy, constant=None, tracer=tracer)
        return result

    def _fake_result(self, run: _Call | None, real: Callable[[], _Call], args: Any, kwargs: Any) -> Any:
        fake_mode = detect_fake_mode(pytree.tree_leaves((args, kwargs)))
        assert fake_mode is not None
        assert fake_mode.shape_env is not None
        failure: Exception | None = None
        with patched((self, "_inside", True)), DisableTorchFunction(), disable_current_modes():
            if run is not None:
                try:
                    with fake_mode, fake_mode.shape_env.ignore_fresh_unbacked_symbols():
                        result = run(*args, **kwargs)
                    if all(size.node.hint is not None for size in symbolic_sizes(pytree.tree_leaves(result))):
                        return result
                except Exception as error:
                    failure = error
            try:
                return infer_by_running(real(), args, kwargs, fake_mode)
            except Exception as error:
                if failure is None or isinstance(error, CaptureError):
                    raise
                raise error from failure


# Calls that a graph would lose.

_LOST: dict[Any, str] = {
    Tensor.register_hook: "it registers a hook on a tensor, which a graph would lose",
    Tensor.register_post_accumulate_grad_hook: "it registers a hook on a tensor, which a graph would lose",
    Tensor.backward: "it runs a backward pass within the forward",
    torch.autograd.backward: "it runs a backward pass within the forward",
    torch.autograd.grad: "it computes a gradient within the forward",
}


_NOT_OF_STAND_INS: dict[Any, str] = {
    Tensor.grad: "it asks for the gradient of a tensor, which is another one in every step",
    Tensor.grad_fn: "it asks for the grad_fn of a tensor: a graph has no autograd history, and loses hooks on it",
    Tensor.is_leaf: "it asks whether a tensor is a leaf: a graph has no autograd history",
    Tensor._version: "it asks for the version of a tensor, which is another one in every call",
}
"""Properties of tensors whose values in a capture would differ from those in a call of the model."""


class _Refusing(TorchFunctionMode):
    def __init__(self, held: Held, recorder: ReadRecorder) -> None:
        super().__init__()
        self._held = held
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        asked = getattr(func, "__self__", None)
        if asked is Tensor.data and len(args) == 1:  # .data of a tensor subclass is not traced
            return args[0].detach()
        if asked is Tensor.dtype:
            self._recorder.reads.dtypes = True
        if (
            asked in _NOT_OF_STAND_INS
            and len(args) == 1
            and not (asked is Tensor.is_leaf and isinstance(args[0], nn.Parameter))
            and self._recorder.hears(sys._getframe(1))
        ):
            raise CaptureError(_NOT_OF_STAND_INS[asked])
        if asked is Tensor.requires_grad and len(args) == 1:
            return self._recorder.requires_grad(args[0], sys._getframe(1), func(*args))
        if any(isinstance(value, torch.Generator) for value in (*args, *(kwargs or {}).values())):
            raise CaptureError(
                "it draws random numbers from a torch.Generator of its own, whose state a graph does not have: omit "
                "`generator`, and they come from the random stream of the stage and micro-batch"
            )
        if (reason := _LOST.get(func)) is not None:
            raise CaptureError(reason)
        # torch.export's function mode for autocast lists the open blocks in its attribute ``enter_autocast_nodes``.
        modes = get_current_function_mode_stack() if func is set_grad_enabled else ()
        if any(getattr(mode, "enter_autocast_nodes", None) for mode in modes) and args[0] != torch.is_grad_enabled():
            raise CaptureError(
                "it switches gradients off or on within a block of autocast, which torch.export loses: the backward "
                "pass would differ"
            )
        _hold((args, kwargs), self._held)
        return self._recorder.reads.values.call(func, args, kwargs or {})


@contextmanager
def refusing_lost_calls(tensors: Sequence[Tensor], held: Held, recorder: ReadRecorder) -> Iterator[None]:
    """Within the block, refuse calls that a graph would lose: they raise a CaptureError that does not name the line.

    ``torch.inference_mode`` acts like ``torch.no_grad``, which a graph can contain. Lines that test sizes of
    ``tensors`` are recorded. Real tensors that require gradients are added to ``held`` when torch functions take them.
    ``recorder`` records which properties of tensors are read.
    """
    fake_mode = detect_fake_mode(list(tensors))
    blocks: list[Any] = []

    def enter(self: Any) -> None:
        blocks.append(torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode))

    def leave(self: Any, *error: Any) -> None:
        blocks.pop().__exit__(*error)

    packing = torch.autograd.graph.saved_tensors_hooks
    enter_packing = packing.__enter__

    def pack(self: Any) -> None:
        # save_on_cpu changes no value, so it is allowed.
        if not isinstance(self, torch.autograd.graph.save_on_cpu) and recorder.hears(sys._getframe(1)):
            raise CaptureError("it packs what is saved for the backward pass by hooks, which a graph would lose")
        enter_packing(self)

    kind = torch.inference_mode
    with (
        where_sizes_are_asked(None if fake_mode is None else fake_mode.shape_env),
        patched((kind, "__enter__", enter), (kind, "__exit__", leave), (packing, "__enter__", pack)),
        _Refusing(held, recorder),
    ):
        yield


# Calls of autograd Functions.


class FunctionCalls:
    """Redirects calls of autograd Functions to ``instead``, if ``is_asked`` returns True when a call begins.

    ``instead`` takes the class, the ``apply`` of that class and a tuple of the arguments. It runs in the caller's grad
    mode, and its result becomes the result of the call.
    """

    def __init__(self, instead: Callable[..., Any], is_asked: Callable[[type], bool]) -> None:
        self._instead = instead
        self._is_asked = is_asked
        self._begun: tuple[type, bool] | None = None
        """The class whose ``apply`` has begun and will look up ``forward`` next, and the grad mode of its caller."""
        self._has_run: type | None = None
        """The class whose replaced ``forward`` has run, and whose ``apply`` will look up ``setup_context`` next."""

    def intercepted(self) -> AbstractContextManager[None]:
        """Intercept calls of ``autograd.Function`` within the block."""
        _functions_are_heard()
        return self._patched()

    def _patched(self) -> AbstractContextManager[None]:
        return patched((FunctionMeta, "__getattribute__", lambda cls, name: self._attribute(cls, name)))

    def _attribute(self, cls: Any, name: str) -> Any:
        """Return an attribute of the class, or a replacement if ``apply`` reads it in a call that is redirected."""
        value = type.__getattribute__(cls, name)
        if name not in ("_backward_cls", "forward", "setup_context") or not self._is_asked(cls):
            return value
        if name == "_backward_cls":
            self._begun = cls, torch.is_grad_enabled()
        elif name == "forward" and self._begun is not None and self._begun[0] is cls:
            (_, grad_enabled), self._begun = self._begun, None
            return self._forward(cls, grad_enabled)
        elif name == "setup_context" and self._has_run is cls:
            self._has_run = None
            return _describe
        return value

    def _forward(self, cls: Any, grad_enabled: bool) -> Callable[..., Any]:
        """Return the function that ``apply`` calls in place of ``forward``."""
        above: Any = super(SingleLevelFunction, cls)
        apply = above.apply
        has_context = type.__getattribute__(cls, "setup_context") is not SingleLevelFunction.setup_context

        def forward(*args: Any) -> Any:
            context, values = (None, args) if has_context else (args[0], args[1:])
            with _grad_mode(grad_enabled):
                result = self._instead(cls, apply, values)
            if has_context:
                self._has_run = cls
            else:
                _describe(context, values, result)
            return result

        return forward


def _describe(context: Any, inputs: tuple[Any, ...], result: Any) -> None:
    """Mark the tensors in ``result`` as a forward would, so that ``apply`` returns ``result`` unchanged."""
    outputs = [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, Tensor)]
    context.mark_dirty(*[output for output in outputs if any(output is value for value in inputs)])
    context.mark_non_differentiable(*[output for output in outputs if not output.requires_grad])


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    """Within the block, undo the change of the grad mode by ``apply``, without recording this in the graph."""
    before = torch.is_grad_enabled()
    with DisableTorchFunction():
        set_grad_enabled(enabled)
    try:
        yield
    finally:
        with DisableTorchFunction():
            set_grad_enabled(before)


class _OfOneContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class _OfSetup(_OfOneContext):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.is_set_up = True


@canaries.canary
def _functions_are_heard() -> canaries.Exercises:
    """Test the private names that intercept a model's autograd Functions during a capture."""
    leaf = torch.ones(1, dtype=torch.float64, device="cpu", requires_grad=True)
    found = []
    for kind in (_OfOneContext, _OfSetup):
        bound = kind.apply  # a name that is bound before the interception begins
        heard: list[Any] = []

        def instead(cls: type, apply: Any, args: Any, heard: list[Any] = heard) -> Any:
            heard.append((cls, torch.is_grad_enabled(), apply))
            return args[0] * 3

        with FunctionCalls(instead, lambda cls, kind=kind: cls is kind)._patched():  # type: ignore[misc]
            result = bound(leaf)
        again = heard[0][2](leaf) if heard else result
        found.append([one[:2] for one in heard] == [(kind, True)] and result.item() == 3 and again.item() == 2)
    for name in ("FunctionMeta", "SingleLevelFunction"):
        yield name, all(found)
