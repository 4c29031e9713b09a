"""Tools for timing on a GPU: inputs that are not in the cache, and calls without their launch times.

A kernel that takes a few microseconds reads its inputs from the L2 cache if the call before it read the same inputs.
On CUDA, candidates therefore cycle through copies of their inputs that together fill the cache three times
(:class:`Rotating`), except that there are at most 2048 copies.

Such a kernel also takes less time than the host needs to launch it, through Python or not. The time of a CUDA graph of
many calls (:class:`InGraph`) is that of the device alone; the time of an eager call includes the launch, as in a
program. Both times are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle

import torch

from pymoe.bench.calls import Sample, mapped, same_layout_copy, tensors_in

TIMES_THE_CACHE = 3
MOST_COPIES = 2048
CALLS_IN_GRAPH = 20
"""Minimum number of calls in a graph; it may have more, so that it uses every copy of the inputs equally often."""


class Rotating:
    """A callable that calls one of the ``functions`` in each call, cycling through them."""

    def __init__(self, functions: Sequence[Callable[[], object]]) -> None:
        self.functions = tuple(functions)
        self._turns = cycle(self.functions)

    def __call__(self) -> object:
        return next(self._turns)()


class InGraph:
    """Consecutive calls of ``function``, captured in one CUDA graph; calling the object replays it.

    A function that waits for the device, for example by reading a value of a tensor, cannot be captured. After a failed
    capture, torch's default generator on the device can no longer draw numbers (so benchmarks use other generators),
    and torch's allocator keeps memory. Therefore the function is called before the capture in torch's mode that
    raises an error when a call waits; this mode detects most waits.
    """

    def __init__(self, function: Callable[[], object], calls: int) -> None:
        self.calls = calls
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
            with waiting_raises():
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # The outer block restores the current stream, because a failed capture leaves its own stream current.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(self._graph):
            for _ in range(calls):
                function()

    def __call__(self) -> None:
        self._graph.replay()


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Make torch raise RuntimeError, inside the context, for a call that waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def in_graph(function: Callable[[], object]) -> InGraph:
    """Return a CUDA graph of at least ``CALLS_IN_GRAPH`` calls of ``function``.

    If ``function`` is a :class:`Rotating`, the graph calls each of its functions equally often.
    """
    turns = len(function.functions) if isinstance(function, Rotating) else 1
    return InGraph(function, turns * -(-CALLS_IN_GRAPH // turns))


def copies_needed(bytes: int, device: torch.device) -> int:
    """Return how many copies of ``bytes`` bytes fill the device's L2 cache three times, at most 2048; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return min(max(-(-TIMES_THE_CACHE * cache // max(bytes, 1)), 1), MOST_COPIES)


def copies_of(sample: Sample, device: torch.device) -> list[Sample]:
    """Return a list of ``sample`` and copies of it, :func:`copies_needed` samples in all.

    Tensors keep their ``requires_grad``.
    """
    tensors = tensors_in((sample.args, sample.kwargs))
    count = copies_needed(sum(value.numel() * value.element_size() for value in tensors), device)
    copies = [
        mapped(sample, lambda value: same_layout_copy(value).requires_grad_(value.requires_grad))
        for _ in range(count - 1)
    ]
    return [sample, *copies]
