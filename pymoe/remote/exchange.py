"""Requests of a client over streams that stay open, one request at a time each.

To begin and end a call of its own costs gRPC more than to carry a short request: headers, a deadline, a handler, a
status, all made anew in both processes. So a channel keeps its streams, as many as it had requests under way at a time,
and what a call's beginning and end would say is in the messages: the deadline, and why there is no answer. A stream
whose request is given up is cancelled with it, which tells the server what the end of a call would.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import grpc
from grpc import StatusCode

from pymoe.remote import wire
from pymoe.remote.errors import KIND_KEY

REFUSED_S = 5.0
"""How long after the server has refused a stream none is opened, and requests are calls of their own."""
IDLE_S = 60.0
"""How long a stream without a request stays open."""
_CODES: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}


class Ended(grpc.RpcError):
    """A request on a stream had no answer: what a call of gRPC would say of that."""

    def __init__(self, code: StatusCode, details: str, kind: str = "") -> None:
        super().__init__(details)
        self._code, self._details, self._kind = code, details, kind

    def code(self) -> StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return the message."""
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the name of the exception, as a call's metadata have it."""
        return ((KIND_KEY, self._kind),) if self._kind else ()


class NoStream(Exception):
    """The server opens no further stream, or has refused one lately. Nothing of the request has reached it."""


class Stream:
    """A stream to a server. For one thread at a time."""

    def __init__(self, method: Any, metadata: Any) -> None:
        self.metadata = metadata
        self.used = self.overdue = False
        self._messages: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        self._stream = method(self._frames(), metadata=metadata)
        self._stream.add_done_callback(lambda _: self._messages.put(None))  # or gRPC's thread would wait for ever

    def _frames(self) -> Iterator[bytes]:
        while (message := self._messages.get()) is not None:
            yield from message

    @property
    def open(self) -> bool:
        """Whether it is, as far as is known."""
        return bool(self._stream.running())

    def ask(self, head: bytes, tail: Sequence[memoryview]) -> tuple[wire.Reply, wire.Tail]:
        """Send a request, wait, and return the reply with what came behind it.

        Raises:
            Ended: the server says why there is no answer; the stream stays open unless frames were on their way.
            NoStream: the server opens no further stream.
            grpc.RpcError: the stream has ended.
            WireError: the answer is none.
        """
        self._messages.put(_frames_of(head, tail))
        reply = wire.decode(self._next(), wire.Reply)
        self.used = True
        if reply.status:
            raise Ended(_CODES.get(reply.status, StatusCode.UNKNOWN), reply.details, reply.kind)
        came = wire.Tail(reply.tensors)
        while came.missing:
            came.take(self._next())
        return reply, came

    def _next(self) -> bytes:
        try:
            frame: bytes = next(self._stream)
        except StopIteration:
            raise Ended(StatusCode.UNAVAILABLE, "the server ended the stream") from None
        except grpc.RpcError as error:
            if not self.used and self._stream.code() is StatusCode.RESOURCE_EXHAUSTED:
                raise NoStream from None
            raise error
        return frame

    def cancel(self) -> None:
        """End it, and the request that is under way; the server takes that out of its queue."""
        self._stream.cancel()


def _frames_of(head: bytes, tail: Sequence[memoryview]) -> Iterator[bytes]:
    yield head
    yield from wire.frames(tail)


class Streams:
    """The streams of a channel. Thread-safe.

    Args:
        method: opens one: a callable of gRPC.
    """

    def __init__(self, method: Any) -> None:
        self._method = method
        self._lock = threading.Lock()
        self._idle: list[Stream] = []
        self._refused = -REFUSED_S
        self._deadlines = Deadlines()

    def ask(
        self, head: bytes, tail: Sequence[memoryview], seconds: float, metadata: Any
    ) -> tuple[wire.Reply, wire.Tail]:
        """Send a request on a stream that is idle, or on a new one; takes and raises what :meth:`Stream.ask` does.

        Raises:
            Ended: also where there is no answer within ``seconds``.
            NoStream: none is idle, and the server has its most; that is found out every :data:`REFUSED_S` seconds.
        """
        stream = self._take(metadata)
        try:
            self._deadlines.begin(stream, time.monotonic() + seconds)
            try:
                found = stream.ask(head, tail)
            finally:
                self._deadlines.end(stream)
        except grpc.RpcError as error:
            if stream.overdue:
                raise Ended(StatusCode.DEADLINE_EXCEEDED, "there was no answer in time") from None
            if isinstance(error, Ended) and not tail:
                self._give_back(stream)
            else:
                stream.cancel()
            raise
        except NoStream:
            self._refused = time.monotonic()
            stream.cancel()
            raise
        except BaseException:
            stream.cancel()
            raise
        self._give_back(stream)
        return found

    def _take(self, metadata: Any) -> Stream:
        with self._lock:
            while self._idle:
                stream = self._idle.pop()
                self._deadlines.end(stream)
                if stream.metadata is metadata and stream.open and not stream.overdue:
                    return stream
                stream.cancel()
        if time.monotonic() < self._refused + REFUSED_S:
            raise NoStream
        return Stream(self._method, metadata)

    def _give_back(self, stream: Stream) -> None:
        if stream.open:
            with self._lock:
                self._deadlines.begin(stream, time.monotonic() + IDLE_S)
                self._idle.append(stream)

    def close(self) -> None:
        """Forget the streams, which end with their channel."""
        with self._lock:
            self._idle.clear()
        self._deadlines.close()


class Deadlines:
    """Cancels streams whose requests are overdue, or that are idle for too long. A thread waits for the earliest
    deadline, once there is one.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._until: dict[Stream, float] = {}
        self._wakes = float("inf")
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, stream: Stream, deadline: float) -> None:
        """Have ``stream`` cancelled when ``deadline`` has passed, on the monotonic clock."""
        with self._changed:
            self._until[stream] = deadline
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="pymoe-remote-deadlines", daemon=True)
                self._thread.start()
            elif deadline < self._wakes:
                self._changed.notify()

    def end(self, stream: Stream) -> None:
        """Have it cancelled no more."""
        with self._changed:
            self._until.pop(stream, None)

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for stream in [one for one, until in self._until.items() if until <= now]:
                    del self._until[stream]
                    stream.overdue = True
                    stream.cancel()
                # Most requests end long before their deadlines, and the thread sleeps through them.
                self._wakes = min(self._until.values(), default=float("inf"))
                self._changed.wait(min(self._wakes - now, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
