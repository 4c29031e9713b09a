"""Requests to an expert on another machine: from a pool, through one or more attempts, to the answer.

A pool sends its requests one by one (:class:`DirectPool`), or the rows of many callers together
(:class:`CoalescingPool`). What it sends is a :class:`RemoteCall`, which is repeated after a failure of the connection;
all attempts of a backward call carry the same number, so that the server applies it once.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from itertools import chain
from typing import Any, Literal

import grpc
from grpc import StatusCode
from torch import Tensor

from pymoe._common.seconds import check_seconds
from pymoe._runtime import patience_of_batch
from pymoe.remote import wire
from pymoe.remote.channel import MAX_DEADLINE_S, Channel, NoStream
from pymoe.remote.errors import KIND_KEY, AppliedError, ProtocolError, ServerLost, WireError, from_status
from pymoe.runtime import BatchTensorProto, QueueFull, TaskPool
from pymoe.runtime.awaiting import outcome
from pymoe.runtime.interrupts import interrupt_soon, uninterrupted
from pymoe.runtime.nested import nested_flatten
from pymoe.runtime.room import RoomLine, submit_when_there_is_room
from pymoe.runtime.schema import RequestSchema
from pymoe.runtime.timers import call_later, call_soon

Method = Literal["Forward", "Backward"]
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
"""Pauses between two attempts: each is twice the one before, times a random factor from 0.5 to 1."""
MAX_UNDER_WAY = 1024
"""The maximum number of unanswered requests of a :class:`DirectPool`."""
_LOST = {StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.CANCELLED}


class RequestNumbers:
    """Numbers of one expert's backward requests, by which the server recognises further attempts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()

    def new(self) -> int:
        """Return the next number, which is open until :meth:`close`."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._open.add(number)
            return number

    def close(self, number: int) -> None:
        """Close ``number``: there is no further attempt with it."""
        with self._lock:
            self._open.discard(number)

    def ack(self) -> int:
        """Return the lowest open number: there is no further attempt with any number below it."""
        with self._lock:
            return min(self._open, default=self._next)


class ExpertStub:
    """Keeps the client's information about an expert, from the server's description.

    Attributes:
        schema: the schema of its requests.
        numbers: the numbers of its backward requests.
        updates: number of updates that the expert had made by its last answer.
        answered_by: the server run that last answered a backward request; empty before the first answer.
        max_batch_size: largest number of rows that the server runs at once.

    Raises:
        ProtocolError: the description is malformed.
    """

    def __init__(self, channel: Channel, name: str, info: wire.ExpertInfo) -> None:
        self.channel, self.name, self.trains, self.updates = channel, name, info.trains, info.updates
        if info.max_batch_size < 1:
            raise ProtocolError(f"{channel.address}: {name!r} has a max_batch_size of {info.max_batch_size}")
        self.max_batch_size = info.max_batch_size
        try:
            forward_schema = wire.read_schema(info.forward_schema)
            self.outputs_schema = wire.read_schema(info.outputs_schema)
            args, kwargs = forward_schema
            if not isinstance(args, tuple) or not isinstance(kwargs, dict):
                raise ValueError("expected (args, kwargs) as the forward schema")
            self.schema = RequestSchema(name, (args, kwargs), self.outputs_schema)
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"{channel.address}: the schema of {name!r} cannot be read: {error}") from None
        if not self.schema.inputs:
            raise ProtocolError(f"{channel.address}: {name!r} takes no tensor")
        self._leaves = nested_flatten(self.outputs_schema)
        self.has_constants = any(not isinstance(leaf, BatchTensorProto) for leaf in self._leaves)
        self.forward_schema: tuple[tuple[Any, ...], dict[str, Any]] = args, kwargs
        self.numbers = RequestNumbers()
        self.answered_by = ""

    def with_constants(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the flat outputs: ``tensors``, with the schema's constants inserted between them."""
        rest = iter(tensors)
        return [next(rest) if isinstance(leaf, BatchTensorProto) else leaf for leaf in self._leaves]


