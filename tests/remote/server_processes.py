"""Starts servers in separate processes quickly: as children of one process that has imported everything."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from limits import LONG

# Reads a server's arguments and environment, forks it and answers with its process ID; reports which ones have ended.
TEMPLATE = """
import ctypes, json, os, sys
import torch, pymoe.remote.cli, safetensors.torch
import experts
torch.set_num_threads(1)
for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
else:
    sys.exit()
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: it ends with the process that starts it
out = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(out, 1), os.dup2(out, 2)
os.environ.update(asked["environment"])
os._exit(pymoe.remote.cli.main(asked["arguments"]))
"""


class ServerProcess:
    """A server in another process, by ``python -m pymoe.remote serve``."""

    def __init__(self, starter: ServerProcesses, pid: int, output: Path) -> None:
        self.starter, self.pid, self.output, self.status = starter, pid, output, None

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    @property
    def address(self) -> str:
        """Return the server's address, once it serves."""
        deadline = time.monotonic() + LONG
        while "serving at " not in self.said():
            assert time.monotonic() < deadline, self.said()
            assert self.alive(), self.said()
            time.sleep(0.01)
        return self.said().split("serving at ")[1].split(";")[0]

    def alive(self) -> bool:
        return self.status is None and Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"

    def send(self, what: signal.Signals) -> None:
        os.kill(self.pid, what)

    def freeze(self) -> None:
        """Send ``kill -STOP``, and wait until every thread has stopped."""
        self.send(signal.SIGSTOP)
        deadline = time.monotonic() + LONG
        while {self._state(thread) for thread in Path(f"/proc/{self.pid}/task").iterdir()} != {"T"}:
            assert time.monotonic() < deadline, "the server does not stop"
            time.sleep(0.001)

    @staticmethod
    def _state(thread: Path) -> str:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]

    def wait(self) -> int:
        """Wait for the process to end, and return its exit status."""
        if self.status is None:
            self.status = self.starter.ask({"wait": self.pid})
        return self.status

    def kill(self) -> None:
        """Send ``kill -9``, and wait for the end."""
        if self.status is None:
            self.send(signal.SIGKILL)
            self.wait()


class ServerProcesses:
    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        paths = [str(root), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TEMPLATE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.running: list[ServerProcess] = []

    def ask(self, what: dict[str, object]) -> int:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(what), file=self.process.stdin, flush=True)
        assert select.select([self.process.stdout], [], [], LONG)[0], "a server does not end"
        return int(self.process.stdout.readline())

    def start(self, output: Path, *arguments: str, **environment: str) -> ServerProcess:
        """Start ``serve ARGUMENTS``; the output goes to the file ``output``."""
        if "--listen" not in arguments:
            arguments = (*arguments, "--listen", "127.0.0.1:0")
        output.unlink(missing_ok=True)
        asked = {"arguments": ["serve", *arguments], "environment": environment, "output": str(output)}
        self.running.append(ServerProcess(self, self.ask(asked), output))
        return self.running[-1]

    def kill_all(self) -> None:
        for one in self.running:
            one.kill()
        self.running.clear()

    def __enter__(self) -> ServerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        self.process.kill()
        self.process.wait()
