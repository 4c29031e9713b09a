"""Addresses of servers: how they are written, and whether one of this machine is free."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager

SCHEMES = ("dns:///", "dns:", "ipv4:", "ipv6:")
"""Those in front of ``HOST:PORT``."""
MOST_PORT = 65535
LONGEST_SOCKET = 107
"""Bytes of the path of a socket that Linux takes."""
FREE = (errno.ENOENT, errno.ECONNREFUSED)
"""What an attempt to connect to a socket says if there is none, or if its server has ended without removing it."""


def check_address(owner: str, address: str, lowest_port: int = 0) -> None:
    """Raise ValueError unless ``address`` is ``HOST:PORT``, ``unix:PATH``, or another name that gRPC may resolve.

    gRPC itself takes a port beyond 65535 for another one, and one that is missing for 443.
    """
    path = socket_path(address)
    if path is not None:
        if not 0 < len(os.fsencode(path)) <= LONGEST_SOCKET:
            raise ValueError(
                f"{owner}: expected unix:PATH with a path of 1 to {LONGEST_SOCKET} bytes, got one of "
                f"{len(os.fsencode(path))}: {address!r}"
            )
        return
    rest = next((address.removeprefix(one) for one in SCHEMES if address.startswith(one)), address)
    if ":///" in rest or rest.startswith("unix-abstract:"):
        return
    for one in rest.split(","):
        host, _, port = one.rpartition(":")
        plain = host and (":" not in host or host[0] + host[-1] == "[]")
        if not plain or not port.isdecimal() or not lowest_port <= int(port) <= MOST_PORT:
            raise ValueError(
                f"{owner}: expected HOST:PORT with a port from {lowest_port} to {MOST_PORT}, [IPV6]:PORT or unix:PATH, "
                f"got {address!r}"
            )


def socket_path(address: str) -> str | None:
    """Return the path of the socket that ``address`` names, or None where it is no socket in the file system."""
    if not address.startswith("unix:"):
        return None
    return urllib.parse.unquote(address.removeprefix("unix:").removeprefix("//"))


@contextmanager
def held_for_binding(address: str) -> Iterator[None]:
    """Keep other servers from the path of a socket while the caller binds it. Nothing, for other addresses.

    gRPC takes a socket away from the server that listens there, as the system does not see that it is in use.

    Raises:
        OSError: its folder cannot be opened, or somebody listens there.
    """
    path = socket_path(address)
    if path is None:
        yield
        return
    try:
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OSError(f"cannot listen at {address}: the folder of the socket: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # as long as two servers that start at a time look, and bind
        if _connect(path) not in FREE:
            raise OSError(f"cannot listen at {address}: another server does")
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)
        os.close(folder)


def _connect(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as there:
        there.setblocking(False)
        return there.connect_ex(path)


def why_not_free(address: str) -> str:
    """Return why a server could not listen at ``address``, as the system says it."""
    try:
        path = socket_path(address)
        if path is not None:
            with socket.socket(socket.AF_UNIX) as here:
                here.bind(path)
            os.unlink(path)
        else:
            host, _, port = address.rpartition(":")
            with socket.create_server((host.strip("[]"), int(port)), family=_family(host)):
                pass
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return "gRPC does not say why"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if host.startswith("[") else socket.AF_INET
