"""Fixed bugs of pymoe.remote. Docstrings describe the bugs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import signal
import threading
import time
import tracemalloc
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from experts import ROW, WIDTH, Held, Raising, count, counted, counting, mlp, of
from grpc import StatusCode
from limits import LONG
from server_processes import ServerProcesses
from torch import Tensor, nn

from pymoe.remote import (
    AppliedError,
    ExpertServer,
    ProtocolError,
    ServerLost,
    WireError,
    cli,
    connect,
    errors,
    requests,
    wire,
)
from pymoe.remote import server as server_module
from pymoe.remote.channel import Channel, Ended
from pymoe.remote.journal import IN_PART
from pymoe.remote.service import Service
from pymoe.runtime import ExpertBackend, ExpertClient

X = torch.randn(4, WIDTH)


def eventually(check: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_request_of_several_updates_is_in_every_checkpoint_that_holds_a_part_of_it() -> None:
    """The key of the request had the number of its last update. A state saved between the first and last update
    held rows of the request but not its key, so that after a kill another attempt applied these rows again.
    """
    backend = counting(max_batch_size=1)
    with ExpertServer(backend) as server, connect(server.address, coalesce=False) as there:
        (remote,) = there.backends()
        remote.backward_pool.submit_task(torch.tensor([[1], [2]]), -torch.ones(2, 1)).result()
        assert backend.updates == 2
        journal = server._service.entries["counting"].journal
        assert [[keys for _, keys in journal.keys(updates).values()] for updates in (0, 1, 2)] == [[[]], [[0]], [[0]]]


@pytest.mark.parametrize("way", ["removed and added", "another server"])
def test_an_expert_that_is_served_again_knows_what_it_holds(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys went with the server while the parameters stayed, so a later attempt was applied again."""
    backend = counting()
    attempts = []
    real = requests.RemoteCall.__init__

    def second_attempt(self: requests.RemoteCall, *arguments: object) -> None:
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
            monkeypatch.setattr(requests.RemoteCall, "__init__", second_attempt)
            count(again.backends()[0], 7).result()
            assert attempts
            assert counted(backend, 8)[7] == 1
            assert server.counts["repeated"] == 1


def test_an_expert_that_hangs_holds_up_neither_other_checkpoints_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts were saved one after the other: if one hung, later updates of the others were lost. And drain()
    waited for its batch for ever, so that SIGTERM and Ctrl-C did not end a server.
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

        def drain() -> None:
            with contextlib.suppress(TimeoutError):  # no error if the hanging expert's last update was saved
                server.drain()

        ending = threading.Thread(target=drain)
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
    """The server accepted the expert, but never served it."""
    server = ExpertServer(mlp("a"))
    with server:
        pass
    with pytest.raises(RuntimeError, match=r"expected a server that serves, got <ExpertServer at .*draining a>"):
        server.add(mlp("b"))


@pytest.mark.parametrize("many", ["tensors", "dimensions"])
def test_a_message_of_many_small_parts_takes_no_memory(many: str) -> None:
    """Messages were counted only after decoding, which takes 50 bytes of memory per byte."""
    count, one = 50_000, msgspec.msgpack.encode(["f32", [], "raw", b""])
    if many == "tensors":
        parts = b"\xdd" + count.to_bytes(4, "big") + one * count
    else:
        parts = b"\x91\x94\xa3f32\xdd" + count.to_bytes(4, "big") + b"\x01" * count + b"\xa3raw\xc4\x00"
    message = b"\x82\xa6expert\xa1a\xa7tensors" + parts
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="Expected `array` of length <="):
            wire.decode(message, wire.Request)
        assert tracemalloc.get_traced_memory()[1] < len(message) // 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["🦆" * 3000, "%" * 3000, "half a character: \ud800"], ids=["wide", "percent", "half"])
def test_the_message_of_an_exception_travels_whatever_its_characters(text: str) -> None:
    """A text of 1000 characters exceeded a reply's metadata, and one that is not UTF-8 had no status at all: the
    client waited until its deadline.
    """
    with (
        ExpertServer(of(Raising(ValueError(text)))) as server,
        connect(server.address, coalesce=False, timeout=LONG) as there,
    ):
        (remote,) = there.backends()
        with pytest.raises(ValueError) as found:
            remote.forward_pool.submit_task(X).result()
        said = str(found.value).partition("_forward@")[2].partition(": ")[2]
        assert said == text.replace("\ud800", "?")[: len(said)]
        assert len(said) >= 18
    assert len(urllib.parse.quote(errors.to_status(ValueError(text))[1])) < 4000, "as gRPC sends it"


