"""Counts gradients one by one, through cut connections and killed servers: none is applied twice."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cutting_proxy import CuttingProxy
from experts import KEYS, Counting, count, counted, counting, mlp
from limits import LONG, rounds
from server_processes import ServerProcesses

from pymoe.remote import AppliedError, ExpertServer, RemoteBackend, RemoteExpertError, ServerLost, connect
from pymoe.remote.channel import Ended
from pymoe.remote.requests import RemoteCall
from pymoe.runtime import BatchTensorProto, ExpertBackend

X = torch.randn(4, 8)


def train(backend: RemoteBackend, keys: range, threads: int) -> tuple[set[int], Counter[str]]:
    """Request one gradient per key; return the keys that were answered, and the other outcomes."""
    answered: set[int] = set()
    others: Counter[str] = Counter()
    lock = threading.Lock()

    def one(key: int) -> None:
        try:
            backend.backward_pool.submit_task(torch.tensor([[key]]), torch.tensor([[-1.0]])).result()
        except (AppliedError, ServerLost, TimeoutError) as error:
            with lock:
                others[type(error).__name__] += 1
        else:
            with lock:
                answered.add(key)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, keys))
    return answered, others


@pytest.mark.parametrize("coalesce", [True, False], ids=["coalesced", "direct"])
def test_nothing_is_lost_or_applied_twice_where_connections_are_cut(coalesce: bool) -> None:
    least, keys, answered = rounds(300, 4000), 0, set[int]()
    others: Counter[str] = Counter()
    backend = counting()
    with ExpertServer(backend) as server, CuttingProxy(server.address, mean=0.03) as proxy:
        deadline = time.monotonic() + LONG
        while True:
            try:
                there = connect(proxy.address, coalesce=coalesce, timeout=LONG)
                (remote,) = there.backends()
                break
            except (ServerLost, TimeoutError):
                assert time.monotonic() < deadline
        with there:
            # Continue until enough connections were cut, however fast the machine is.
            while keys < least or proxy.cuts <= 5 or not there.counts["retries"]:
                more, failed = train(remote, range(keys, keys + 50), threads=4)
                answered, others, keys = answered | more, others + failed, keys + 50
                assert keys < KEYS
        counts = counted(backend, keys)
        assert not others
        assert len(answered) == keys
        assert torch.equal(counts, torch.ones(keys, dtype=torch.int64))


def test_nothing_is_applied_twice_where_the_server_is_killed(processes: ServerProcesses, tmp_path: Path) -> None:
    """Gradients answered after the last checkpoint may be lost in a kill, but none is applied twice."""
    kills, keys = rounds(2, 20), rounds(1000, 12_000)
    saved = tmp_path / "saved"
    options = ["experts:counter", "--checkpoints", str(saved), "--save-every", "0.1"]
    server = processes.start(tmp_path / "0", *options)
    address = server.address
    with CuttingProxy(address, mean=0.3) as proxy:
        there = connect(address, timeout=LONG)  # a connection without the proxy, for the checks
        (counter,) = there.backends()
        with connect(proxy.address, timeout=LONG, wait=LONG) as trainer, ThreadPoolExecutor(1) as thread:
            (remote,) = trainer.backends()
            job = thread.submit(train, remote, range(keys), 8)
            for number in range(kills):
                while not job.done() and remote._stub.numbers._next < (number + 1) / (kills + 1) * keys / 4:
                    time.sleep(0.01)
                deadline = time.monotonic() + LONG  # a busy machine may answer all before it saves any
                while all(one.name.endswith("-0.safetensors") for one in saved.rglob("*.safetensors")):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                server.kill()
                server = processes.start(tmp_path / str(number + 1), *options, "--listen", address)
                assert server.address == address
            answered, others = job.result()
            more, none = train(remote, range(keys, keys + 8), 8)  # these come after the last kill
        counts = counted(counter, keys + 8)
        there.close()
    assert (sorted(more), dict(none)) == ([*range(keys, keys + 8)], {})
    assert counts[keys:].tolist() == [1] * 8
    assert int(counts.max()) == 1, "a gradient was applied twice"
    assert len(answered) + sum(others.values()) == keys
    assert set(others) <= {"AppliedError"}
    lost = [key for key in answered if not counts[key]]
    assert len(lost) < len(answered), "checkpoints hold something"
    print(f"{keys} gradients, {kills} kills, {proxy.cuts} cuts: {len(lost)} answered ones lost, {dict(others)}")


def test_a_restarted_server_has_the_parameters_and_the_keys_of_its_checkpoint(tmp_path: Path) -> None:
    backend = counting()
    options = {"checkpoints": tmp_path, "save_every": 0}
    with ExpertServer(backend, **options) as server, connect(server.address, coalesce=False) as there:
        (remote,) = there.backends()
        for key in range(3):
            remote.backward_pool.submit_task(torch.tensor([[key]]), torch.tensor([[-1.0]])).result()
        assert server.save() == 1
        assert server.save() == 0, "nothing has changed"
        client = there.client
    again = counting()
    with ExpertServer(again, checkpoints=tmp_path) as server:
        assert again.updates == 3
        assert counted(again, 4).tolist() == [1, 1, 1, 0]
        with connect(server.address, coalesce=False) as there:
            there.client = client
            (remote,) = there.backends()
            remote._stub.numbers._next = 2  # another attempt of the last request, which had no answer
            with pytest.raises(AppliedError, match="answer is gone"):
                remote.backward_pool.submit_task(torch.tensor([[2]]), torch.tensor([[-1.0]])).result()
        assert counted(again, 4).tolist() == [1, 1, 1, 0]


def test_the_end_of_a_server_saves_what_is_there(tmp_path: Path) -> None:
    backend = mlp("e")
    with ExpertServer(backend, checkpoints=tmp_path) as server, connect(server.address) as there:
        there.backends()[0].backward_pool(X, X)
        assert not list(tmp_path.glob("*/*.safetensors"))
    again = mlp("e", seed=5)
    ExpertServer(again, checkpoints=tmp_path)
    assert again.updates == 1
    assert torch.equal(again.forward(X)[0], backend.forward(X)[0])


def test_a_removed_expert_is_saved_and_an_added_one_loaded(tmp_path: Path) -> None:
    with ExpertServer([mlp("a"), mlp("b")], checkpoints=tmp_path) as server, connect(server.address) as there:
        there.backends("b")[0].backward_pool(X, X)
        b = server.remove("b")
        again = mlp("b", seed=5)
        server.add(again)
        assert torch.equal(again.forward(X)[0], b.forward(X)[0])


def test_gradients_that_wait_for_others_belong_to_the_next_update(tmp_path: Path) -> None:
    """With accumulate_steps, a key is saved, and lost, together with the update that contains its gradient."""
    backend = counting(accumulate_steps=2)
    with ExpertServer(backend, checkpoints=tmp_path) as server, connect(server.address) as there:
        (remote,) = there.backends()
        journal = server._service.entries["counting"].journal
        for key in range(3):
            remote.backward_pool(torch.tensor([[key]]), torch.tensor([[-1.0]]))
        assert backend.updates == 1
        ((_, keys),) = journal.keys(1).values()
        assert 2 not in keys
        ((low, keys),) = journal.keys(2).values()
        assert 2 in keys
        assert low == 2


def test_a_checkpoint_holds_the_key_of_a_request_that_is_still_under_way(tmp_path: Path) -> None:
    """The state is copied after an update but before its request has settled; saving waits for the key."""
    backend = counting()
    with ExpertServer(backend, checkpoints=tmp_path, save_every=0) as server:
        entry = server._service.entries["counting"]
        real, copied = backend.state_dict, threading.Event()

        def state_dict(*args: object, **kwargs: object) -> object:
            state = real(*args, **kwargs)
            copied.set()
            return state

        backend.state_dict = state_dict  # type: ignore[method-assign]
        applied = entry._applied

        async def later(*arguments: Any) -> object:
            found = await applied(*arguments)
            while not copied.is_set():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            return found

        entry._applied = later  # type: ignore[method-assign]
        with connect(server.address, coalesce=False) as there:
            request = count(there.backends()[0], 7)
            while not backend.updates:
                time.sleep(0.001)
            server.save()
            request.result()
    again = counting()
    journal = ExpertServer(again, checkpoints=tmp_path)._service.entries["counting"].journal
    assert (again.updates, [keys for _, keys in journal.keys(1).values()]) == (1, [[0]])


def test_saving_does_not_stop_training(tmp_path: Path) -> None:
    with ExpertServer(counting(), checkpoints=tmp_path, save_every=0.01) as server, connect(server.address) as there:
        (remote,) = there.backends()
        deadline = time.monotonic() + LONG
        key = 0
        while server.counts["saved"] < 4:
            assert time.monotonic() < deadline
            remote.backward_pool(torch.tensor([[key % KEYS]]), torch.tensor([[-1.0]]))
            key += 1
    assert server.counts["backward"] == key


def test_a_checkpoint_that_cannot_be_written_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, full = os.fsync, [False]

    def fsync(descriptor: int) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with ExpertServer(counting(), checkpoints=tmp_path, save_every=0.01) as server, connect(server.address) as there:
        full[0] = True
        there.backends()[0].backward_pool(torch.tensor([[0]]), torch.tensor([[-1.0]]))
        deadline = time.monotonic() + LONG
        while server.counts["save_failed"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with pytest.raises(OSError, match=r"not saved: 'counting' .*No space left"):
            server.save()
        full[0] = False
        while not server.counts["saved"]:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert "no checkpoint was written" in caplog.text


def test_experts_that_share_parameters_are_not_saved_apart(tmp_path: Path) -> None:
    first = mlp("a")
    second = type(first)("b", first.expert, first.opt, args_schema=first.args_schema)
    with pytest.raises(ValueError, match="share parameters"):
        ExpertServer([first, second], checkpoints=tmp_path)
    ExpertServer([first, second])


def test_saving_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="expected checkpoints="):
        ExpertServer(mlp("a")).save()


def test_an_attempt_has_the_key_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt's answer is dropped. The second attempt gets the same answer, and nothing is applied again."""
    backend = counting()
    with ExpertServer(backend) as server, connect(server.address, timeout=LONG) as there:
        (remote,) = there.backends()
        real, thrown_away = RemoteCall.answer, []

        def answer(self: RemoteCall, *arguments: Any) -> Any:
            if thrown_away:
                return real(self, *arguments)
            thrown_away.append(real(self, *arguments))
            raise Ended(grpc.StatusCode.UNAVAILABLE, "the answer is thrown away")

        monkeypatch.setattr(RemoteCall, "answer", answer)
        (again,) = remote.backward_pool(torch.tensor([[7]]), torch.tensor([[-1.0]]))
        assert torch.equal(again, thrown_away[0][0])
        assert counted(backend, 8)[7] == 1
        assert server.counts["repeated"] == 1


