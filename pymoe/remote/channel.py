"""A gRPC channel to a server: watches the server, reads its description, and keeps streams for requests.

Beginning and ending a gRPC call costs more than carrying a short request: headers, a deadline, a handler and a status
are made anew in both processes. So a channel keeps streams open and reuses them: a stream carries one request after the
other, and is closed after :data:`IDLE_S` seconds without one. The messages on a stream contain what the headers and the
status of a call would contain: the deadline, and the reason if there is no answer. To give up a request, the client
cancels the stream, as it would cancel a call.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import grpc
from grpc import StatusCode

from pymoe.remote import wire
from pymoe.remote.encodings import check_encoding
from pymoe.remote.errors import KIND_KEY, ProtocolError, ServerLost, WireError, from_status
from pymoe.remote.security import TLS, authorization, check_address, check_client, is_local
from pymoe.runtime.timers import TimerHandle, call_later

MAX_DEADLINE_S = 1e8
"""Longest time to a deadline that gRPC can represent."""
CHECK_AGAIN_S = 5.0
"""Seconds until the next check of a server that answers, but refuses the check or the watch."""
CHECK_DRAINING_S = 0.2
"""Seconds until the next check of a server that drains: it ends soon, and another may take its place."""
REFUSED_S = 5.0
"""Seconds for which no stream is opened after the server refused one. Meanwhile, requests that find no idle stream are
sent as separate calls."""
IDLE_S = 60.0
"""Seconds for which a stream without a request stays open."""
NO_ANSWER_IN_PLAIN = ("Socket closed", "Connection reset", "before receiving SETTINGS frame")
"""Parts of gRPC's error messages for a client without TLS whose server uses TLS: such a server closes the connection as
soon as it has read something, or waits for more.
"""
OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_BYTES),
    ("grpc.max_send_message_length", wire.MAX_BYTES),
    ("grpc.enable_retries", 0),  # gRPC would repeat requests regardless of their keys
    ("grpc.compression_enabled_algorithms_bitset", 1),  # do not accept compressed replies
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # time limit of an attempt to connect
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_CODES: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}


class Channel:
    """A gRPC channel, and the state that all requests over it share. Thread-safe.

    The arguments, and the errors for invalid arguments, are those of :func:`pymoe.remote.connect`.

    Attributes:
        address: the server's address.
        client: a unique name of this channel for the server; it is part of the keys of backward requests.
        metadata: the metadata of every call.
        methods: gRPC's callables for the methods of the service, by name.
        long_methods: the same for requests that are sent with frames (:mod:`pymoe.remote.wire`).
        streams: the streams that carry the requests of blocking callers.
        counts: the numbers of ``attempts``, ``retries`` and ``lost`` attempts (those that a broken connection ended).
        reachable: false while the server is known to be gone or to drain, and after :meth:`close`.
        closed: true after :meth:`close`.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TLS | None,
        token: str | None,
        timeout: float,
        encoding: str,
        gradient_encoding: str,
        coalesce: bool,
        retries: bool,
    ) -> None:
        check_address("connect", address, lowest_port=1)
        check_client(address, tls, token)
        self.address, self.timeout, self.coalesce, self.retries = address, timeout, coalesce, retries
        self.encoding = check_encoding("connect", encoding)
        self.gradient_encoding = check_encoding("connect", gradient_encoding)
        self.client = uuid.uuid4().hex
        self.metadata = authorization(token)
        self.counts: Counter[str] = Counter()
        self.reachable, self.closed, self._unwatched = True, False, False
        self._encrypted = tls is not None
        self._process = os.getpid()
        self._lock = threading.Lock()
        # Messages within this machine may be unencrypted, so a proxy from $http_proxy must not see them.
        options = (*OPTIONS, ("grpc.enable_http_proxy", 0)) if is_local(address) else OPTIONS
        if tls is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, tls.client_credentials(), options)
        names = ("Forward", "Backward", "Info", wire.WATCH, "Drain")
        self.methods = {name: self._channel.unary_unary(f"/{wire.SERVICE}/{name}") for name in names}
        self.long_methods = {name: self._channel.stream_unary(f"/{wire.SERVICE}/{name}") for name in names[:2]}
        self.streams = Streams(self._channel.stream_stream(f"/{wire.SERVICE}/Exchange"))
        self._health = self._channel.unary_unary(wire.HEALTH)

    # --- reachability of the server ---

    @property
    def why_not_reachable(self) -> str:
        """Return a clause for error messages that says why the server is not reachable."""
        return "the connection is closed" if self.closed else f"the server at {self.address} cannot be reached"

    def _set_reachable(self, reachable: bool) -> None:
        with self._lock:
            self.reachable = reachable and not self.closed

    def watch(self) -> None:
        """Keep ``reachable`` up to date from now on, and reconnect whenever the connection breaks.

        A health check asks whether the server serves, and waits for a server that is known to be gone. If the server
        serves, a second call stays open until the connection breaks or the server drains. (gRPC's own subscriptions to
        the state of a channel crash when the channel is closed.)
        """
        # If the server has gone since its last answer, a check that waits for it would end only when it is back. So the
        # check waits only if the server is known to be gone.
        self._start(self._health, self._health_known, wait_for_ready=not self.reachable)

    def _start(self, method: Any, ended: Callable[[Any], None], **options: Any) -> None:
        with suppress(ValueError):  # raised if the channel was closed
            method.future(b"", metadata=self.metadata, **options).add_done_callback(ended)

    def _health_known(self, health: Any) -> None:
        if self.closed:
            return
        if health.code() is StatusCode.OK and health.result() == wire.SERVING:
            self._set_reachable(True)
            self._start(self.methods[wire.WATCH], self._watch_ended)
        elif health.code() is StatusCode.UNAVAILABLE and self.reachable:
            self._watch_ended(health)
        else:
            drains = health.code() is StatusCode.OK
            self._set_reachable(self.reachable and not drains)
            self._watch_after(CHECK_DRAINING_S if drains else CHECK_AGAIN_S)

    def _watch_ended(self, call: Any) -> None:
        if self.closed:
            return
        if call.code() in (StatusCode.OK, StatusCode.UNAVAILABLE):
            self._set_reachable(False)
            self.watch()
        else:  # too many clients watch the server, or the token is no longer valid (requests will report that)
            self._watch_after(CHECK_AGAIN_S)

    def _watch_after(self, seconds: float) -> None:
        try:
            call_later(seconds, self.watch)
        except RuntimeError:  # no thread can be started: check_usable() will call watch() for the next request
            self._set_reachable(True)
            self._unwatched = True

    def check_usable(self) -> None:
        """Raise RuntimeError in a forked child, which lacks gRPC's threads, and ServerLost after :meth:`close`.

        Otherwise call :meth:`watch` again if an earlier watch ended because no thread could be started.
        """
        if os.getpid() != self._process:
            raise RuntimeError(f"{self.address}: a connection cannot be used in a fork: connect() again in the child")
        if self.closed:
            raise ServerLost(f"{self.address}: the connection is closed")
        if self._unwatched:
            self._unwatched = False
            self.watch()

    def count(self, what: str) -> None:
        """Count an event in ``counts``."""
        with self._lock:
            self.counts[what] += 1

    # --- the server's description ---

    def info(self, timeout: float | None = None) -> wire.Info:
        """Return the server's description of itself.

        Args:
            timeout: time limit in seconds; None: the connection's ``timeout``.

        Raises:
            ServerLost: the server cannot be reached; the message has gRPC's reason.
            PermissionError: the server expects another token.
            ProtocolError: the server is not an ExpertServer, or is one of another version.
            TimeoutError: the server does not answer.
            RuntimeError: this process was forked from the one that connected.
        """
        return self._ask("Info", timeout)

    def drain(self, timeout: float | None = None) -> wire.Info:
        """Make the server refuse further requests, answer current ones, save, and stop; return once it has saved.

        ``timeout`` is as for :meth:`info`.

        Raises:
            RuntimeError: experts were not saved, and the message names them; or this process was forked.
            ServerLost, PermissionError, ProtocolError, TimeoutError: see :meth:`info`.
        """
        found = self._ask("Drain", timeout)
        if found.not_saved:
            raise RuntimeError(f"{self.address}: not saved: {'; '.join(found.not_saved.values())}")
        return found

    def _ask(self, method: str, timeout: float | None) -> wire.Info:
        self.check_usable()
        seconds = min(self.timeout if timeout is None else timeout, MAX_DEADLINE_S)
        try:
            message = self.methods[method](b"", timeout=seconds, metadata=self.metadata)
        except grpc.RpcError as failed:
            error = from_status(failed, self.address)
            if not self._encrypted and any(said in str(error) for said in NO_ANSWER_IN_PLAIN):
                error = type(error)(f"{error}; does the server use TLS? (tls=TLS(ca=), --tls-ca)")
            raise error from None
        try:
            return wire.decode(message, wire.Info)
        except WireError as error:
            raise ProtocolError(f"{self.address}: {error}") from None

    def close(self) -> bool:
        """End current requests with :class:`~pymoe.remote.ServerLost`, and disconnect.

        Do nothing in a forked child: the connection belongs to the parent.

        Returns:
            False if nothing was done: the channel was closed already, or this is a forked child.
        """
        with self._lock:
            if self.closed or os.getpid() != self._process:
                return False
            self.closed, self.reachable = True, False
        self.streams.close()
        self._channel.close()
        return True


