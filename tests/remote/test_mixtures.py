"""Mixtures continue while servers die, leave out dead ones immediately, and take them back immediately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experts import WIDTH, Held, mlp, of
from limits import EXHAUSTIVE, LONG, rounds
from server_processes import ServerProcess, ServerProcesses
from torch import nn

import pymoe
from pymoe.remote import Connection, ExpertServer, connect

NAMES = "abcd"


class Trained:
    """Four experts on separate servers, in one mixture that learns to sort."""

    def __init__(self, processes: ServerProcesses, folder: Path) -> None:
        self.processes, self.folder, self.starts = processes, folder, 0
        self.servers = {name: self.start(name, "127.0.0.1:0") for name in NAMES}
        self.addresses = {name: server.address for name, server in self.servers.items()}
        self.connections: list[Connection] = [
            connect(address, retries=False, timeout=LONG) for address in self.addresses.values()
        ]
        torch.manual_seed(0)
        self.mixture = pymoe.MixtureOfExpertBackends(
            [one for there in self.connections for one in there.backends()],
            top_k=2, forward_timeout=LONG, backward_timeout=LONG, timeout_after_k_min=None, on_too_few="fallback",
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.mixture.parameters(), 3e-3)
        self.data = torch.Generator().manual_seed(1)
        self.losses: list[float] = []

    def start(self, name: str, listen: str) -> ServerProcess:
        self.starts += 1
        saved = str(self.folder / "saved" / name)
        options = ["experts:named", "--listen", listen, "--checkpoints", saved, "--save-every", "0.1", "--grace", "1"]
        return self.processes.start(self.folder / f"{self.starts}", *options, EXPERTS=name)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(64, WIDTH, generator=self.data)
            loss = nn.functional.mse_loss(self.mixture(x), x.sort(dim=1).values)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def close(self) -> None:
        for one in self.connections:
            one.close()


@pytest.mark.slow
def test_training_goes_on_with_1_of_4_servers_killed_and_restarted(processes: ServerProcesses, tmp_path: Path) -> None:
    """The final loss is about the same as without a death, which only a long run shows."""
    steps, ends = rounds(12, 400), []
    for faulty in (True, False) if EXHAUSTIVE else (True,):
        (tmp_path / str(faulty)).mkdir()
        one = Trained(processes, tmp_path / str(faulty))
        dead = one.mixture.backends["b"].get_pools()[0]
        one.train(steps)
        if faulty:
            one.servers["b"].kill()
            eventually(lambda: not dead.served)  # noqa: B023
        before = one.mixture.stats()["b"].forward
        one.train(steps)
        after = one.mixture.stats()["b"].forward
        if faulty:
            assert after.requests == before.requests, "it is left out at once"
            one.servers["b"] = one.start("b", one.addresses["b"])
            eventually(lambda: dead.served)  # noqa: B023
        one.train(steps)
        assert one.mixture.stats()["b"].forward.answered > after.answered, "it is back"
        ends.append(statistics.mean(one.losses[-50:]))
        one.close()
        processes.kill_all()
    if EXHAUSTIVE:
        after_a_death, healthy = ends
        print(f"loss {healthy:.4f} healthy, {after_a_death:.4f} with a server that died")
        assert after_a_death < 1.1 * healthy


def test_a_death_in_a_step_costs_that_step_one_answer(processes: ServerProcesses, tmp_path: Path) -> None:
    server = processes.start(tmp_path / "1", "experts:two")
    here = mlp("here")
    with connect(server.address, retries=False, timeout=LONG) as there, pymoe.Runtime([here]):
        mixture = pymoe.MixtureOfExpertBackends([*there.backends(), here], top_k=3, timeout_after_k_min=None)
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = mixture(x)
        server.kill()
        y.sum().backward()  # gradients of dead experts are zero
        eventually(lambda: not there.reachable)
        assert torch.equal(mixture(x), here.forward(x)[0])
        assert [one.backward.failed for one in mixture.stats().values()] == [1, 1, 0]


@pytest.mark.parametrize("coalesce", [True, False], ids=["coalesced", "direct"])
def test_a_server_that_does_not_answer_backs_off_as_a_local_expert_does(coalesce: bool) -> None:
    held, here = Held(), mlp("here")
    options = {"retries": False, "timeout": LONG, "coalesce": coalesce}
    with ExpertServer(of(held), grace=0) as server, connect(server.address, **options) as there, pymoe.Runtime([here]):
        mixture = pymoe.MixtureOfExpertBackends(
            [*there.backends(), here], top_k=2, timeout_after_k_min=0.1, rest_after=3, rest=LONG
        )
        with torch.no_grad():
            for _ in range(6):
                mixture(torch.randn(4, WIDTH))
        slow, quick = mixture.stats().values()
        assert (slow.forward.requests, slow.forward.given_up, slow.forward.failed) == (3, 3, 0)
        assert quick.forward.answered == 6
        held.open.set()


def eventually(check: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_are_asked_where_none_can_be_reached(processes: ServerProcesses, tmp_path: Path) -> None:
    server = processes.start(tmp_path / "1", "experts:two")
    with connect(server.address, retries=False, timeout=LONG) as there:
        mixture = pymoe.MixtureOfExpertBackends(
            there.backends(), top_k=1, forward_timeout=LONG, on_too_few="fallback", fallback="input"
        )
        x = torch.randn(4, WIDTH)
        server.kill()
        while there.reachable:
            time.sleep(0.01)
        assert torch.equal(mixture(x), x)
        assert sum(one.forward.failed for one in mixture.stats().values()) > 0
