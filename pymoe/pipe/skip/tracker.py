"""Trackers keep skips between their stash and their pops; namespaces keep skips of one name apart.

A skippable module knows names alone. It hands what it stashes to the tracker of its thread, and asks the tracker for
what it pops. Outside a pipeline that is an :class:`InPlace`, which keeps skips for the modules that run next in the
same thread; inside, the pipeline's own, which sends them to other stages.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Namespace:
    """Keeps skips apart: those of one name in different namespaces have nothing to do with each other.

    ::

        for _ in range(2):
            ns = Namespace()
            layers += [Down().isolate(ns), Up().isolate(ns)]

    Copies, pickled ones included, are the same namespace.
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and other._id == self._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Namespace {self._id[:8]}>"


Key = tuple[Namespace | None, str]  # None: skips that are not in a namespace


class SkipTracker(Protocol):
    """Takes skips, and gives them back once for each module that pops them."""

    def save(self, key: Key, value: Any) -> None:
        """Keep ``value``, which may be None, for all pops of ``key``."""

    def load(self, key: Key) -> Any:
        """Return what was saved. Raise KeyError if nothing was, or nothing is left."""


_lock = threading.Lock()
_poppers: dict[str, weakref.WeakSet[Any]] = {}  # living modules by what they pop


def will_pop(name: str, module: Any) -> None:
    """Remember, while ``module`` lives, that it pops ``name``, in the namespace that it has then."""
    with _lock:
        _poppers.setdefault(name, weakref.WeakSet()).add(module)


def _count_pops(key: Key) -> int:
    """Return how many times a skip is asked for in a forward pass."""
    with _lock:
        modules = list(_poppers.get(key[1], ()))
    return sum(module.key_of(key[1]) == key for module in modules)


class InPlace:
    """The tracker outside pipelines.

    A skip is released when all modules that pop it have done so. Where two models have the same key, as a model and its
    copy do, it is released at the next stash.
    """

    def __init__(self, count_pops: Callable[[Key], int] = _count_pops) -> None:
        self._kept: dict[Key, tuple[Any, int]] = {}
        self._count_pops = count_pops

    def save(self, key: Key, value: Any) -> None:
        self._kept.pop(key, None)
        if pops := self._count_pops(key):
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
    """Return the tracker of this thread."""
    return _current.tracker


current_skip_tracker = current_tracker  # torchgpipe's name


@contextmanager
def tracking(tracker: SkipTracker) -> Iterator[None]:
    """Have modules that run in this thread within the block stash into ``tracker`` and pop from it."""
    before, _current.tracker = _current.tracker, tracker
    try:
        yield
    finally:
        _current.tracker = before
