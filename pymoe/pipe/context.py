"""What a module can ask while a pipeline runs it: which micro-batch this is, and whether it is a repetition."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pymoe.autograd.compiler_disable import compiler_disable

__all__ = ["MicroBatch", "call_for", "in_pipeline", "is_checkpointing", "is_recomputing", "micro_batch", "running"]

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class MicroBatch:
    """The micro-batch whose forward pass this thread runs."""

    index: int
    """Counted from 0."""
    count: int
    """The number of micro-batches of this mini-batch."""
    weight: float
    """Its share of the rows of the mini-batch: what a mean over its rows counts in the mean over all."""
    checkpointing: bool = False
    """The graph of this forward is not kept; it will be run again."""
    recomputing: bool = False
    """The forward is run again, to make the graph: whatever counts forwards must leave this one out."""
    stage: int = 0
    """The stage that runs: a module that is in several is called by each."""


class _Thread(threading.local):
    micro_batch: MicroBatch | None = None


_thread = _Thread()
_lock = threading.Lock()
_threads = 0  # that run pipelines now


# torch.compile would take what a thread's variable holds for a constant, but looks at a number of the module each time.
@compiler_disable
def _of_this_thread() -> MicroBatch | None:
    return _thread.micro_batch


def micro_batch() -> MicroBatch | None:
    """The micro-batch that a stage of a pipeline runs on this thread; None outside of a stage's forward.

    All calls within one forward get one object, and every mini-batch has others.
    """
    return _of_this_thread() if _threads > 0 else None


def is_checkpointing() -> bool:
    """Is this a forward whose graph is not kept, of which the pipeline will run a second one?"""
    current = micro_batch()
    return current is not None and current.checkpointing


def is_recomputing() -> bool:
    """Is this the second forward of a checkpointed micro-batch?"""
    current = micro_batch()
    return current is not None and current.recomputing


@contextmanager
def running(micro_batch: MicroBatch) -> Iterator[None]:
    """Within the block this thread runs a stage's forward for ``micro_batch``."""
    _count(1)
    before, _thread.micro_batch = _thread.micro_batch, micro_batch
    try:
        yield
    finally:
        _thread.micro_batch = before
        _count(-1)


def call_for(micro_batch: MicroBatch, function: Callable[..., Result], *args: Any) -> Result:
    """``function(*args)``, as in :func:`running`, on a thread that is :func:`in_pipeline`."""
    thread = _thread
    before, thread.micro_batch = thread.micro_batch, micro_batch
    try:
        return function(*args)
    finally:
        thread.micro_batch = before


def in_pipeline(function: Callable[..., Result], *args: Any) -> Result:
    """``function(*args)``, in which this thread runs forwards of stages."""
    _count(1)
    try:
        return function(*args)
    finally:
        _count(-1)


def _count(threads: int) -> None:
    global _threads
    with _lock:
        _threads += threads
