"""Tells a module, while a pipeline runs it, which micro-batch this is and whether it is being recomputed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pymoe.autograd import random_streams
from pymoe.autograd.compiler_disable import compiler_disable
from pymoe.autograd.random_streams import RandomStream


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
    """The graph of this forward is not kept, and it is recomputed, unless it changes what cannot be put back."""
    recomputing: bool = False
    """The forward is run again for its graph: whatever counts forwards must leave this one out."""
    stage: int = 0
    """The stage that runs: a module that several stages contain is called by each."""
    is_last: bool | None = None
    """True if no other micro-batch of the mini-batch comes to this stage after it; None: they come by their index."""
    mini_batch: object = None
    """An object that all micro-batches of a mini-batch have, and no others; None: not known."""

    def in_run(self, *, checkpointing: bool = False, recomputing: bool = False) -> MicroBatch:
        """Return the same micro-batch in another run, in less time than ``dataclasses.replace`` takes."""
        return MicroBatch(
            self.index,
            self.count,
            self.weight,
            checkpointing,
            recomputing,
            self.stage,
            self.is_last,
            self.mini_batch,
        )


class _ThreadMicroBatch(threading.local):
    micro_batch: MicroBatch | None = None


this_thread = _ThreadMicroBatch()
"""``this_thread.micro_batch`` is what this thread runs, for those who set it themselves; see :func:`count_threads`."""
_lock = threading.Lock()
_threads = 0  # the number of threads that run pipelines now


# torch.compile would take what a thread's variable holds for a constant, but looks at a number of the module each time.
@compiler_disable
def _of_this_thread() -> MicroBatch | None:
    return this_thread.micro_batch


def micro_batch() -> MicroBatch | None:
    """Return the micro-batch that a stage of a pipeline runs on this thread; None outside of a stage's forward.

    All calls within one forward get the same object; every mini-batch has new ones.
    """
    return _of_this_thread() if _threads > 0 else None


def is_checkpointing() -> bool:
    """Return whether this is a forward whose graph is not kept, because the pipeline will recompute it."""
    current = micro_batch()
    return current is not None and current.checkpointing


def is_recomputing() -> bool:
    """Return whether this is the recomputation of a checkpointed micro-batch."""
    current = micro_batch()
    return current is not None and current.recomputing


@contextmanager
def running(micro_batch: MicroBatch) -> Iterator[None]:
    """Note, within the block, that this thread runs a stage's forward for ``micro_batch``."""
    count_threads(1)
    before, this_thread.micro_batch = this_thread.micro_batch, micro_batch
    try:
        yield
    finally:
        this_thread.micro_batch = before
        count_threads(-1)


@contextmanager
def in_pipeline(stream: RandomStream) -> Iterator[None]:
    """Note, within the block, that this thread runs actions of a pipeline, and draws from ``stream`` between them."""
    streams = random_streams.this_thread
    outer, outer_stream = this_thread.micro_batch, streams.stream
    count_threads(1)
    try:
        streams.stream = stream
        if outer_stream is None:
            random_streams.begin_drawing()
        yield
    finally:
        this_thread.micro_batch, streams.stream = outer, outer_stream
        if outer_stream is None:
            random_streams.end_drawing()
            random_streams.restore()
        count_threads(-1)


def count_threads(difference: int) -> None:
    """Add to the number of threads that run actions of pipelines."""
    global _threads
    with _lock:
        _threads += difference