def test_concurrent_futures_waits_for_cancelled_requests() -> None:
    """The futures stayed CANCELLED and never became CANCELLED_AND_NOTIFIED, so waiting threads waited for ever."""
    held = Held()
    with ExpertServer(of(held), grace=0) as server, connect(server.address, coalesce=False, timeout=LONG) as there:
        (remote,) = there.backends()
        requests = [remote.forward_pool.submit_task(X) for _ in range(2)]
        assert held.begun.wait(LONG)
        assert requests[1].cancel()
        assert concurrent.futures.wait(requests[1:], timeout=LONG).done == {requests[1]}
        held.open.set()
        assert len(list(concurrent.futures.as_completed(requests, timeout=LONG))) == 2


def test_requests_that_wait_for_their_call_end_with_the_connection() -> None:
    """The requests were cancelled, unlike in the documented table of failures."""
    held = Held()
    with ExpertServer(of(held), grace=0) as server:
        there = connect(server.address, timeout=LONG)
        (remote,) = there.backends()
        requests = [remote.forward_pool.submit_task(X)]
        assert held.begun.wait(LONG)
        requests += [remote.forward_pool.submit_task(X) for _ in range(2)]
        there.close()
        assert [type(one.exception(LONG)) for one in requests] == [ServerLost] * 3
        held.open.set()


@pytest.mark.parametrize("coalesce", [True, False])
def test_a_request_may_have_all_the_time_there_is(coalesce: bool) -> None:
    """An infinite deadline was taken by gRPC for one that had passed."""
    with ExpertServer(mlp("a")) as server, connect(server.address, coalesce=coalesce) as there:
        (a,) = there.backends()
        assert a.forward_pool.submit_task(X, timeout=math.inf).result(LONG)[0].shape == X.shape
        assert there.info(timeout=math.inf).experts
        with pytest.raises(ValueError, match="positive, finite number of seconds, got inf"):
            connect(server.address, timeout=math.inf)


def test_a_server_on_this_machine_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy in $http_proxy got requests for a server on this machine, with the token in clear text."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nothing listens there
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    with ExpertServer(mlp("a"), token="secret") as server, connect(server.address, token="secret") as there:
        assert there.backends()[0].forward_pool(X)[0].shape == X.shape


def test_experts_that_come_later_have_workers_too() -> None:
    """A connection had only as many threads as its first call of backends() had experts."""
    with ExpertServer([mlp(name) for name in "abcd"]) as server, connect(server.address) as there:
        there.backends("a")
        assert there._runtime is not None
        assert there._runtime.num_workers == 8