class Ended(grpc.RpcError):
    """Raised if a request on a stream ended without an answer; has the methods of a failed gRPC call."""

    def __init__(self, code: StatusCode, details: str, kind: str = "") -> None:
        super().__init__(details)
        self._code, self._details, self._kind = code, details, kind

    def code(self) -> StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return the error message."""
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata with the name of the server's exception; () if the name is unknown."""
        return ((KIND_KEY, self._kind),) if self._kind else ()


class NoStream(Exception):
    """Raised if the server refuses another stream, or did so recently. The server has not received the request."""


class RequestStream:
    """A stream to a server, for one thread at a time.

    Attributes:
        metadata: the metadata with which the stream was opened.
        used: true once a reply has been received on the stream.
        overdue: true once ``timer`` has cancelled the stream.
        timer: cancels the stream at the deadline of its request, or after :data:`IDLE_S` seconds without a request.
        open: returns whether the stream is still open.
    """

    def __init__(self, method: Any, metadata: Any) -> None:
        self.metadata = metadata
        self.used = self.overdue = False
        self.timer = TimerHandle(self._time_is_over)
        self._messages: SimpleQueue[tuple[bytes, Sequence[memoryview]] | None] = SimpleQueue()
        self._call = method(self._pieces(), metadata=metadata)
        # Make _pieces() end: otherwise, gRPC's thread that iterates over it would wait forever for the next message.
        self._call.add_done_callback(lambda _: self._messages.put(None))
        self.open: Callable[[], bool] = self._call.running

    def _pieces(self) -> Iterator[bytes]:
        """Yield the bytes for gRPC to send: each message, followed by its frames."""
        while (message := self._messages.get()) is not None:
            head, tail = message
            yield head
            if tail:
                yield from wire.frames(tail)

    def ask(self, head: bytes, tail: Sequence[memoryview]) -> tuple[wire.Reply, wire.Tail | None]:
        """Send the message ``head`` and the frames of ``tail``, wait, and return the reply and its frames, or None if
        it has no frames.

        Raises:
            Ended: the server has replied with the reason why there is no answer, or has ended the stream. After such a
                reply the stream stays open, unless the request has frames, which the server may not have read.
            NoStream: the server refuses to open this stream.
            grpc.RpcError: the stream has ended.
            WireError: the answer is malformed.
        """
        self._messages.put((head, tail))
        try:
            reply = wire.decode(next(self._call), wire.Reply)
            self.used = True
            if reply.status:
                raise Ended(_CODES.get(reply.status, StatusCode.UNKNOWN), reply.details, reply.kind)
            if not wire.following(reply.tensors):
                return reply, None
            received = wire.Tail(reply.tensors)
            while received.missing:
                received.take(next(self._call))
            return reply, received
        except StopIteration:
            raise Ended(StatusCode.UNAVAILABLE, "the server ended the stream") from None
        except grpc.RpcError:
            if not self.used and self._call.code() is StatusCode.RESOURCE_EXHAUSTED:
                raise NoStream from None
            raise

    def _time_is_over(self) -> None:
        self.overdue = True
        self._call.cancel()

    def cancel(self) -> None:
        """End the stream. The server removes the stream's request from its queue."""
        self.timer.cancel()
        self._call.cancel()


