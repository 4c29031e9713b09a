"""Addresses of servers, and access to servers: TLS, certificates of clients, tokens.

A server that other machines can reach must use TLS, and must ask for a token or for clients' certificates, because
every client that can request gradients trains the experts. Tokens are sent only over TLS, or within this machine.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import ipaddress
import os
import socket
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

PREFIX = "Bearer "
SCHEMES = ("dns:///", "dns:", "ipv4:", "ipv6:")
"""Schemes of gRPC that may precede ``HOST:PORT``."""
MAX_PORT = 65535
PORT = "address='HOST:PORT' has the host and the port"
"""Hint for callers that pass the host or the port as a separate argument."""
MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket on Linux, in bytes."""
FREE = (errno.ENOENT, errno.ECONNREFUSED)
"""Errors of connecting to a Unix socket that does not exist, or whose server has ended."""

# --- addresses ---


def check_address(owner: str, address: str, lowest_port: int = 0) -> None:
    """Raise ValueError unless ``address`` is ``HOST:PORT``, ``unix:PATH``, or another name that gRPC may resolve.

    gRPC itself wraps a port above 65535 around to another one, and uses 443 if the port is missing.
    """
    path = socket_path(address)
    if path is not None:
        length = len(os.fsencode(path))
        if not 0 < length <= MAX_SOCKET_PATH:
            raise ValueError(
                f"{owner}: expected unix:PATH with a path of 1 to {MAX_SOCKET_PATH} bytes, got one of {length}: "
                f"{address!r}"
            )
        return
    rest = without_scheme(address)
    if ":///" in rest or rest.startswith("unix-abstract:"):
        return
    for one in rest.split(","):
        host, _, port = one.rpartition(":")
        plain = host and (":" not in host or host[0] + host[-1] == "[]")
        if not plain or not port.isdecimal() or not lowest_port <= int(port) <= MAX_PORT:
            raise ValueError(
                f"{owner}: expected HOST:PORT with a port from {lowest_port} to {MAX_PORT}, [IPV6]:PORT or unix:PATH, "
                f"got {address!r}"
            )


def without_scheme(address: str) -> str:
    """Return ``address`` without its scheme, if it begins with one of :data:`SCHEMES`."""
    return next((address.removeprefix(one) for one in SCHEMES if address.startswith(one)), address)


def socket_path(address: str) -> str | None:
    """Return the path of the Unix socket that ``address`` names, or None for any other address."""
    if not address.startswith("unix:"):
        return None
    return urllib.parse.unquote(address.removeprefix("unix:").removeprefix("//"))


def is_local(address: str) -> bool:
    """Return whether only this machine can reach ``address``: loopback, or a Unix socket."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    return all(_is_loopback(one) for one in without_scheme(address).split(","))


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0] if address.count(":") == 1 or "]" in address else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def held_for_binding(address: str) -> Iterator[None]:
    """Return a context manager that checks that no server listens at a Unix socket, and lets no other server of this
    package bind the socket during its block.

    The caller binds the socket in the block. Without the check, gRPC would replace the socket of a server that is
    listening there. For other addresses, nothing is done.

    Raises:
        OSError: another server listens at ``address``, or the folder of the socket cannot be opened.
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
        fcntl.flock(folder, fcntl.LOCK_EX)  # no other server may test the socket between the test below and the binding
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if probe.connect_ex(path) not in FREE:
                raise OSError(f"cannot listen at {address}: another server does")
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)
        os.close(folder)


def addresses_of(address: str) -> list[str]:
    """Return the addresses at which a server at ``address`` must listen: one for each IP address of the host's name.

    IP addresses of other machines are left out. Return only ``address`` if nothing is left, or if it contains no name
    that can be resolved.

    A server must listen at all of these addresses. gRPC itself would accept a single one; a client that resolves the
    name to another address could then reach another program.
    """
    host, _, port = address.rpartition(":")
    if ":" in host or not port.isdecimal() or socket_path(address) is not None:
        return [address]
    if host == "localhost":  # gRPC resolves this name to both addresses, regardless of /etc/hosts
        found = ["127.0.0.1", "::1"]
    else:
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            return [address]
        found = list(dict.fromkeys(str(info[4][0]) for info in infos))
    return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in found if _is_own(one)] or [address]


def _is_own(host: str) -> bool:
    """Return whether a server on this machine can listen at the IP address ``host``."""
    try:
        _listen_for_a_moment(host, 0)
    except OSError:
        return False
    return True


