"""Many calls at once on the shared workers, and the thread that asked among them."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pymoe._runtime import Profiled, TaskGraph
from pymoe.runtime.parallel.pool import shared_pool
from pymoe.runtime.parallel.random_streams import Stream, with_stream
from pymoe.runtime.parallel.state import ThreadState, current, in_state, know_state, known_state
from pymoe.runtime.text import described

_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled

# Seconds. Calls that are shorter stay on the thread that asked: a worker would spend as much on the interpreter's lock.
PATIENCE = 100e-6


def run_together(name: str, function: Callable[[int], None], streams: Sequence[Stream], inline: bool = False) -> None:
    """``function(i)`` for every i, each in the state of this thread, drawing from ``streams[i]``.

    Returns when all have ended. This thread takes part, so calls may do the same again however few workers there are.
    ``inline``: it does everything, one after the other.

    Raises:
        BaseException: what the first of the calls that failed raised, the first by its position; notes tell of the
            others. On Ctrl-C calls that have not started are left out, those that run are waited for.
    """
    before, state = known_state(), current()
    errors: list[BaseException | None] = [None] * len(streams)
    if _is_profiled():
        function = functools.partial(_profiled, Profiled(), name, function)
    calls = [
        _Call(state, contextvars.copy_context(), stream, function, number, errors)
        for number, stream in enumerate(streams)
    ]
    know_state(state)
    try:
        if inline or len(calls) == 1:
            for call in calls:
                call()
        else:
            graph = TaskGraph()
            for call in calls:
                graph.add(call)
            graph.run(shared_pool(), PATIENCE).wait()
        raise_first(name, errors)
    finally:
        know_state(before)
        errors.clear()  # they hold frames that hold them
        for call in calls:
            call.forget()  # a worker may let go of the graph later


class _Call:
    __slots__ = ("context", "errors", "function", "number", "state", "stream")

    def __init__(
        self,
        state: ThreadState,
        context: contextvars.Context,
        stream: Stream,
        function: Callable[[int], None],
        number: int,
        errors: list[BaseException | None],
    ) -> None:
        self.state = state
        self.context = context
        self.stream = stream
        self.function = function
        self.number = number
        self.errors = errors

    def forget(self) -> None:
        self.function = _nothing

    def __call__(self) -> None:
        if known_state() is None:  # a worker: nobody else changes its state
            know_state(current())
        try:
            self.context.run(in_state, self.state, with_stream, self.stream, self.function, self.number)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            self.errors[self.number] = error


def _profiled(profiled: Profiled, name: str, function: Callable[[int], None], number: int) -> None:
    """With a range of its own, and all that happens in it, in the profile of the thread that asked."""
    joined = not _is_profiled() and profiled.join()
    try:
        with torch.autograd.profiler.record_function(f"{name}: call {number}"):
            function(number)
    finally:
        if joined:
            profiled.leave()


def _nothing(number: int) -> None:
    pass


def raise_first(name: str, errors: Sequence[BaseException | None]) -> None:
    failed = [(number, error) for number, error in enumerate(errors) if error is not None]
    if not failed:
        return
    first = failed[0][1]
    if hasattr(first, "add_note"):  # Python 3.11
        for number, error in failed[1:]:
            if error is not first:
                first.add_note(f"{name}: call {number} failed, too: {described(error)}")
    try:
        raise first
    finally:
        del first, failed


def functorch_is_active() -> bool:
    """Inside ``torch.func`` transforms: calls belong to their graphs, and must run in their order."""
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None
