"""The server's side of a call: checks access, limits memory, passes requests to the expert's pools, and answers.

A request that is a separate call is checked for its token, then refused if the server drains, then charged to the byte
budget. Only then is its body read. For this purpose the handler of such a call is registered as that of a stream: gRPC
then reads messages on demand, each of at most :data:`~pymoe.remote.wire.MAX_READ` bytes. On a stream of many requests,
a message is charged after it was read.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from pymoe._errors import describe_error
from pymoe.remote import wire
from pymoe.remote.checkpoints import ExpertCheckpoints
from pymoe.remote.encodings import check_encoding
from pymoe.remote.errors import KIND_KEY, RemoteExpertError, ServerLost, WireError, to_status
from pymoe.remote.journal import IN_PART, Applied, Journal
from pymoe.remote.security import token_problem
from pymoe.runtime import ExpertBackend, QueueFull, TaskPool
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.nested import nested_flatten
from pymoe.runtime.numbered import numbered_backward_pool
from pymoe.runtime.protocols import how

MAX_BYTES_IN_FLIGHT = 1 << 30
MAX_WATCHES = 4096
"""Maximum number of connections that are notified immediately when the server drains."""
MAX_STREAMS = 1024
"""Maximum number of request streams; each may occupy up to MAX_READ bytes outside the budget."""
MAX_REQUEST_S = 3600.0
"""Maximum time limit of a request in seconds, and the time limit of a separate call whose client sets none."""
SLOW_REPLY_S = 10.0
"""Seconds after a request's deadline during which its client may still read a long reply."""
CUT_S = 1.0
"""Seconds that a drain waits for cancelled requests to end."""
DRAINING, CUT = "the server is draining", "the server drained before the request was done"
"""Messages for clients whose requests a drain has refused (DRAINING) or cancelled (CUT)."""
LONG_MESSAGE = 1 << 18
"""Tensors of at least this many bytes together are encoded and decoded on another thread, to delay no other request."""
LOOK_S = 0.05
"""Seconds between two readings of the clock by :class:`StallDetector`."""
STALL_S = 0.2
"""If the clock is not read for this many seconds, the event loop was stalled."""
SETTLE_S = 0.05
"""Seconds that requests wait after a stall."""

T = TypeVar("T")
_journals: weakref.WeakKeyDictionary[ExpertBackend, Journal] = weakref.WeakKeyDictionary()
"""The journals of all backends that were ever served. If a backend is served again, its state still includes the
updates of the requests in its journal, so these requests must not be applied again.
"""

# --- admission ---


class ByteBudget:
    """Limits the number of bytes of messages and tensors in the server's memory. Not thread-safe.

    To release bytes, the caller subtracts them from ``used``.
    """

    def __init__(self, limit: int = MAX_BYTES_IN_FLIGHT) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> int:
        """Add ``size`` bytes to ``used``, and return ``size``; raise QueueFull if this would exceed the limit."""
        if self.used + size > self.limit:
            raise QueueFull(f"requests of {self.used} bytes are under way, of at most {self.limit}")
        self.used += size
        return size


def announced_size(metadata: Any) -> int:
    """Return the number of bytes that a request's metadata announces, but at most MAX_BYTES.

    If it announces no valid number, return MAX_BYTES.
    """
    for key, value in metadata or ():
        if key == wire.SIZE_KEY and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
            return min(int(value), wire.MAX_BYTES)
    return wire.MAX_BYTES


class StallDetector:
    """Detects that the event loop was stalled, for example because the process was stopped or got no processor time.

    After a stall, the loop reads all messages that have arrived meanwhile, a request always before its cancellation.
    Therefore every request first awaits :meth:`settle`, so that its cancellation is read before the request runs.
    """

    def __init__(self) -> None:
        self._looked = self._settled = 0.0
        self._next: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start to read the clock at regular intervals, on the running event loop."""
        self._looked = time.monotonic()
        self._look_again()

    def end(self) -> None:
        """Stop reading the clock."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    async def settle(self) -> float:
        """After a stall, sleep up to SETTLE_S seconds while cancellations are read; return the seconds slept, or 0."""
        if self._next is None or (wait := self._seconds_to_settle()) <= 0:
            return 0.0
        await asyncio.sleep(wait)
        return wait

    def _seconds_to_settle(self) -> float:
        now = time.monotonic()
        if now - self._looked > STALL_S:
            self._settled = now + SETTLE_S
        self._looked = now
        return self._settled - now

    def _look_again(self) -> None:
        self._seconds_to_settle()
        self._next = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)


