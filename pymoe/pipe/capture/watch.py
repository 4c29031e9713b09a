"""What is watched while ``torch.export`` runs a model's code: calls that a graph would lose, questions about sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from pymoe.pipe.capture.errors import CaptureError, is_library

__all__ = ["Held", "asked_at", "hold", "watching"]

_LOST: dict[Any, str] = {
    Tensor.register_hook: "it puts a hook on a tensor, and a graph would forget it",
    Tensor.register_post_accumulate_grad_hook: "it puts a hook on a tensor, and a graph would forget it",
    Tensor.backward: "it runs a backward pass within the forward",
    torch.autograd.backward: "it runs a backward pass within the forward",
    torch.autograd.grad: "it takes a gradient within the forward",
}


Held = dict[int, Tensor]
"""Tensors that take gradients and that no module has registered, by address. A graph would hold them detached."""


def hold(values: Any, held: Held) -> None:
    """Note such tensors among the arguments of a call."""
    from torch._subclasses.fake_tensor import FakeTensor

    for leaf in _pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, FakeTensor):
            held[leaf.data_ptr()] = leaf


class _Watch(TorchFunctionMode):
    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held = held

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is Tensor.data and len(args) == 1:  # a graph cannot look behind a tensor
            return args[0].detach()
        if (reason := _LOST.get(func)) is not None:
            raise CaptureError(reason)
        hold((args, kwargs), self._held)
        return func(*args, **kwargs or {})


@contextmanager
def watching(tensors: Sequence[Tensor], held: Held) -> Iterator[None]:
    """Within the block calls that a graph would lose raise CaptureError, without a place; ``torch.inference_mode`` is
    ``torch.no_grad``, which a graph can have; guards remember the line that asked (:func:`asked_at`); and ``held`` gets
    what :class:`Held` says.
    """
    from torch._guards import detect_fake_mode

    fake_mode = detect_fake_mode(list(tensors))
    if fake_mode is not None and fake_mode.shape_env is not None:
        fake_mode.shape_env.guards = _Guards(fake_mode.shape_env.guards)
    kind: Any = torch.inference_mode
    before = kind.__enter__, kind.__exit__
    blocks: list[Any] = []

    def enter(self: Any) -> None:
        blocks.append(torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode))

    def leave(self: Any, *error: Any) -> None:
        blocks.pop().__exit__(*error)

    kind.__enter__, kind.__exit__ = enter, leave
    try:
        with _Watch(held):
            yield
    finally:
        kind.__enter__, kind.__exit__ = before


class _Guards(list[Any]):
    """The guards of a shape environment, and for each the line of the user's code that led to it."""

    def __init__(self, guards: Sequence[Any]) -> None:
        super().__init__(guards)
        self.places = [""] * len(guards)

    def append(self, guard: Any) -> None:
        super().append(guard)
        self.places.append(_users_line(sys._getframe(1)))


def _users_line(frame: FrameType | None) -> str:
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def asked_at(environment: Any) -> list[tuple[Any, str]]:
    """The conditions on sizes under which a graph was made, as expressions of sympy, and the lines that asked."""
    guards = environment.guards
    places = guards.places if isinstance(guards, _Guards) else [""] * len(guards)
    return [(guard.expr, place) for guard, place in zip(guards, places, strict=True)]
