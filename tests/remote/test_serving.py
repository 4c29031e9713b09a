"""Remote backends can be used like local ones, and answer with the same bits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from experts import ROW, WIDTH, Held, mlp, of
from limits import LONG
from processes import in_child
from torch import nn

import pymoe
from pymoe.remote import Connection, ExpertServer, connect
from pymoe.remote.encodings import ENCODINGS
from pymoe.runtime import BatchTensorProto, ExpertBackend, ExpertClient, Runtime

X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
G = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
WAYS = pytest.mark.parametrize("coalesce", [True, False], ids=["coalesced", "direct"])


@pytest.fixture(scope="module")
def held() -> Held:
    return Held()


@pytest.fixture(scope="module")
def server(held: Held) -> Iterator[ExpertServer]:
    """Serve an expert a that trains, b that does not, and one that can be blocked."""
    experts = [mlp("a", 1), mlp("b", 2, optimizer=None), of(held, "held")]
    with ExpertServer(experts, workers=4) as made:
        yield made


@pytest.fixture(params=[True, False], ids=["coalesced", "direct"])
def there(request: pytest.FixtureRequest, server: ExpertServer) -> Iterator[Connection]:
    with connect(server.address, coalesce=request.param, timeout=LONG) as made:
        yield made


def twin(server: ExpertServer, name: str) -> ExpertBackend:
    """Return a local copy of a served expert."""
    return copy.deepcopy(server.experts[name])


def test_both_passes_have_the_bits_of_a_local_backend(server: ExpertServer, there: Connection) -> None:
    (remote,), local = there.backends("a"), twin(server, "a")
    for rows in (6, 1, 3, 6):
        x, g = X[:rows], G[:rows]
        (y,) = remote.forward_pool.submit_task(x).result()
        assert torch.equal(y, local.forward(x)[0])
        (grad,) = remote.backward_pool.submit_task(x, g).result()
        assert torch.equal(grad, local.backward(x, g)[0])
        assert remote.updates == local.updates
    for ours, theirs in zip(local.expert.parameters(), server.experts["a"].expert.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_client_trains_the_expert_as_it_does_a_local_one(server: ExpertServer, there: Connection) -> None:
    (remote,), local = there.backends("a"), twin(server, "a")
    losses = []
    with Runtime([local]):
        for backend in (remote, local):
            client, x = ExpertClient(backend), X.clone().requires_grad_()
            for _ in range(3):
                loss = nn.functional.mse_loss(client(x), G)
                loss.backward()
            losses.append((loss, x.grad))
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(losses[0][1], losses[1][1])


def test_a_mixture_of_remote_and_local_experts_equals_one_of_local_experts(server: ExpertServer) -> None:
    with connect(server.address) as there, connect(server.address, coalesce=False) as directly:
        locals_ = [twin(server, "a"), twin(server, "b"), mlp("c", 3)]
        found = []
        third = copy.deepcopy(locals_[2])
        with Runtime([*locals_, third]):
            remote = [*there.backends("a"), *directly.backends("b")]
            for backends in ([*remote, third], locals_):
                torch.manual_seed(0)
                mixture = pymoe.MixtureOfExpertBackends(backends, top_k=2, forward_timeout=LONG, backward_timeout=LONG)
                x = X.clone().requires_grad_()
                y = mixture(x)
                y.square().sum().backward()
                found.append((y, x.grad, mixture.gate.weight.grad))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_calls_run_in_parallel_forward_and_backward(server: ExpertServer, there: Connection) -> None:
    clients = [ExpertClient(one) for one in there.backends("a", "b")]
    x = X.clone().requires_grad_()
    (y,), (z,) = pymoe.map_with_parallel_backward(lambda client, t: client(t), *((one, x) for one in clients))
    assert torch.equal(z, twin(server, "b").forward(X)[0])
    (y.sum() + z.sum()).backward()
    assert x.grad is not None


def test_arguments_of_every_kind_arrive() -> None:
    class Expert(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: int, mask: dict[str, torch.Tensor]) -> dict[str, Any]:
            return {"y": x * scale, "rows": mask["keep"], "constant": "text"}

    schema: dict[str, Any] = {
        "args_schema": [ROW],
        "kwargs_schema": {"scale": 3, "mask": {"keep": BatchTensorProto(dtype=torch.bool)}},
    }
    backend = ExpertBackend("e", Expert(), None, **schema)
    keep = torch.tensor([True, False, True, True, False, True])
    with ExpertServer(backend) as server:
        for coalesce in (True, False):
            with connect(server.address, coalesce=coalesce) as there:
                (remote,) = there.backends()
                told, known = remote.get_info(), backend.get_info()
                assert {**told, "outputs_schema": None} == {**known, "outputs_schema": None}
                y = ExpertClient(remote)(X, scale=3, mask={"keep": keep})
                assert torch.equal(y["y"], X * 3)
                assert torch.equal(y["rows"], keep)
                assert y["constant"] == "text"


def test_requests_without_rows_and_of_many_batches() -> None:
    backend = mlp("e", max_batch_size=4)
    local = copy.deepcopy(backend)
    with ExpertServer(backend) as server, Runtime([local]):
        for coalesce in (True, False):
            with connect(server.address, coalesce=coalesce) as there:
                (remote,) = there.backends()
                for rows in (0, 6, 5):
                    x, g = X[:rows], G[:rows]
                    (y,), (same,) = remote.forward_pool(x), local.forward_pool(x)
                    assert torch.equal(y, same)
                    (grad,), (same,) = remote.backward_pool(x, g), local.backward_pool(x, g)
                    assert torch.equal(grad, same)
                assert remote.updates == local.updates


def test_answers_are_memory_of_their_own(there: Connection) -> None:
    (remote,) = there.backends("b")
    (y,) = remote.forward_pool.submit_task(X).result()
    before = y.clone()
    y.add_(1)
    assert torch.equal(remote.forward_pool.submit_task(X).result()[0], before)


def test_an_expert_may_write_to_what_it_gets() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.data_ptr() % 16 == 0
            return x.add_(1)

    with ExpertServer(of(InPlace(), lr=None)) as server, connect(server.address) as there:
        (remote,) = there.backends()
        for _ in range(2):
            assert torch.equal(remote.forward_pool(X)[0], X + 1)


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "raw"])
def test_activations_may_travel_in_fewer_bits_and_gradients_do_not(server: ExpertServer, encoding: str) -> None:
    with connect(server.address, encoding=encoding) as there:
        (remote,), local = there.backends("b"), twin(server, "b")
        (y,) = remote.forward_pool(X)
        assert not torch.equal(y, local.forward(X)[0])
        assert torch.allclose(y, local.forward(X)[0], atol=0.05)
        exact = X.bfloat16().float()
        if encoding == "bf16":  # numbers that bf16 represents exactly
            assert torch.equal(remote.backward_pool(exact, G)[0], local.backward(exact, G)[0])
    with connect(server.address, gradient_encoding="bf16") as there:
        (remote,) = there.backends("b")
        assert torch.equal(remote.forward_pool(X)[0], local.forward(X)[0])
        assert torch.equal(remote.backward_pool(X, G)[0], local.backward(X, G.bfloat16().float())[0].bfloat16().float())


# --- futures ---


def test_futures_are_awaited_waited_for_and_handed_out_as_they_end(server: ExpertServer, there: Connection) -> None:
    (remote,), local = there.backends("b"), twin(server, "b")

    async def ask() -> list[Any]:
        pool = remote.forward_pool
        first = [pool.submit_task(X[i : i + 1]) for i in range(3)]
        return [*await asyncio.gather(*first, *(pool.submit_async(X[i : i + 1]) for i in range(3, 6)))]

    for i, (y,) in enumerate(asyncio.run(ask())):
        assert torch.equal(y, local.forward(X[i : i + 1])[0]) or torch.allclose(y, local.forward(X)[0][i : i + 1])
    futures = [remote.forward_pool.submit_task(X) for _ in range(4)]
    done, not_done = pymoe.runtime.wait(futures)
    assert (len(done), not_done) == (4, set())
    assert set(pymoe.runtime.as_completed(futures)) == set(futures)
    assert concurrent.futures.wait(futures).done == set(futures)
    called = threading.Event()
    futures[0].add_done_callback(lambda _: called.set())
    assert called.is_set()
    assert isinstance(futures[0], concurrent.futures.Future)


def test_a_client_is_awaited(server: ExpertServer, there: Connection) -> None:
    client = ExpertClient(there.backends("b")[0], timeout=LONG)

    async def ask() -> Any:
        return await client.submit(X), await client.call_async(X)

    for y in asyncio.run(ask()):
        assert torch.equal(y, twin(server, "b").forward(X)[0])


def test_cancelling_a_direct_request_takes_it_out_of_the_queue_over_there(server: ExpertServer, held: Held) -> None:
    held.open.clear(), held.begun.clear()
    pool = server.experts["held"].forward_pool
    with connect(server.address, coalesce=False, timeout=LONG) as there:
        (remote,) = there.backends("held")
        running = remote.forward_pool.submit_task(X)
        assert held.begun.wait(LONG)
        calls = held.calls
        queued = [remote.forward_pool.submit_task(X) for _ in range(3)]
        while pool._statistics()["queued"] < 3:
            pass
        assert all(one.cancel() for one in queued)
        with pytest.raises(concurrent.futures.CancelledError):
            queued[0].result()
        while pool._statistics()["queued"]:  # otherwise this test would not end
            pass
        held.open.set()
        running.result()
        assert held.calls == calls


def test_cancelling_the_task_that_awaits_cancels_the_request(server: ExpertServer, held: Held) -> None:
    held.open.clear(), held.begun.clear()
    with connect(server.address, coalesce=False, timeout=LONG) as there:
        (remote,) = there.backends("held")

        async def ask() -> Any:
            running = remote.forward_pool.submit_task(X)
            await asyncio.to_thread(held.begun.wait, LONG)
            queued = remote.forward_pool.submit_task(X)
            task = asyncio.ensure_future(_wait_for(queued))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            held.open.set()
            await running
            return queued

        assert asyncio.run(ask()).cancelled()


async def _wait_for(future: Any) -> Any:
    return await future


@WAYS
def test_many_callers_share_calls_and_a_lone_one_waits_for_nobody(server: ExpertServer, coalesce: bool) -> None:
    with connect(server.address, coalesce=coalesce, timeout=LONG) as there:
        (remote,), local = there.backends("b"), twin(server, "b")
        expected = local.forward(X)[0]

        def ask(i: int) -> None:
            for _ in range(20):
                (y,) = remote.forward_pool.submit_task(X[i : i + 1]).result()
                assert torch.allclose(y, expected[i : i + 1], atol=1e-6)

        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            list(threads.map(ask, range(6)))
        attempts = there.counts["attempts"]
        assert (attempts < 120) is coalesce
        for _ in range(5):
            remote.forward_pool.submit_task(X[:1]).result()
        assert there.counts["attempts"] == attempts + 5


def test_a_call_has_the_patience_of_its_own_requests(server: ExpertServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call's deadline is not the deadline of a request that has ended."""
    seen: list[float] = []
    real = pymoe.remote.requests.RemoteCall
    monkeypatch.setattr("pymoe.remote.requests.RemoteCall", lambda *all_: (seen.append(all_[-1]), real(*all_))[1])
    with connect(server.address, timeout=LONG) as there:
        pool = there.backends("b")[0].forward_pool
        pool.submit_task(X, timeout=1000 * LONG).result()
        pool.submit_task(X, timeout=LONG).result()
        assert seen[1] < seen[0] - 998 * LONG