# --- one expert ---


class ExpertEntry:
    """A served expert: its backend, a pool for backward requests with keys, and the journal of the keys.

    Attributes:
        checkpoints: saves the expert; None if the server has no checkpoints.

    Raises:
        TypeError: ``backend`` is not an ExpertBackend, or its schemas cannot be described to other machines.
        ValueError: the name of the backend is empty or too long.
    """

    def __init__(self, backend: ExpertBackend, incarnation: str) -> None:
        if not isinstance(backend, ExpertBackend):
            kind = type(backend).__name__
            raise TypeError(f"ExpertServer: expected an ExpertBackend to serve, got {kind}{how(backend)}")
        if not wire.is_name(backend.name):
            raise ValueError(f"ExpertServer: a name has 1 to {wire.MAX_NAME} bytes, got {backend.name!r}")
        self.backend = backend
        self.name: str = backend.name
        self.checkpoints: ExpertCheckpoints | None = None
        self.journal = _journals.setdefault(backend, Journal(incarnation))
        self.journal.incarnation = incarnation
        self.keyed_pool, self._partly_applied = numbered_backward_pool(backend)
        self._names = itertools.count(1)
        info = backend.get_info()
        schemas = info["forward_schema"], info["outputs_schema"]
        self._schemas = wire.write_schema(self.name, schemas[0]), wire.write_schema(self.name, schemas[1])
        leaves = nested_flatten(schemas[1])
        self._has_constants = any(not isinstance(leaf, BatchTensorProto) for leaf in leaves)

    def get_pools(self) -> tuple[TaskPool, ...]:
        """Return the pools that a runtime must serve: the backend's own, and the one for requests with keys."""
        return (*self.backend.get_pools(), self.keyed_pool)

    def info(self) -> wire.ExpertInfo:
        """Return the expert's description for clients."""
        backend = self.backend
        return wire.ExpertInfo(*self._schemas, backend.trains, backend.updates, self.keyed_pool.max_batch_size)

    async def forward(self, tensors: Sequence[Tensor], seconds: float) -> Sequence[Tensor]:
        """Run a forward request and return the tensors among the outputs.

        Raises:
            TimeoutError: the request did not begin within ``seconds``. It is not run.
            QueueFull: there is no room in the queue.
            RemoteExpertError: the expert raised a BaseException that is not an Exception, such as SystemExit.
            Exception: any exception of the expert.
        """
        future = submit(self.backend.forward_pool, tensors, seconds)
        try:
            leaves: Sequence[Tensor] = await future
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise RemoteExpertError(describe_error(error)) from None
        finally:
            if self.checkpoints is not None:
                self.checkpoints.answered += 1
        return self.backend._schema.output_tensors(leaves) if self._has_constants else leaves

    async def backward(
        self, request: wire.Request, tensors: Sequence[Tensor], seconds: float
    ) -> tuple[Sequence[Tensor], bool]:
        """Run a backward request, unless an earlier attempt was applied.

        Returns:
            The gradients of the inputs, and whether an earlier attempt was applied.

        Raises:
            ValueError: the request has no key.
            AppliedError: see :meth:`pymoe.remote.journal.Journal.once`.
            TypeError: the expert's state can no longer be saved.
            Exception: any exception of the expert; see also :meth:`forward`.
        """
        if not wire.is_name(request.client) or request.seq < 0:
            raise ValueError(f"{self.name}: a backward request needs a key: client and seq")

        def run() -> tuple[Awaitable[Applied], Callable[[], Any]]:
            if self.checkpoints is not None and self.checkpoints.cannot_save is not None:
                raise TypeError(f"{self.name}: further updates would be lost: {self.checkpoints.cannot_save}")
            rows = len(tensors[0])
            name = next(self._names) if rows > self.keyed_pool.max_batch_size else 0
            future = submit(self.keyed_pool, (*tensors, torch.full((rows,), name)), seconds)
            return self._applied(future, rows, name), future.cancel

        try:
            answer = await self.journal.once(
                request.client, request.seq, request.ack, run,
                attempt=request.attempt, incarnation=request.incarnation, age=request.age,
            )  # fmt: skip
        finally:
            if self.checkpoints is not None:
                self.checkpoints.answered += 1
        if self.checkpoints is not None:
            self.checkpoints.updated()
        return answer

    async def _applied(self, future: Any, rows: int, name: int) -> Applied:
        try:
            *gradients, numbers = await future
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # If the exception forbids another run, the update may have been applied in part, or gradients of earlier
            # requests were dropped.
            broken = getattr(error, "pymoe_may_retry", True) is False
            in_part = broken or name in self._partly_applied
            if not isinstance(error, Exception):  # SystemExit, for example, would end the event loop
                error = RemoteExpertError(describe_error(error))
            return Applied(IN_PART if in_part else None, error=error)
        finally:
            self._partly_applied.discard(name)
        # A request of several batches counts as applied in its first update, which includes some of its rows.
        update = int(numbers.min()) if rows else self.backend.updates
        return Applied(update, [one.clone() for one in gradients])  # views would keep the whole batch in memory


