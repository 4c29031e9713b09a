"""Messages: typed msgpack, checked before anything is made of them.

Decoding never runs code, raises :class:`~pymoe.remote.errors.WireError` and nothing else, and allocates at most
:data:`MOST_BYTES` for the tensors of a message. Fields that a side does not know are ignored, so that later versions
may add some; what an old side must not ignore makes a new service, and the number in :data:`SERVICE` goes up.

Short tensors travel inside their message. The bytes of long ones follow it in **frames** of at most :data:`FRAME`
bytes, one tensor after the other: neither side ever holds a long message in one piece beside its tensors, and the
pieces are short enough to be made of memory that was used before. A tensor's bytes are copied once on the way into a
message or frame and once on the way out, beside the copies that gRPC makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from pymoe.remote import encodings
from pymoe.remote.errors import WireError

SERVICE = "pymoe.Experts1"
HEALTH = "/grpc.health.v1.Health/Check"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""HealthCheckResponse of grpc.health.v1 with its only field, ``status``."""
MOST_BYTES = 256 << 20
"""Of a message with its frames, and of the tensors in it once they are decoded."""
FRAME = 256 << 10
"""Bytes of a frame, and of the tensors that travel inside a message."""
MOST_READ = FRAME + (64 << 10)
"""Bytes that a server reads in one piece: a message with short tensors, or a frame."""
MOST_TENSORS = 256
MOST_NAME = 256
"""Bytes of the name of an expert or a client, in UTF-8."""

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class Packed(msgspec.Struct, array_like=True):
    """A tensor: ``[dtype, shape, encoding, bytes, following]``."""

    dtype: str
    shape: Annotated[list[int], msgspec.Meta(max_length=encodings.MOST_DIMENSIONS)]
    encoding: str
    data: memoryview
    following: Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)] = 0
    """How many bytes follow in frames, in place of ``data``."""


# Limits are in the types, and so known before memory is taken: a Packed of 10 bytes takes 500 once it is decoded.
Tensors = Annotated[list[Packed], msgspec.Meta(max_length=MOST_TENSORS)]


class Request(msgspec.Struct, omit_defaults=True):
    """A forward request: inputs. A backward request: inputs, gradients of the outputs, and its key."""

    expert: str
    tensors: Tensors
    reply_encoding: str = "raw"
    client: str = ""
    """With ``seq`` the key of a backward request: a random name of the connection that asks."""
    seq: int = -1
    ack: int = 0
    """The client will not ask again for keys below."""
    attempt: int = 0
    """How often this request was sent before."""
    incarnation: str = ""
    """Of the server from which the client last had an answer to a backward request, when it first sent this one."""
    age: float = 0.0
    """Seconds since it was first sent."""
    backward: bool = False
    """Of a request on a stream: which pass. Otherwise the method says it."""
    seconds: float = 0.0
    """Of a request on a stream: the time that it has. Otherwise the call's deadline says it."""


class Reply(msgspec.Struct, omit_defaults=True):
    """Outputs, or gradients of the inputs; or, on a stream, why there are none."""

    tensors: Tensors
    incarnation: str = ""
    updates: int = 0
    """How many updates the expert has seen."""
    status: int = 0
    """On a stream: the code of gRPC that a call would have ended with."""
    details: str = ""
    kind: str = ""
    """Of the exception, as in the metadata ``pymoe-error``."""


class ExpertInfo(msgspec.Struct, omit_defaults=True):
    """What a client must know of one expert."""

    forward_schema: Any
    """As :mod:`pymoe.remote.trees` writes it, like ``outputs_schema``."""
    outputs_schema: Any
    trains: bool
    updates: int
    max_batch_size: int


Histogram = tuple[list[int], int, int]
Counters = dict[str, int | Histogram]


class Info(msgspec.Struct, omit_defaults=True):
    """What a server says of itself."""

    incarnation: str
    version: str
    """Of pymoe."""
    encodings: list[str]
    experts: dict[str, ExpertInfo]
    draining: bool = False
    counts: dict[str, int] = {}
    seconds: float = 0.0
    """Since it began to serve."""
    pid: int = 0
    pools: dict[str, Counters] = {}
    """Counters of its pools, by name, as :mod:`pymoe.runtime.monitoring.statistics` reads them."""
    not_saved: dict[str, str] = {}
    """Experts of which the last save of all has written no checkpoint, and why."""


