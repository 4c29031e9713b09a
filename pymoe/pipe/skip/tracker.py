"""Where skips are between their stash and their pops.

A skippable module knows names alone. It hands what it stashes to the tracker of its thread, and asks that for what it
pops: outside a pipeline an :class:`InPlace`, which keeps skips for the modules that run next in the same thread; inside
one the pipeline's own, which sends them to other stages.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from pymoe.pipe.skip.namespace import Namespace

__all__ = ["Key", "SkipTracker", "current_tracker", "tracking", "will_pop"]

Key = tuple[Namespace | None, str]  # None: the namespace of skips that are in none


class SkipTracker(Protocol):
    """Takes skips, and gives them back once for each module that pops them."""

    def save(self, key: Key, value: Any) -> None:
        """Keep ``value``, which may be None, for all pops of ``key``."""

    def load(self, key: Key) -> Any:
        """What was saved. Raises KeyError if nothing was, or nothing is left."""


_lock = threading.Lock()
_poppers: dict[str, weakref.WeakSet[Any]] = {}  # living modules by what they pop


def will_pop(name: str, module: Any) -> None:
    """Remember, while ``module`` lives, that it pops ``name``, in the namespace that it has then."""
    with _lock:
        _poppers.setdefault(name, weakref.WeakSet()).add(module)


def _count_pops(key: Key) -> int:
    """How many times a skip is asked for in a forward pass."""
    with _lock:
        modules = list(_poppers.get(key[1], ()))
    return sum(module.key_of(key[1]) == key for module in modules)


class InPlace:
    """The tracker outside pipelines.

    A skip is let go of when as many modules have popped it as there are that do. Where two models have one key, as a
    model and its copy do, that is not before the next stash.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, tuple[Any, int]] = {}

    def save(self, key: Key, value: Any) -> None:
        self._kept.pop(key, None)
        if pops := _count_pops(key):
            self._kept[key] = value, pops

    def load(self, key: Key) -> Any:
        value, pops = self._kept.pop(key)
        if pops > 1:
            self._kept[key] = value, pops - 1
        return value


class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker: SkipTracker = InPlace()


_current = _Current()


def current_tracker() -> SkipTracker:
    """The tracker of this thread."""
    return _current.tracker


@contextmanager
def tracking(tracker: SkipTracker) -> Iterator[None]:
    """Modules that run in this thread, within the block, stash into ``tracker`` and pop from it."""
    before, _current.tracker = _current.tracker, tracker
    try:
        yield
    finally:
        _current.tracker = before
