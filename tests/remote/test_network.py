"""A server in a network namespace of its own, behind a wire that delays and loses packets where the system has one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from certificates import Certificates
from experts import WIDTH, mlp
from limits import LONG
from torch import nn

import pymoe
from pymoe.remote import connect

HERE, THERE = "10.87.0.1", "10.87.0.2"
NETEM = ["netem", "delay", "25ms", "5ms", "loss", "1%"]


@pytest.fixture(params=[False, True], ids=["a plain wire", "a wire that delays and loses"])
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace at the other end of a wire: a plain one, or one with 50 ms there and back, and 1 % loss each way."""
    name, wire = f"pymoe-{os.getpid()}", f"py{os.getpid()}"
    ours, theirs = f"{wire}a", f"{wire}b"
    within = ["ip", "netns", "exec", name]
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name],
        ["ip", "address", "add", f"{HERE}/24", "dev", ours],
        ["ip", "link", "set", ours, "up"],
        [*within, "ip", "address", "add", f"{THERE}/24", "dev", theirs],
        [*within, "ip", "link", "set", theirs, "up"],
    ]
    if request.param:
        commands.append(["tc", "qdisc", "add", "dev", ours, "root", *NETEM])
        commands.append([*within, "tc", "qdisc", "add", "dev", theirs, "root", *NETEM])
    try:
        for command in commands:
            try:
                done = subprocess.run(command, capture_output=True, text=True)
            except OSError as error:
                pytest.skip(f"no network namespaces: {error}")
            if done.returncode:
                pytest.skip(f"no network namespaces: {' '.join(command)}: {done.stderr.strip()}")
        yield name
    finally:
        subprocess.run(["ip", "link", "delete", ours], capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.exhaustive
@pytest.mark.only_on("cpu")
def test_a_mixture_trains_over_a_network(namespace: str, certificates: Certificates, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("correct-horse")
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [
        "ip", "netns", "exec", namespace, sys.executable, "-m", "pymoe.remote", "serve", "experts:two",
        "--listen", f"{THERE}:7000", "--token-file", str(token),
        "--tls-cert", certificates.file("server.crt"), "--tls-key", certificates.file("server.key"),
    ]  # fmt: skip
    server = subprocess.Popen(command, cwd=Path(__file__).parent, env=environment)
    here = mlp("here")
    try:
        options = {"tls": certificates.client(), "token": "correct-horse", "retries": False, "wait": LONG}
        with connect(f"{THERE}:7000", **options) as there, pymoe.Runtime([here]):
            mixture = pymoe.MixtureOfExpertBackends(
                [*there.backends(), here], top_k=2, forward_timeout=LONG, backward_timeout=LONG
            )
            optimizer = torch.optim.Adam(mixture.parameters(), 3e-3)
            losses, begin = [], time.perf_counter()
            for _ in range(100):
                x = torch.randn(64, WIDTH)
                loss = nn.functional.mse_loss(mixture(x), x.sort(dim=1).values)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            seconds = (time.perf_counter() - begin) / len(losses)
            print(f"a step took {seconds * 1e3:.0f} ms, {there.info().experts['a'].updates} updates of a")
            assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    finally:
        server.terminate()
        server.wait()
