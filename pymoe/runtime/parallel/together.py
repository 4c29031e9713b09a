"""Many calls at once on the shared workers, and the thread that asked among them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pymoe._runtime import TaskGraph
from pymoe.runtime.parallel.pool import shared_pool
from pymoe.runtime.parallel.random_streams import Stream, with_stream
from pymoe.runtime.parallel.state import ThreadState, current, in_state


def run_together(name: str, function: Callable[[int], None], streams: Sequence[Stream], inline: bool = False) -> None:
    """``function(i)`` for every i, each in the state of this thread, drawing from ``streams[i]``.

    Returns when all have ended. This thread takes part, so calls may do the same again however few workers there are.
    ``inline``: it does everything, one after the other.

    Raises:
        BaseException: what the first of the calls that failed raised, the first by its position; notes tell of the
            others. On Ctrl-C calls that have not started are left out, those that run are waited for.
    """
    state = current()
    errors: list[BaseException | None] = [None] * len(streams)
    calls = [
        _Call(state, contextvars.copy_context(), stream, name, function, number, errors)
        for number, stream in enumerate(streams)
    ]
    try:
        if inline or len(calls) == 1:
            for call in calls:
                call()
        else:
            graph = TaskGraph()
            for call in calls:
                graph.add(call)
            graph.run(shared_pool()).wait()
        raise_first(name, errors)
    finally:
        errors.clear()  # they hold frames that hold them
        for call in calls:
            call.forget()  # a worker may let go of the graph later


class _Call:
    __slots__ = ("context", "errors", "function", "name", "number", "state", "stream")

    def __init__(
        self,
        state: ThreadState,
        context: contextvars.Context,
        stream: Stream,
        name: str,
        function: Callable[[int], None],
        number: int,
        errors: list[BaseException | None],
    ) -> None:
        self.state = state
        self.context = context
        self.stream = stream
        self.name = name
        self.function = function
        self.number = number
        self.errors = errors

    def forget(self) -> None:
        self.function = _nothing

    def __call__(self) -> None:
        try:
            self.context.run(in_state, self.state, with_stream, self.stream, self.function, self.number)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            self.errors[self.number] = error


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
                first.add_note(f"{name}: call {number} failed, too: {type(error).__name__}: {error}")
    try:
        raise first
    finally:
        del first, failed


def functorch_is_active() -> bool:
    """Inside ``torch.func`` transforms: calls belong to their graphs, and must run in their order."""
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None