# --- experts that come and go ---


def test_experts_are_added_and_removed_while_others_are_served() -> None:
    with ExpertServer(mlp("a")) as server, connect(server.address) as there:
        (a,) = there.backends()
        server.add(mlp("b", 2))
        _, b = there.backends()
        assert there.backends("a") == [a], "an expert has one backend, and one numbering of its requests"
        assert torch.equal(b.forward_pool(X)[0], mlp("b", 2).forward(X)[0])
        with pytest.raises(ValueError, match="names that differ"):
            server.add(mlp("b"))
        removed = server.remove("b")
        assert removed.name == "b"
        with pytest.raises(LookupError, match="no expert 'b' is served here"):
            b.forward_pool(X)
        a.forward_pool(X)
        with pytest.raises(KeyError, match="no expert 'b'"):
            server.remove("b")
        with Runtime([removed]):  # the backend may be served by others
            removed.forward_pool(X)


def test_a_server_says_what_it_serves(server: ExpertServer, there: Connection) -> None:
    info = there.info()
    assert list(info.experts) == ["a", "b", "held"]
    assert [one.trains for one in info.experts.values()] == [True, False, True]
    assert info.version == pymoe.__version__
    assert info.pid > 0
    assert not info.draining


# --- processes and copies ---


def test_a_copy_of_a_model_asks_the_same_expert_and_pickles_are_refused(there: Connection) -> None:
    (remote,) = there.backends("a")
    assert copy.deepcopy(ExpertClient(remote)).backend is remote
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(remote)


def test_a_connection_in_a_fork_says_so(there: Connection) -> None:
    (remote,) = there.backends("a")

    def check() -> None:
        with pytest.raises(RuntimeError, match="fork"):
            there.info()
        with pytest.raises(RuntimeError):
            remote.forward_pool.submit_task(X).result()

    assert in_child(check) == 0
    remote.forward_pool.submit_task(X).result()


def test_a_mixture_takes_what_is_a_backend_and_names_what_is_missing() -> None:
    with pytest.raises(
        TypeError, match=r"expected a backend, as ExpertBackend is one, got Linear without name, trains"
    ):
        pymoe.MixtureOfExpertBackends([nn.Linear(2, 2)], top_k=1)
    with pytest.raises(TypeError, match="got the class ExpertBackend"):
        ExpertClient(ExpertBackend)  # type: ignore[arg-type]