class Chosen(Counting):
    """Blocks the batch that has row 0, and raises once for a batch that has row 9."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.open, self.raised = threading.Event(), threading.Event(), False

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            if (index == 0).any():
                self.begun.set()
                assert self.open.wait(LONG)
            if (index == 9).any() and not self.raised:
                self.raised = True
                raise OSError("once")
        return super().forward(index)


def chosen() -> tuple[Chosen, ExpertBackend]:
    expert = Chosen()
    opt = torch.optim.SGD(expert.parameters(), 1.0)
    proto = BatchTensorProto(1, dtype=torch.int64)
    return expert, ExpertBackend(
        "e", expert, opt, args_schema=[proto], outputs_schema=BatchTensorProto(1), max_batch_size=2
    )


@pytest.mark.parametrize("rows", [[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 9, 4]], ids=["in the queue", "at once", "later"])
def test_only_a_request_of_which_something_was_applied_is_applied_in_part(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any end of a request of several batches counted as applied, even if no batch had begun: its gradient was lost."""
    expert, backend = chosen()
    with ExpertServer(backend) as server, connect(server.address, coalesce=False, timeout=LONG) as there:
        (remote,) = there.backends()
        journal = server._service.entries["e"].journal
        first = count(remote, 0)
        assert expert.begun.wait(LONG)
        tensors = torch.tensor(rows)[:, None], -torch.ones(len(rows), 1)
        request = remote.backward_pool.submit_task(*tensors)
        while not any(client.running for client in journal._clients.values() if len(client.running) > 1):
            time.sleep(0.001)
        if 9 not in rows:
            request.cancel()
            while any(len(client.running) > 1 for client in journal._clients.values()):
                time.sleep(0.001)
        expert.open.set()
        first.result()
        if 9 in rows:
            with pytest.raises(RemoteExpertError, match="once"):
                request.result(LONG)
        monkeypatch.setattr(remote._stub.numbers, "new", lambda: 1)  # another attempt under its key
        monkeypatch.setattr(remote._stub.numbers, "ack", lambda: 0)
        again = remote.backward_pool.submit_task(*tensors)
        if rows[2] == 9:
            with pytest.raises(AppliedError, match="in part"):
                again.result(LONG)
        else:
            again.result(LONG)
        expected = [int(row in rows and not (rows[2] == 9 and row in rows[2:])) for row in range(1, 10)]
        assert counted(backend, 10)[1:].tolist() == expected
