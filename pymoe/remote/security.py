"""Who may speak to a server: TLS, certificates of clients, tokens; and what is refused without them.

An address that other machines can reach needs TLS, and a token or certificates of clients: whoever may ask an expert
for gradients may train it. A token travels over TLS, or within this machine.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

PREFIX = "Bearer "


@dataclass(frozen=True)
class TLS:
    """Files in PEM format, of a server or of a client.

    Args:
        cert: this side's certificate, and those between it and its authority. A server needs one; a client where the
            server asks for it.
        key: the certificate's private key.
        ca: authorities. A client accepts servers that one of these has signed (None: those that gRPC knows); a server
            with these accepts only clients that one of these has signed.
    """

    cert: str | Path | None = None
    key: str | Path | None = None
    ca: str | Path | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a certificate without its key, or the other way round."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("TLS: expected cert and key together, got one of them alone")

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return gRPC's credentials of a server.

        Raises:
            ValueError: no certificate.
            OSError: a file cannot be read.
        """
        if self.cert is None or self.key is None:
            raise ValueError("TLS: a server needs cert and key")
        authorities = _read(self.ca)
        pair = (Path(self.key).read_bytes(), Path(self.cert).read_bytes())
        return grpc.ssl_server_credentials([pair], authorities, authorities is not None)

    def client_credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC's credentials of a client. Raises OSError if a file cannot be read."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def is_local(address: str) -> bool:
    """Return whether only this machine can reach ``address``: loopback, or a socket in its file system."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(scheme)
    return all(_is_loopback(one) for one in address.split(","))


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0] if address.count(":") == 1 or "]" in address else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_server(address: str, tls: TLS | None, token: str | None) -> None:
    """Raise ValueError if ``address`` can be reached from elsewhere and strangers would be let in, or listen."""
    check_token("ExpertServer", token)
    if is_local(address):
        return
    if tls is None:
        raise ValueError(
            f"ExpertServer: other machines can reach {address}: expected tls=TLS(cert, key), got None (without TLS a "
            f"server listens on 127.0.0.1, localhost or unix: alone)"
        )
    if token is None and tls.ca is None:
        raise ValueError(
            f"ExpertServer: other machines can reach {address}, and whoever asks may train the experts: expected a "
            f"token, or TLS(ca=) for certificates of clients"
        )


def check_client(address: str, tls: TLS | None, token: str | None) -> None:
    """Raise ValueError if the token would be sent in clear to another machine."""
    check_token("connect", token)
    if token is not None and tls is None and not is_local(address):
        raise ValueError(f"connect: a token is sent over TLS alone: expected tls= for {address}, got None")


def check_token(owner: str, token: Any) -> None:
    """Raise TypeError or ValueError unless ``token`` is None or can be sent in a header."""
    if token is None:
        return
    if not isinstance(token, str):
        raise TypeError(f"{owner}: token must be a string or None, got {type(token).__name__}")
    if not token or not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{owner}: a token consists of printable ASCII characters without spaces, at least one")


def authorization(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that shows a token."""
    return () if token is None else (("authorization", PREFIX + token),)


def shows_token(metadata: Any, token: str) -> bool:
    """Return whether ``metadata`` shows the token; how long that takes does not tell how much of it is right."""
    given = ""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            given = value
    return hmac.compare_digest(given.encode(), (PREFIX + token).encode())
