"""A channel to a server: whether it is there, what it says of itself, and what all requests over it have in common."""

from __future__ import annotations

import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from pymoe.remote import wire
from pymoe.remote.addresses import check_address
from pymoe.remote.encodings import check_encoding
from pymoe.remote.errors import ProtocolError, ServerLost, WireError, from_status
from pymoe.remote.exchange import Streams
from pymoe.remote.security import TLS, authorization, check_client, is_local
from pymoe.remote.wire import SERVING

LONGEST_S = 1e8
"""Seconds to a deadline that gRPC can tell."""
LOOK_AGAIN_S = 5.0
"""Between two looks at a server that answers and cannot be stayed with."""
DRAINS_S = 0.2
"""The same where it drains: it ends soon, and another may take its place."""
HUNG_UP = ("Socket closed", "Connection reset")
"""What gRPC says of a server that answers what it reads by hanging up."""
OPTIONS = (
    ("grpc.max_receive_message_length", wire.MOST_BYTES),
    ("grpc.max_send_message_length", wire.MOST_BYTES),
    ("grpc.enable_retries", 0),  # gRPC's own know nothing of keys
    ("grpc.compression_enabled_algorithms_bitset", 1),  # what a server sends is not decompressed, either
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # for as long an attempt to connect may last
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class Channel:
    """A channel of gRPC with what all requests over it share. Thread-safe.

    The arguments are those of :func:`pymoe.remote.connect`, and so are the errors.

    Attributes:
        address: of the server.
        client: the name by which the server knows this channel, with which its backward requests are numbered.
        metadata: what every call shows.
        methods: of the service, by name: callables of gRPC.
        long_methods: those for a message that frames follow.
        streams: that carry requests for whose answers a thread waits.
        counts: ``attempts``, ``retries`` and ``lost`` (attempts that ended with the connection).
        closed: whether :meth:`close` was called.
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
        self.closed = False
        self._encrypted = tls is not None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._reachable = True
        # $http_proxy is not for this machine: its proxy would read what need not be encrypted here, the token first.
        options = (*OPTIONS, ("grpc.enable_http_proxy", 0)) if is_local(address) else OPTIONS
        if tls is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, tls.client_credentials(), options)
        names = ("Forward", "Backward", "Info", "Stay", "Drain")
        self.methods = {name: self._channel.unary_unary(f"/{wire.SERVICE}/{name}") for name in names}
        self.long_methods = {name: self._channel.stream_unary(f"/{wire.SERVICE}/{name}") for name in names[:2]}
        self.streams = Streams(self._channel.stream_stream(f"/{wire.SERVICE}/Exchange"))
        self._health = self._channel.unary_unary(wire.HEALTH)

    # --- whether the server is there ---

    @property
    def reachable(self) -> bool:
        """Whether the server can be reached, as far as the channel knows: not from a refusal until it is back."""
        return self._reachable and not self.closed

    @property
    def why_not_reachable(self) -> str:
        """What to say while it is not."""
        return "the connection is closed" if self.closed else f"the server at {self.address} cannot be reached"

    def watch(self) -> None:
        """Follow whether the server is there, from now to the end, and have the channel connect whenever it is not.

        A call of health waits until the server is there; then another stays with it, and ends when the connection does,
        or the server drains. (gRPC's own subscriptions to a channel's state do not survive that it is closed.)
        """
        # The server may have gone since it was last heard of: a call that waits would end only when it is back.
        self._start(self._health, self._found, wait_for_ready=not self._reachable)

    def _start(self, method: Any, ended: Callable[[Any], None], **options: Any) -> None:
        with suppress(ValueError):  # the channel was closed
            method.future(b"", metadata=self.metadata, **options).add_done_callback(ended)

    def _found(self, health: Any) -> None:
        if self.closed:
            return
        if health.code() is grpc.StatusCode.OK and health.result() == SERVING:
            self._reachable = True
            self._start(self.methods["Stay"], self._left)
        elif health.code() is grpc.StatusCode.UNAVAILABLE and self._reachable:
            self._left(health)
        else:
            drains = health.code() is grpc.StatusCode.OK
            self._reachable = self._reachable and not drains
            self._look_later(DRAINS_S if drains else LOOK_AGAIN_S)

    def _left(self, stay: Any) -> None:
        if self.closed:
            return
        if stay.code() in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE):
            self._reachable = False
            self.watch()
        else:  # too many stay already, or the token has changed: calls themselves will tell
            self._look_later(LOOK_AGAIN_S)

    def _look_later(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self.watch)
        timer.daemon = True
        timer.start()

    def check_usable(self) -> None:
        """Raise RuntimeError in a fork, whose threads of gRPC are gone; ServerLost once it is closed."""
        if os.getpid() != self._process:
            raise RuntimeError(f"{self.address}: a connection cannot be used in a fork: connect() again in the child")
        if self.closed:
            raise ServerLost(f"{self.address}: the connection is closed")

    def count(self, what: str) -> None:
        """Count an event in ``counts``."""
        with self._lock:
            self.counts[what] += 1

    # --- what the server has ---

    def info(self, timeout: float | None = None) -> wire.Info:
        """Return what the server says of itself.

        Args:
            timeout: seconds; None: that of the connection.

        Raises:
            ServerLost: it cannot be reached; the message has gRPC's reason.
            PermissionError: it wants another token.
            ProtocolError: it is no ExpertServer, or one of another version.
            TimeoutError: it does not answer.
        """
        return self._ask("Info", timeout)

    def drain(self, timeout: float | None = None) -> wire.Info:
        """Have the server refuse further requests, answer those under way, save, and stop; return once it has saved.

        Raises:
            RuntimeError: experts were not saved; the message names them.
            ServerLost, PermissionError, ProtocolError, TimeoutError: see :meth:`info`.
        """
        found = self._ask("Drain", timeout)
        if found.not_saved:
            raise RuntimeError(f"{self.address}: not saved: {'; '.join(found.not_saved.values())}")
        return found

    def _ask(self, method: str, timeout: float | None) -> wire.Info:
        self.check_usable()
        seconds = min(self.timeout if timeout is None else timeout, LONGEST_S)
        try:
            message = self.methods[method](b"", timeout=seconds, metadata=self.metadata)
        except grpc.RpcError as failed:
            error = from_status(failed, self.address)
            if not self._encrypted and any(said in str(error) for said in HUNG_UP):
                error = type(error)(f"{error}; does the server use TLS? (tls=TLS(ca=), --tls-ca)")
            raise error from None
        try:
            return wire.decode(message, wire.Info)
        except WireError as error:
            raise ProtocolError(f"{self.address}: {error}") from None

    def close(self) -> bool:
        """End what is under way with :class:`~pymoe.remote.ServerLost`, and hang up; return False if that was done
        before.

        In a fork it leaves the parent's connection alone.
        """
        with self._lock:
            if self.closed or os.getpid() != self._process:
                return False
            self.closed = True
        self.streams.close()
        self._channel.close()
        return True
