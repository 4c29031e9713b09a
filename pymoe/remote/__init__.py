"""Experts on other machines: a server for the experts of a process, and connections that provide them as backends.

The packages grpcio, msgspec and safetensors are required: ``pip install --no-build-isolation -e '.[remote]'`` in the
source folder.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's log messages on stderr say nothing that the exceptions do not

try:
    import grpc  # noqa: F401
    import msgspec  # noqa: F401
except ImportError as error:
    raise ImportError(
        "pymoe.remote needs grpcio, msgspec and safetensors: pip install grpcio msgspec safetensors"
    ) from error

from pymoe.remote.client import Connection, RemoteBackend, connect
from pymoe.remote.errors import AppliedError, ProtocolError, RemoteExpertError, ServerLost, WireError
from pymoe.remote.requests import RemoteFuture
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
