"""Messages between clients and servers: typed msgpack, validated before use.

Decoding never runs code, raises only :class:`~pymoe.remote.errors.WireError`, and allocates at most :data:`MAX_BYTES`
for the tensors of a message. Both sides ignore unknown fields, so that later versions may add some; a change that must
not be ignored requires a new service, with the next number in :data:`SERVICE`.

If the tensors of a message have at most :data:`FRAME` bytes together, the message contains them. Otherwise their bytes
follow the message in **frames** of at most :data:`FRAME` bytes, one tensor after the other. So neither side needs
memory for a long message in addition to the memory for its tensors. (The reply to a separate gRPC call has no frames:
it contains all tensors.) A tensor's bytes are copied once into a message or frame and once out of it, not counting the
copies that gRPC makes.

Schemas in messages, and optimizer states in checkpoints, are **trees**: nested structures that JSON can represent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from pymoe.remote import encodings
from pymoe.remote.errors import WireError
from pymoe.runtime.batch_tensor_proto import BatchTensorProto

SERVICE = "pymoe.Experts1"
HEALTH = "/grpc.health.v1.Health/Check"
WATCH = "Stay"
"""The method whose calls end when the server drains or the connection breaks."""
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""Encoded HealthCheckResponse messages of grpc.health.v1."""
SIZE_KEY = "pymoe-bytes"
"""The metadata key under which a client announces the number of bytes of a request that is a separate gRPC call."""
MAX_BYTES = 256 << 20
"""Maximum number of bytes of a message with its frames, and of its decoded tensors."""
FRAME = 256 << 10
"""Maximum number of bytes of a frame, and of all tensors inside a message together."""
MAX_READ = FRAME + (64 << 10)
"""Maximum number of bytes that a server reads in one piece: a message with short tensors, or a frame."""
MAX_TENSORS = 256
MAX_NAME = 256
"""Longest name of an expert or a client, in bytes of UTF-8."""
MAX_DEPTH = 64
"""Largest nesting depth of containers in a tree."""

MessageT = TypeVar("MessageT", bound=msgspec.Struct)

# --- messages ---


class Packed(msgspec.Struct, array_like=True):
    """A tensor in a message, encoded as the array ``[dtype, shape, encoding, data, following]``."""

    dtype: str
    shape: Annotated[list[int], msgspec.Meta(max_length=encodings.MAX_DIMENSIONS)]
    encoding: str
    data: memoryview
    following: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)] = 0
    """Number of bytes that follow the message in frames; ``data`` is then empty."""


# The limits are part of the types, so that msgspec checks them before it allocates memory: a Packed that is encoded in
# 10 bytes takes 500 bytes once it is decoded.
Tensors = Annotated[list[Packed], msgspec.Meta(max_length=MAX_TENSORS)]


class Request(msgspec.Struct, omit_defaults=True):
    """A request for a forward pass, with the flat inputs, or for a backward pass, with the flat inputs followed by the
    gradients of the outputs.

    The key of a backward request is (``client``, ``seq``).
    """

    expert: str
    tensors: Tensors
    reply_encoding: str = "raw"
    client: str = ""
    """The random name of the client's connection, for backward requests only."""
    seq: int = -1
    """The connection's number of a backward request."""
    ack: int = 0
    """The client makes no more attempts with a ``seq`` below this one."""
    attempt: int = 0
    """Number of earlier attempts of this request."""
    incarnation: str = ""
    """The ``incarnation`` of the server that had last answered a backward request of the client, when this request was
    made; empty if none had.
    """
    age: float = 0.0
    """Seconds since the first attempt."""
    backward: bool = False
    """On a stream, true for the backward pass; in separate calls, the gRPC method determines the pass."""
    seconds: float = 0.0
    """On a stream, the seconds until the request's deadline; for a separate call, gRPC has the deadline."""


