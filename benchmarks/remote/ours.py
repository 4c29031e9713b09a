"""Starts a server of pymoe.remote in a child process; its clients run in this process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.runtime.clients import Ask, AskAsync
from benchmarks.runtime.worker import group_and_seconds

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-the-benchmark"


class RemoteServer:
    """Starts a server, connects to it, and sends requests.

    Args:
        coalesce: whether requests that wait share a gRPC message; otherwise each request is a gRPC call.
        secure: whether to use TLS and a token.

    Attributes:
        pools: the pools of the small expert, by direction.
        echo: the forward pool of the expert that returns its input.
    """

    def __init__(self, *, coalesce: bool = True, secure: bool = False) -> None:
        from pymoe.remote import TLS, connect

        self.folder = tempfile.TemporaryDirectory()
        listen = "localhost:0" if secure else "127.0.0.1:0"
        command = [sys.executable, "-m", "pymoe.remote", "serve", "benchmarks.remote.served:make"]
        command += ["--listen", listen, "--threads", "1"]
        options: dict[str, Any] = {}
        if secure:
            key, cert, token = (Path(self.folder.name, name) for name in ("key", "cert", "token"))
            make_certificate(key, cert)
            token.write_text(TOKEN)
            command += ["--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(token)]
            options = {"tls": TLS(ca=cert), "token": TOKEN}
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        address = next(found[1] for line in self.process.stdout if (found := re.match(r"serving at (\S+);", line)))
        self.connection = connect(address, coalesce=coalesce, timeout=60, **options)
        expert, echo = self.connection.backends("expert", "echo")
        self.pools = {"forward": expert.forward_pool, "backward": expert.backward_pool}
        self.echo = echo.forward_pool

    def ask(self, direction: str) -> Ask:
        submit = self.pools[direction].submit_task
        return lambda *tensors: submit(*tensors).result()[0]

    def ask_async(self, direction: str) -> AskAsync:
        submit = self.pools[direction].submit_task

        async def ask(*tensors: Tensor) -> Tensor:
            return (await submit(*tensors))[0]

        return ask

    def cpu(self) -> float:
        """Return processor seconds of server and client process."""
        return time.process_time() + group_and_seconds(self.process.pid)[1]

    def close(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.communicate(timeout=60)
        self.folder.cleanup()


def make_certificate(key: Path, cert: Path) -> None:
    """Write a self-signed certificate for localhost, and its key."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
