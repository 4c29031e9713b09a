"""Requests to an expert on another machine: pools, the calls that they make, and the attempts of a call.

A pool makes a :class:`RemoteCall` for each request (:class:`DirectPool`), or for the rows of many requests together
(:class:`CoalescingPool`). If the connection breaks, another attempt sends the call again. All attempts of a backward
call have the same number, so that the server applies the call once.
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
"""Seconds of the first pause between two attempts, and of the longest one. Each pause is twice the one before, and is
multiplied by a random factor from 0.5 to 1."""
MAX_UNDER_WAY = 1024
"""The maximum number of unanswered requests of a :class:`DirectPool`."""
_LOST = {StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.CANCELLED}


class RequestNumbers:
    """Numbers the backward requests of one expert, so that the server recognises repeated attempts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()

    def new(self) -> int:
        """Return the next number. It is open until it is passed to :meth:`close`."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._open.add(number)
            return number

    def close(self, number: int) -> None:
        """Close ``number``: no attempts with it will follow."""
        with self._lock:
            self._open.discard(number)

    def ack(self) -> int:
        """Return the lowest open number, or the next new one if none is open: no attempt below it will follow."""
        with self._lock:
            return min(self._open, default=self._next)


class ExpertStub:
    """The client's information about an expert, from the server's description and from answers.

    Attributes:
        schema: the schema of its requests.
        numbers: assigns the numbers of its backward requests.
        updates: the number of updates of the expert according to its last answer.
        answered_by: the ``incarnation`` of the server that last answered a backward request; empty before that.
        max_batch_size: the maximum number of rows that the server runs at once.

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
    """A request to the server: the tensors, the deadline and the number that all of its attempts share.

    Only backward requests have a number. Unless :meth:`run` is used, the caller must call :meth:`end` after the last
    attempt.

    Args:
        stub: the expert that receives the request.
        method: the pass to run.
        tensors: the flat inputs, followed by the gradients of the outputs for a backward pass.
        deadline: a time of ``time.monotonic()``.

    Raises:
        ServerLost, RuntimeError: see :meth:`Channel.check_usable`.
        TypeError, ValueError: the tensors cannot be sent; see :func:`pymoe.remote.wire.pack`.
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
        """Close the number of a backward request, so that later requests tell the server to forget this one.

        Do nothing for a forward request.
        """
        if self._request.seq >= 0:
            self.stub.numbers.close(self._request.seq)

    def _next_attempt(self) -> tuple[bytes, float]:
        """Count the next attempt; return its message, and its time limit in seconds.

        Raises:
            TimeoutError: the deadline has passed.
            ServerLost, QueueFull: the deadline has passed, and the last attempt failed for this reason.
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
        """Send the message ``head`` and its frames as a separate gRPC call, and return gRPC's future."""
        size = len(head) + sum([data.nbytes for data in self._tail])
        options = {"timeout": seconds, "metadata": (*self.channel.metadata, (wire.SIZE_KEY, str(size)))}
        if not self._tail:
            return self.channel.methods[self.method].future(head, **options)
        return self.channel.long_methods[self.method].future(chain((head,), wire.frames(self._tail)), **options)

    def begin(self) -> Any:
        """Send the next attempt as a separate gRPC call, and return gRPC's future.

        Raises:
            ServerLost: the channel is closed, or see :meth:`_next_attempt`.
            TimeoutError, QueueFull: see :meth:`_next_attempt`.
        """
        head, seconds = self._next_attempt()
        try:
            return self._begin(head, seconds)
        except ValueError as error:  # raised by gRPC if the channel was closed
            raise ServerLost(f"{self._where}: {error}") from None

    def run(self) -> tuple[Any, ...]:
        """Send the request on a stream and return the answer; if an attempt fails, repeat it until the deadline.

        This calls :meth:`end`.

        Raises:
            ServerLost: the server cannot be reached.
            TimeoutError: there was no answer by the deadline.
            ProtocolError: the answer is malformed or does not fit the expert's schema.
            AppliedError: a backward request has been applied, or may have been, and its answer is no longer available.
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
                except ValueError as error:  # raised by gRPC if the channel was closed
                    raise ServerLost(f"{self._where}: {error}") from None
                time.sleep(pause)
        finally:
            self.end()

    def pause_after(self, failed: Any) -> float:
        """Return the seconds from the attempt ``failed`` to the next one, or raise its error if there must be no other.

        There is another attempt if the connection broke or the server was overloaded, unless ``retries`` is off or the
        channel is closed.
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
        """Decode a reply without frames, and return the result of :meth:`answer`.

        Raises:
            ProtocolError: the reply is malformed or does not fit the expert's schema.
        """
        try:
            return self.answer(wire.decode(message, wire.Reply))
        except WireError as error:
            raise ProtocolError(f"{self._where}: {error}") from None

    def answer(self, reply: wire.Reply, tail: wire.Tail | None = None) -> tuple[Any, ...]:
        """Return the flat outputs, or the gradients of the flat inputs, on the device of the first input.

        Also record the reply's ``updates``, and after a backward pass its ``incarnation``, in the stub.

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
    """Base class of the pools of a remote expert."""

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
    """Combines the rows of all waiting requests into one call, as a local pool does; one call is under way at a time.

    A request is sent immediately if no call is under way and no other request waits. The deadline of a call is the
    latest deadline of its requests; requests whose futures have been dropped do not count. A request with more rows
    than the server runs at once is sent in several calls. ``future.cancel()`` withdraws the calls of the request that
    have not been sent; a call that has been sent runs to its end.
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
        # `left` is None if all futures of the batch have been dropped.
        deadline = time.monotonic() + (self._stub.channel.timeout if left is None else left)
        if self._method == "Forward":
            return RemoteCall(self._stub, self._method, tensors, deadline).run()
        # An interrupted batch returns to the queue and is sent again. A backward call would then have another number,
        # and might be applied twice.
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
    """The future of a request to a pool. ``cancel()`` also removes the request from the server's queue.

    The callbacks of a request run one after the other on a thread of :mod:`pymoe.runtime.timers`. They may block, and
    may wait for other requests; until they have ended, the request counts towards the pool's limit. The callbacks of a
    cancelled request run in ``cancel()``. A callback that is added after the request is done runs in
    ``add_done_callback()``.
    """

    _attempt: Any = None  # gRPC's future of the latest attempt
    _may_block = False  # true after add_done_callback(): callbacks may block, so they run on a timer thread

    def add_done_callback(self, function: Callable[[Any], Any]) -> None:
        """Call ``function(future)`` once the request is done or cancelled."""
        with self._condition:
            self._may_block = True
        super().add_done_callback(function)

    def _tell(self, function: Callable[[Any], Any]) -> None:
        """Add a callback that must not block; see :func:`pymoe.runtime.future.tell`."""
        super().add_done_callback(function)

    def cancel(self) -> bool:
        """Cancel the request; return False if it is done. A request that the server is running runs to its end."""
        cancelled = super().cancel()
        if cancelled and self._attempt is not None:
            self._attempt.cancel()
        return cancelled

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the result in an event loop. Cancelling the task that awaits cancels the request."""
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

    While :data:`MAX_UNDER_WAY` requests are unanswered, further requests wait. A waiting request whose caller gives up
    is never sent.
    """

    def __init__(self, stub: ExpertStub, method: Method, protos: Sequence[BatchTensorProto]) -> None:
        self._stub, self._method = stub, method
        self._protos = [proto.replace(device=None) for proto in protos]
        self.name = f"{stub.name}_{method.lower()}"
        self._permits = _Permits(MAX_UNDER_WAY)
        self._line = RoomLine(self._permits.wait)

    def submit_task(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> RemoteFuture:
        """Send a request and return its future, like :meth:`pymoe.runtime.TaskPool.submit_task`; ignore ``priority``.

        Raises:
            QueueFull: :data:`MAX_UNDER_WAY` requests were unanswered until the timeout of this one.
            ServerLost: the connection is closed.
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
        """Send a request and return its answer. Nothing blocks the event loop, even if the request must wait."""
        return await (await self._queue(tensors, timeout))

    def __call__(self, *tensors: Tensor, timeout: float | None = None, priority: float = 0.0) -> Any:
        """Send a request, wait for its answer, and return the answer."""
        return self.submit_task(*tensors, timeout=timeout).result()

    def _idle_is_known(self) -> None:
        """Do nothing: this pool never warns that it is not served, because its requests end at their deadlines."""

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
    """Sends a call, repeats it if necessary, and completes its future.

    Everything after sending the first attempt happens on threads of gRPC and on timer threads. Callbacks that may block
    run on a timer thread: on gRPC's thread, they would delay all other answers of the connection.
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
        if self._future.cancelled():  # RemoteFuture.cancel() may not have seen this attempt
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
        with self._future._condition:  # add_done_callback() sets _may_block under this lock
            if not self._future._may_block:
                self._permits.give_back()
                return self._complete(error, result)
        return call_soon(self._call_back, error, result)

    def _call_back(self, error: Exception | None, result: Any) -> None:
        """Complete the future, which runs its callbacks, and then give back the permit.

        Callbacks that block occupy a thread, so the permits also limit the number of these threads.
        """
        try:
            self._complete(error, result)
        finally:
            self._permits.give_back()

    def _complete(self, error: Exception | None, result: Any) -> None:
        if not self._future.set_running_or_notify_cancel():  # it was cancelled; this call has woken its waiters
            return
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)
