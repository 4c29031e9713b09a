"""Counts the micro-batches whose saved tensors a stage keeps alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Live:
    """Counts the forward passes whose saved tensors have not been freed: the current number and the maximum."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._lock = threading.Lock()

    def one(self) -> AbstractContextManager[None]:
        """Count the tensors saved for backward inside the context as belonging to one more micro-batch."""
        mark = _Mark(self)
        # Saving an operator's own output would keep alive the graph that it is saved in.
        return saved_tensors_hooks(lambda tensor: (tensor.detach(), mark), _tensor)

    def add(self, change: int) -> None:
        """Change the count by one, up or down."""
        with self._lock:
            self.now += change
            self.peak = max(self.peak, self.now)


class _Mark:
    """A mark that lives as long as the saved tensors that hold it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        live.add(1)

    def __del__(self) -> None:
        self._live.add(-1)


def _tensor(saved: tuple[Tensor, _Mark]) -> Tensor:
    return saved[0]


@contextmanager
def watched(stages: list[nn.Sequential]) -> Iterator[list[Live]]:
    """Yield a counter for every stage, which counts the tensors that the stage's first layer saves."""
    counters = [Live() for _ in stages]
    for stage, live in zip(stages, counters, strict=True):
        stage[0].forward = _counted(type(stage[0]).forward.__get__(stage[0]), live)
    try:
        yield counters
    finally:
        for stage in stages:
            del stage[0].forward


def _counted(forward: Callable[[Tensor], Tensor], live: Live) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with live.one():
            return forward(x)

    return call
