"""The pools of an expert on another machine: requests go there one by one, or the rows of many callers in one call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor

from pymoe._runtime import patience_of_batch
from pymoe.remote.calls import Call, Method, ask
from pymoe.remote.errors import AppliedError
from pymoe.remote.expert import KnownExpert
from pymoe.remote.wire import MOST_BYTES
from pymoe.runtime import BatchTensorProto, QueueFull, TaskPool
from pymoe.runtime.awaiting import outcome
from pymoe.runtime.interrupts import interrupt_soon, uninterrupted

MOST_UNDER_WAY = 1024
"""Requests that a :class:`DirectPool` has sent and that are not answered."""
LOOK_FOR_ROOM_S = 0.005


class CoalescingPool(TaskPool):
    """Puts the rows of all callers that wait into one call, as a local pool does; one call is under way at a time.

    A caller who is alone waits for nobody. A call has the time of its most patient request whose future somebody has,
    and ``future.cancel()`` takes a request back as long as its call has not begun: after that it is as with a batch
    that runs. A request of more rows than the server runs at once is sent in several calls.
    """

    def __init__(self, expert: KnownExpert, method: Method, protos: Sequence[BatchTensorProto]) -> None:
        row = sum(proto.make_empty(1, device="cpu").nbytes for proto in protos)
        self._expert, self._method = expert, method
        super().__init__(
            self._ask,
            name=f"{expert.name}_{method.lower()}",
            schema=protos,
            max_batch_size=max(1, min(expert.max_batch_size, MOST_BYTES // 2 // max(row, 1))),
            request_timeout=expert.channel.timeout,
        )

    def _ask(self, *tensors: Tensor) -> tuple[Any, ...]:
        left = patience_of_batch()
        # None: nobody has a future any more.
        patience = time.monotonic() + (self._expert.channel.timeout if left is None else left)
        if self._method == "Forward":
            return ask(self._expert, self._method, tensors, patience)
        # A batch that is interrupted is put back, and would be sent again under another key.
        try:
            with uninterrupted():
                return ask(self._expert, self._method, tensors, patience)
        except KeyboardInterrupt:  # the second one, which does not wait
            interrupt_soon()
            raise AppliedError(f"{self.name}: interrupted; the request may have been applied") from None

    def submit_task(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Queue a request and return its future; as :meth:`pymoe.runtime.TaskPool.submit_task`.

        Raises:
            ServerLost: the connection is closed.
        """
        try:
            return super().submit_task(*tensors, timeout=timeout, priority=priority)
        except RuntimeError:
            self._expert.channel.check_usable()
            raise

    def _try_submit(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        try:
            return super()._try_submit(*tensors, timeout=timeout, priority=priority)
        except RuntimeError:
            self._expert.channel.check_usable()
            raise

    @property
    def served(self) -> bool:
        """Whether the server can be reached, as far as is known, and the connection is open."""
        return self._expert.channel.reachable and super().served

    @property
    def why_unserved(self) -> str:
        """What clients say while it is not."""
        return self._expert.channel.why_not_reachable


class RemoteFuture(concurrent.futures.Future):
    """The outcome of a request that was sent on its own. ``cancel()`` takes it out of the server's queue, too."""

    _call: Any = None  # of gRPC

    def cancel(self) -> bool:
        """Cancel the request; False if it is done. Over there one that has begun ends without its client."""
        cancelled = super().cancel()
        if cancelled and self._call is not None:
            self._call.cancel()
        return cancelled

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in an event loop; cancelling the task that awaits cancels the request."""
        return outcome(self)


class DirectPool:
    """Sends each request on its own, at once. For few callers with long requests, and for cancelling each alone."""

    def __init__(self, expert: KnownExpert, method: Method, protos: Sequence[BatchTensorProto]) -> None:
        self._expert, self._method = expert, method
        self._protos = [proto.replace(device=None) for proto in protos]
        self.name = f"{expert.name}_{method.lower()}"
        self._room = threading.BoundedSemaphore(MOST_UNDER_WAY)

    @property
    def served(self) -> bool:
        """Whether the server can be reached, as far as is known, and the connection is open."""
        return self._expert.channel.reachable

    @property
    def why_unserved(self) -> str:
        """What clients say while it is not."""
        return self._expert.channel.why_not_reachable

    def submit_task(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> RemoteFuture:
        """Send a request and return its future; as :meth:`pymoe.runtime.TaskPool.submit_task`, without priorities.

        Raises:
            QueueFull: too many requests are under way for as long as this one has.
        """
        self._check(tensors)
        seconds = self._seconds(timeout)
        deadline = time.monotonic() + seconds
        if not self._room.acquire(timeout=seconds):
            raise QueueFull(f"{self.name}: {MOST_UNDER_WAY} requests are under way")
        return self._send(tensors, deadline)

    def _try_submit(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> RemoteFuture | None:
        self._check(tensors)
        seconds = self._seconds(timeout)
        if not self._room.acquire(blocking=False):
            return None
        return self._send(tensors, time.monotonic() + seconds)

    async def _queue(self, tensors: Sequence[Any], timeout: float | None, priority: float = 0.0) -> RemoteFuture:
        deadline = time.monotonic() + self._seconds(timeout)
        while True:
            future = self._try_submit(*tensors, timeout=max(0.0, deadline - time.monotonic()))
            if future is not None:
                return future
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.name}: there was no room for the request in time")
            await asyncio.sleep(LOOK_FOR_ROOM_S)

    async def submit_async(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Send a request and await the answer, without blocking the event loop while too many are under way."""
        return await (await self._queue(tensors, timeout))

    def __call__(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Send a request and wait for the answer."""
        return self.submit_task(*tensors, timeout=timeout).result()

    def _idle_is_known(self) -> None:
        """Nothing: requests have deadlines, and end."""

    def _seconds(self, timeout: float | None) -> float:
        if timeout is not None and math.isnan(timeout):
            raise ValueError(f"timeout must be a number of seconds, got {timeout!r}")
        return self._expert.channel.timeout if timeout is None else timeout

    def _check(self, tensors: Sequence[Any]) -> None:
        if len(tensors) != len(self._protos):
            raise ValueError(f"{self.name}: expected {len(self._protos)} tensors, got {len(tensors)}")
        for place, (proto, tensor) in enumerate(zip(self._protos, tensors, strict=True)):
            proto.check(tensor, f"{self.name}: tensor {place}")
            if tensor.is_meta:
                raise TypeError(f"{self.name}: tensor {place}: expected a tensor with numbers, got one on meta")
        rows = [len(tensor) for tensor in tensors]
        if len(set(rows)) > 1:
            raise ValueError(f"{self.name}: all tensors must have as many rows as the first, got {rows}")

    def _send(self, tensors: Sequence[Tensor], deadline: float) -> RemoteFuture:
        future = RemoteFuture()
        try:
            call = Call(self._expert, self._method, [one.detach() for one in tensors], deadline)
        except BaseException:
            self._room.release()
            raise
        _Attempts(call, future, self._room).send()
        return future

    def __repr__(self) -> str:
        return f"DirectPool({self.name!r} at {self._expert.channel.address})"


class _Attempts:
    """Sends a call, again and again if need be, and completes its future; on gRPC's threads and those of timers."""

    def __init__(self, call: Call, future: RemoteFuture, room: threading.BoundedSemaphore) -> None:
        self._call, self._future, self._room = call, future, room

    def send(self) -> None:
        if self._future.cancelled():
            return self._end(None)
        try:
            under_way = self._call.send()
        except Exception as error:
            return self._end(error)
        self._future._call = under_way
        if self._future.cancelled():  # before it could be told
            under_way.cancel()
        under_way.add_done_callback(self._ended)
        return None

    def _ended(self, under_way: Any) -> None:
        if self._future.cancelled():
            return self._end(None)
        try:
            if under_way.exception() is None:
                return self._end(None, self._call.read(under_way.result()))
            timer = threading.Timer(self._call.pause_after(under_way), self.send)
        except Exception as error:
            return self._end(error)
        timer.daemon = True
        return timer.start()

    def _end(self, error: Exception | None, result: Any = None) -> None:
        self._call.end()
        self._room.release()
        if not self._future.set_running_or_notify_cancel():  # which tells those who wait for cancelled ones
            return
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)
