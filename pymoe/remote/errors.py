"""Errors between machines: exceptions in a process, status codes on the wire.

A server sends the type of its exception as the trailing metadata ``pymoe-error``. A status without this metadata comes
from gRPC itself: the connection broke, a deadline passed, or the server does not speak this protocol. A client raises
the types in :data:`KNOWN`, and :class:`RemoteExpertError` in place of any other.
"""

from __future__ import annotations

from typing import Any

from grpc import StatusCode

from pymoe._errors import describe_error
from pymoe.runtime.gradients import NonFiniteGradientError
from pymoe.runtime.task_pool import QueueFull

KIND_KEY = "pymoe-error"
MAX_TEXT = 3000
"""Maximum number of bytes of an exception's message that are sent: all metadata of a reply must fit into 8 KiB."""


class ServerLost(ConnectionError):
    """Raised if the server could not be reached, or went away, within the time limit of the request.

    A backward request that raises this may have been applied once, or not at all.
    """


class ProtocolError(ConnectionError):
    """Raised if the other side does not speak this protocol, or violates it."""


class WireError(ValueError):
    """Raised for bytes that are not a message of this protocol."""


class AppliedError(RuntimeError):
    """Raised if a backward request has been applied, or may have been, and its answer is no longer available.

    The server does not apply the request again.
    """


class RemoteExpertError(RuntimeError):
    """Raised in place of an expert's exception of a type that clients do not know; the message names the type."""


_KINDS: tuple[type[Exception], ...] = (
    *(
        AppliedError,
        RemoteExpertError,
        ServerLost,
        WireError,
        QueueFull,
        NonFiniteGradientError,
        TimeoutError,
        PermissionError,
    ),
    *(ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError, MemoryError),
    *(LookupError, IndexError, KeyError),
    *(ArithmeticError, FloatingPointError, OverflowError, ZeroDivisionError),
)
KNOWN = {kind.__name__: kind for kind in _KINDS}
"""The exceptions that a client raises with the same type as the server, by name."""

CODES: dict[type[BaseException], StatusCode] = {
    AppliedError: StatusCode.ABORTED,
    PermissionError: StatusCode.UNAUTHENTICATED,
    QueueFull: StatusCode.RESOURCE_EXHAUSTED,
    ServerLost: StatusCode.UNAVAILABLE,
    TimeoutError: StatusCode.DEADLINE_EXCEEDED,
    LookupError: StatusCode.NOT_FOUND,
    TypeError: StatusCode.INVALID_ARGUMENT,
    ValueError: StatusCode.INVALID_ARGUMENT,
    WireError: StatusCode.INVALID_ARGUMENT,
}
"""Status codes, by exception, for other gRPC programs; clients of this package use the name in the metadata."""

_BY_CODE: dict[StatusCode, type[Exception]] = {
    StatusCode.DEADLINE_EXCEEDED: TimeoutError,
    StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    StatusCode.UNIMPLEMENTED: ProtocolError,
    StatusCode.UNAUTHENTICATED: PermissionError,
    StatusCode.PERMISSION_DENIED: PermissionError,
}


HINTS = {
    "Connection refused": "; nothing listens there: is the server running, and is this its port?",
    "No such file or directory": "; nothing listens there: is the server running?",
    "Failed parsing HTTP/2": "; what listens there is not an ExpertServer (a web server?)",
    "Trying to connect an http1.x server": "; what listens there is not an ExpertServer (a web server?)",
    "DNS resolution failed": "; is the name of the host right?",
    "Name resolution failure": "; is the name of the host right?",
    "WRONG_VERSION_NUMBER": "; does the server use TLS? Without it, connect without tls=",
    "CERTIFICATE_VERIFY_FAILED": "; TLS(ca=), --tls-ca, must hold the authority that signed the server's certificate",
    "Hostname Verification Check failed": "; connect by a name that is in the server's certificate",
}
"""Hints that are appended to gRPC's messages, which do not say what to do. The keys are parts of the messages."""


def to_status(error: BaseException) -> tuple[StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return the status code, message and trailing metadata for ``error``, without its traceback."""
    kind = type(error)
    if kind.__name__ in KNOWN and KNOWN[kind.__name__] is kind:
        # str() of a KeyError would return the repr of the key.
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else _text(error)
        return CODES.get(kind, StatusCode.UNKNOWN), _short(text), ((KIND_KEY, kind.__name__),)
    return StatusCode.UNKNOWN, _short(describe_error(error)), ((KIND_KEY, RemoteExpertError.__name__),)


def _short(text: str) -> str:
    """Return ``text``, cut to the length that can be sent, with ``?`` in place of lone surrogates."""
    text = text[:MAX_TEXT].encode(errors="replace").decode()
    left = MAX_TEXT
    for place, character in enumerate(text):
        # gRPC sends a byte that is not printable ASCII, or is %, as three bytes, such as %C3.
        left -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if left < 0:
            return text[:place]
    return text


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def from_status(call: Any, where: str) -> Exception:
    """Return the exception for the failed gRPC ``call``; its message begins with ``where``."""
    text = f"{where}: {call.details() or 'no reason was given'}"
    trailing = dict(call.trailing_metadata() or ())
    if (kind := trailing.get(KIND_KEY)) is not None:
        return KNOWN.get(str(kind), RemoteExpertError)(text)
    text += next((hint for said, hint in HINTS.items() if said in text), "")
    code = call.code()
    if code is StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return ValueError(text)
    if code is StatusCode.UNAUTHENTICATED and "SSL server name" in text:
        return ServerLost(text)  # from gRPC in this process: the server's certificate does not name the host
    return _BY_CODE.get(code, ServerLost)(text)
