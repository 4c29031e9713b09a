"""Bugs of pymoe.remote that were fixed, each with its story."""

from __future__ import annotations

import pytest
import torch
from experts import count, counted, counting

from pymoe.remote import ExpertServer, calls, connect


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