class Reply(msgspec.Struct, omit_defaults=True):
    """The answer to a request: the outputs, or the gradients of the inputs. On a stream, it may be an error instead."""

    tensors: Tensors
    incarnation: str = ""
    updates: int = 0
    """Number of updates of the expert so far."""
    status: int = 0
    """On a stream, the gRPC status code of an error; 0 if there is none."""
    details: str = ""
    kind: str = ""
    """Name of the exception, as in the ``pymoe-error`` metadata."""


class ExpertInfo(msgspec.Struct, omit_defaults=True):
    """The server's description of an expert for clients."""

    forward_schema: Any
    """The result of :func:`write_schema`."""
    outputs_schema: Any
    """The result of :func:`write_schema`."""
    trains: bool
    updates: int
    max_batch_size: int


Histogram = tuple[list[int], int, int]
Counters = dict[str, int | Histogram]


class Info(msgspec.Struct, omit_defaults=True):
    """The server's description of itself for clients."""

    incarnation: str
    version: str
    """Version of pymoe."""
    encodings: list[str]
    experts: dict[str, ExpertInfo]
    draining: bool = False
    counts: dict[str, int] = {}
    seconds: float = 0.0
    """Seconds since the server started to serve."""
    pid: int = 0
    pools: dict[str, Counters] = {}
    """Counters of the server's pools by name, as :mod:`pymoe.runtime.monitoring.statistics` reads them."""
    not_saved: dict[str, str] = {}
    """Errors of the experts that could not be saved when all experts were last saved, by name."""


def is_name(name: str) -> bool:
    """Return whether an expert or a client may have this name."""
    return 0 < len(name.encode(errors="replace")) <= MAX_NAME


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[msgspec.Struct], msgspec.msgpack.Decoder] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Request, Reply, Info)
}


def encode(message: msgspec.Struct) -> bytes:
    """Encode ``message``, and return the bytes to send.

    Raises:
        ValueError: the message is longer than :data:`MAX_BYTES`.
    """
    found = _encoder.encode(message)
    if len(found) > MAX_BYTES:
        raise ValueError(f"pymoe.remote: expected a message of at most {MAX_BYTES} bytes, got {len(found)}")
    return found


def decode(data: bytes, kind: type[MessageT]) -> MessageT:
    """Decode ``data`` as a message of type ``kind``, and return it.

    The tensors in the message remain encoded, as views of ``data``; :func:`unpack` decodes them.

    Raises:
        WireError: the bytes are not such a message.
    """
    try:
        found: MessageT = _decoders[kind].decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
        raise WireError(f"expected a {kind.__name__} of {SERVICE}: {error}") from None
    return found


# --- tensors ---


def pack(tensors: Sequence[Tensor], encoding: str) -> list[Packed]:
    """Return the tensors in the form in which a message contains them.

    The result may share the tensors' memory: encode the message, and copy its frames, before the tensors change.

    Raises:
        TypeError: a dtype that cannot be sent.
        ValueError: the tensors have more than :data:`MAX_BYTES` bytes together, or there are more than
            :data:`MAX_TENSORS`.
    """
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
    if size > MAX_BYTES or len(tensors) > MAX_TENSORS:
        raise ValueError(
            f"pymoe.remote: expected at most {MAX_TENSORS} tensors of {MAX_BYTES} bytes in all, got {len(tensors)} "
            f"of {size}: ask for fewer rows at a time"
        )
    packed = []
    for tensor in tensors:
        name = encodings.NAMES.get(tensor.dtype) or encodings.dtype_name(tensor.dtype)
        how = encoding if encoding == "raw" else encodings.encoding_for(tensor.dtype, tensor.shape, encoding)
        packed.append(Packed(name, list(tensor.shape), how, encodings.encode(tensor, how)))
    return packed


def detach_long(packed: Sequence[Packed]) -> list[memoryview]:
    """If the tensors have more than :data:`FRAME` bytes together, remove the bytes from the message; return them for
    :func:`frames`.

    The result has one entry for each tensor that has elements. If the message was not changed, the result is empty.
    """
    size = 0
    for one in packed:
        size += one.data.nbytes
    if size <= FRAME:
        return []
    tail = [one.data for one in packed if one.data.nbytes]
    for one in packed:
        one.following, one.data = one.data.nbytes, memoryview(b"")
    return tail


