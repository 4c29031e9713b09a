"""Runs a server in a separate network namespace, behind a wire that delays and loses packets if the system allows
it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from certificates import Certificates
from experts import WIDTH, mlp
from limits import LONG
from torch import Tensor, nn

import pymoe
from pymoe.remote import connect

HERE, THERE = "10.87.0.1", "10.87.0.2"
NETEM = ["netem", "delay", "25ms", "5ms", "loss", "1%"]


@pytest.fixture(params=[False, True], ids=["a plain wire", "a wire that delays and loses"])
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the name of a namespace behind a plain wire, or behind one with 50 ms round trip and 1 % loss each way."""
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


@pytest.fixture
def mixture(namespace: str, certificates: Certificates, tmp_path: Path) -> Iterator[pymoe.MixtureOfExpertBackends]:
    """Yield a mixture of two experts behind the wire, with TLS and a token, and a local expert; rows ask two of the
    three.
    """
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
            yield pymoe.MixtureOfExpertBackends(
                [*there.backends(), here], top_k=2, forward_timeout=LONG, backward_timeout=LONG
            )
    finally:
        server.terminate()
        server.wait()


def train(model: nn.Module, loss_of_a_step: Callable[[], Tensor]) -> list[float]:
    """Run a hundred steps; return the time per step."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses, begin = [], time.perf_counter()
    for _ in range(100):
        loss = loss_of_a_step()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"a step took {(time.perf_counter() - begin) / len(losses) * 1e3:.0f} ms")
    return losses


@pytest.mark.exhaustive
@pytest.mark.only_on("cpu")
def test_a_mixture_trains_over_a_network(mixture: pymoe.MixtureOfExpertBackends) -> None:
    def step() -> Tensor:
        x = torch.randn(64, WIDTH)
        return nn.functional.mse_loss(mixture(x), x.sort(dim=1).values)

    losses = train(mixture, step)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


@pytest.mark.exhaustive
@pytest.mark.only_on("cpu")
def test_a_classifier_of_digits_trains_over_a_network(mixture: pymoe.MixtureOfExpertBackends) -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")
    images, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16 - 0.5, torch.tensor(labels)
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    held_back, train_on = order[:360], order[360:]
    model = nn.Sequential(nn.Linear(64, WIDTH), mixture, nn.Linear(WIDTH, 10))

    def step() -> Tensor:
        rows = train_on[torch.randint(len(train_on), (64,))]
        return nn.functional.cross_entropy(model(x[rows]), y[rows])

    losses = train(model, step)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    with torch.no_grad():
        right = (model.eval()(x[held_back]).argmax(1) == y[held_back]).float().mean().item()
    print(f"{100 * right:.1f} % of the images held back are right")
    assert right > 0.4
    assert all(one.forward.answered == one.forward.requests > 0 for one in mixture.stats().values())
