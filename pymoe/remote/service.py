"""The methods of the service: what a server does with each call, and whom it lets in.

A call passes, in this order, the token, the draining server's refusal, and the room for its bytes. Only then is its
body read: handlers are those of streams, whose messages gRPC fetches when they are asked for, and no longer than
:data:`~pymoe.remote.wire.MOST_READ`. What a stream of requests sends is read up to that length, and finds room then.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from pymoe.remote import wire
from pymoe.remote.admission import Room, said_size
from pymoe.remote.encodings import check_encoding
from pymoe.remote.errors import KIND_KEY, ServerLost, WireError, to_status
from pymoe.remote.hosted import HostedExpert
from pymoe.remote.security import shows_token
from pymoe.remote.stalls import Stalls
from pymoe.runtime import QueueFull

MOST_STAYING = 4096
"""Connections that are told at once when the server drains."""
MOST_STREAMS = 1024
"""Streams of requests: each may hold a message, as long as may be read, that has found no room yet."""
LONGEST_REQUEST_S = 3600.0
"""The deadline of a request whose client names none, or a later one."""
SLOW_REPLY_S = 10.0
"""How long after the end of its request's time a client may take to read a long reply."""
CUT_S = 1.0
"""How long a drain waits for requests to end that it has cancelled."""
LONG_MESSAGE = 1 << 18
"""Bytes from which on a message is coded on another thread, so that short ones need not wait for it."""

T = TypeVar("T")