def frames(tail: Sequence[memoryview]) -> Iterator[bytes]:
    """Yield the frames of ``tail``, the result of :func:`detach_long`. Each frame is copied when it is requested."""
    for data in tail:
        for begin in range(0, data.nbytes, FRAME):
            yield bytes(data[begin : begin + FRAME])


def following(packed: Sequence[Packed]) -> int:
    """Return the total number of bytes in the frames that follow the message."""
    size = 0
    for one in packed:
        size += one.following
    return size


class Tail:
    """Receives the frames that follow a message.

    Attributes:
        missing: number of bytes that have not arrived yet.
        data: for each tensor, its bytes if the message contains them, or a uint8 tensor that receives them.

    Raises:
        WireError: the message announces more than :data:`MAX_BYTES` bytes of frames.
    """

    def __init__(self, packed: Sequence[Packed]) -> None:
        self.missing = following(packed)
        if self.missing > MAX_BYTES:
            raise WireError(f"expected tensors of at most {MAX_BYTES} bytes, got {self.missing}")
        # Announced bytes occupy no memory before they arrive: the system provides memory only when it is written.
        self.data = [torch.empty(one.following, dtype=torch.uint8) if one.following else one.data for one in packed]
        self._open = [one.numpy() for one in self.data if isinstance(one, Tensor)]
        self._filled = 0

    def take(self, frame: bytes) -> None:
        """Copy the next frame into its tensor.

        Raises:
            WireError: the frame is empty, or extends beyond the end of its tensor.
        """
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


def unpacked_size(packed: Sequence[Packed]) -> int:
    """Return the number of bytes that the tensors of a message will occupy once unpacked.

    Raises:
        WireError: the number is above :data:`MAX_BYTES`, there are too many tensors, or one has an unknown dtype.
    """
    if len(packed) > MAX_TENSORS:
        raise WireError(f"expected at most {MAX_TENSORS} tensors, got {len(packed)}")
    size = 0
    for one in packed:
        dtype = encodings.DTYPES.get(one.dtype)
        if dtype is None:
            raise WireError(f"there is no dtype {one.dtype[:32]!r}")
        size += max(0, math.prod(one.shape[: encodings.MAX_DIMENSIONS]) * dtype.itemsize)
    if size > MAX_BYTES:
        raise WireError(f"expected tensors of at most {MAX_BYTES} bytes, got {size}")
    return size


def unpack(packed: Sequence[Packed], tail: Tail | None = None, *, checked: bool = False) -> list[Tensor]:
    """Return the decoded tensors of a message. They may share memory with ``tail``, but not with the message.

    Args:
        packed: the tensors as the message contains them.
        tail: the bytes of the frames that followed the message; None if there were none.
        checked: true if :func:`unpacked_size`, which checks the tensors, has already been called.

    Raises:
        WireError: the bytes do not match the tensors' descriptions, or one of the errors of :func:`unpacked_size`.
    """
    if not checked:
        unpacked_size(packed)
    tensors = []
    for place, one in enumerate(packed):
        data = one.data if tail is None else tail.data[place]
        tensors.append(encodings.decode(data, encodings.DTYPES[one.dtype], one.shape, one.encoding))
    return tensors


# --- trees ---

_PLAIN = (bool, int, float, str)


