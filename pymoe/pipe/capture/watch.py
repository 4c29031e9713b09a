"""What is watched while ``torch.export`` runs a model's code: calls that a graph would lose, questions about sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from pymoe.pipe.capture.errors import CaptureError, is_library
from pymoe.pipe.capture.reads import Recorder

__all__ = ["Held", "asked_at", "hold", "watching"]

_TORCH = str(Path(torch.__file__).parent) + "/"
_CONVERSIONS = torch.__file__
_SYMBOLS = _TORCH + "fx/experimental/"
_LAYERS = (_TORCH + "nn/", _TORCH + "functional.py")
_TRIED = (2, 3, 4, 5, 7, 8, 16, 64, 1021, 2**20)

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
    def __init__(self, held: Held, recorder: Recorder) -> None:
        super().__init__()
        self._held = held
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is Tensor.data and len(args) == 1:  # a graph cannot look behind a tensor
            return args[0].detach()
        if getattr(func, "__self__", None) is Tensor.dtype:
            self._recorder.reads.dtypes = True
        if getattr(func, "__self__", None) is Tensor.requires_grad and len(args) == 1:
            return self._recorder.requires_grad(args[0], sys._getframe(1), func(*args))
        if any(isinstance(value, torch.Generator) for value in (*args, *(kwargs or {}).values())):
            raise CaptureError(
                "it draws random numbers from a torch.Generator of its own, whose state a graph does not have: leave "
                "`generator` out, and they come from the stage's and micro-batch's own stream"
            )
        if (reason := _LOST.get(func)) is not None:
            raise CaptureError(reason)
        if func is torch._C._set_grad_enabled and args[0] != torch.is_grad_enabled() and _is_in_autocast_block():
            raise CaptureError(
                "it switches gradients off or on within a block of autocast, which torch.export forgets: its backward "
                "pass would be another"
            )
        hold((args, kwargs), self._held)
        return func(*args, **kwargs or {})


def _is_in_autocast_block() -> bool:
    # The mode by which torch.export notes such blocks keeps a list of those that it is in.
    modes = torch.overrides._get_current_function_mode_stack()
    return any(getattr(mode, "enter_autocast_nodes", None) for mode in modes)


@contextmanager
def watching(tensors: Sequence[Tensor], held: Held, recorder: Recorder) -> Iterator[None]:
    """Within the block calls that a graph would lose raise CaptureError, without a place; ``torch.inference_mode`` is
    ``torch.no_grad``, which a graph can have; guards remember the line that asked (:func:`asked_at`); ``held`` gets
    what :class:`Held` says, and ``recorder`` which questions tensors are asked.
    """
    from torch._guards import detect_fake_mode

    fake_mode = detect_fake_mode(list(tensors))
    environment: Any = None if fake_mode is None else fake_mode.shape_env
    if environment is not None:
        environment.guards = _Guards(environment.guards)
        environment.evaluate_sym_node = environment.guards.listening(environment.evaluate_sym_node)
    kind: Any = torch.inference_mode
    before = kind.__enter__, kind.__exit__
    blocks: list[Any] = []

    def enter(self: Any) -> None:
        blocks.append(torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode))

    def leave(self: Any, *error: Any) -> None:
        blocks.pop().__exit__(*error)

    kind.__enter__, kind.__exit__ = enter, leave
    try:
        with _Watch(held, recorder):
            yield
    finally:
        kind.__enter__, kind.__exit__ = before
        if environment is not None:
            del environment.evaluate_sym_node


class _Guards(list[Any]):
    """The guards of a shape environment, and for each the line of the user's code that led to it."""

    def __init__(self, guards: Sequence[Any]) -> None:
        super().__init__(guards)
        self.places = [""] * len(guards)
        self.answers: list[tuple[Any, str]] = []
        """What the model's own code asked, whether or not the answer was known, as it was answered; and the lines."""

    def listening(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """``evaluate``, which answers questions about sizes; those of the model's code are remembered."""

        def listener(node: Any, *more: Any, **named: Any) -> Any:
            expression, answer = node.expr, evaluate(node, *more, **named)
            frame = sys._getframe(1)
            if _is_asked_by_model(frame):
                self.answers.append((_as_answered(expression, answer), _users_line(frame)))
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
    """Whether Python code of the model, or of ``torch.nn``, has made a ``bool`` or ``int`` of a size.

    Operators ask, too, as to whether to broadcast: but when the graph runs, they ask again.
    """
    converted = False
    while frame is not None and frame.f_code.co_filename.startswith((_CONVERSIONS, _SYMBOLS)):
        converted = converted or frame.f_code.co_filename == _CONVERSIONS
        frame = frame.f_back
    if frame is None or not converted:
        return False
    file = frame.f_code.co_filename
    return not file.startswith(_TORCH) or file.startswith(_LAYERS)


def _as_answered(expression: Any, answer: Any) -> Any:
    import sympy  # type: ignore[import-not-found, import-untyped]

    if isinstance(answer, bool) or answer in (sympy.true, sympy.false):
        return expression if answer else sympy.Not(expression)
    return sympy.Eq(expression, answer)


def asked_at(environment: Any) -> list[tuple[Any, str]]:
    """The conditions on sizes under which a graph was made, as expressions of sympy, and the lines that asked.

    Those of operators that hold for all sizes but 0 and 1 are left out.
    """
    guards = environment.guards
    if not isinstance(guards, _Guards):
        return [(guard.expr, "") for guard in guards]
    asked = [(guard.expr, place) for guard, place in zip(guards, guards.places, strict=True)]
    return guards.answers + [(expression, place) for expression, place in asked if not _is_about_one(expression)]


def _is_about_one(expression: Any) -> bool:
    """Whether it holds for all sizes from 2 up, as far as one can see."""
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
