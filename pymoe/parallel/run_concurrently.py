"""Runs many calls at the same time, on the shared workers and on the calling thread."""

from __future__ import annotations

import contextvars
import functools
import threading
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

import torch

from pymoe._errors import add_note, describe_error
from pymoe._runtime import Profiled, parallel_for
from pymoe._torch_private import profiler_enabled
from pymoe.autograd.random_streams import RandomStream, restore, with_stream
from pymoe.autograd.thread_state import ThreadState, current, in_state, known
from pymoe.parallel.saved_tensors import SavedTensors, hand_over_all
from pymoe.parallel.workers import end_thread_at_exit, shared_pool

# Calls stay on the calling thread as long as that thread finishes a call within this time: a worker would need as much
# time to get the interpreter's lock. (Pipes decide for each run, since their actions wait for each other:
# pymoe.pipe.execution.plan.InlinePolicy.)
INLINE_LIMIT_S = 100e-6
# The same limit for trusted functions: those whose calls took at most INLINE_LIMIT_S each, on average, in a recent run
# without workers. It is longer, because a worker that wakes after the limit to check the progress costs more time than
# short calls. If calls of a trusted function turn out to be long, the workers start this much later, in at most two
# runs: the function stays trusted after its first long run, which may be chance.
TRUSTED_INLINE_LIMIT_S = 16 * INLINE_LIMIT_S
_MAX_TRUSTED = 1000

# Trusted functions, by name and :func:`likeness` of their runs. True: the latest run took long.
_trusted: dict[tuple[str, int], bool] = {}


def run_concurrently(
    name: str, function: Callable[[int], None], streams: Sequence[RandomStream], like: int = 0, inline: bool = False
) -> list[SavedTensors]:
    """Call ``function(i)`` for each index ``i``, in this thread's state, with random numbers from ``streams[i]``.

    Wait until all calls have ended. This thread makes calls, too, so a call may itself use this function even if there
    are few workers. Under hooks on saved tensors together with dispatch modes, calls run one after the other, because
    selective checkpointing identifies results of operators by the order in which its modes get them. On Ctrl-C, calls
    that have not started are dropped and running calls are waited for.

    Args:
        name: the name of the run in errors and profiles.
        function: the function to call.
        streams: one random stream for each call.
        like: the same number for runs of the same name whose calls probably take equally long (:func:`likeness`); 0 if
            nothing is known about them.
        inline: make all calls on this thread, one after the other.

    Returns:
        For each call the tensors that it saved, packed by this thread's hooks on saved tensors; an empty list without
        such hooks.

    Raises:
        BaseException: the exception of the failed call with the smallest index, with notes on the others.
        RuntimeError, CancelledError: the pool of workers was stopped, because the interpreter is exiting.
    """
    before, state = known.state, current()
    if profiler_enabled():
        function = functools.partial(_profiled, Profiled(), name, function)
    run = _Run(state, function, streams)
    known.state = state
    try:
        if inline or len(streams) == 1 or (run.saved and state.dispatch_modes):
            for number in range(len(streams)):
                run.call(number)
        else:
            _on_workers(run, (name, like))
        raise_first(name, run.errors)
        hand_over_all(run.saved)
        return run.saved
    finally:
        known.state = before
        run.function = _nothing  # free the function now, since a worker may still have a reference to the run
        run.errors.clear()  # breaks a cycle: the errors' tracebacks refer to frames, which refer to the errors
        restore()


def _on_workers(run: _Run, kind: tuple[str, int]) -> None:
    began = time.perf_counter()
    limit = TRUSTED_INLINE_LIMIT_S if kind in _trusted else INLINE_LIMIT_S
    try:
        parallel_for(shared_pool(), len(run.streams), run.call, limit)
    except (RuntimeError, CancelledError):  # the pool was stopped; exceptions of calls do not arrive here
        end_thread_at_exit()
        raise
    if kind[1]:
        span = INLINE_LIMIT_S * len(run.streams) * (2 if kind in _trusted else 1)
        _remember(kind, short=not run.helped and time.perf_counter() - began <= span)


def _remember(kind: tuple[str, int], short: bool) -> None:
    if short:
        if kind not in _trusted and len(_trusted) >= _MAX_TRUSTED:
            _trusted.clear()
        _trusted[kind] = False
    elif _trusted.get(kind) is False:
        _trusted[kind] = True
    else:
        _trusted.pop(kind, None)


def likeness(func: Any) -> int:
    """Return a number that identifies ``func``. If two functions happen to share a number, only speed may suffer."""
    owner = getattr(func, "__self__", None)
    # Each access to ``apply`` of an autograd.Function makes a new object: a method or, from torch 2.15 on, a builtin.
    if isinstance(func, types.MethodType) or (isinstance(owner, type) and issubclass(owner, torch.autograd.Function)):
        func = owner
    return id(getattr(func, "__code__", func))


class _Run:
    """The calls that :func:`run_concurrently` makes, with their contexts, random streams and errors."""

    __slots__ = ("contexts", "errors", "function", "helped", "saved", "state", "states", "streams")

    def __init__(self, state: ThreadState, function: Callable[[int], None], streams: Sequence[RandomStream]) -> None:
        self.state = state
        self.function = function
        self.streams = streams
        self.contexts = [contextvars.copy_context() for _ in streams]
        self.errors: list[BaseException | None] = [None] * len(streams)
        self.helped = False  # true once a worker has made a call
        hooks = state.saved_tensor_hooks
        self.saved = [] if hooks is None else [SavedTensors(hooks) for _ in streams]
        self.states = [state._replace(saved_tensor_hooks=of_call.hooks) for of_call in self.saved]

    def call(self, number: int) -> None:
        if known.state is not self.state:
            self.helped = True
            # The worker's state is not known before its first call. Later it is, because only calls change it.
            if known.state is None:
                known.state = current()
        state = self.states[number] if self.states else self.state
        try:
            self.contexts[number].run(
                in_state, state, with_stream, self.streams[number], self.function, number, clears=False
            )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            self.errors[number] = error


def _profiled(profiled: Profiled, name: str, function: Callable[[int], None], number: int) -> None:
    """Call ``function(number)`` as a named range in the profile of the thread that called :func:`run_concurrently`."""
    joined = not profiler_enabled() and profiled.join()
    try:
        with torch.autograd.profiler.record_function(f"{name}: call {number}"):
            function(number)
    finally:
        if joined:
            profiled.leave()


def _nothing(number: int) -> None:
    pass


def raise_first(name: str, errors: Sequence[BaseException | None]) -> None:
    """Raise the first of ``errors``, if there is one, with notes on the others."""
    failed = [(number, error) for number, error in enumerate(errors) if error is not None]
    if not failed:
        return
    first = failed[0][1]
    for number, error in failed[1:]:
        if error is not first:
            add_note(first, f"{name}: call {number} failed, too: {describe_error(error)}")
    try:
        raise first
    finally:
        del first, failed, errors  # breaks the cycle of exception, frames and these variables
