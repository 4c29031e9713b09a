"""Ask a server of experts whether it serves, for probes: exit status 0 if it does, 1 if it drains or does not answer.

    python deploy/health.py localhost:7000 --tls-ca ca.crt

It calls ``grpc.health.v1.Health``, which needs no token. It does not import pymoe, which would import torch, because a
probe runs every few seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc

SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("address", metavar="HOST:PORT", help="with TLS, HOST must be in the server's certificate")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="authorities for the server's certificate")
    parser.add_argument("--timeout", type=float, default=4.0, metavar="SECONDS", help="(default: 4)")
    options = parser.parse_args()
    if options.tls_ca is None:
        channel = grpc.insecure_channel(options.address)
    else:
        credentials = grpc.ssl_channel_credentials(options.tls_ca.read_bytes())
        channel = grpc.secure_channel(options.address, credentials)
    with channel:
        try:
            answer = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=options.timeout)
        except grpc.RpcError as error:
            print(f"{options.address} does not answer: {error.code().name}: {error.details()}")
            return 1
    print(f"{options.address} {'serves' if answer == SERVING else 'does not serve'}")
    return 0 if answer == SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
