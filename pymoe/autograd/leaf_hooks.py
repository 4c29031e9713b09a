"""Hooks of leaves are for the sum of all calls' gradients: they do not run where those of each call are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["entry_of_this_thread", "keep_hooks_outside", "within_call"]

Result = TypeVar("Result")


class _Running(threading.local):
    """On a thread that differentiates a call: the entry of its graph."""

    entry: Any = None


_running = _Running()
_NONE = object()  # the entry of a graph that has none
_everywhere: set[object] = set()  # one for every call that some thread differentiates


def entry_of_this_thread() -> Any:
    """The entry of the call that this thread differentiates; None if it does not."""
    return _running.entry


def within_call(entry: Any, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """``function(*args)``, by which this thread differentiates a call: hooks of leaves do not run."""
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

    On a host a backward pass runs on the thread that asks for it. The nodes of other devices run on autograd's own
    threads, which do not know who has asked: there the hook does not run while anybody differentiates a call.
    """

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        if _running.entry is not None or (_everywhere and not grad.is_cpu):
            return None
        return self.hook(grad)


def keep_hooks_outside(leaf: torch.Tensor) -> None:
    """Autograd runs a leaf's hooks where its gradient is asked for, too, and would come to them twice."""
    hooks: Any = leaf._backward_hooks
    for key, hook in list(hooks.items()) if hooks else ():
        if type(hook) is not _OutsideCalls and key in hooks:
            hooks[key] = _OutsideCalls(hook)
