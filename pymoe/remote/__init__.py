"""Experts on other machines: a server for the experts of a process, and connections that make backends of them.

Needs the packages grpcio, msgspec and safetensors: ``pip install --no-build-isolation -e '.[remote]'`` in the source
folder.
"""

try:
    import grpc  # noqa: F401
    import msgspec  # noqa: F401
except ImportError as error:
    raise ImportError(
        "pymoe.remote needs grpcio, msgspec and safetensors: pip install grpcio msgspec safetensors"
    ) from error

from pymoe.remote.backend import RemoteBackend
from pymoe.remote.connection import Connection, connect
from pymoe.remote.errors import AppliedError, ProtocolError, RemoteExpertError, ServerLost, WireError
from pymoe.remote.pools import RemoteFuture
from pymoe.remote.security import TLS
from pymoe.remote.server import ExpertServer

__all__ = [
    "TLS",
    "AppliedError",
    "Connection",
    "ExpertServer",
    "ProtocolError",
    "RemoteBackend",
    "RemoteExpertError",
    "RemoteFuture",
    "ServerLost",
    "WireError",
    "connect",
]