def test_the_command_prints_what_a_server_says_without_what_a_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(options: object) -> None:
        raise ProtocolError("\x1b]0;owned\x07")

    monkeypatch.setattr(cli, "info", refused)
    assert cli.main(["info", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "python -m pymoe.remote info: ProtocolError: ?]0;owned?\n"


@pytest.mark.parametrize("coalesce", [True, False])
def test_a_client_of_a_server_that_is_gone_says_so(coalesce: bool) -> None:
    """The error said that no Runtime serves the pool."""
    with ExpertServer(mlp("a")) as server:
        there = connect(server.address, coalesce=coalesce, timeout=LONG)
        (a,) = there.backends()
        client = ExpertClient(a, timeout=0.2)
    with there:
        eventually(lambda: not a.forward_pool.served)
        with pytest.raises((TimeoutError, ServerLost)) as found:
            client(X)
        assert "no Runtime" not in str(found.value)
        assert a.forward_pool.why_unserved == f"the server at {server.address} cannot be reached"
    assert a.forward_pool.why_unserved == "the connection is closed"


def test_a_server_that_is_gone_before_anybody_stays_with_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the first health check came after the server had gone. It waited for the server's return,
    and until then pools counted as served.
    """
    watch = Channel.watch
    monkeypatch.setattr(Channel, "watch", lambda channel: None)
    with ExpertServer(mlp("a")) as server:
        there = connect(server.address)
    monkeypatch.setattr(Channel, "watch", watch)
    with there:
        there.watch()
        eventually(lambda: not there.reachable)


class OwnUpdates(ExpertBackend):
    """Has its own backward pass, which does not report its updates."""

    def backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        _, grad = inputs
        with torch.no_grad():
            self.expert.weight += 1
        return (grad @ self.expert.weight,)


def test_an_expert_that_counts_no_updates_is_saved_too(tmp_path: Path) -> None:
    """Such an expert was saved only once, before it had learned anything, since nothing seemed to have changed."""
    experts = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    backend, again = (
        OwnUpdates("own", one, torch.optim.SGD(one.parameters(), 0.1), args_schema=[ROW], outputs_schema=ROW)
        for one in experts
    )
    with ExpertServer(backend, checkpoints=tmp_path, save_every=0) as server, connect(server.address) as there:
        server.save()
        (remote,) = there.backends()
        for _ in range(3):
            remote.backward_pool(X, X)
        assert [keys for _, keys in server._service.entries["own"].journal.keys(2).values()] == [[]]
    ExpertServer(again, checkpoints=tmp_path)
    assert torch.equal(experts[1].weight, experts[0].weight)


@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_answer_of_another_kind_of_number_is_none(way: str, coalesce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only shapes were compared with the schema: integers were accepted as outputs and as gradients."""
    real = Service._reply
    monkeypatch.setattr(Service, "_reply", lambda self, one, got, how: real(self, one, [x.long() for x in got], how))
    with ExpertServer(mlp("a")) as server, connect(server.address, coalesce=coalesce, timeout=LONG) as there:
        (a,) = there.backends()
        request = a.forward_pool.submit_task(X) if way == "forward" else a.backward_pool.submit_task(X, X)
        with pytest.raises(ProtocolError, match=r"expected an answer of torch\.float32, got torch\.int64"):
            request.result()


class BreaksOff(OwnUpdates):
    """Raises after it has made its update."""

    def backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        super().backward(*inputs)
        raise ArithmeticError("too late")


@pytest.mark.parametrize("isolate", [True, False])
def test_a_backward_pass_of_ones_own_that_raises_may_have_made_its_update(isolate: bool) -> None:
    """Such a request counted as not applied: with ``isolate`` the batch ran again, and another attempt could be
    applied, too.
    """
    expert = nn.Linear(WIDTH, WIDTH)
    before = expert.weight.detach().clone()
    schemas: dict[str, Any] = {"args_schema": [ROW], "outputs_schema": ROW, "isolate": isolate}
    backend = BreaksOff("own", expert, torch.optim.SGD(expert.parameters(), 0.1), **schemas)
    with ExpertServer(backend) as server, connect(server.address, coalesce=False, timeout=LONG) as there:
        (remote,) = there.backends()
        with pytest.raises(ArithmeticError, match="too late"):
            remote.backward_pool(X, X)
        (client,) = server._service.entries["own"].journal._clients.values()
        assert list(client.applied.values()) == [IN_PART]
    assert torch.equal(expert.weight, before + 1)


def test_saving_waits_for_an_expert_that_hangs_no_longer_than_it_is_told_to(tmp_path: Path) -> None:
    """save() waited for ever, and later experts were not saved."""
    held = Held(opened=True)
    experts = [of(held, "held"), mlp("a")]
    with ExpertServer(experts, checkpoints=tmp_path, save_every=0) as server, connect(server.address) as there:
        hangs, answers = there.backends()
        for one in (hangs, answers):
            one.backward_pool(X, X)
        held.open.clear()
        held.begun.clear()
        waiting = hangs.forward_pool.submit_task(X)
        assert held.begun.wait(LONG)
        with pytest.raises(TimeoutError, match=r"'held' did not answer within 1 s"):
            server.save(timeout=1.0)  # in which the other is saved
        assert server.counts["saved"] == 1
        held.open.set()
        waiting.result()
        assert server.save(timeout=LONG) == 1


@pytest.mark.parametrize("interrupts", [1, 2])
def test_a_backward_call_that_is_interrupted_is_not_sent_again_under_another_key(interrupts: int) -> None:
    """Ctrl-C in a main thread that ran a batch requeued it, and its gradients were sent and applied a second time."""
    held = Held()
    with ExpertServer(of(held), grace=0) as server, connect(server.address, timeout=LONG) as there:
        pool: Any = there.backends()[0].backward_pool

        def interrupt() -> None:
            assert held.begun.wait(LONG)
            for _ in range(interrupts):
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(0.2)  # two signals at once count as one
            held.open.set()

        main = threading.get_ident()
        other = threading.Thread(target=interrupt)
        other.start()
        if interrupts == 1:
            assert len(pool._ask(X, X)) == 1
        else:
            with pytest.raises(AppliedError, match="may have been applied"):
                pool._ask(X, X)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(LONG)
        other.join()
        assert there.counts["attempts"] == 1


@pytest.mark.parametrize("reason", ["Socket closed", "connection attempt timed out before receiving SETTINGS frame"])
def test_a_connection_in_plain_that_gets_no_answer_is_asked_about_tls(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, gRPC gave up before the TLS server had hung up, and no message said what to try."""
    channel = Channel(
        "localhost:1", tls=None, token=None, timeout=LONG, encoding="raw", gradient_encoding="raw", coalesce=False,
        retries=False,
    )  # fmt: skip

    def fail(*_: Any, **__: Any) -> bytes:
        raise Ended(StatusCode.UNAVAILABLE, f"failed to connect to all addresses; last error: UNKNOWN: {reason}")

    monkeypatch.setitem(channel.methods, "Info", fail)
    try:
        with pytest.raises(ServerLost, match=r"does the server use TLS\?"):
            channel.info()
    finally:
        channel.close()
