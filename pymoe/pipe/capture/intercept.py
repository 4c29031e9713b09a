"""How calls become opaque while ``torch.export`` runs the model: each leaves one node, and runs beside the graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree

from pymoe.pipe.capture.by_running import RealModule, fakes_by_running, without_boundaries
from pymoe.pipe.capture.errors import CaptureError
from pymoe.pipe.capture.opaque import OpaqueCall, OpaqueFunction, OpaqueModule, running_in_one_piece
from pymoe.pipe.capture.untouched import untouched
from pymoe.pipe.capture.watch import Held, hold

__all__ = ["OPAQUE", "intercepting"]

OPAQUE = "pymoe_opaque_call"


@contextmanager
def intercepting(
    modules: Mapping[str, RealModule],
    calls: list[OpaqueCall],
    held: Held,
    beside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[None]:
    """Within the block, on this thread, calls of these modules and of autograd Functions add themselves to ``calls``
    and leave a node: the operator :func:`marker` with the number of the call and its computed leaves.

    Modules are given by qualified name, and must be :func:`untouched` around the block. What they do is done within
    ``beside()``.
    """
    tracing = _Tracing(calls, held, beside)
    for path, module in modules.items():
        module.module.__dict__["_compiled_call_impl"] = tracing.module_call(path, module)
    with _functions(tracing):
        yield


class _Tracing:
    def __init__(self, calls: list[OpaqueCall], held: Held, beside: Callable[[], AbstractContextManager[Any]]) -> None:
        self._beside = beside
        self._held = held
        self._calls = calls
        self._thread = threading.get_ident()
        self._inside = False

    def is_on(self) -> bool:
        return threading.get_ident() == self._thread and not self._inside

    def module_call(self, path: str, real: RealModule) -> Callable[..., Any]:
        module = real.module

        def run(*args: Any, **kwargs: Any) -> Any:
            with untouched(module):
                without_boundaries(module)
                return module._call_impl(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on():
                return run(*args, **kwargs)
            _boundaries(module._forward_pre_hooks)
            result = self.record(OpaqueModule(path, module), None if real.fixes_sizes else run, real.copy, args, kwargs)
            _boundaries(module._forward_hooks)
            return result

        return call

    def record(
        self,
        call: OpaqueCall,
        run: Callable[..., Any] | None,
        real: Callable[[], Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Leave a node for the call, and return what it makes of fake arguments, as the node's value.

        That is what ``run`` makes of them; or what ``real()`` makes of real ones, without ``run``, or where they do not
        get through it.
        """
        from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

        mode = get_proxy_mode()
        assert mode is not None
        leaves = call.take(args, kwargs)
        hold(leaves, self._held)
        path = call.path if isinstance(call, OpaqueModule) else call.__name__
        with self._beside(), running_in_one_piece(path):
            result = self._beside_the_graph(run, real, args, kwargs)
        values = call.give(result)
        tracer: Any = mode.tracer
        proxies = [tracer.unwrap_proxy(leaf) for leaf in leaves]
        number = len(self._calls)
        self._calls.append(call)
        proxy = tracer.create_proxy("call_function", marker(), (number, *proxies), {}, name=call.__name__)
        track_tensor_tree(values, proxy, constant=None, tracer=tracer)
        return result

    def _beside_the_graph(
        self,
        run: Callable[..., Any] | None,
        real: Callable[[], Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        from torch._guards import detect_fake_mode
        from torch.utils._python_dispatch import _disable_current_modes

        fake_mode = detect_fake_mode(_pytree.tree_leaves((args, kwargs)))
        assert fake_mode is not None
        assert fake_mode.shape_env is not None
        self._inside = True
        try:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                if run is None:
                    return fakes_by_running(real(), args, kwargs, fake_mode)
                try:
                    with fake_mode, fake_mode.shape_env.ignore_fresh_unbacked_symbols():
                        result = run(*args, **kwargs)
                    if not _depends_on_values(result):
                        return result
                except Exception as error:
                    try:
                        return fakes_by_running(real(), args, kwargs, fake_mode)
                    except CaptureError:
                        raise
                    except Exception as other:
                        raise other from error
                return fakes_by_running(real(), args, kwargs, fake_mode)
        finally:
            self._inside = False


def _depends_on_values(result: Any) -> bool:
    """Whether sizes of fake results are unknown."""
    sizes = [
        size
        for leaf in _pytree.tree_leaves(result)
        for size in (leaf.shape if isinstance(leaf, torch.Tensor) else [leaf])
        if isinstance(size, torch.SymInt)
    ]
    return any(size.node.hint is None for size in sizes)


def _boundaries(hooks: Mapping[int, Any]) -> None:
    """Boundaries of stages are hooks, and those of an opaque module would be lost within its call."""
    for hook in hooks.values():
        if getattr(hook, "is_boundary", False):
            hook()


_OF_OPERATORS = "torch._library.autograd"
"""Where torch makes Functions for custom operators, which graphs hold as they are."""


@contextmanager
def _functions(tracing: _Tracing) -> Iterator[None]:
    """Autograd Functions ask ``tracing``. Their base class is asked by all, also by ``apply = MyFunction.apply``."""
    from torch.autograd import function

    Base: Any = function._SingleLevelFunction

    def apply(cls: Any, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            return super(Base, cls).apply(*args)

        if not tracing.is_on() or cls.__module__ == _OF_OPERATORS:
            return run(*args)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            function, _preserve, *values = args
            return function(*values)
        return tracing.record(OpaqueFunction(cls), run, lambda: run, args, {})

    Base.apply = classmethod(apply)
    try:
        yield
    finally:
        del Base.apply


def marker() -> Any:
    """What stands for opaque calls in an exported graph."""
    global _marker
    if _marker is None:
        _marker = _make_marker()
    return _marker


_marker: Any = None


def _make_marker() -> Any:
    from torch._ops import HigherOrderOperator

    class OpaqueMarker(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__(OPAQUE)

        def __call__(self, number: int, *values: Any) -> Any:
            return super().__call__(number, *values)

    return OpaqueMarker()
