"""One request to a server, from its first attempt to its last."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import grpc
from grpc import StatusCode
from torch import Tensor

from pymoe.remote import wire
from pymoe.remote.admission import SIZE_KEY
from pymoe.remote.channel import LONGEST_S
from pymoe.remote.errors import KIND_KEY, ProtocolError, ServerLost, WireError, from_status
from pymoe.remote.exchange import NoStream
from pymoe.remote.expert import KnownExpert
from pymoe.runtime import QueueFull

Method = Literal["Forward", "Backward"]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Between two attempts; each pause is twice the one before, times a random factor from 0.5 to 1."""
_LOST = {StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.CANCELLED}


class Call:
    """A request, with what all of its attempts share: tensors, deadline and, for a backward request, the key.

    Whoever makes one calls :meth:`end`, once, after its last attempt.

    Args:
        expert: whom to ask.
        method: which pass.
        tensors: the flat inputs; for a backward request, gradients of the outputs behind them.
        deadline: on the monotonic clock.
    """

    def __init__(self, expert: KnownExpert, method: Method, tensors: Sequence[Tensor], deadline: float) -> None:
        channel = expert.channel
        channel.check_usable()
        self.expert, self.channel, self.method, self.deadline = expert, channel, method, deadline
        self._rows, self._home = len(tensors[0]), tensors[0].device
        self._begun, self._pause = time.monotonic(), FIRST_PAUSE_S
        self._why: Exception | None = None
        count = len(expert.schema.inputs)
        packed = wire.pack(tensors[:count], channel.encoding)
        if len(tensors) > count:
            packed += wire.pack(tensors[count:], channel.gradient_encoding)
        self._tail = wire.detach_long(packed)
        backward = method == "Backward"
        reply = channel.gradient_encoding if backward else channel.encoding
        self._request = wire.Request(expert.name, packed, reply)
        if backward:
            self._request.client, self._request.incarnation = channel.client, expert.answered_by
            self._request.seq, self._request.backward = expert.keys.new(), True

    def end(self) -> None:
        """Let the server forget the request."""
        if self._request.seq >= 0:
            self.expert.keys.close(self._request.seq)

    def seconds_left(self) -> float:
        """Return the seconds until the deadline.

        Raises:
            TimeoutError: it has passed.
            ServerLost: it has passed, and that is why earlier attempts failed.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self._why or TimeoutError(f"{self._where}: the request is not done in time")
        return left

    def _next_attempt(self) -> tuple[bytes, float]:
        """Return the message of the next attempt, and the seconds that it has."""
        if self._request.seq >= 0:
            self._request.ack = self.expert.keys.ack()
        self._request.seconds = left = min(self.seconds_left(), LONGEST_S)
        self._request.age = time.monotonic() - self._begun if self._request.attempt else 0.0
        message = wire.encode(self._request)
        self._request.attempt += 1
        self.channel.count("attempts")
        return message, left

    def _begin(self, head: bytes, seconds: float) -> Any:
        """Send a message as a call of its own; return that, a future of gRPC."""
        size = len(head) + sum([data.nbytes for data in self._tail])
        options = {"timeout": seconds, "metadata": (*self.channel.metadata, (SIZE_KEY, str(size)))}
        if not self._tail:
            return self.channel.methods[self.method].future(head, **options)
        return self.channel.long_methods[self.method].future(chain((head,), wire.frames(self._tail)), **options)

    def send(self) -> Any:
        """Send the next attempt as a call of its own; return that, a future of gRPC."""
        head, left = self._next_attempt()
        try:
            return self._begin(head, left)
        except ValueError as error:  # gRPC's way to say that the channel was closed
            raise ServerLost(f"{self._where}: {error}") from None

    def ask(self) -> tuple[Any, ...]:
        """Send the next attempt on a stream, wait, and return what :meth:`answer` does.

        Raises:
            grpc.RpcError: there is none: :meth:`pause_after` says what to do.
        """
        head, left = self._next_attempt()
        try:
            try:
                reply, tail = self.channel.streams.ask(head, self._tail, left, self.channel.metadata)
            except NoStream:
                reply, tail = wire.decode(self._begin(head, left).result(), wire.Reply), None
        except WireError as error:
            raise ProtocolError(f"{self._where}: {error}") from None
        except ValueError as error:  # gRPC's way to say that the channel was closed
            raise ServerLost(f"{self._where}: {error}") from None
        return self.answer(reply, tail)

    def pause_after(self, failed: Any) -> float:
        """Return how many seconds after a failed attempt the next one is to follow.

        Raises:
            Exception: what the failure means, where there is to be no other attempt.
        """
        error = from_status(failed, self._where)
        own = KIND_KEY in dict(failed.trailing_metadata() or ())
        overloaded = isinstance(error, QueueFull)
        lost = isinstance(error, ServerLost) and (own or failed.code() in _LOST)
        if lost:
            self.channel.count("lost")
        if not self.channel.retries or self.channel.closed or not (overloaded or lost):
            raise error
        self._why = error
        wait = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(LONGEST_PAUSE_S, 2 * self._pause)
        if time.monotonic() + wait >= self.deadline:
            wait = max(0.0, self.deadline - time.monotonic())  # seconds_left() raises then
        self.channel.count("retries")
        return wait

    def read(self, message: bytes) -> tuple[Any, ...]:
        """Return what :meth:`answer` does for a reply that is one message."""
        try:
            return self.answer(wire.decode(message, wire.Reply))
        except WireError as error:
            raise ProtocolError(f"{self._where}: {error}") from None

    def answer(self, reply: wire.Reply, tail: wire.Tail | None = None) -> tuple[Any, ...]:
        """Return the flat outputs, or the gradients of the flat inputs, where the first input was.

        Raises:
            ProtocolError: the reply is no such answer.
        """
        schema = self.expert.schema
        protos = schema.inputs if self.method == "Backward" else schema.outputs
        try:
            tensors = wire.unpack(reply.tensors, tail)
        except WireError as error:
            raise ProtocolError(f"{self._where}: {error}") from None
        if len(tensors) != len(protos) or any(
            one.shape[:1] != (self._rows,) or one.shape[1:] != proto.size
            for proto, one in zip(protos, tensors, strict=True)
        ):
            shapes = [(self._rows, *proto.size) for proto in protos]
            found = [tuple(one.shape) for one in tensors]
            raise ProtocolError(f"{self._where}: expected an answer of shapes {shapes}, got {found}")
        for proto, one in zip(protos, tensors, strict=True):
            if one.dtype != proto.dtype:
                raise ProtocolError(f"{self._where}: expected an answer of {proto.dtype}, got {one.dtype}")
        self.expert.heard(reply.incarnation, reply.updates, self.method)
        at_home = tensors if self._home.type == "cpu" else [one.to(self._home) for one in tensors]
        return tuple(at_home) if self.method == "Backward" else self.expert.with_constants(at_home)

    @property
    def _where(self) -> str:
        return f"{self.expert.name}_{self.method.lower()}@{self.channel.address}"


def ask(expert: KnownExpert, method: Method, tensors: Sequence[Tensor], deadline: float) -> tuple[Any, ...]:
    """Send a request, again if need be until the deadline, wait, and return the answer.

    Raises:
        ServerLost: the server cannot be reached.
        TimeoutError: no answer by the deadline.
        AppliedError: a backward request was applied, and its answer is gone.
        QueueFull: the server has no room.
        ValueError, TypeError, LookupError, PermissionError: the server refuses it.
        Exception: what the expert raised.
    """
    call = Call(expert, method, tensors, deadline)
    try:
        while True:
            try:
                return call.ask()
            except grpc.RpcError as failed:
                pause = call.pause_after(failed)
            time.sleep(pause)
    finally:
        call.end()