class Service(grpc.GenericRpcHandler):
    """What a server answers. All calls run in one event loop.

    Args:
        token: who may ask for more than health; None: everybody.
        info: what to say of the server.
        drain: called once a client asks the server to drain.
    """

    def __init__(self, token: str | None, info: Callable[[], wire.Info], drain: Callable[[], Any]) -> None:
        self.token = token
        self.hosted: dict[str, HostedExpert] = {}
        self._over = asyncio.Event()
        self._staying = 0
        self._streams = 0
        self._busy: set[asyncio.Task[Any]] = set()  # calls with requests, idle streams among them
        self._idle: set[asyncio.Task[Any]] = set()  # streams that wait for a request
        self._cut: set[asyncio.Task[Any]] = set()
        self.saved = asyncio.Event()
        """When nothing more will be saved."""
        self.room = Room()
        self.counts: Counter[str] = Counter()
        self.incarnation = ""
        self._info, self._drain = info, drain
        self.stalls = Stalls()
        handler = grpc.stream_unary_rpc_method_handler
        self._methods = {
            f"/{wire.SERVICE}/Forward": handler(self._guarded(self._waited_for(self._forward))),
            f"/{wire.SERVICE}/Backward": handler(self._guarded(self._waited_for(self._backward))),
            f"/{wire.SERVICE}/Exchange": grpc.stream_stream_rpc_method_handler(
                self._guarded(self._waited_for(self._exchange))
            ),
            f"/{wire.SERVICE}/Info": handler(self._guarded(self._tell)),
            f"/{wire.SERVICE}/Stay": handler(self._guarded(self._let_stay)),
            f"/{wire.SERVICE}/Drain": handler(self._guarded(self._begin_to_drain)),
        }
        self._health = handler(self._check_health)
        self._refusal = handler(self._refuse)

    @property
    def draining(self) -> bool:
        """Whether further requests are refused."""
        return self._over.is_set()

    async def drain(self, grace: float) -> None:
        """Refuse further requests, tell who stays, end the streams that wait for a request, and wait for the requests
        under way; cancel those that take longer than ``grace`` seconds.
        """
        self._over.set()
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
        """Return, after ``seconds`` at most, whether further requests are refused."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self.draining

    def service(self, details: Any) -> Any:
        """Return the handler of a call, before anything but its metadata is read."""
        if details.method == wire.HEALTH:
            return self._health
        if self.token is not None and not shows_token(details.invocation_metadata, self.token):
            return self._refusal
        return self._methods.get(details.method)

    async def _check_health(self, messages: Any, context: Any) -> bytes:
        # Which service was asked for is not even read: the answer is that of the whole server.
        return wire.NOT_SERVING if self.draining else wire.SERVING

    async def _refuse(self, messages: Any, context: Any) -> None:
        self.counts["unauthenticated"] += 1
        await context.abort(*to_status(PermissionError("a token is needed, and this is not it")))

    def _guarded(self, answer: Callable[[Any], Awaitable[bytes | None]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return a handler that turns exceptions into statuses."""

        async def handle(messages: Any, context: Any) -> bytes | None:
            try:
                return await answer(context)
            except Exception as error:
                status = self._status_of(error)
            await context.abort(*status)
            return None

        return handle

    def _waited_for(self, answer: Callable[[Any], Awaitable[T]]) -> Callable[[Any], Awaitable[T]]:
        """Return ``answer`` as what a drain waits for, and cuts off when its grace is over."""

        async def answered(context: Any) -> T:
            task = asyncio.current_task()
            assert task is not None
            self._busy.add(task)
            task.add_done_callback(self._busy.discard)  # then its status has been sent, too
            try:
                return await answer(context)
            except asyncio.CancelledError:
                if task not in self._cut:
                    raise
                raise ServerLost("the server drained before the request was done") from None

        return answered

    def _status_of(self, error: Exception) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
        """Count an exception, and return what stands for it."""
        kinds = (WireError, "malformed"), (QueueFull, "shed")
        self.counts[next((name for kind, name in kinds if isinstance(error, kind)), "failed")] += 1
        return to_status(error)

    # --- requests ---

    async def _forward(self, context: Any) -> bytes:
        return await self._single(context, backward=False)

    async def _backward(self, context: Any) -> bytes:
        return await self._single(context, backward=True)

    async def _single(self, context: Any, backward: bool) -> bytes:
        """Answer a request that is a call of its own."""
        self._refuse_when_draining()
        size = said_size(context.invocation_metadata())
        with self.room.take(size):
            head = _message(await context.read())
            request = wire.decode(head, wire.Request)
            whole = len(head) + wire.following(request.tensors)
            if whole > size:
                raise WireError(f"expected a message of {size} bytes, as its metadata say, got {whole}")
            tail = await _read_tail(context, request.tensors)
            left = context.time_remaining()
            request.backward, request.seconds = backward, LONGEST_REQUEST_S if left is None else left
            return wire.encode(await self._answer(request, tail))

    async def _exchange(self, context: Any) -> None:
        """Answer requests one after the other, until the client ends the stream or the server drains."""
        if self._streams >= MOST_STREAMS:
            raise QueueFull(f"{MOST_STREAMS} streams of requests are open")
        self._streams += 1
        task = asyncio.current_task()
        assert task is not None
        try:
            while not self.draining:
                self._idle.add(task)
                try:
                    head = await context.read()
                except asyncio.CancelledError:
                    if self.draining:
                        return
                    raise
                finally:
                    self._idle.discard(task)
                if head is grpc.aio.EOF or not await self._exchange_one(context, head):
                    return
        finally:
            self._streams -= 1

    async def _exchange_one(self, context: Any, head: bytes) -> bool:
        """Answer a request of a stream; return whether another can follow."""
        missing, until = 0, time.monotonic()
        try:
            with self.room.take(len(head)):
                request = wire.decode(head, wire.Request)
                until += _limited(request.seconds)
                self._refuse_when_draining()
                missing = wire.following(request.tensors)
                if not missing:
                    reply = await self._answer(request, None)
                else:
                    with self.room.take(missing):
                        begun = time.monotonic()
                        reading = _read_tail(context, request.tensors)
                        try:
                            tail = await asyncio.wait_for(reading, _limited(request.seconds))
                        except asyncio.TimeoutError:  # before Python 3.11 not that of other waits
                            raise TimeoutError("the message did not come in time") from None
                        missing = 0
                        request.seconds -= time.monotonic() - begun
                        reply = await self._answer(request, tail)
        except Exception as error:
            code, text, metadata = self._status_of(error)
            reply = wire.Reply([], status=code.value[0], details=text, kind=dict(metadata).get(KIND_KEY, ""))
        await self._write(context, reply, until)
        return not missing  # frames that nobody has read would be taken for requests

    async def _write(self, context: Any, reply: wire.Reply, until: float) -> None:
        """Write a reply to a stream. A long one takes room, and its client has to read it in time.

        Raises:
            TimeoutError: it has not: the stream ends, and with it what it held.
        """
        following = wire.detach_long(reply.tensors)
        head = wire.encode(reply)
        if not following:
            return await context.write(head)  # type: ignore[no-any-return]

        async def write_all() -> None:
            await context.write(head)
            for frame in wire.frames(following):
                await context.write(frame)

        size = sum([one.nbytes for one in following])
        self.room.used += size  # there may be too little: what is computed is not thrown away, but nothing else begins
        try:
            await asyncio.wait_for(write_all(), max(0.0, until - time.monotonic()) + SLOW_REPLY_S)
        except asyncio.TimeoutError:  # before Python 3.11 not that of other waits
            raise TimeoutError("the reply was not read in time") from None
        finally:
            self.room.used -= size

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise ServerLost("the server is draining")

    async def _answer(self, request: wire.Request, tail: wire.Tail | None) -> wire.Reply:
        check_encoding("reply_encoding", request.reply_encoding)
        request.seconds -= await self.stalls.settle()
        hosted = self.hosted.get(request.expert)
        if hosted is None:
            raise LookupError(f"no expert {request.expert[: wire.MOST_NAME]!r} is served here")
        unpacked = wire.unpacked_size(request.tensors)
        with self.room.take(min(unpacked, wire.MOST_BYTES)):
            if unpacked < LONG_MESSAGE:
                tensors = wire.unpack(request.tensors, tail)
            else:
                tensors = await _aside(wire.unpack, request.tensors, tail)
            seconds = _limited(request.seconds)
            if request.backward:
                outputs, repeated = await hosted.backward(request, tensors, seconds)
                self.counts["repeated" if repeated else "backward"] += 1
            else:
                self.counts["forward"] += 1
                outputs = await hosted.forward(request, tensors, seconds)
            if sum([one.nbytes for one in outputs]) < LONG_MESSAGE:
                return self._reply(hosted, outputs, request.reply_encoding)
            return await _aside(self._reply, hosted, outputs, request.reply_encoding)

    def _reply(self, hosted: HostedExpert, outputs: Any, encoding: str) -> wire.Reply:
        return wire.Reply(wire.pack(outputs, encoding), self.incarnation, hosted.backend.updates)

    # --- the others ---

    async def _tell(self, context: Any) -> bytes:
        return wire.encode(self._info())

    async def _let_stay(self, context: Any) -> bytes:
        """Answer when the server drains: clients see at once that it goes, or that the connection broke."""
        if self._staying >= MOST_STAYING:
            raise QueueFull(f"{MOST_STAYING} connections stay already")
        self._staying += 1
        try:
            await self._over.wait()
        finally:
            self._staying -= 1
        return b""

    async def _begin_to_drain(self, context: Any) -> bytes:
        self._drain()
        await self.saved.wait()
        return wire.encode(self._info())


def _message(found: Any) -> bytes:
    if not isinstance(found, bytes):
        raise WireError("expected a message, got none")
    return found


async def _read_tail(context: Any, packed: Sequence[wire.Packed]) -> wire.Tail:
    """Read what follows a message."""
    tail = wire.Tail(packed)
    while tail.missing:
        tail.take(_message(await context.read()))
    return tail


def _limited(seconds: float) -> float:
    """Return the seconds that a request has here; of no number, which would pass for any, none."""
    return min(seconds, LONGEST_REQUEST_S) if seconds > 0 else 0.0


async def _aside(function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, called on another thread."""
    return await asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *arguments))
