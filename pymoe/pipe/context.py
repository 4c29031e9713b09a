"""Tells the modules of a pipeline which micro-batch is processed, and whether the forward is a recomputation. Also
weights the losses that layers inject by the micro-batch's share of the rows of the mini-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from pymoe.autograd import random_streams
from pymoe.autograd.compiler_disable import compiler_disable
from pymoe.autograd.random_streams import RandomStream
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.moe import MoE
from pymoe.nn.router import Router


@dataclass(eq=False, slots=True)
class MicroBatch:
    """The micro-batch whose forward pass this thread runs."""

    index: int
    """The position of the micro-batch in the mini-batch, from 0."""
    count: int
    """The number of micro-batches of this mini-batch."""
    weight: float
    """This micro-batch's share of the rows of the mini-batch. A mean over all rows is the sum of the
    micro-batches' means, each times its weight. In a pipe on several processes, which know the number of rows only at
    the end of a step, it is 1.
    """
    checkpointing: bool = False
    """True if the autograd graph of this forward is not kept, because the forward is to be recomputed. (It is not
    recomputed if it changes something that cannot be restored.)
    """
    recomputing: bool = False
    """True if this forward repeats an earlier one to make its autograd graph: code that counts forwards must not count
    it.
    """
    stage: int = 0
    """The number of the stage that runs. A module in several stages is called by each of them."""
    is_last: bool | None = None
    """True if this stage runs no further micro-batch of the mini-batch after this one; None if it runs micro-batches in
    the order of their indices.
    """
    mini_batch: object = None
    """An object that identifies the mini-batch, shared by all its micro-batches; None if unknown."""

    def in_run(self, *, checkpointing: bool = False, recomputing: bool = False) -> MicroBatch:
        """Return a copy for another run of the forward, with the given flags; faster than ``dataclasses.replace``."""
        about = self.index, self.count, self.weight, checkpointing, recomputing
        return MicroBatch(*about, self.stage, self.is_last, self.mini_batch)


class _ThreadMicroBatch(threading.local):
    micro_batch: MicroBatch | None = None


this_thread = _ThreadMicroBatch()
"""``this_thread.micro_batch`` is the micro-batch that this thread runs. Code that sets it directly must also
call :func:`count_threads`."""
_lock = threading.Lock()
_threads = 0  # how many threads are running actions of pipelines


# torch.compile must not trace this function, because it would treat the thread-local value as a constant. It may trace
# ``micro_batch``, because compiled code checks the global ``_threads`` in every call.
@compiler_disable
def _of_this_thread() -> MicroBatch | None:
    return this_thread.micro_batch


def micro_batch() -> MicroBatch | None:
    """Return the micro-batch whose forward a stage runs on this thread; None outside of a stage's forward.

    All calls within one forward return the same object; every mini-batch has new objects.
    """
    return _of_this_thread() if _threads > 0 else None


def is_checkpointing() -> bool:
    """Return whether this is a forward whose autograd graph is not kept, because the pipeline will recompute it."""
    current = micro_batch()
    return current is not None and current.checkpointing


def is_recomputing() -> bool:
    """Return whether this is the recomputation of a checkpointed micro-batch."""
    current = micro_batch()
    return current is not None and current.recomputing


@contextmanager
def running(micro_batch: MicroBatch) -> Iterator[None]:
    """Within the block, make ``micro_batch`` the current micro-batch of this thread."""
    count_threads(1)
    before, this_thread.micro_batch = this_thread.micro_batch, micro_batch
    try:
        yield
    finally:
        this_thread.micro_batch = before
        count_threads(-1)


@contextmanager
def in_pipeline(stream: RandomStream) -> Iterator[None]:
    """Within the block, count this thread as running a pipeline, and make it draw random numbers from ``stream``
    between actions.
    """
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
    """Add ``difference`` to the number of threads that run actions of pipelines."""
    global _threads
    with _lock:
        _threads += difference


# Losses that layers inject (``pymoe.nn.inject_loss``). They are not part of the loss of a step, so the weights of that
# loss do not apply to them.

Function = Callable[..., Sequence[Any]]


def is_weighted(layer: nn.Module) -> bool:
    """Return whether :func:`with_auxiliary_losses` changes the layer's ``scale`` while its stage runs."""
    return isinstance(layer, AuxiliaryLosses)


def keeps_counts(layer: nn.Module) -> bool:
    """Return whether this is a layer of pymoe that counts, keeps statistics or injects a loss in its forward."""
    return isinstance(layer, (MoE, Router, AuxiliaryLosses))


def has_capacity(layer: nn.Module) -> bool:
    """Return whether the layer may drop tokens beyond a capacity that depends on the number of tokens in the call."""
    if not isinstance(layer, MoE) or layer.capacity_factor is None:
        return False
    # pymoe's own router chooses distinct experts for a token, so an expert takes every token at most once.
    choices = layer.router.top_k if isinstance(layer.router, Router) else 1
    return layer.capacity_factor * choices < layer.num_experts


def with_auxiliary_losses(function: Function, module: nn.Module) -> Function:
    """Wrap a stage's ``function`` so that auxiliary losses in ``module`` get the running micro-batch's weight.

    Return ``function`` itself if there are no such losses.
    """
    losses = [part for part in module.modules() if isinstance(part, AuxiliaryLosses)]
    return partial(_weighted, function, losses) if losses else function


def _weighted(function: Function, losses: list[AuxiliaryLosses], *values: Any) -> Sequence[Any]:
    about = micro_batch()
    if about is None or about.count == 1:
        return function(*values)
    before = [loss.scale for loss in losses]
    for loss, scale in zip(losses, before, strict=True):
        loss.scale = scale * about.weight
    try:
        return function(*values)
    finally:
        for loss, scale in zip(losses, before, strict=True):
            loss.scale = scale
