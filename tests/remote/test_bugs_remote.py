"""Bugs of pymoe.remote that were fixed, each with its story."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experts import WIDTH, Held, count, counted, counting, mlp, of
from limits import LONG
from server_processes import ServerProcesses

from pymoe.remote import ExpertServer, calls, connect
from pymoe.remote import server as server_module

X = torch.randn(4, WIDTH)


def eventually(check: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_request_of_several_updates_is_in_every_checkpoint_that_holds_a_part_of_it() -> None:
    """Its key had the number of its last update: a state saved between the first and the last held rows of it and not
    its key, so that after a kill another attempt applied these rows again.
    """
    backend = counting(max_batch_size=1)
    with ExpertServer(backend) as server, connect(server.address, coalesce=False) as there:
        (remote,) = there.backends()
        remote.backward_pool.submit_task(torch.tensor([[1], [2]]), -torch.ones(2, 1)).result()
        assert backend.updates == 2
        journal = server._service.hosted["counting"].journal
        assert [[keys for _, keys in journal.keys(updates).values()] for updates in (0, 1, 2)] == [[[]], [[0]], [[0]]]


@pytest.mark.parametrize("way", ["removed and added", "another server"])
def test_an_expert_that_is_served_again_knows_what_it_holds(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys went with the server while the parameters stayed: an attempt that came after that was applied again."""
    backend = counting()
    attempts = []
    real = calls.Call.__init__

    def second_attempt(self: calls.Call, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        self._request.attempt = 1
        attempts.append(self)

    with ExpertServer(backend) as server, connect(server.address, coalesce=False) as there:
        client = there.client
        count(there.backends()[0], 7).result()
        if way == "removed and added":
            assert server.remove("counting") is backend
            server.add(backend)
        else:
            server.drain()
            server = ExpertServer(backend)
            server.start()
        with server, connect(server.address, coalesce=False) as again:
            again.client = client
            monkeypatch.setattr(calls.Call, "__init__", second_attempt)
            count(again.backends()[0], 7).result()
            assert attempts
            assert counted(backend, 8)[7] == 1
            assert server.counts["repeated"] == 1


def test_an_expert_that_hangs_holds_up_neither_other_checkpoints_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts were saved one after the other: one that hung had the others lose what they learned from then on. And
    drain() waited for its batch for ever, so that SIGTERM and Ctrl-C did not end a server.
    """
    monkeypatch.setattr(server_module, "PATIENCE_S", 0.1)
    held = Held(opened=True)
    hanging, well = of(held, "hanging"), mlp("well")
    server = ExpertServer([hanging, well], checkpoints=tmp_path, save_every=0.02, grace=0.1)
    server.start()
    with connect(server.address, coalesce=False, timeout=LONG, retries=False) as there:
        first, second = there.backends()
        first.backward_pool.submit_task(X, X).result()
        held.open.clear()
        held.begun.clear()
        lost = first.backward_pool.submit_task(X, X)
        assert held.begun.wait(LONG)
        for _ in range(3):
            saved = server.counts["saved"]
            second.backward_pool.submit_task(X, X).result()
            eventually(lambda before=saved: server.counts["saved"] > before)
        second.backward_pool.submit_task(X, X).result()
        ending = threading.Thread(target=server.drain)
        ending.start()
        ending.join(LONG)
        assert not ending.is_alive()
        assert isinstance(lost.exception(LONG), Exception)
    assert server.stuck
    held.open.set()
    again = mlp("well", seed=5)
    ExpertServer(again, checkpoints=tmp_path)
    assert again.updates == 4


def test_the_command_ends_although_an_expert_hangs(processes: ServerProcesses, tmp_path: Path) -> None:
    server = processes.start(tmp_path / "said", "experts:one_that_hangs", "--grace", "0.1")
    with connect(server.address, coalesce=False, timeout=LONG, retries=False) as there:
        there.backends("held")[0].forward_pool.submit_task(X)
        eventually(lambda: there.info().counts.get("forward"))
        server.send(signal.SIGTERM)
        assert server.wait() == 1
    assert "an expert hangs: the process ends without it" in server.said()


def test_a_server_that_was_drained_takes_no_expert() -> None:
    """It took it, and never served it."""
    server = ExpertServer(mlp("a"))
    with server:
        pass
    with pytest.raises(RuntimeError, match=r"expected a server that serves, got <ExpertServer at .*draining a>"):
        server.add(mlp("b"))
