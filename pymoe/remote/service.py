"""The methods of the service: what a server does with each call, and whom it lets in.

A call passes, in this order, the token, the draining server's refusal, and the room for its bytes. Only then is its
body read: handlers are those of streams, whose messages gRPC fetches when they are asked for.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from pymoe.remote import wire
from pymoe.remote.admission import Room, said_size
from pymoe.remote.encodings import check_encoding
from pymoe.remote.errors import ServerLost, WireError, to_status
from pymoe.remote.hosted import HostedExpert
from pymoe.remote.security import shows_token
from pymoe.runtime import QueueFull

MOST_STAYING = 4096
"""Connections that are told at once when the server drains."""
LONGEST_REQUEST_S = 3600.0
"""The deadline of a request whose client names none, or a later one."""
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
        self.room = Room()
        self.counts: Counter[str] = Counter()
        self.incarnation = ""
        self._info, self._drain = info, drain
        handler = grpc.stream_unary_rpc_method_handler
        self._methods = {
            f"/{wire.SERVICE}/Forward": handler(self._guarded(self._forward)),
            f"/{wire.SERVICE}/Backward": handler(self._guarded(self._backward)),
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

    async def begin_to_drain(self) -> None:
        """Refuse further requests, and tell who stays."""
        self._over.set()

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

    def _guarded(self, answer: Callable[[Any], Awaitable[bytes]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return a handler that turns exceptions into statuses."""

        async def handle(messages: Any, context: Any) -> bytes | None:
            try:
                return await answer(context)
            except WireError as error:
                self.counts["malformed"] += 1
                status = to_status(error)
            except QueueFull as error:
                self.counts["shed"] += 1
                status = to_status(error)
            except Exception as error:
                self.counts["failed"] += 1
                status = to_status(error)
            await context.abort(*status)
            return None

        return handle

    # --- the methods ---

    async def _forward(self, context: Any) -> bytes:
        async def run(hosted: HostedExpert, request: wire.Request, tensors: Any, seconds: float) -> Any:
            self.counts["forward"] += 1
            return await hosted.forward(request, tensors, seconds)

        return await self._run(context, run)

    async def _backward(self, context: Any) -> bytes:
        async def run(hosted: HostedExpert, request: wire.Request, tensors: Any, seconds: float) -> Any:
            gradients, repeated = await hosted.backward(request, tensors, seconds)
            self.counts["repeated" if repeated else "backward"] += 1
            return gradients

        return await self._run(context, run)

    async def _run(self, context: Any, run: Callable[..., Awaitable[Any]]) -> bytes:
        if self.draining:
            raise ServerLost("the server is draining")
        size = said_size(context.invocation_metadata())
        with self.room.take(size):
            message = await context.read()
            if not isinstance(message, bytes):
                raise WireError("expected a message, got none")
            if len(message) > size:
                raise WireError(f"expected a message of {size} bytes, as its metadata say, got {len(message)}")
            request = wire.decode(message, wire.Request)
            check_encoding("reply_encoding", request.reply_encoding)
            hosted = self.hosted.get(request.expert)
            if hosted is None:
                raise LookupError(f"no expert {request.expert[: wire.MOST_NAME]!r} is served here")
            with self.room.take(min(wire.unpacked_size(request.tensors), wire.MOST_BYTES)):
                tensors = await _aside(len(message), wire.unpack, request.tensors)
                left = context.time_remaining()
                seconds = LONGEST_REQUEST_S if left is None else min(left, LONGEST_REQUEST_S)
                outputs = await run(hosted, request, tensors, seconds)
                size = sum(one.nbytes for one in outputs)
                return await _aside(size, self._reply, hosted, outputs, request.reply_encoding)

    def _reply(self, hosted: HostedExpert, outputs: Any, encoding: str) -> bytes:
        return wire.encode(wire.Reply(wire.pack(outputs, encoding), self.incarnation, hosted.backend.updates))

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
        return wire.encode(self._info())


async def _aside(size: int, function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, called on another thread if it has ``size`` bytes to copy and these are many."""
    if size < LONG_MESSAGE:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *arguments))