def _listen_for_a_moment(host: str, port: int) -> None:
    """Listen at this host and port and stop at once; raise the system's OSError if that is impossible."""
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
        pass


def why_not_free(address: str) -> str:
    """Return the system's reason why a server cannot listen at ``address``."""
    try:
        path = socket_path(address)
        if path is not None:
            with socket.socket(socket.AF_UNIX) as here:
                here.bind(path)
            os.unlink(path)
        else:
            host, _, port = address.rpartition(":")
            _listen_for_a_moment(host.strip("[]"), int(port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"{os.strerror(error.errno)}; port 0 takes any free one"
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
    return "gRPC does not say why"


# --- certificates and tokens ---


@dataclass(frozen=True)
class TLS:
    """Files in PEM format, for a server or a client.

    Args:
        cert: the certificate of this side, with any intermediate certificates. A server needs one; a client needs one
            if the server asks for it.
        key: the private key of the certificate.
        ca: the certificates of authorities. A client accepts only servers whose certificate was signed by one of them;
            None: by one that gRPC trusts by default. A server accepts only clients whose certificate was signed by one
            of them; None: all clients.
    """

    cert: str | Path | None = None
    key: str | Path | None = None
    ca: str | Path | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a certificate without its key, or a key without its certificate."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("TLS: expected cert and key together, got only one of them")

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a server for gRPC.

        Raises:
            ValueError: there is no certificate.
            OSError: a file cannot be read.
        """
        if self.cert is None or self.key is None:
            raise ValueError("TLS: a server needs cert and key")
        authorities = _read(self.ca)
        pair = (Path(self.key).read_bytes(), Path(self.cert).read_bytes())
        return grpc.ssl_server_credentials([pair], authorities, authorities is not None)

    def client_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a client for gRPC; raise OSError if a file cannot be read."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def check_server(address: str, tls: TLS | None, token: str | None) -> None:
    """Raise ValueError if other machines can reach ``address``, unless there is TLS, and also a token or ``TLS(ca=)``.

    Also raise TypeError or ValueError for an invalid ``tls`` or ``token``.
    """
    check_token("ExpertServer", token)
    check_tls("ExpertServer", tls)
    if is_local(address):
        return
    if tls is None:
        raise ValueError(
            f"ExpertServer: other machines can reach {address}: expected tls=TLS(cert, key), got None (without TLS a "
            f"server listens only on 127.0.0.1, localhost or unix:)"
        )
    if token is None and tls.ca is None:
        raise ValueError(
            f"ExpertServer: other machines can reach {address}, and whoever asks may train the experts: expected a "
            f"token, or TLS(ca=) for certificates of clients"
        )


def check_client(address: str, tls: TLS | None, token: str | None) -> None:
    """Raise ValueError if the token would be sent to another machine without encryption.

    Also raise TypeError or ValueError for an invalid ``tls`` or ``token``.
    """
    check_token("connect", token)
    check_tls("connect", tls)
    if token is not None and tls is None and not is_local(address):
        raise ValueError(f"connect: a token is sent only over TLS: expected tls= for {address}, got None")


def check_tls(owner: str, tls: Any) -> None:
    """Raise TypeError unless ``tls`` is a :class:`TLS` or None."""
    if tls is not None and not isinstance(tls, TLS):
        raise TypeError(
            f"{owner}: tls must be None or a TLS, got {tls!r}: TLS(cert, key) of a server, TLS(ca=) of its clients"
        )


def check_token(owner: str, token: Any) -> None:
    """Raise TypeError or ValueError unless ``token`` is None or can be sent in a header."""
    if token is None:
        return
    if not isinstance(token, str):
        raise TypeError(f"{owner}: token must be a string or None, got {type(token).__name__}")
    if not token or not all("!" <= character <= "~" for character in token):
        raise ValueError(
            f"{owner}: a token consists of printable ASCII characters without spaces, at least one; strip() the line "
            f"end of one that is read from a file"
        )


def authorization(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the call metadata that carries the token, or () if ``token`` is None."""
    return () if token is None else (("authorization", PREFIX + token),)


def token_problem(metadata: Any, token: str) -> str:
    """Return "" if ``metadata`` contains ``token``; otherwise return a clause for an error message about the token.

    The time of the comparison does not depend on where the tokens differ, so an attacker cannot guess the token part by
    part.
    """
    given = ""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            given = value
    if hmac.compare_digest(given.encode(), (PREFIX + token).encode()):
        return ""
    return (
        "got another one: give connect() or a command the token of this server"
        if given
        else "got none: give connect() token=, or a command --token-file"
    )
