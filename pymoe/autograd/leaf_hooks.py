"""Hooks of leaves: run on the sum of all calls' gradients, and not when the gradients of one call are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class _Running(threading.local):
    """The entry of the graph of the call that this thread differentiates."""

    entry: Any = None


_running = _Running()
_NONE = object()  # the entry of a graph without an entry
_everywhere: set[object] = set()  # one object for every call that some thread differentiates


def entry_of_this_thread() -> Any:
    """Return the entry of the call that this thread differentiates, or None."""
    return _running.entry


def within_call(entry: Any, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Call ``function(*args)``, which differentiates a call on this thread: hooks of leaves do not run."""
    token = object()
    before, _running.entry = _running.entry, entry or _NONE
    _everywhere.add(token)
    try:
        return function(*args, **options)
    finally:
        _everywhere.discard(token)
        _running.entry = before


class _OutsideCalls:
    """A hook of a leaf that does not run within calls.

    On the host a backward pass runs on the thread that asks for it. Nodes of other devices run on autograd's own
    threads, which do not know that thread: there the hook does not run while any thread differentiates a call.
    """

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        if _running.entry is not None or (_everywhere and not grad.is_cpu):
            return None
        return self.hook(grad)


def keep_hooks_outside(leaf: torch.Tensor) -> None:
    """Wrap the hooks of ``leaf``: autograd would also run them when ``autograd.grad`` computes its gradient."""
    hooks: Any = leaf._backward_hooks
    for key, hook in list(hooks.items()) if hooks else ():
        if type(hook) is not _OutsideCalls and key in hooks:
            hooks[key] = _OutsideCalls(hook)