class RemoteCall:
    """A request to the server, with what all of its attempts share: message, deadline and, if backward, number.

    The creator calls :meth:`end` once, after the last attempt.

    Args:
        stub: the expert to ask.
        method: the pass.
        tensors: the flat inputs, followed by the gradients of the outputs for a backward pass.
        deadline: time on the monotonic clock.
    """

    def __init__(self, stub: ExpertStub, method: Method, tensors: Sequence[Tensor], deadline: float) -> None:
        channel = stub.channel
        channel.check_usable()
        self.stub, self.channel, self.method, self.deadline = stub, channel, method, deadline
        self._rows, self._device = len(tensors[0]), tensors[0].device
        self._begun, self._pause = time.monotonic(), FIRST_PAUSE_S
        self._failure: Exception | None = None
        count = len(stub.schema.inputs)
        packed = wire.pack(tensors[:count], channel.encoding)
        if len(tensors) > count:
            packed += wire.pack(tensors[count:], channel.gradient_encoding)
        self._tail = wire.detach_long(packed)
        backward = method == "Backward"
        self._request = wire.Request(stub.name, packed, channel.gradient_encoding if backward else channel.encoding)
        if backward:
            self._request.client, self._request.incarnation = channel.client, stub.answered_by
            self._request.seq, self._request.backward = stub.numbers.new(), True

    def end(self) -> None:
        """Close the request's number, if it has one, so that the server may forget the request."""
        if self._request.seq >= 0:
            self.stub.numbers.close(self._request.seq)

    def _next_attempt(self) -> tuple[bytes, float]:
        """Count the next attempt; return its message, and its time limit in seconds.

        Raises:
            TimeoutError: the deadline has passed.
            ServerLost, QueueFull: the deadline has passed, and an earlier attempt failed for this reason.
        """
        request = self._request
        now = time.monotonic()
        if now >= self.deadline:
            raise self._failure or TimeoutError(f"{self._where}: the request is not done in time")
        if request.seq >= 0:
            request.ack = self.stub.numbers.ack()
        request.seconds = seconds = min(self.deadline - now, MAX_DEADLINE_S)
        request.age = now - self._begun if request.attempt else 0.0
        message = wire.encode(request)
        request.attempt += 1
        self.channel.count("attempts")
        return message, seconds

    def _begin(self, head: bytes, seconds: float) -> Any:
        """Send a message as a separate gRPC call, and return gRPC's future."""
        size = len(head) + sum([data.nbytes for data in self._tail])
        options = {"timeout": seconds, "metadata": (*self.channel.metadata, (wire.SIZE_KEY, str(size)))}
        if not self._tail:
            return self.channel.methods[self.method].future(head, **options)
        return self.channel.long_methods[self.method].future(chain((head,), wire.frames(self._tail)), **options)

    def begin(self) -> Any:
        """Send the next attempt as a separate gRPC call, and return gRPC's future."""
        head, seconds = self._next_attempt()
        try:
            return self._begin(head, seconds)
        except ValueError as error:  # from gRPC: the channel was closed
            raise ServerLost(f"{self._where}: {error}") from None

    def run(self) -> tuple[Any, ...]:
        """Send the request on a stream, repeatedly if necessary until the deadline, and return the answer.

        Raises:
            ServerLost: the server cannot be reached.
            TimeoutError: there was no answer by the deadline.
            AppliedError: a backward request was applied, and its answer is gone.
            QueueFull: the server has no room.
            ValueError, TypeError, LookupError, PermissionError: the server refuses the request.
            Exception: the exception of the expert.
        """
        try:
            while True:
                head, seconds = self._next_attempt()
                try:
                    try:
                        reply, tail = self.channel.streams.ask(head, self._tail, seconds, self.channel.metadata)
                    except NoStream:
                        reply, tail = wire.decode(self._begin(head, seconds).result(), wire.Reply), None
                    return self.answer(reply, tail)
                except grpc.RpcError as failed:
                    pause = self.pause_after(failed)
                except WireError as error:
                    raise ProtocolError(f"{self._where}: {error}") from None
                except ValueError as error:  # from gRPC: the channel was closed
                    raise ServerLost(f"{self._where}: {error}") from None
                time.sleep(pause)
        finally:
            self.end()

    def pause_after(self, failed: Any) -> float:
        """Return the pause in seconds between a failed attempt and the next one.

        Raises:
            Exception: the exception that the failure stands for, if there must not be another attempt.
        """
        error = from_status(failed, self._where)
        from_server = KIND_KEY in dict(failed.trailing_metadata() or ())
        overloaded = isinstance(error, QueueFull)
        lost = isinstance(error, ServerLost) and (from_server or failed.code() in _LOST)
        if lost:
            self.channel.count("lost")
        if not self.channel.retries or self.channel.closed or not (overloaded or lost):
            raise error
        self._failure = error
        pause = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(MAX_PAUSE_S, 2 * self._pause)
        self.channel.count("retries")
        return min(pause, max(0.0, self.deadline - time.monotonic()))

    def read(self, message: bytes) -> tuple[Any, ...]:
        """Decode a reply that is a single message, and return its :meth:`answer`."""
        try:
            return self.answer(wire.decode(message, wire.Reply))
        except WireError as error:
            raise ProtocolError(f"{self._where}: {error}") from None

    def answer(self, reply: wire.Reply, tail: wire.Tail | None = None) -> tuple[Any, ...]:
        """Return the flat outputs, or the gradients of the flat inputs, on the device of the first input.

        Raises:
            WireError: the tensors are malformed.
            ProtocolError: the tensors do not fit the expert's schema.
        """
        backward = self.method == "Backward"
        protos = self.stub.schema.inputs if backward else self.stub.schema.outputs
        tensors = wire.unpack(reply.tensors, tail)
        fits = len(tensors) == len(protos)
        for proto, one in zip(protos, tensors, strict=False):
            fits = fits and one.shape == (self._rows, *proto.size)
            if fits and one.dtype != proto.dtype:
                raise ProtocolError(f"{self._where}: expected an answer of {proto.dtype}, got {one.dtype}")
        if not fits:
            shapes = [(self._rows, *proto.size) for proto in protos]
            found = [tuple(one.shape) for one in tensors]
            raise ProtocolError(f"{self._where}: expected an answer of shapes {shapes}, got {found}")
        self.stub.updates = reply.updates
        if backward:
            self.stub.answered_by = reply.incarnation
        if self._device.type != "cpu":
            tensors = [one.to(self._device) for one in tensors]
        return tuple(self.stub.with_constants(tensors) if not backward and self.stub.has_constants else tensors)

    @property
    def _where(self) -> str:
        return f"{self.stub.name}_{self.method.lower()}@{self.channel.address}"


