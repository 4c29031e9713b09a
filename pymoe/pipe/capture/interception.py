"""Intercepts calls while ``torch.export`` runs a model: opaque calls, each of which leaves one node and runs outside of
the graph, and calls that a graph would lose, which are refused.

Calls of autograd Functions are also intercepted through names that were bound before, as in ``cubed = Cubed.apply``.
``apply`` need not go through Python: from torch 2.15 on it is C code, so replacing ``apply`` would miss bound names.
But in every version ``apply`` reads attributes of the class, and these reads are intercepted: ``_backward_cls``, while
the caller's grad mode is still set, then ``forward``, then ``setup_context`` if the class has one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from pymoe.pipe.capture.errors import CaptureError
from pymoe.pipe.capture.opaque import (
    OpaqueCall,
    OpaqueModule,
    RealModule,
    calling_as_a_whole,
    infer_by_running,
    symbolic_sizes,
    without_boundaries,
)
from pymoe.pipe.capture.python_reads import ReadRecorder
from pymoe.pipe.capture.snapshots import attributes_restored, patched

Held = dict[int, Tensor]
"""Tensors that require gradients and are not registered in a module, by address. torch.export detaches such tensors, so
the captured graph takes them from here.
"""


def _hold(values: Any, held: Held) -> None:
    """Record in ``held`` the unregistered tensors that require gradients among the arguments of a call."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, FakeTensor):
            held[leaf.data_ptr()] = leaf


# Opaque calls.


class _OpaqueMarker(HigherOrderOperator):
    def __call__(self, number: int, *values: Any) -> Any:
        return super().__call__(number, *values)


OPAQUE_CALL = _OpaqueMarker("pymoe_opaque_call")
"""The operator that stands for opaque calls in an exported graph; it takes the number of the call and its computed
leaves."""


_Call = Callable[..., Any]

_OF_OPERATORS = "torch._library.autograd"
"""The module in which torch creates Functions for custom operators. They are not intercepted, because graphs contain
the operators as they are.
"""


class OpaqueCalls:
    """Calls of opaque modules and autograd Functions on this thread: each adds a node of ``OPAQUE_CALL`` and runs
    within ``outside()``.
    """

    def __init__(self, outside: Callable[[], AbstractContextManager[Any]]) -> None:
        self.calls: list[OpaqueCall] = []
        """The calls, indexed by the numbers in the nodes."""
        self.held: Held = {}
        self._outside = outside
        self._thread = threading.get_ident()
        self._inside = False

    @contextmanager
    def intercepted(self, modules: Mapping[str, RealModule]) -> Iterator[None]:
        """Intercept calls within the block, which must be within :func:`attributes_restored` of these modules."""
        for path, module in modules.items():
            module.module.__dict__["_compiled_call_impl"] = self._module_call(path, module)
        functions = FunctionCalls(self._function_call, self._is_intercepted)
        segments = (torch.utils.checkpoint.CheckpointFunction, "apply", staticmethod(self._segment_call()))
        with patched(segments), functions.intercepted():
            yield

    def _is_on(self) -> bool:
        return threading.get_ident() == self._thread and not self._inside

    def _module_call(self, path: str, real: RealModule) -> Callable[..., Any]:
        """Return the function that is called in place of the opaque module ``real``; ``path``: its qualified name."""
        module = real.module

        def run(*args: Any, **kwargs: Any) -> Any:
            with attributes_restored(module):
                without_boundaries(module)
                return module._call_impl(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on():
                return run(*args, **kwargs)
            _run_boundaries(module._forward_pre_hooks)
            # Recurrent layers run on real tensors, because fake ones lose their free sizes there.
            through = None if isinstance(module, nn.RNNBase) else run
            result = self._record(OpaqueModule(path, module), through, real.copy, args, kwargs)
            _run_boundaries(module._forward_hooks)
            return result

        return call

    def _segment_call(self) -> Callable[..., Any]:
        """Return the function that reentrant checkpoints call instead of ``apply``: their segments become part of the
        graph.
        """
        apply = torch.utils.checkpoint.CheckpointFunction.apply

        def call(segment: _Call, preserve: bool, *values: Any) -> Any:
            return segment(*values) if self._is_on() else apply(segment, preserve, *values)

        return call

    def _is_intercepted(self, function: type) -> bool:
        return self._is_on() and type.__getattribute__(function, "__module__") != _OF_OPERATORS

    def _function_call(self, function: Any, apply: _Call, args: tuple[Any, ...]) -> Any:
        """Record a call of an autograd Function as an opaque call. Return the fake result."""
        return self._record(OpaqueCall(function.__name__, apply), apply, lambda: apply, args, {})

    def _record(self, call: OpaqueCall, run: _Call | None, real: Callable[[], _Call], args: Any, kwargs: Any) -> Any:
        """Add a node for the call, and return its fake result as the node's value. The result comes from ``run`` with
        fake arguments; without ``run``, or if that fails, from ``real()`` with real arguments.
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


def _run_boundaries(hooks: Mapping[int, Any]) -> None:
    """Run the hooks that are stage boundaries, outside of the opaque module's call, in which they would be lost."""
    for hook in hooks.values():
        if getattr(hook, "is_boundary", False):
            hook()


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
"""Properties of tensors whose values would differ in a capture."""


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
        if func is set_grad_enabled and args[0] != torch.is_grad_enabled() and _is_in_autocast_block():
            raise CaptureError(
                "it switches gradients off or on within a block of autocast, which torch.export loses: the backward "
                "pass would differ"
            )
        _hold((args, kwargs), self._held)
        return self._recorder.reads.values.call(func, args, kwargs or {})


def _is_in_autocast_block() -> bool:
    # The mode with which torch.export records such blocks keeps a list of the open ones.
    modes = get_current_function_mode_stack()
    return any(getattr(mode, "enter_autocast_nodes", None) for mode in modes)


@contextmanager
def refusing_lost_calls(tensors: Sequence[Tensor], held: Held, recorder: ReadRecorder) -> Iterator[None]:
    """Refuse calls that a graph would lose, within the block: they raise a CaptureError that does not say where.

    ``torch.inference_mode`` acts as ``torch.no_grad`` there, which a graph can contain. Conditions on the sizes of
    ``tensors`` remember the line that tested them; Tensors that ``Held`` describes are added to ``held``; ``recorder``
    records properties of tensors that code reads.
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
    """Redirects calls of autograd Functions to ``instead``.

    Args:
        instead: takes the class, the ``apply`` of that class and the arguments, and returns what the call returns. It
            runs with the caller's grad mode.
        is_asked: returns whether to redirect the call that begins now.
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
        """Return the attribute ``name`` of a Function's class, or a replacement if ``apply`` reads it in a call to
        redirect.
        """
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
    """Mark the tensors in ``result`` as those of a forward, so that ``apply`` returns ``result`` unchanged."""
    outputs = [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, Tensor)]
    context.mark_dirty(*[output for output in outputs if any(output is value for value in inputs)])
    context.mark_non_differentiable(*[output for output in outputs if not output.requires_grad])


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    """Set the grad mode within the block, without recording the change in the graph: ``apply``, whose change this
    undoes, has not recorded it, either.
    """
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
        bound = kind.apply  # a name bound before the interception
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