def to_tree(structure: Any, write: Callable[[Any, str], Any], where: str = "", depth: int = MAX_DEPTH) -> Any:
    """Convert a nested structure to a tree, which JSON can represent.

    JSON has neither tuples nor keys other than strings, so containers are tagged: ``{"tuple": [...]}``, ``{"list":
    [...]}``, ``{"dict": [[key, value], ...]}``. Numbers, strings, booleans and None are not converted. Any other leaf
    becomes ``{"leaf": write(leaf, path)}``, where ``path`` is the keys and indices that lead to the leaf, joined by
    dots. Reading a tree never imports or calls anything by name.

    Raises:
        TypeError: there is a key that is not a number, string, boolean or None; containers are nested more than
            :data:`MAX_DEPTH` deep; or ``write`` raises it for a leaf. Containers of other types are leaves.
    """
    if structure is None or type(structure) in _PLAIN:
        return structure
    if depth == 0:
        raise TypeError(f"{where}: expected at most {MAX_DEPTH} nested containers, got more")
    if isinstance(structure, dict):
        for key in structure:
            if key is not None and type(key) not in _PLAIN:
                owner = where or "pymoe.remote"
                raise TypeError(f"{owner}: expected strings or numbers as keys, got {type(key).__name__}")
        return {"dict": [[key, to_tree(one, write, _inside(where, key), depth - 1)] for key, one in structure.items()]}
    if type(structure) in (list, tuple):
        members = [to_tree(one, write, _inside(where, place), depth - 1) for place, one in enumerate(structure)]
        return {type(structure).__name__: members}
    return {"leaf": write(structure, where)}


def _inside(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def from_tree(tree: Any, read: Callable[[Any], Any], depth: int = MAX_DEPTH) -> Any:
    """Convert a tree back to the structure that :func:`to_tree` was given; ``read`` converts the results of ``write``.

    Raises:
        ValueError: ``tree`` is not a tree, is nested too deep, or ``read`` raises ValueError.
    """
    if tree is None or type(tree) in _PLAIN:
        return tree
    if depth == 0 or not isinstance(tree, dict) or len(tree) != 1:
        raise ValueError(f"pymoe.remote: expected a tagged container, got {type(tree).__name__}")
    ((tag, value),) = tree.items()
    if tag == "leaf":
        return read(value)
    if not isinstance(value, list):
        raise ValueError(f"pymoe.remote: expected a list as the value of {tag!r}, got {type(value).__name__}")
    if tag == "list":
        return [from_tree(one, read, depth - 1) for one in value]
    if tag == "tuple":
        return tuple(from_tree(one, read, depth - 1) for one in value)
    if tag == "dict" and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        keys = [key for key, _ in value]
        if all(key is None or type(key) in _PLAIN for key in keys):
            return {key: from_tree(one, read, depth - 1) for key, one in value}
    raise ValueError(f"pymoe.remote: there is no container {tag!r}")


def write_schema(name: str, schema: Any) -> Any:
    """Convert a schema of the expert ``name`` to a tree.

    Raises:
        TypeError: the schema has a constant or container that a tree cannot represent, or a dtype that cannot be sent.
    """

    def write(leaf: Any, where: str) -> Any:
        if not isinstance(leaf, BatchTensorProto):
            raise TypeError(
                f"ExpertServer: the schema of {name!r} holds a {type(leaf).__name__}, which cannot be described to "
                f"other machines: expected prototypes, numbers, strings and None in lists, tuples and dicts"
            )
        return [encodings.dtype_name(leaf.dtype), list(leaf.size)]

    return to_tree(schema, write)


def read_schema(tree: Any) -> Any:
    """Return the schema that ``tree`` describes. Its prototypes have only the dtype and the size, and no device.

    Raises:
        ValueError: the tree is not a schema.
    """
    return from_tree(tree, _read_proto)


def _read_proto(leaf: Any) -> BatchTensorProto:
    if not isinstance(leaf, list) or len(leaf) != 2 or not isinstance(leaf[0], str) or not isinstance(leaf[1], list):
        raise ValueError(f"expected [dtype, shape], got {leaf!r}")
    name, size = leaf
    if name not in encodings.DTYPES or len(size) >= encodings.MAX_DIMENSIONS:
        raise ValueError(
            f"expected a dtype and at most {encodings.MAX_DIMENSIONS - 1} dimensions of a row, got {leaf!r}"
        )
    if not all(type(length) is int and 0 <= length <= encodings.MAX_DIMENSION for length in size):
        raise ValueError(f"expected lengths of dimensions, got {size!r}")
    return BatchTensorProto(*size, dtype=encodings.DTYPES[name])
