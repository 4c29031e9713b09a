"""``run_in_background``: runs a function on the shared workers, and returns a future of its result."""

from __future__ import annotations

import concurrent.futures
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pymoe.autograd import random_streams
from pymoe.autograd.thread_state import current, in_state
from pymoe.parallel.saved_tensors import depend_on_order
from pymoe.parallel.workers import shared_pool

Result = TypeVar("Result")


class BackgroundFuture(concurrent.futures.Future, Generic[Result]):
    """A ``concurrent.futures.Future`` that runs its function on the waiting thread if no worker has started it.

    So functions in the background may wait for each other's results even if there are few workers. A thread that waits
    with a timeout does not run the function, which may take longer than the timeout.
    """

    def __init__(self, function: Callable[[], Result]) -> None:
        super().__init__()
        self._function: Callable[[], Result] | None = function
        self._claim = threading.Lock()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the function, and return its result or raise its exception.

        Args:
            timeout: the maximum number of seconds to wait; None waits without a limit, and runs the function if it has
                not started.

        Raises:
            concurrent.futures.TimeoutError: the function has not ended in time.
            concurrent.futures.CancelledError: the future was cancelled before the function had started.
        """
        if timeout is None:
            self._run()
        try:
            return super().result(timeout)
        finally:
            del self  # avoids a cycle: the error's frames would keep the future alive, which keeps the error alive

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as :meth:`result` does, and return the exception that the function raised, or None."""
        if timeout is None:
            self._run()
        return super().exception(timeout)

    def _run(self) -> None:
        """Run the function here, unless another thread has claimed it or the future was cancelled."""
        if not self._claim.acquire(blocking=False):
            return
        function, self._function = self._function, None
        if function is None or not self.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            self.set_exception(error)
            del self  # avoids a cycle: the error's frames would keep the future alive, which keeps the error alive
        else:
            self.set_result(result)


def run_in_background(func: Callable[..., Result], /, *args: Any, **kwargs: Any) -> BackgroundFuture[Result]:
    """Run ``func(*args, **kwargs)`` on one of the workers of :func:`map_with_parallel_backward`.

    The function runs in the current state of this thread: grad mode, inference mode, autocast, default device, function
    and dispatch modes, saved-tensor hooks, context variables, CUDA device and stream. (Hooks and modes are called on
    the thread that runs the function, possibly at the same time as on other threads.) The function draws random numbers
    from a separate stream, seeded with the next number of this thread's generator. That generator advances by one
    number even if the function draws none. So the function's random numbers depend on the seed and on how many numbers
    were drawn before, not on the threads.

    Returns:
        A ``concurrent.futures.Future``, which ``concurrent.futures.wait`` and ``as_completed`` accept, too.
        ``result()`` without a timeout runs the function itself if no worker has started it, so that functions may wait
        for each other's results.

    Raises:
        TypeError: ``func`` is not callable.
        RuntimeError: the interpreter is exiting, or this is called inside ``torch.utils.checkpoint``.

    Example:
        >>> future = pymoe.run_in_background(torch.mul, torch.ones(3), 2)
        >>> future.result()
        tensor([2., 2., 2.])
    """
    if not callable(func):
        raise TypeError(f"run_in_background: func must be callable, got {type(func).__name__}")
    random_streams.install()
    state, context = current(), contextvars.copy_context()
    if depend_on_order(state.saved_tensor_hooks):
        raise RuntimeError(
            "run_in_background: called inside torch.utils.checkpoint, which tells saved tensors apart by the order in "
            "which they are saved; checkpoint within the function, or use map_with_parallel_backward, whose calls save "
            "in a fixed order"
        )
    stream = random_streams.RandomSource(eager=True).stream(0)
    bound = functools.partial(func, *args, **kwargs)

    def call() -> Result:
        try:
            return context.run(in_state, state, random_streams.with_stream, stream, bound)
        finally:
            random_streams.restore()

    future = BackgroundFuture(call)
    shared_pool().submit(future._run)
    return future
