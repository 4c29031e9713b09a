"""A pool that collects the requests of many clients, and passes their rows to a function in batches."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pymoe import _runtime
from pymoe._common.names import explain_arguments
from pymoe._runtime import QueueFull
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.future import Future
from pymoe.runtime.room import RoomLine, submit_when_there_is_room

__all__ = ["QueueFull", "TaskPool"]

DEFAULT_CAPACITY = 65536
REPLACED = {
    "pool_size": "capacity= is how many requests the queue holds",
    "prefetch_batches": "there is no queue of batches between a pool and its workers",
    "start": "a pool has no process or thread of its own; Runtime([pool]).start() serves it",
    "uid": "name= is what a pool is called",
}
"""Options of hivemind's pools, each with its replacement here."""
LARGEST_COUNT = 2**31 - 1


def check_count(owner: str, option: str, value: Any) -> int:
    """Return ``value``, an integer of any type, as an int; ``owner`` and ``option`` name it in messages.

    Raises:
        TypeError: the value is not an integer. (A conversion would silently cut off a fraction.)
        OverflowError: the value is above :data:`LARGEST_COUNT`.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}: {option} must be an integer, got {value!r}") from None
    if count > LARGEST_COUNT:
        raise OverflowError(f"{owner}: {option} must be at most {LARGEST_COUNT}, got {count}")
    return count


def _check_number(option: str, value: Any) -> float:
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"TaskPool: {option} must be a number, got {value!r}")
    return float(value)


class TaskPool(_runtime.TaskPool):
    """A bounded queue of requests in front of a function that works on batches.

    Any number of threads and coroutines call :meth:`submit_task`. A :class:`Runtime` takes queued requests, oldest
    first, concatenates the rows of as many requests as fit, calls ``process_func`` once, and returns to every request
    the rows of the result that belong to it. Requests of different dtypes, devices or row shapes never share a batch.

    The future of a request can be used like a ``concurrent.futures.Future``. Several tasks can await it; cancelling one
    of them cancels the request for all.

    On a GPU, batches are assembled in the device's default stream, and results become ready there. A client that uses
    another stream must make the default stream wait for this stream before it submits tensors. Before it reads a
    result, it must make its stream wait for the default stream, and call ``record_stream`` of the result. It may drop
    the tensors that it submitted once the request is done.

    Args:
        process_func: called with one tensor for each tensor of a request. Dimension 0 contains the rows of all requests
            of the batch; the function may change these tensors. It returns a tensor, or a tuple, list, dict or nested
            structure of tensors, with the same number of rows. A request's result has the same structure. Its tensors
            are copies of the returned tensors or views of such copies, so that clients may change their results even if
            the function keeps what it has returned. (Tensors that share memory with each other are not copied.) A view
            keeps the rows of the whole batch in memory, and saving it saves them all; use ``clone()`` for results that
            are kept. Leaves that are not tensors are returned to every request unchanged. The function runs with
            gradients enabled, on a worker of the runtime or on a thread that waits for a result or for room in the
            queue. If it raises, every request of the batch raises the same exception (but see ``isolate``).
        name: shown in statistics, errors and profiles (``pymoe::NAME batch``).
        min_batch_size: the number of rows to wait for, as long as ``timeout`` allows.
        max_batch_size: the maximum number of rows of a batch. A request with more rows is split over several batches,
            and its result is joined.
        timeout: the maximum number of seconds that a request waits for ``min_batch_size`` rows; None: no limit.
        capacity: the maximum number of requests in the queue; None: 65536.
        linger: the maximum number of seconds to wait for a fuller batch. The wait adapts to the clients: a single
            client never waits. 0: never wait.
        priority: head start in seconds over the requests of other pools.
        isolate: if a batch raises, run it again in halves, so that only a bad request fails. Use this only for
            functions that change nothing if they raise. A batch whose exception has the attribute
            ``pymoe_may_retry = False`` is not run again.
        on_full: ``"wait"`` blocks until there is room (at most until the request's timeout), ``"raise"`` raises
            :class:`QueueFull`.
        schema: the prototypes of the tensors of every request, one per position; None: any tensors.
        pin_memory: gather tensors of the host in page-locked memory, for a function that copies them to a GPU.
        exclusive_with: a pool whose batches never overlap with those of this pool.
        request_timeout: the timeout of requests that are submitted without one; None: no limit.

    Raises:
        ValueError: a size, a time or ``on_full`` is invalid.
        OverflowError: a size is above 2**31 - 1.
        TypeError: ``process_func`` cannot be called, ``name`` is not a string, an option does not exist, a size is not
            an integer or a time is not a number.

    Example:
        >>> pool = pymoe.TaskPool(lambda x: x + 1, name="increment", max_batch_size=64)
        >>> with pymoe.Runtime([pool]):
        ...     result = pool.submit_task(torch.zeros(2, 3)).result()  # or: await pool.submit_task(...)
        >>> result
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """

    @explain_arguments(**REPLACED)
    def __init__(
        self,
        process_func: Callable[..., Any],
        *,
        name: str | None = None,
        min_batch_size: int = 1,
        max_batch_size: int = 4096,
        timeout: float | None = None,
        capacity: int | None = None,
        linger: float = 0.005,
        priority: float = 0.0,
        isolate: bool = False,
        on_full: Literal["wait", "raise"] = "wait",
        schema: Sequence[BatchTensorProto] | None = None,
        pin_memory: bool = False,
        exclusive_with: _runtime.TaskPool | None = None,
        request_timeout: float | None = None,
    ) -> None:
        if on_full not in ("wait", "raise"):
            raise ValueError(f"TaskPool: on_full must be 'wait' or 'raise', got {on_full!r}")
        if "name" in vars(self):
            raise RuntimeError("TaskPool: __init__ was called twice")
        if not isinstance(name, str):
            got = "none" if name is None else type(name).__name__
            raise TypeError(
                f"TaskPool: expected name=, a string that statistics and errors call the pool by, got {got}"
            )
        super().__init__(
            process_func,
            name=name,
            min_batch_size=check_count("TaskPool", "min_batch_size", min_batch_size),
            max_batch_size=check_count("TaskPool", "max_batch_size", max_batch_size),
            timeout=None if timeout is None else _check_number("timeout", timeout),
            capacity=DEFAULT_CAPACITY if capacity is None else check_count("TaskPool", "capacity", capacity),
            linger=_check_number("linger", linger),
            priority=_check_number("priority", priority),
            isolate=isolate,
            raise_when_full=on_full == "raise",
            schema=None if schema is None else [torch.empty((0, *one.size), dtype=one.dtype) for one in schema],
            pin_memory=pin_memory,
            exclusive_with=exclusive_with,
            request_timeout=None if request_timeout is None else _check_number("request_timeout", request_timeout),
        )
        self.name = name
        self.process_func = process_func
        self.min_batch_size = min_batch_size
        self.max_batch_size = max_batch_size
        self._server: weakref.ref[_runtime.Executor] | None = None
        self._line = RoomLine(self._room())

    @property
    def served(self) -> bool:
        """True while a runtime serves the pool."""
        executor = None if self._server is None else self._server()
        return executor is not None and executor.running()

    @property
    def why_unserved(self) -> str:
        """Return a clause for messages that says why the pool is not served."""
        return "no Runtime serves the pool: start one with Runtime([backend])"

    @property
    def empty(self) -> bool:
        """True while no request waits in the queue."""
        return self._statistics()["queued"] == 0

    def __call__(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Submit a request, wait for its result, and return the result.

        Raises the errors of :meth:`submit_task` and :meth:`Future.result`.

        Args:
            tensors: one for each argument of ``process_func``; the same number of rows in each, in the first dimension.
            timeout: seconds within which the request must have started; None: the pool's ``request_timeout``.
            priority: head start in seconds, in addition to the pool's.
        """
        return self.submit_task(*tensors, timeout=timeout, priority=priority).result()

    async def submit_async(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Submit a request, await its result, and return the result. Even a full queue does not block the event loop.

        Raises the errors of :meth:`submit_task` and :meth:`Future.result`. Cancelling the task that awaits cancels the
        request.

        Args:
            tensors: one for each argument of ``process_func``; the same number of rows in each, in the first dimension.
            timeout: seconds within which there must be room in the queue and the request must have started; None: the
                pool's ``request_timeout``, counted from when there is room.
            priority: head start in seconds, in addition to the pool's.
        """
        return await (await self._queue(tensors, timeout, priority))

    async def _queue(self, tensors: Sequence[Any], timeout: float | None, priority: float = 0.0) -> Future:
        return await submit_when_there_is_room(self, tensors, timeout, priority)

    def __repr__(self) -> str:
        return f"TaskPool({self.name!r}, min_batch_size={self.min_batch_size}, max_batch_size={self.max_batch_size})"
