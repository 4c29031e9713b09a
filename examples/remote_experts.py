"""pymoe.remote: a mixture over experts of two servers, one of which is killed on the way and comes back.

This program starts the servers, as a user would in two terminals, and trains in a third place:

    python -m pymoe.remote serve examples.remote_experts:left --listen 127.0.0.1:7001 --checkpoints runs/left
    python -m pymoe.remote serve examples.remote_experts:right --listen 127.0.0.1:7002 --checkpoints runs/right
"""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import pymoe

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    parser.add_argument("--wait", type=float, default=120.0, help="seconds for a server to start (default: 120)")
    options = parser.parse_args()

FOLDER = Path(__file__).parent


def served_expert(name):
    torch.manual_seed(sum(map(ord, name)))
    expert = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 8))
    return pymoe.ExpertBackend(
        name, expert, torch.optim.Adam(expert.parameters(), 3e-3), args_schema=[pymoe.BatchTensorProto(8)]
    )


def left():
    return [served_expert("ada"), served_expert("bob")]


def right():
    return [served_expert("cleo"), served_expert("dan")]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def start(name, port, folder):
    command = [sys.executable, "-m", "pymoe.remote", "serve", f"{FOLDER.name}.{Path(__file__).stem}:{name}"]
    command += ["--listen", f"127.0.0.1:{port}", "--checkpoints", f"{folder}/{name}", "--save-every", "1"]
    return subprocess.Popen(command, cwd=FOLDER.parent)


def main():
    ports = {"left": free_port(), "right": free_port()}
    with tempfile.TemporaryDirectory() as folder:
        servers = {name: start(name, port, folder) for name, port in ports.items()}
        try:
            train(servers, ports, folder)
        finally:
            for server in servers.values():
                server.terminate()  # drains: answers current requests, and saves
                server.wait()


def train(servers, ports, folder):
    # A mixture can ask other experts, so its requests are not retried on a server that is gone.
    connections = [
        pymoe.remote.connect(f"127.0.0.1:{port}", retries=False, wait=options.wait) for port in ports.values()
    ]
    backends = [backend for there in connections for backend in there.backends()]
    mixture = pymoe.MixtureOfExpertBackends(
        backends, top_k=2, forward_timeout=5, backward_timeout=5, on_too_few="fallback"
    )
    optimizer = torch.optim.Adam(mixture.parameters(), 3e-3)  # for the gate; each expert has its own optimizer
    for step in range(options.steps + 1):
        if step == options.steps // 3:
            servers["right"].kill()
            servers["right"].wait()
            print("the server right is killed; nobody tells the mixture")
        if step == 2 * options.steps // 3:
            servers["right"] = start("right", ports["right"], folder)
            deadline = time.monotonic() + options.wait
            while not connections[1].reachable and time.monotonic() < deadline:
                time.sleep(0.05)  # only for the output below; the mixture could continue to train
            print("the server right is back, with its last checkpoint")
        x = torch.randn(64, 8)
        loss = nn.functional.mse_loss(mixture(x), x.sort(dim=1).values)  # learn to sort
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, options.steps // 6) == 0:
            there = [name for name, backend in mixture.backends.items() if backend.forward_pool.served]
            print(f"step {step:3d}  loss {loss.item():.3f}  reachable: {', '.join(there)}")
    for name, stats in mixture.stats().items():
        print(f"{name}: {stats.forward.answered} of {stats.forward.requests} requests answered")
    for there in connections:
        there.close()


if __name__ == "__main__":
    import pymoe.remote

    main()
