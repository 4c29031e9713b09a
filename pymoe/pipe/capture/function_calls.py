"""Intercepts calls of autograd Functions, also those by a name that was bound before, as in ``cubed = Cubed.apply``.

``apply`` need not go through Python: from torch 2.15 on it is C code from the start, so an ``apply`` put in its place
would miss bound ones. But in every version it asks the class for what it runs: ``_backward_cls``, while the caller's
grad mode is still on, then ``forward``, then, where the class has one, ``setup_context``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import DisableTorchFunction, FunctionMeta, SingleLevelFunction, set_grad_enabled
from pymoe.pipe.capture.snapshots import patched


class FunctionCalls:
    """The calls of autograd Functions that ``instead`` is to make.

    Args:
        instead: takes the class, the ``apply`` of that class and the arguments, and returns what the call returns. It
            runs with the caller's grad mode.
        is_asked: whether the call that begins now is one of them.
    """

    def __init__(self, instead: Callable[..., Any], is_asked: Callable[[type], bool]) -> None:
        self._instead = instead
        self._is_asked = is_asked
        self._begun: tuple[type, bool] | None = None
        """The class whose ``apply`` has begun and will ask for ``forward``, and the grad mode of its caller."""
        self._has_run: type | None = None
        """The class whose ``apply`` will ask for ``setup_context``."""

    def intercepted(self) -> AbstractContextManager[None]:
        """Intercept them within the block."""
        _functions_are_heard()
        return self._patched()

    def _patched(self) -> AbstractContextManager[None]:
        return patched((FunctionMeta, "__getattribute__", lambda cls, name: self._attribute(cls, name)))

    def _attribute(self, cls: Any, name: str) -> Any:
        """Return what a Function's class answers."""
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
        """Return what ``apply`` is to call in place of ``forward``."""
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
    """Have ``apply``, which takes ``result`` for what a forward has computed, return it as it is."""
    outputs = [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, Tensor)]
    context.mark_dirty(*[output for output in outputs if any(output is value for value in inputs)])
    context.mark_non_differentiable(*[output for output in outputs if not output.requires_grad])


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    """Switch gradients on or off, which ``apply`` has done without the knowledge of a graph that is being recorded."""
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
    """Exercise what intercepts the autograd Functions of a model while it is captured."""
    leaf = torch.ones(1, dtype=torch.float64, device="cpu", requires_grad=True)
    found = []
    for kind in (_OfOneContext, _OfSetup):
        bound = kind.apply  # by a name that was bound before
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
