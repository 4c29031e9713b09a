"""The documentation's table of failures, from the client's view, row by row."""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experts import WIDTH, Held, Raising, Slow, mlp, of
from limits import LONG
from server_processes import ServerProcesses

from pymoe.remote import (
    AppliedError,
    ExpertServer,
    ProtocolError,
    RemoteExpertError,
    ServerLost,
    channel,
    connect,
    service,
    wire,
)
from pymoe.remote import server as server_module
from pymoe.runtime import ExpertClient, NonFiniteGradientError, QueueFull

X = torch.randn(4, WIDTH)
SOON = 0.3  # seconds; for timeouts that are meant to expire
WAYS = pytest.mark.parametrize("coalesce", [True, False], ids=["coalesced", "direct"])


def eventually(check: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.thinned(usual=1)
@WAYS
def test_gone_and_back_within_the_deadline(processes: ServerProcesses, tmp_path: Path, coalesce: bool) -> None:
    first = processes.start(tmp_path / "1", "experts:two")
    with connect(first.address, timeout=LONG, coalesce=coalesce) as there:
        a, b = there.backends()
        (before,) = b.forward_pool.submit_task(X).result()
        first.kill()
        eventually(lambda: not a.forward_pool.served)
        request = b.forward_pool.submit_task(X)
        trained = a.backward_pool.submit_task(X, X)
        time.sleep(0.1)
        assert not request.done()
        processes.start(tmp_path / "2", "experts:two", "--listen", first.address)
        assert torch.equal(request.result()[0], before)
        trained.result()
        assert there.counts["retries"] > 0
        eventually(lambda: a.forward_pool.served)


@WAYS
def test_gone_without_retries_and_until_the_deadline(coalesce: bool) -> None:
    with ExpertServer(mlp("a")) as server:
        hasty = connect(server.address, retries=False, coalesce=coalesce)
        patient = connect(server.address, timeout=SOON, coalesce=coalesce)
        (a,), (b,) = hasty.backends(), patient.backends()
    with hasty, patient:
        with pytest.raises(ServerLost, match=r"a_forward@127.0.0.1.*(refused|connect|Socket)"):
            a.forward_pool.submit_task(X).result()
        begin = time.monotonic()
        with pytest.raises(ServerLost, match="a_backward@127"):
            b.backward_pool.submit_task(X, X).result()
        assert time.monotonic() - begin >= SOON - 0.01
        assert patient.counts["retries"] > 0
        assert hasty.counts["retries"] == 0


@WAYS
def test_a_frozen_server_times_out_and_never_runs_the_late_request(
    processes: ServerProcesses, tmp_path: Path, coalesce: bool
) -> None:
    server = processes.start(tmp_path / "1", "experts:two")
    with connect(server.address, timeout=LONG, coalesce=coalesce) as there:
        (a, _) = there.backends()
        a.forward_pool.submit_task(X).result()
        server.freeze()
        try:
            for request in (
                a.forward_pool.submit_task(X, timeout=SOON),
                a.backward_pool.submit_task(X, X, timeout=SOON),
            ):
                with pytest.raises(TimeoutError):
                    request.result()
        finally:
            server.send(signal.SIGCONT)
        a.forward_pool.submit_task(X).result()
        assert there.info().experts["a"].updates == 0


def test_a_server_notices_that_it_stood_still_as_long_as_it_serves() -> None:
    with ExpertServer(mlp("a")) as server:

        async def stand_still() -> float:
            time.sleep(2 * service.STALL_S)  # stops the event loop, too
            return await server._service.stalls.settle()

        assert server_module.run(stand_still()) > 0
        server.drain()
        assert server_module.run(stand_still()) == 0, "nobody looks at the clock any more"


@WAYS
def test_the_time_in_which_a_server_settles_is_the_requests_own(
    coalesce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stall, a server waits for the cancellations of requests that clients have given up, however these
    were sent.
    """

    async def settle(stalls: Any) -> float:
        return 1e9

    with ExpertServer(mlp("a")) as server, connect(server.address, coalesce=coalesce, retries=False) as there:
        (a,) = there.backends()
        assert a.forward_pool(X)[0].shape == X.shape
        monkeypatch.setattr("pymoe.remote.service.StallDetector.settle", settle)
        with pytest.raises(TimeoutError):
            a.forward_pool(X)
        assert server.runtime.stats()["a_forward"].expired == 1


def test_a_request_that_has_not_begun_by_its_deadline_is_taken_out_of_the_queue() -> None:
    held = Held()
    backend = of(held)
    with ExpertServer(backend, workers=2) as server, connect(server.address, coalesce=False) as there:
        (remote,) = there.backends()
        running = remote.forward_pool.submit_task(X, timeout=LONG)
        assert held.begun.wait(LONG)
        late = remote.backward_pool.submit_task(X, X, timeout=SOON)
        with pytest.raises(TimeoutError):
            late.result()
        held.open.set()
        running.result()
        remote.forward_pool.submit_task(X, timeout=LONG).result()
        assert (held.calls, backend.updates) == (2, 0)


@WAYS
def test_more_requests_than_allowed(monkeypatch: pytest.MonkeyPatch, coalesce: bool) -> None:
    held = Held()
    backend = of(held, capacity=1)
    with ExpertServer(backend, workers=2) as server:
        with connect(server.address, coalesce=False, retries=False, timeout=LONG) as other:
            (first,) = other.backends()
            running = [first.forward_pool.submit_task(X)]
            assert held.begun.wait(LONG)
            running.append(first.forward_pool.submit_task(X))
            eventually(lambda: backend.forward_pool._statistics()["queued"] == 1)
            with pytest.raises(QueueFull, match="the queue has no room"):
                first.forward_pool.submit_task(X).result()
            with connect(server.address, coalesce=coalesce, timeout=LONG) as there:  # an overloaded server is not lost
                (second,) = there.backends()
                patient = second.forward_pool.submit_task(X)
                eventually(lambda: there.counts["retries"] > 1)
                held.open.set()
                assert torch.equal(patient.result()[0], X)
            for one in running:
                one.result()
        assert server.counts["shed"] > 1


def test_a_drain_answers_what_is_under_way_and_refuses_what_is_new() -> None:
    held = Held()
    with ExpertServer(of(held), workers=2, grace=LONG) as server:
        there = connect(server.address, coalesce=False, retries=False)
        (remote,) = there.backends()
        under_way = remote.backward_pool.submit_task(X, X, timeout=LONG)
        assert held.begun.wait(LONG)
        draining = threading.Thread(target=server.drain)
        draining.start()
        eventually(lambda: isinstance(_error_of(remote), ServerLost))
        assert not server.wait(0)
        held.open.set()
        assert torch.equal(under_way.result()[0], X)
        draining.join(LONG)
        assert server.wait(0)
        assert server.experts["expert"].updates == 1
        there.close()


def _error_of(remote: Any) -> BaseException | None:
    return remote.forward_pool.submit_task(X, timeout=SOON).exception()  # type: ignore[no-any-return]


@WAYS
def test_an_unknown_expert_and_tensors_that_do_not_fit(coalesce: bool) -> None:
    with ExpertServer(mlp("a")) as server, connect(server.address, coalesce=coalesce) as there:
        with pytest.raises(LookupError, match=r"there is no expert 'x', only \['a'\]"):
            there.backends("x")
        (a,) = there.backends()
        sent = there.counts["attempts"]
        with pytest.raises(ValueError, match="shape"):
            a.forward_pool.submit_task(torch.randn(4, WIDTH + 1)).result()
        with pytest.raises(TypeError, match="float64"):
            a.forward_pool.submit_task(X.double()).result()
        with pytest.raises(ValueError):
            a.backward_pool.submit_task(X).result()
        with pytest.raises(ValueError, match="rows"):
            a.backward_pool.submit_task(X, X[:2]).result()
        assert there.counts["attempts"] == sent, "nothing was sent"
        server.remove("a")
        with pytest.raises(LookupError, match="no expert 'a' is served here"):
            a.forward_pool.submit_task(X).result()


class Unheard(Exception):
    """An exception type that clients do not know."""


@WAYS
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad row"), ValueError),
        (ZeroDivisionError("by zero"), ZeroDivisionError),
        (KeyError("missing"), KeyError),
        (TimeoutError("the expert's own"), TimeoutError),
        (NonFiniteGradientError("nan"), NonFiniteGradientError),
        (Unheard("secret path"), RemoteExpertError),
    ],
)
def test_an_expert_that_raises(error: BaseException, kind: type[Exception], coalesce: bool) -> None:
    backend = of(Raising(error))
    with ExpertServer(backend) as server, connect(server.address, coalesce=coalesce, timeout=LONG) as there:
        (remote,) = there.backends()
        for request in (remote.forward_pool.submit_task(X), remote.backward_pool.submit_task(X, X)):
            with pytest.raises(kind) as found:
                request.result()
            assert str(error.args[0]) in str(found.value)
            assert "experts.py" not in str(found.value), "nothing of the server's traceback"
            assert type(found.value) is kind
        assert there.counts["retries"] == 0
        assert backend.updates == 0


def test_an_update_that_broke_off_is_not_tried_again() -> None:
    backend = mlp("a")

    def broken() -> None:
        raise RuntimeError("half way")

    backend.opt.step = broken  # type: ignore[union-attr,method-assign]
    with ExpertServer(backend) as server, connect(server.address) as there:
        (remote,) = there.backends()
        with pytest.raises(RuntimeError, match="half way"):
            remote.backward_pool.submit_task(X, X).result()
        ((_, keys),) = server._service.entries["a"].journal.keys(0).values()
        assert keys == [0]


def test_applied_and_the_answer_lost() -> None:
    """The server has applied the request and forgotten its answer; the request is not applied again."""
    backend = mlp("a")
    with ExpertServer(backend) as server, connect(server.address, coalesce=False) as there:
        (remote,) = there.backends()
        remote.backward_pool.submit_task(X, X).result()
        journal = server._service.entries["a"].journal
        journal.restore(journal.keys(backend.updates))
        remote._stub.numbers._next = 0  # as a retry would
        with pytest.raises(AppliedError, match="answer is gone"):
            remote.backward_pool.submit_task(X, X).result()
        assert backend.updates == 1


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ServerLost, match=r"127\.0\.0\.1.*[Cc]onnect"):
        connect(address)
    begin = time.monotonic()
    with pytest.raises(ServerLost):
        connect(address, wait=SOON)
    assert time.monotonic() - begin > SOON / 3


def test_a_server_of_another_kind() -> None:
    def answer(listener: socket.socket) -> None:
        for _ in range(20):
            try:
                one, _ = listener.accept()
            except OSError:
                return
            one.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            one.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        with pytest.raises((ServerLost, ProtocolError), match=r"127\.0\.0\.1"):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", timeout=LONG)


def test_a_server_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExpertServer(mlp("a")) as server:
        monkeypatch.setattr("pymoe.remote.wire.SERVICE", "pymoe.Experts2")
        with pytest.raises(ProtocolError, match="Method not found"):
            connect(server.address)


@pytest.mark.parametrize("coalesce", [True, False])
def test_an_answer_that_is_none(coalesce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = wire.encode
    nonsense = lambda message: b"\xc1nonsense" if isinstance(message, wire.Reply) else real(message)  # noqa: E731
    with ExpertServer(mlp("a")) as server, connect(server.address, coalesce=coalesce) as there:
        (remote,) = there.backends()
        monkeypatch.setattr(wire, "encode", nonsense)
        with pytest.raises(ProtocolError, match="expected a Reply"):
            remote.forward_pool.submit_task(X).result()
        monkeypatch.undo()
        remote.forward_pool.submit_task(X).result()


def test_a_client_that_asks_whether_the_server_lives_is_not_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    often = [(name, 50 if name == "grpc.keepalive_time_ms" else value) for name, value in channel.OPTIONS]
    monkeypatch.setattr(channel, "OPTIONS", often)
    left: list[Any] = []
    monkeypatch.setattr(channel.Channel, "_watch_ended", lambda self, call: left.append(call))
    with ExpertServer(mlp("a")) as server, connect(server.address, retries=False) as there:
        (a,) = there.backends()
        for _ in range(10):
            time.sleep(0.1)
            a.forward_pool.submit_task(X).result()
        assert not left


def test_a_connection_that_is_closed() -> None:
    slow = Slow(LONG / 100)
    with ExpertServer(of(slow), grace=0) as server:
        for coalesce in (True, False):
            there = connect(server.address, coalesce=coalesce, timeout=LONG)
            (remote,) = there.backends()
            request = remote.forward_pool.submit_task(X)
            time.sleep(0.05)
            there.close()
            there.close()
            with pytest.raises(ServerLost):
                request.result(LONG)
            assert not remote.forward_pool.served
            for ask in (there.info, lambda pool=remote.forward_pool: pool(X), lambda one=remote: ExpertClient(one)(X)):
                with pytest.raises(ServerLost, match="closed"):  # a pool that was closed raised a RuntimeError
                    ask()
        slow.seconds = 0


def test_a_server_that_was_drained_does_not_start_again() -> None:
    server = ExpertServer(mlp("a"))
    with server:
        pass
    with pytest.raises(RuntimeError, match="does not start again"):
        server.start()


@pytest.mark.parametrize("coalesce", [True, False])
def test_what_no_request_can_have(coalesce: bool) -> None:
    with ExpertServer(mlp("a")) as server, connect(server.address, coalesce=coalesce) as there:
        pool = there.backends()[0].forward_pool
        with pytest.raises(ValueError, match="timeout must be a number of seconds, got nan"):
            pool.submit_task(X, timeout=math.nan)
        for tensor in (X.to("meta"), X.to_sparse()):
            with pytest.raises(TypeError, match="tensor 0"):
                pool.submit_task(tensor)