def is_name(name: str) -> bool:
    """Return whether an expert or a client may have this name."""
    return 0 < len(name.encode(errors="replace")) <= MOST_NAME


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[msgspec.Struct], msgspec.msgpack.Decoder] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Request, Reply, Info)
}


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as bytes.

    Raises:
        ValueError: it is longer than :data:`MOST_BYTES`.
    """
    found = _encoder.encode(message)
    if len(found) > MOST_BYTES:
        raise ValueError(f"pymoe.remote: expected a message of at most {MOST_BYTES} bytes, got {len(found)}")
    return found


def decode(data: bytes, kind: type[MessageT]) -> MessageT:
    """Return the message of that kind; its tensors are views of ``data``, to be unpacked. Raises WireError."""
    try:
        found: MessageT = _decoders[kind].decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
        raise WireError(f"expected a {kind.__name__} of {SERVICE}: {error}") from None
    return found


def pack(tensors: Sequence[Tensor], encoding: str) -> list[Packed]:
    """Return tensors as parts of a message that is to be encoded before they change.

    Raises:
        TypeError: a dtype that cannot be sent.
        ValueError: together they have more than :data:`MOST_BYTES` bytes, or there are too many.
    """
    size = sum(tensor.nbytes for tensor in tensors)
    if size > MOST_BYTES or len(tensors) > MOST_TENSORS:
        raise ValueError(
            f"pymoe.remote: expected at most {MOST_TENSORS} tensors of {MOST_BYTES} bytes in all, got {len(tensors)} "
            f"of {size}: ask for fewer rows at a time"
        )
    packed = []
    for tensor in tensors:
        name = encodings.dtype_name(tensor.dtype)
        how = encodings.encoding_for(tensor.dtype, tensor.shape, encoding)
        packed.append(Packed(name, list(tensor.shape), how, encodings.encode(tensor, how)))
    return packed


def detach_long(packed: Sequence[Packed]) -> list[memoryview]:
    """Take the bytes out of a message's tensors, if these are long, and return them: they follow in :func:`frames`."""
    if sum([one.data.nbytes for one in packed]) <= FRAME:
        return []
    tail = [one.data for one in packed if one.data.nbytes]
    for one in packed:
        one.following, one.data = one.data.nbytes, memoryview(b"")
    return tail


def frames(tail: Sequence[memoryview]) -> Iterator[bytes]:
    """Yield the bytes of a message's long tensors, each frame when it is wanted."""
    for data in tail:
        for begin in range(0, data.nbytes, FRAME):
            yield bytes(data[begin : begin + FRAME])


class Tail:
    """The bytes of a message's long tensors, while they come.

    Attributes:
        missing: how many are not here yet.
        data: of each tensor of the message: what came inside it, or, as a tensor, what comes behind it.

    Raises:
        WireError: there are to be more than a message may have.
    """

    def __init__(self, packed: Sequence[Packed]) -> None:
        self.missing = following(packed)
        if self.missing > MOST_BYTES:
            raise WireError(f"expected tensors of at most {MOST_BYTES} bytes, got {self.missing}")
        # Untouched memory costs nothing: it is there only as far as frames have come.
        self.data = [torch.empty(one.following, dtype=torch.uint8) if one.following else one.data for one in packed]
        self._open = [one.numpy() for one in self.data if isinstance(one, Tensor)]
        self._filled = 0

    def take(self, frame: bytes) -> None:
        """Copy a frame to where it belongs. Raises WireError if it is empty, or does not end with its tensor."""
        into = self._open[0] if self._open else np.empty(0, np.uint8)
        end = self._filled + len(frame)
        if not frame or end > len(into):
            raise WireError(f"expected a frame of at most {len(into) - self._filled} bytes, got {len(frame)}")
        into[self._filled : end] = np.frombuffer(frame, np.uint8)
        self.missing -= len(frame)
        self._filled = end
        if end == len(into):
            self._filled = 0
            del self._open[0]


def following(packed: Sequence[Packed]) -> int:
    """Return how many bytes follow a message."""
    return sum([one.following for one in packed])


def unpacked_size(packed: Sequence[Packed]) -> int:
    """Return the bytes of the tensors of a message, before they are unpacked. Raises WireError."""
    size = 0
    for one in packed:
        dtype = encodings.DTYPES.get(one.dtype)
        if dtype is None:
            raise WireError(f"there is no dtype {one.dtype[:32]!r}")
        size += max(0, math.prod(one.shape[: encodings.MOST_DIMENSIONS]) * dtype.itemsize)
    return size


def unpack(packed: Sequence[Packed], tail: Tail | None = None) -> list[Tensor]:
    """Return the tensors of a message, in memory of their own, given what has come behind it. Raises WireError."""
    if len(packed) > MOST_TENSORS:
        raise WireError(f"expected at most {MOST_TENSORS} tensors, got {len(packed)}")
    size = unpacked_size(packed)
    if size > MOST_BYTES:
        raise WireError(f"expected tensors of at most {MOST_BYTES} bytes, got {size}")
    came: Sequence[Any] = [one.data for one in packed] if tail is None else tail.data
    return [
        encodings.decode(data, encodings.DTYPES[one.dtype], one.shape, one.encoding)
        for one, data in zip(packed, came, strict=True)
    ]
