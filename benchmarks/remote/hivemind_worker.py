"""Runs server and clients of hivemind's RemoteExpert, over its p2pd on loopback, in a separate virtual environment.

    python -m benchmarks.remote.hivemind_worker EXPERT

It speaks the protocol of benchmarks/runtime/worker.py. Without arguments it prints hivemind's version.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import hivemind
import torch
from hivemind.moe.client.expert import create_remote_experts
from hivemind.moe.expert_uid import ExpertInfo
from hivemind.moe.server import ModuleBackend, Server
from hivemind.p2p import PeerID
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import Tensor

from benchmarks.runtime.clients import Ask
from benchmarks.runtime.scenario import Expert
from benchmarks.runtime.serving import InProcess
from benchmarks.runtime.worker import answer_lines, group_and_seconds

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
ALONE = {"host_maddrs": LOOPBACK, "use_relay": False, "use_auto_relay": False}


def serve(name: str, pipe: Connection) -> None:
    """Serve an expert with hivemind's Server until the process is killed; send its addresses to ``pipe``."""
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    dht = hivemind.DHT(start=True, **ALONE)
    expert = Expert(name)
    row = BatchTensorDescriptor(expert.hidden)
    options = {"args_schema": (row,), "outputs_schema": row, "max_batch_size": 4096}
    backend = ModuleBackend("expert.0", expert.module, optimizer=expert.optimizer, **options)
    server = Server(dht, {"expert.0": backend}, num_connection_handlers=1)
    server.start()
    server.ready.wait()
    pipe.send([str(one) for one in dht.get_visible_maddrs()])
    time.sleep(1e6)


class RemoteExpertServer:
    """Starts hivemind's server in a child process, and sends requests to it."""

    def __init__(self, expert: Expert) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(expert.name, theirs))
        self.process.start()
        if not ours.poll(90):
            raise TimeoutError("hivemind's server did not start within 90 s")
        peers = ours.recv()
        dht = hivemind.DHT(start=True, initial_peers=peers, client_mode=True, **ALONE)
        peer = PeerID.from_base58(peers[0].split("/p2p/")[1])
        self.expert = create_remote_experts([ExpertInfo("expert.0", peer)], dht)[0]

    def ask(self, direction: str) -> Ask:
        def forward(x: Tensor) -> Tensor:
            with torch.no_grad():
                return self.expert(x)

        graphs: dict[int, tuple[Tensor, Tensor]] = {}

        def backward(x: Tensor, grad: Tensor) -> Tensor:
            if id(x) not in graphs:  # one forward request per input: only backward requests are measured
                leaf = x.clone().requires_grad_()
                graphs[id(x)] = leaf, self.expert(leaf)
            leaf, y = graphs[id(x)]
            return torch.autograd.grad(y, leaf, grad, retain_graph=True)[0]

        return forward if direction == "forward" else backward

    def cpu(self) -> float:
        """Return processor seconds of all processes of server and client."""
        groups = {os.getpgid(0), os.getpgid(self.process.pid)}
        total = 0.0
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                group, seconds = group_and_seconds(path.name)
                total += seconds if group in groups else 0.0
        return total

    def close(self) -> None:
        os.killpg(os.getpgid(self.process.pid), 9)


def served(expert: Expert) -> InProcess:
    server = RemoteExpertServer(expert)
    return InProcess(server, expert, server.cpu)


def main() -> None:
    if len(sys.argv) == 1:
        print(hivemind.__version__)
        return
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # the group identifies all child processes, to measure and to kill them
    answer_lines(served)
    os.killpg(os.getpgid(0), 9)  # some of hivemind's threads and processes would not end otherwise


if __name__ == "__main__":
    main()