def submit(pool: TaskPool, tensors: Sequence[Tensor], seconds: float) -> Any:
    """Submit a request and return its future. Raise QueueFull if there is no room; the client then tries again."""
    future = pool._try_submit(*tensors, timeout=seconds)
    if future is None:
        raise QueueFull(f"{pool.name}: the queue has no room")
    return future


# --- the service ---


class Service(grpc.GenericRpcHandler):
    """The gRPC methods of a server. All calls run in one event loop.

    Args:
        token: the token that clients must send, except for health checks; None: no token.
        info: returns the description of the server.
        drain: called when a client asks the server to drain; must not block.

    Attributes:
        entries: the served experts by name.
        saved: set when a drain has finished saving, even if some experts could not be saved.
    """

    def __init__(self, token: str | None, info: Callable[[], wire.Info], drain: Callable[[], Any]) -> None:
        self.token = token
        self.entries: dict[str, ExpertEntry] = {}
        self.draining = False
        self.saved = asyncio.Event()
        self.budget = ByteBudget()
        self.counts: Counter[str] = Counter()
        self.incarnation = ""
        self.stalls = StallDetector()
        self._drained = asyncio.Event()  # set once a drain has begun
        self._watches = 0
        self._streams = 0
        self._busy: set[asyncio.Task[Any]] = set()  # tasks of all calls for requests, including idle streams
        self._idle: set[asyncio.Task[Any]] = set()  # tasks of streams that wait for a request
        self._cut: set[asyncio.Task[Any]] = set()  # tasks that a drain has cancelled
        self._info, self._drain = info, drain
        unary = grpc.stream_unary_rpc_method_handler
        self._methods = {
            f"/{wire.SERVICE}/Forward": unary(self._answering(self._forward)),
            f"/{wire.SERVICE}/Backward": unary(self._answering(self._backward)),
            f"/{wire.SERVICE}/Exchange": grpc.stream_stream_rpc_method_handler(self._exchange),
            f"/{wire.SERVICE}/Info": unary(self._answering(self._describe)),
            f"/{wire.SERVICE}/{wire.WATCH}": unary(self._answering(self._watch)),
            f"/{wire.SERVICE}/Drain": unary(self._answering(self._drain_and_save)),
        }
        self._health = unary(self._check_health)

    async def drain(self, grace: float) -> None:
        """Refuse further requests, end watches and idle streams, and wait for current requests.

        Requests that take longer than ``grace`` seconds are cancelled.
        """
        self.draining = True
        self._drained.set()
        self.stalls.end()
        idle, busy = set(self._idle), set(self._busy)
        for task in idle:
            task.cancel()
        if busy:
            _, late = await asyncio.wait(busy, timeout=grace)
            self._cut = late - idle
            for task in self._cut:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=CUT_S)

    async def drains_within(self, seconds: float) -> bool:
        """Return True as soon as the server drains, or False after ``seconds`` if it does not."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drained.wait(), seconds)
        return self.draining

    def service(self, details: Any) -> Any:
        """Return the handler of a call, or None for an unknown method. gRPC calls this before it reads a message."""
        if details.method == wire.HEALTH:
            return self._health
        if self.token is not None and (problem := token_problem(details.invocation_metadata, self.token)):
            return grpc.stream_unary_rpc_method_handler(functools.partial(self._refuse, problem))
        return self._methods.get(details.method)

    async def _check_health(self, messages: Any, context: Any) -> bytes:
        # Do not read the message, which names a service: the answer is the same for all services.
        return wire.NOT_SERVING if self.draining else wire.SERVING

    async def _refuse(self, problem: str, messages: Any, context: Any) -> None:
        self.counts["unauthenticated"] += 1
        await context.abort(*to_status(PermissionError(f"a token is needed, {problem}")))

    def _answering(self, answer: Callable[[Any], Awaitable[bytes]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return a gRPC handler that returns ``answer(context)``; if that raises, it ends the call with a status."""

        async def handle(messages: Any, context: Any) -> bytes | None:
            try:
                return await answer(context)
            except asyncio.CancelledError:
                if asyncio.current_task() not in self._cut:
                    raise
                await context.abort(*self._status_of(ServerLost(CUT)))
            except Exception as error:
                await context.abort(*self._status_of(error))
            return None

        return handle

    def _status_of(self, error: Exception) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
        """Count the exception in ``counts``, and return the result of :func:`~pymoe.remote.errors.to_status` for it."""
        kinds = (WireError, "malformed"), (QueueFull, "shed")
        self.counts[next((name for kind, name in kinds if isinstance(error, kind)), "failed")] += 1
        return to_status(error)

    def _waited_for(self) -> asyncio.Task[Any]:
        """Add the current task to those for which a drain waits, and return the task."""
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)  # the task is done only after the status was sent
        return task

    # --- requests ---

    async def _forward(self, context: Any) -> bytes:
        return await self._single(context, backward=False)

    async def _backward(self, context: Any) -> bytes:
        return await self._single(context, backward=True)

    async def _single(self, context: Any, backward: bool) -> bytes:
        """Answer a request that is a separate gRPC call."""
        self._waited_for()
        if self.draining:
            raise ServerLost(DRAINING)
        size = announced_size(context.invocation_metadata())
        held = self.budget.take(size)
        try:
            head = _message(await context.read())
            request = wire.decode(head, wire.Request)
            whole = len(head) + wire.following(request.tensors)
            if whole > size:
                raise WireError(f"expected a message of {size} bytes, as its metadata say, got {whole}")
            tail = await _read_tail(context, request.tensors)
            request.backward = backward
            left = context.time_remaining()
            return wire.encode(await self._answer(request, tail, _limited(MAX_REQUEST_S if left is None else left)))
        finally:
            self.budget.used -= held

    async def _exchange(self, messages: Any, context: Any) -> None:
        """Answer the requests of a stream one after the other, until the client ends the stream, the server drains, or
        a failed request has frames that were not read.
        """
        if self._streams >= MAX_STREAMS:
            await context.abort(*self._status_of(QueueFull(f"{MAX_STREAMS} streams of requests are open")))
        task = self._waited_for()
        self._streams += 1
        failure: Exception | None = None
        try:
            missing = 0
            while not missing and not self.draining:  # unread frames would be taken for requests, so end the stream
                self._idle.add(task)
                head = await context.read()
                self._idle.discard(task)
                if head is grpc.aio.EOF:
                    break
                held, until = 0, time.monotonic()
                try:
                    held = self.budget.take(len(head))
                    request = wire.decode(head, wire.Request)
                    until += (seconds := _limited(request.seconds))
                    if self.draining:
                        raise ServerLost(DRAINING)
                    missing = wire.following(request.tensors)
                    tail = None
                    if missing:
                        held += self.budget.take(missing)
                        tail = await _within(seconds, _read_tail(context, request.tensors), "message did not come")
                        missing = 0
                        seconds = until - time.monotonic()
                    reply = await self._answer(request, tail, seconds)
                except Exception as error:
                    code, text, metadata = self._status_of(error)
                    reply = wire.Reply([], status=code.value[0], details=text, kind=dict(metadata).get(KIND_KEY, ""))
                finally:
                    self.budget.used -= held
                if following := wire.detach_long(reply.tensors):
                    await self._write_long(context, reply, following, until)
                else:
                    await context.write(wire.encode(reply))
        except asyncio.CancelledError:
            if task in self._cut:
                failure = ServerLost(CUT)
            elif not (self.draining and task in self._idle):
                raise
        except Exception as error:
            failure = error
        finally:
            self._idle.discard(task)
            self._streams -= 1
        if failure is not None:  # after the cleanup, because a client that does not read delays abort()
            await context.abort(*self._status_of(failure))

    async def _write_long(self, context: Any, reply: wire.Reply, following: Sequence[memoryview], until: float) -> None:
        """Write a reply with its frames; raise TimeoutError if the client does not read it in time.

        Meanwhile, the frames count in the byte budget. They may exceed the budget, because they are in memory already;
        further requests are then refused.
        """

        async def write() -> None:
            await context.write(wire.encode(reply))
            for frame in wire.frames(following):
                await context.write(frame)

        size = sum([one.nbytes for one in following])
        self.budget.used += size
        try:
            await _within(max(0.0, until - time.monotonic()) + SLOW_REPLY_S, write(), "reply was not read")
        finally:
            self.budget.used -= size

    async def _answer(self, request: wire.Request, tail: wire.Tail | None, seconds: float) -> wire.Reply:
        """Run the request, which must begin within ``seconds``, and return the reply."""
        check_encoding("reply_encoding", request.reply_encoding)
        seconds -= await self.stalls.settle()
        entry = self.entries.get(request.expert)
        if entry is None:
            raise LookupError(f"no expert {request.expert[: wire.MAX_NAME]!r} is served here")
        size = self.budget.take(wire.unpacked_size(request.tensors))
        try:
            unpack = functools.partial(wire.unpack, request.tensors, tail, checked=True)
            tensors = unpack() if size < LONG_MESSAGE else await _aside(unpack)
            if request.backward:
                outputs, repeated = await entry.backward(request, tensors, max(seconds, 0.0))
                self.counts["repeated" if repeated else "backward"] += 1
            else:
                self.counts["forward"] += 1
                outputs = await entry.forward(tensors, max(seconds, 0.0))
            length = 0
            for one in outputs:
                length += one.nbytes
            if length < LONG_MESSAGE:
                return self._reply(entry, outputs, request.reply_encoding)
            return await _aside(self._reply, entry, outputs, request.reply_encoding)
        finally:
            self.budget.used -= size

    def _reply(self, entry: ExpertEntry, outputs: Sequence[Tensor], encoding: str) -> wire.Reply:
        return wire.Reply(wire.pack(outputs, encoding), self.incarnation, entry.backend.updates)

    # --- other methods ---

    async def _describe(self, context: Any) -> bytes:
        return wire.encode(self._info())

    async def _watch(self, context: Any) -> bytes:
        """Answer once the server drains, so that the client notices the drain immediately.

        If the call ends without an answer, the client knows that the connection broke.
        """
        if self._watches >= MAX_WATCHES:
            raise QueueFull(f"{MAX_WATCHES} connections watch already")
        self._watches += 1
        try:
            await self._drained.wait()
        finally:
            self._watches -= 1
        return b""

    async def _drain_and_save(self, context: Any) -> bytes:
        self._drain()
        await self.saved.wait()
        return wire.encode(self._info())


def _message(found: Any) -> bytes:
    if not isinstance(found, bytes):
        raise WireError("expected a message, got none")
    return found


async def _read_tail(context: Any, packed: Sequence[wire.Packed]) -> wire.Tail:
    """Read the frames that follow a message, and return them."""
    tail = wire.Tail(packed)
    while tail.missing:
        tail.take(_message(await context.read()))
    return tail


def _limited(seconds: float) -> float:
    """Return the time limit ``seconds`` of a client, but at most MAX_REQUEST_S; return 0 if it is negative or NaN."""
    return min(seconds, MAX_REQUEST_S) if seconds > 0 else 0.0


async def _within(seconds: float, work: Awaitable[T], what: str) -> T:
    """Return the result of ``work``; raise TimeoutError if it takes more than ``seconds``."""
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:  # before Python 3.11, this is not the builtin TimeoutError
        raise TimeoutError(f"the {what} in time") from None


async def _aside(function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function(*arguments)`` on a thread of the event loop's executor, and return the result."""
    return await asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *arguments))
