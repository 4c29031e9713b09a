"""For timing on a GPU: inputs that are not in the cache, and calls without their launch times.

A kernel of some microseconds reads its inputs from the L2 cache if the call before it read the same inputs. Candidates
on CUDA therefore cycle through copies of their inputs that together are several times the cache (:class:`Rotating`).

Such a kernel also takes less time than the host needs to launch it, through Python or not. A replay from a CUDA graph
of many calls (:class:`InGraph`) takes the device's time; an eager call also costs the launch that a program would pay
for. Both times are shown.
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
"""Minimum number of calls in a graph; it has more if there are more copies of the inputs."""


class Rotating:
    """A function that calls one of ``functions`` per call, in turn."""

    def __init__(self, functions: Sequence[Callable[[], object]]) -> None:
        self.functions = tuple(functions)
        self._turns = cycle(self.functions)

    def __call__(self) -> object:
        return next(self._turns)()


class InGraph:
    """Consecutive calls of ``function``, captured in one CUDA graph; calling the object replays it.

    A function that waits for the device, for example by reading a value of a tensor, cannot be captured. After a failed
    capture torch's default generator on the device no longer draws (so benchmarks draw from separate generators), and
    its allocator keeps memory. Therefore the function is first called in torch's mode that raises an error for a wait;
    the mode detects most waits.
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
    """Return a context manager in which torch raises RuntimeError for a call that waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def in_graph(function: Callable[[], object]) -> InGraph:
    """Return a CUDA graph of at least ``CALLS_IN_GRAPH`` calls of ``function``, equally many on each copy of inputs."""
    turns = len(function.functions) if isinstance(function, Rotating) else 1
    return InGraph(function, turns * -(-CALLS_IN_GRAPH // turns))


def copies_needed(bytes: int, device: torch.device) -> int:
    """Return the number of copies of ``bytes`` that exceed the cache of ``device`` several times; 1 on a CPU (warm)."""
    if device.type != "cuda":
        return 1
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return min(max(-(-TIMES_THE_CACHE * cache // max(bytes, 1)), 1), MOST_COPIES)


def copies_of(sample: Sample, device: torch.device) -> list[Sample]:
    """Return ``sample`` and copies of it, :func:`copies_needed` in all; leaves that require grad stay leaves."""
    tensors = tensors_in((sample.args, sample.kwargs))
    count = copies_needed(sum(value.numel() * value.element_size() for value in tensors), device)
    copies = [
        mapped(sample, lambda value: same_layout_copy(value).requires_grad_(value.requires_grad))
        for _ in range(count - 1)
    ]
    return [sample, *copies]
