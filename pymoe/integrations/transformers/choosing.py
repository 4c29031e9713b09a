"""Overrides which experts a router of the transformers library chooses, and nothing else.

Routers choose experts by calling ``torch.topk`` on scores whose last dimension is E. While a router runs, the mode
:class:`Choosing` intercepts that call: it substitutes its own indices, and gathers the router's scores at these
indices as the values. The router thus still computes the weights by its own rule. (If the router has first chosen
groups, it has masked the scores of other groups. The values are then NaN.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROUTERS = ("gate", "router")
"""The names of routers in blocks."""


Mode = TypeVar("Mode", bound=TorchFunctionMode)


def router_of(block: nn.Module | None) -> Any:
    """Return the router of a sparse block; None if the block is None or has no router."""
    return next((child for name in ROUTERS if (child := getattr(block, name, None)) is not None), None)


class Choosing(TorchFunctionMode):
    """A mode in which ``choose`` chooses the experts instead of ``torch.topk``.

    Args:
        num_experts: E, the number of experts.
        choose: takes the scores (..., E), detached, and K; returns the indices (..., K), int64, of distinct experts.
    """

    def __init__(self, num_experts: int, choose: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.choose = choose
        self.indices: Tensor | None = None
        """The indices of the last choice among all experts; None before the first."""
        self.groups = False
        """True once the router has chosen groups of experts, after which it masks the scores of the other groups."""

    def __enter__(self) -> Choosing:
        _running.modes.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        _running.modes.remove(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        return self._choice(func, *args, **kwargs)

    def _choice(self, func: Any, input: Tensor, k: int, dim: int = -1, **other: Any) -> Any:
        size = input.shape[-1]
        if size != self.num_experts or dim not in (-1, input.dim() - 1):
            # Choosing the only group excludes no experts.
            self.groups = self.groups or size > 1
            return func(input, k, dim, **other)
        # Make the call, although its result is not used, so that outer modes see it.
        func(input, k, dim, **other)
        indices = self.choose(input.detach(), k)
        for mode in _running.modes:
            mode.indices = indices
        values = input.gather(-1, indices)
        # After a choice of groups, the router has masked the scores of all other groups. Weights that it computed from
        # masked scores would be wrong, so make them NaN.
        if self.groups:
            values = torch.full_like(values, torch.nan)
        return torch.return_types.topk((values, indices))


class _Running(threading.local):
    """The :class:`Choosing` modes that are active in a thread, innermost last."""

    def __init__(self) -> None:
        self.modes: list[Choosing] = []


_running = _Running()


class ModeAround(Generic[Mode]):
    """Runs every call of a router inside a new mode, until :meth:`remove`.

    Args:
        router: the module whose call makes the choice.
        make: called once for each call of the router; returns the mode for that call.
    """

    def __init__(self, router: nn.Module, make: Callable[[], Mode]) -> None:
        self.make = make
        self.last: Mode | None = None
        """The mode of the router's last call that returned; None once it is taken."""
        around = router.__dict__.get("forward")
        self._around = around if isinstance(around, _Around) else _Around(router)
        self._around.parts.append(self)

    def take(self) -> Mode | None:
        """Return the mode of the router's last call; None if no call has returned since the last ``take``."""
        last, self.last = self.last, None
        return last

    def remove(self) -> None:
        """Stop entering a mode in the router's calls."""
        self._around.remove(self)


class _Around:
    """Replaces a router's forward with one that enters the modes of all ``parts`` and calls the router's own forward.

    A pair of hooks would not do: torch calls no hook after a :class:`KeyboardInterrupt`, so the modes would stay on.
    """

    def __init__(self, router: nn.Module) -> None:
        self.router = router
        self.before = router.__dict__.get("forward")
        self.parts: list[ModeAround[Any]] = []
        self.hook = router.register_forward_pre_hook(_refuse_compiled)
        router.forward = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        forward = self.before or type(self.router).forward.__get__(self.router)
        with ExitStack() as stack:
            modes = [(part, stack.enter_context(part.make())) for part in self.parts]
            result = forward(*arguments, **named)
        for part, mode in modes:
            part.last = mode
        return result

    def remove(self, part: ModeAround[Any]) -> None:
        self.parts.remove(part)
        if not self.parts:
            self.hook.remove()
            del self.router.forward
            if self.before is not None:
                self.router.forward = self.before


def _refuse_compiled(router: nn.Module, arguments: Any) -> None:
    """Raise RuntimeError under torch.compile. A hook does this, because Dynamo traces again when a hook is added, but
    not when a forward is replaced.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{type(router).__name__}: what a router computes can be followed in eager code only, got torch.compile"
        )