class Streams:
    """The streams of a channel. Thread-safe.

    Args:
        method: gRPC's callable that opens a stream.
    """

    def __init__(self, method: Any) -> None:
        self._method = method
        self._lock = threading.Lock()
        self._idle: list[RequestStream] = []
        self._refused = -REFUSED_S

    def ask(
        self, head: bytes, tail: Sequence[memoryview], seconds: float, metadata: Any
    ) -> tuple[wire.Reply, wire.Tail | None]:
        """Send a request with :meth:`RequestStream.ask`, on an idle stream or a new one, and return its result.

        Raises:
            Ended: there was no answer within ``seconds``, or the server has replied with the reason why there is none.
            NoStream: no stream is idle, and the server refuses to open another one, or did so within the last
                :data:`REFUSED_S` seconds.
            grpc.RpcError, WireError: see :meth:`RequestStream.ask`.
            RuntimeError: no thread can be started for the timer of the stream.
        """
        stream = self._take(seconds, metadata)
        try:
            answer = stream.ask(head, tail)
        except grpc.RpcError as error:
            if stream.overdue:
                raise Ended(StatusCode.DEADLINE_EXCEEDED, "there was no answer in time") from None
            if isinstance(error, Ended) and not tail:
                self._put_back(stream)
            else:
                stream.cancel()
            raise
        except BaseException as error:
            if isinstance(error, NoStream):
                self._refused = time.monotonic()
            stream.cancel()
            raise
        self._put_back(stream)
        return answer

    def _take(self, seconds: float, metadata: Any) -> RequestStream:
        """Return an idle stream or a new one, with its timer set to cancel the stream after ``seconds``."""
        stream: RequestStream | None = None
        try:
            while self._idle:
                with self._lock:
                    if not self._idle:
                        break
                    stream = self._idle.pop()
                # reset() returns False if the stream's idle time is over: the stream is being cancelled.
                if stream.timer.reset(seconds) and stream.metadata is metadata and stream.open():
                    return stream
                stream.cancel()
            if time.monotonic() < self._refused + REFUSED_S:
                raise NoStream
            stream = RequestStream(self._method, metadata)
            stream.timer.reset(seconds)
            return stream
        except RuntimeError:  # raised if no thread can be started for the timer
            if stream is not None:
                stream.cancel()
            raise

    def _put_back(self, stream: RequestStream) -> None:
        with suppress(RuntimeError), self._lock:  # raised if no thread can be started for the timer
            if stream.open() and stream.timer.reset(IDLE_S):
                self._idle.append(stream)
                return
        stream.cancel()

    def close(self) -> None:
        """Drop the idle streams and stop their timers. gRPC ends the streams when the channel is closed."""
        with self._lock:
            for stream in self._idle:
                stream.timer.cancel()
            self._idle.clear()