# --- pools ---


class _RemotePool:
    """A pool of one pass of a remote expert."""

    _stub: ExpertStub

    @property
    def served(self) -> bool:
        """True if the connection is open and, as far as is known, the server can be reached."""
        return self._stub.channel.reachable

    @property
    def why_unserved(self) -> str:
        """Return a clause for error messages that says why the pool is not served."""
        return self._stub.channel.why_not_reachable


class CoalescingPool(_RemotePool, TaskPool):
    """Combines the rows of all waiting callers into one call, as a local pool does; one call is under way at a time.

    If no other request waits, a request is sent immediately. The deadline of a call is the latest deadline of those of
    its requests whose futures still exist. ``future.cancel()`` withdraws a request until its call has begun; after that
    the request is treated like one in a running batch. A request with more rows than the server runs at once is sent in
    several calls.
    """

    def __init__(self, stub: ExpertStub, method: Method, protos: Sequence[BatchTensorProto]) -> None:
        row = sum(proto.make_empty(1, device="cpu").nbytes for proto in protos)
        self._stub, self._method = stub, method
        super().__init__(
            self._ask,
            name=f"{stub.name}_{method.lower()}",
            schema=protos,
            max_batch_size=max(1, min(stub.max_batch_size, wire.MAX_BYTES // 2 // max(row, 1))),
            request_timeout=stub.channel.timeout,
        )

    def _ask(self, *tensors: Tensor) -> tuple[Any, ...]:
        left = patience_of_batch()
        # None means that none of the futures exists any more.
        deadline = time.monotonic() + (self._stub.channel.timeout if left is None else left)
        if self._method == "Forward":
            return RemoteCall(self._stub, self._method, tensors, deadline).run()
        # A backward call must not be interrupted: its batch would return to the queue, and be sent again with another
        # number.
        try:
            with uninterrupted():
                return RemoteCall(self._stub, self._method, tensors, deadline).run()
        except KeyboardInterrupt:  # a second Ctrl-C, which is not deferred
            interrupt_soon()
            raise AppliedError(f"{self.name}: interrupted; the request may have been applied") from None

    def submit_task(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Queue a request and return its future, like :meth:`pymoe.runtime.TaskPool.submit_task`.

        Raises:
            ServerLost: the connection is closed.
        """
        try:
            return super().submit_task(*tensors, timeout=timeout, priority=priority)
        except RuntimeError:
            self._stub.channel.check_usable()
            raise

    def _try_submit(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        try:
            return super()._try_submit(*tensors, timeout=timeout, priority=priority)
        except RuntimeError:
            self._stub.channel.check_usable()
            raise


class RemoteFuture(concurrent.futures.Future):
    """The outcome of a request that was sent separately. ``cancel()`` also removes it from the server's queue.

    Callbacks run one after the other on a thread of :mod:`pymoe.runtime.timers`, where they may block and wait for
    other requests; the request counts as under way until they have ended. The callbacks of a cancelled request run in
    ``cancel()``, and a callback that is added to a future that is done runs in ``add_done_callback()``.
    """

    _attempt: Any = None  # future of gRPC
    _may_block = False  # true if a callback may block, and so needs a thread of timers

    def add_done_callback(self, function: Callable[[Any], Any]) -> None:
        """Call ``function(future)`` once the request is done or cancelled."""
        with self._condition:
            self._may_block = True
        super().add_done_callback(function)

    def _tell(self, function: Callable[[Any], Any]) -> None:
        """Add a callback that does not block; see :func:`pymoe.runtime.future.tell`."""
        super().add_done_callback(function)

    def cancel(self) -> bool:
        """Cancel the request; return False if it is done. If the server has begun to run it, it runs to its end."""
        cancelled = super().cancel()
        if cancelled and self._attempt is not None:
            self._attempt.cancel()
        return cancelled

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in an event loop; cancelling the task that awaits cancels the request."""
        return outcome(self)


class _Permits:
    """A semaphore that limits the requests under way. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._free, self._changed = count, threading.Condition()

    def take(self) -> bool:
        """Take a permit; return False if none is left."""
        with self._changed:
            taken = self._free > 0
            self._free -= taken
            return taken

    def give_back(self) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify()

    def wait(self) -> None:
        """Wait until a permit is free, without taking it. Only one thread may wait at a time."""
        with self._changed:
            self._changed.wait_for(lambda: self._free > 0)


class DirectPool(_RemotePool):
    """Sends each request separately and immediately. Suits few callers with long requests, and requests that may be
    cancelled.

    If a request waits because too many are under way, and its caller gives it up meanwhile, it is never sent.
    """

    def __init__(self, stub: ExpertStub, method: Method, protos: Sequence[BatchTensorProto]) -> None:
        self._stub, self._method = stub, method
        self._protos = [proto.replace(device=None) for proto in protos]
        self.name = f"{stub.name}_{method.lower()}"
        self._permits = _Permits(MAX_UNDER_WAY)
        self._line = RoomLine(self._permits.wait)

    def submit_task(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> RemoteFuture:
        """Send a request and return its future, like :meth:`pymoe.runtime.TaskPool.submit_task`, without priorities.

        Raises:
            QueueFull: too many requests were under way for as long as this one could wait.
        """
        self._check(tensors)
        seconds = self._seconds(timeout)
        send = functools.partial(self._send_if_there_is_room, tensors, time.monotonic() + seconds)
        future = send() or self._line.join(send).wait(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        if future is None:
            raise QueueFull(f"{self.name}: {MAX_UNDER_WAY} requests are under way")
        return future

    def _try_submit(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> RemoteFuture | None:
        self._check(tensors)
        return self._send_if_there_is_room(tensors, time.monotonic() + self._seconds(timeout))

    async def _queue(self, tensors: Sequence[Any], timeout: float | None, priority: float = 0.0) -> RemoteFuture:
        return await submit_when_there_is_room(self, tensors, self._seconds(timeout), priority)

    async def submit_async(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Send a request, await its answer and return it, without blocking the event loop if too many are under way."""
        return await (await self._queue(tensors, timeout))

    def __call__(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Send a request, wait for the answer, and return it."""
        return self.submit_task(*tensors, timeout=timeout).result()

    def _idle_is_known(self) -> None:
        """Do nothing: the requests have deadlines, so they end."""

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self._stub.channel.timeout
        return check_seconds("timeout", timeout, least=-math.inf)

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

    def _send_if_there_is_room(self, tensors: Sequence[Tensor], deadline: float) -> RemoteFuture | None:
        self._stub.channel.check_usable()
        if not self._permits.take():
            return None
        try:
            call = RemoteCall(self._stub, self._method, [one.detach() for one in tensors], deadline)
        except BaseException:
            self._permits.give_back()
            raise
        future = RemoteFuture()
        _Attempts(call, future, self._permits).begin()
        return future

    def __repr__(self) -> str:
        return f"DirectPool({self.name!r} at {self._stub.channel.address})"


class _Attempts:
    """Sends a call, repeatedly if necessary, and completes its future, on the threads of gRPC and of timers.

    Callbacks of the future run on threads of timers, since they may block: on gRPC's thread they would hold up all
    other answers of the connection.
    """

    def __init__(self, call: RemoteCall, future: RemoteFuture, permits: _Permits) -> None:
        self._call, self._future, self._permits = call, future, permits

    def begin(self) -> None:
        if self._future.cancelled():
            return self._end(None)
        try:
            attempt = self._call.begin()
        except Exception as error:
            return self._end(error)
        self._future._attempt = attempt
        if self._future.cancelled():  # cancelled before the attempt was set
            attempt.cancel()
        attempt.add_done_callback(self._ended)
        return None

    def _ended(self, attempt: Any) -> None:
        if self._future.cancelled():
            return self._end(None)
        try:
            if attempt.exception() is None:
                return self._end(None, self._call.read(attempt.result()))
            call_later(self._call.pause_after(attempt), self.begin)
        except Exception as error:
            return self._end(error)
        return None

    def _end(self, error: Exception | None, result: Any = None) -> None:
        self._call.end()
        with self._future._condition:  # add_done_callback() takes this lock, too
            if not self._future._may_block:
                self._permits.give_back()
                return self._complete(error, result)
        return call_soon(self._call_back, error, result)

    def _call_back(self, error: Exception | None, result: Any) -> None:
        """Complete the future, and return the permit only when the future's callbacks have ended.

        Each callback may occupy a thread, and the permits limit the number of these threads.
        """
        try:
            self._complete(error, result)
        finally:
            self._permits.give_back()

    def _complete(self, error: Exception | None, result: Any) -> None:
        if not self._future.set_running_or_notify_cancel():  # this wakes threads that wait for a cancelled future
            return
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)
