"""The documentation's table of threats: what strangers can do to a server, row by row (messages: test_wire.py)."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from certificates import Certificates
from experts import WIDTH, Held, mlp, of
from limits import LONG, rounds
from server_processes import ServerProcesses
from test_wire import GOOD, mutated

import pymoe.remote
from pymoe.remote import TLS, Connection, ExpertServer, ServerLost, connect, wire
from pymoe.remote.security import is_local, token_problem
from pymoe.remote.service import ByteBudget, announced_size
from pymoe.remote.wire import SIZE_KEY
from pymoe.runtime import QueueFull

X = torch.randn(4, WIDTH)
TOKEN = "correct-horse-battery-staple"
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[ExpertServer]:
    with ExpertServer(mlp("a")) as made:
        yield made


@pytest.fixture(scope="module")
def guarded(certificates: Certificates) -> Iterator[ExpertServer]:
    with ExpertServer(mlp("a"), "localhost:0", tls=certificates.server(), token=TOKEN) as made:
        yield made


def works(there: Connection) -> None:
    (a,) = there.backends("a")
    assert a.forward_pool.submit_task(X, timeout=LONG).result()[0].shape == X.shape


def memory(process: int | str = "self") -> int:
    """Return the peak memory of a process in bytes; of this one by default."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


# --- no code in messages ---


def test_nothing_that_unpickles_is_imported_anywhere() -> None:
    forbidden = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    files = sorted(Path(pymoe.remote.__file__).parent.rglob("*.py"))
    assert len(files) > 12
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not forbidden & {one.name.split(".")[0] for one in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in ("torch.load", "torch.save", "numpy.load", "np.load"), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), path


# --- strangers ---


def test_the_right_token_over_tls_is_served(guarded: ExpertServer, certificates: Certificates) -> None:
    with connect(guarded.address, tls=certificates.client(), token=TOKEN) as there:
        works(there)


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_another_token_is_refused_at_once(guarded: ExpertServer, certificates: Certificates, token: str | None) -> None:
    with pytest.raises(PermissionError, match="a token is needed"):
        connect(guarded.address, tls=certificates.client(), token=token, timeout=LONG)


def test_a_token_that_changes_meanwhile_ends_requests(guarded: ExpertServer, certificates: Certificates) -> None:
    with connect(guarded.address, tls=certificates.client(), token=TOKEN, timeout=LONG) as there:
        (a,) = there.backends()
        there.metadata = ()
        for pool, tensors in ((a.forward_pool, [X]), (a.backward_pool, [X, X])):
            with pytest.raises(PermissionError):
                pool.submit_task(*tensors).result()
        assert there.counts["retries"] == 0


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("pymoe.remote.security.hmac.compare_digest", lambda a, b: compared.append((a, b)))
    token_problem((("authorization", "Bearer x"),), TOKEN)
    assert compared == [(b"Bearer x", f"Bearer {TOKEN}".encode())]


def test_the_body_of_a_stranger_s_request_is_not_read(processes: ServerProcesses, tmp_path: Path) -> None:
    """Each stranger sends 64 MiB at once; the server's memory hardly grows."""
    (tmp_path / "token").write_text(TOKEN)
    server = processes.start(tmp_path / "said", "experts:two", "--token-file", str(tmp_path / "token"))
    body = bytes(64 * MIB)
    with grpc.insecure_channel(server.address, pymoe_options()) as channel:
        before = memory(server.pid)
        calls = [channel.unary_unary(f"/{wire.SERVICE}/Forward").future(body, timeout=LONG) for _ in range(6)]
        for call in calls:
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert memory(server.pid) - before < 64 * MIB


def pymoe_options() -> list[tuple[str, int]]:
    return [("grpc.max_send_message_length", 512 * MIB), ("grpc.use_local_subchannel_pool", 1)]


def test_health_needs_no_token_and_tells_nothing_else(guarded: ExpertServer, certificates: Certificates) -> None:
    with grpc.secure_channel(guarded.address, certificates.client().client_credentials()) as channel:
        answer = channel.unary_unary(wire.HEALTH)(b"", timeout=LONG)
        assert answer == wire.SERVING
        for method in ("Forward", "Backward", "Exchange", "Info", "Drain"):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"/{wire.SERVICE}/{method}")(b"", timeout=LONG)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


# --- in clear, or to the wrong one ---


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.168.1.2:0", "experts.example:0"])
def test_an_address_that_others_can_reach_needs_tls_and_a_secret(address: str, certificates: Certificates) -> None:
    with pytest.raises(ValueError, match="expected tls="):
        ExpertServer(mlp("a"), address, token=TOKEN)
    with pytest.raises(ValueError, match="whoever asks may train"):
        ExpertServer(mlp("a"), address, tls=certificates.server())
    for options in ({"tls": certificates.server(), "token": TOKEN}, {"tls": certificates.server(asks=True)}):
        ExpertServer(mlp("a"), address, **options)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True), ("127.8.9.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("unix:/tmp/x", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", True), ("ipv4:127.0.0.1:1,10.0.0.1:1", False), ("dns:///localhost:1", True),
        ("dns:///experts:7000", False), ("0.0.0.0:1", False), ("[::]:1", False), ("10.0.0.1:1", False),
        ("localhost.evil.example:1", False), ("127.0.0.1.evil.example:1", False), ("", False),
    ],
)  # fmt: skip
def test_what_counts_as_this_machine(address: str, local: bool) -> None:
    assert is_local(address) is local


def test_a_token_is_not_sent_in_clear_to_another_machine() -> None:
    with pytest.raises(ValueError, match="a token is sent only over TLS"):
        connect("192.0.2.1:7000", token=TOKEN)


@pytest.mark.parametrize("token", ["", "two words", "line\n", "é"])
def test_a_token_that_cannot_be_sent_is_refused(token: str) -> None:
    for make in (lambda: connect("127.0.0.1:1", token=token), lambda: ExpertServer(mlp("a"), token=token)):
        with pytest.raises(ValueError, match="printable ASCII"):
            make()


def test_a_client_accepts_only_a_server_whose_authority_it_knows(
    guarded: ExpertServer, certificates: Certificates
) -> None:
    with pytest.raises(ServerLost, match=r"(?i)certificate|ssl|tls"):
        connect(guarded.address, tls=TLS(ca=certificates.file("strange-ca.crt")), token=TOKEN)
    with pytest.raises(ServerLost):
        connect(guarded.address)  # a client without TLS


def test_a_certificate_without_the_name_of_its_host_is_no_wrong_token(certificates: Certificates) -> None:
    """The status from gRPC is the same as for a wrong token."""
    tls = TLS(certificates.file("127.0.0.1.crt"), certificates.file("127.0.0.1.key"))
    with (
        ExpertServer(mlp("a"), "127.0.0.1:0", tls=tls, token=TOKEN) as server,
        pytest.raises(ServerLost, match="does not match SSL server name"),
    ):
        connect(server.address, tls=certificates.client(), token=TOKEN)


def test_mutual_tls_refuses_who_has_no_certificate_or_a_stranger_s(certificates: Certificates) -> None:
    with ExpertServer(mlp("a"), "localhost:0", tls=certificates.server(asks=True)) as server:
        with connect(server.address, tls=certificates.client("client")) as there:
            works(there)
        for tls in (certificates.client(), certificates.client("stranger")):
            with pytest.raises(ServerLost):
                connect(server.address, tls=tls)


def test_tls_takes_a_certificate_with_its_key() -> None:
    with pytest.raises(ValueError, match="cert and key together"):
        TLS(cert="a.crt")
    with pytest.raises(ValueError, match="a server needs cert and key"):
        TLS().server_credentials()


# --- too much ---


def test_a_compressed_message_is_not_decompressed(server: ExpertServer) -> None:
    """The message, 200 MiB of zeros compressed to 200 KiB, is refused without decompression."""
    bomb = bytes(200 * MIB)
    with grpc.insecure_channel(server.address, pymoe_options(), compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_unary(f"/{wire.SERVICE}/Forward")
        with pytest.raises(grpc.RpcError) as refused:
            call(bomb, timeout=LONG)
        assert refused.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
    with connect(server.address) as there:
        works(there)


def test_a_message_beyond_the_limit_is_refused(server: ExpertServer) -> None:
    with grpc.insecure_channel(server.address, pymoe_options()) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/{wire.SERVICE}/Forward")(bytes(wire.MAX_BYTES + 1), timeout=LONG)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with connect(server.address) as there:
        with pytest.raises(ValueError, match="at most 256 tensors of 268435456 bytes"):
            wire.pack([torch.empty(9_000_000, 8)], "raw")
        works(there)


def test_a_message_longer_than_it_was_said_to_be_is_refused(server: ExpertServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError, match="as its metadata say") as refused:
            channel.unary_unary(f"/{wire.SERVICE}/Forward")(
                wire.encode(GOOD), timeout=LONG, metadata=((SIZE_KEY, "10"),)
            )
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_requests_beyond_the_budget_are_refused_before_they_are_read() -> None:
    budget = ByteBudget(100)
    assert budget.take(60) == 60
    with pytest.raises(QueueFull, match="60 bytes are under way, of at most 100"):
        budget.take(41)
    assert budget.take(40) == 40
    assert budget.used == 100


@pytest.mark.parametrize(
    ("said", "size"),
    [("10", 10), ("0", 0), ("-1", wire.MAX_BYTES), ("x", wire.MAX_BYTES), ("9" * 50, wire.MAX_BYTES), ("²", None)],
)
def test_who_does_not_say_how_much_gets_room_for_the_longest(said: str, size: int | None) -> None:
    assert announced_size((("pymoe-bytes", said),)) == (wire.MAX_BYTES if size is None else size)
    assert announced_size(()) == wire.MAX_BYTES


def test_a_full_server_sheds_and_others_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExpertServer(mlp("a")) as server:
        server._service.budget.limit = 10
        with connect(server.address, retries=False) as there:
            (a,) = there.backends()
            with pytest.raises(QueueFull, match="of at most 10"):
                a.forward_pool.submit_task(X).result()
        with connect(server.address, timeout=LONG) as there:
            (a,) = there.backends()
            waiting = a.forward_pool.submit_task(X)
            while there.counts["retries"] < 2:
                pass
            server._service.budget.limit = MIB
            waiting.result()
        assert server.counts["shed"] >= 3
        assert server.bytes_in_flight == 0


def test_calls_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymoe.remote.server.MAX_CALLS", 4)
    held = Held()
    options = {"coalesce": False, "retries": False, "timeout": LONG}
    with ExpertServer(of(held), grace=0) as server, connect(server.address, **options) as there:
        (remote,) = there.backends()
        calls = [remote.forward_pool.submit_task(X) for _ in range(8)]
        refused = [call.exception() for call in calls[6:]]
        assert all(isinstance(one, QueueFull) for one in refused), refused
        held.open.set()
        assert calls[0].result()[0].shape == X.shape


def test_more_connections_than_may_stay_are_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymoe.remote.service.MAX_WATCHES", 1)
    with ExpertServer(mlp("a")) as server, connect(server.address) as first, connect(server.address) as second:
        for _ in range(2):
            works(first)
            works(second)
        assert first.reachable
        assert second.reachable


# --- what does not speak the protocol ---


def test_silent_and_talkative_sockets_keep_nobody_out(server: ExpertServer) -> None:
    chance = random.Random(0)
    host, port = server.address.split(":")
    before = memory()
    with contextlib.ExitStack() as sockets, connect(server.address) as there:
        for i in range(rounds(200, 500)):
            one = sockets.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):
                if i % 4 == 1:
                    one.sendall(chance.randbytes(chance.randrange(1, 2000)))
                elif i % 4 == 2:
                    one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chance.randbytes(200))
                elif i % 4 == 3:
                    one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            if i % 20 == 0:
                works(there)
        works(there)
        assert memory() - before < 100 * MIB


def test_mutated_requests_get_a_status_and_no_more(server: ExpertServer) -> None:
    """All of them get a status that blames the caller, and the expert answers as before."""
    chance = random.Random(1)
    good = wire.encode(wire.Request("a", wire.pack([X], "raw")))
    allowed = {
        grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN,
    }  # fmt: skip
    with connect(server.address, coalesce=False) as there:
        (a,) = there.backends("a")
        (before,) = a.forward_pool.submit_task(X).result()
        for method in ("Forward", "Backward"):
            send = there.methods[method].future
            for _ in range(rounds(1, 20)):  # gRPC itself cancels some of thousands at once
                bad = [mutated(good, chance) for _ in range(150)]
                calls = [send(one, timeout=LONG, metadata=((SIZE_KEY, str(len(one))),)) for one in bad]
                codes = {call.code() for call in calls}
                assert codes <= allowed
        assert torch.equal(a.forward_pool.submit_task(X).result()[0], before)


def test_a_client_survives_a_hostile_server() -> None:
    """Whatever the server answers, the client raises one exception that says so."""
    chance = random.Random(2)
    answers: list[bytes] = []

    class Hostile(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda *_: answers.pop())

    server = grpc.server(__import__("concurrent.futures").futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Hostile(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        info = wire.Info("life", "0", [], {"a": wire.ExpertInfo({"tuple": [1]}, None, True, 0, 1)})
        for _ in range(100):
            answers.append(mutated(wire.encode(info), chance))
            with contextlib.suppress(ConnectionError), connect(f"127.0.0.1:{port}") as there:
                answers.append(mutated(wire.encode(info), chance))
                there.backends()
                raise AssertionError
    finally:
        server.stop(0)


def test_a_server_in_a_loop_of_ours_is_not_disturbed() -> None:
    """Servers share their own event loop, whatever loops a program has."""

    async def ask() -> None:
        with ExpertServer(mlp("a")) as first, ExpertServer(mlp("a")) as second:
            for one in (first, second):
                with connect(one.address) as there:
                    (a,) = there.backends()
                    await a.forward_pool.submit_task(X)

    asyncio.run(ask())
    assert sum(one.name == "pymoe-remote" for one in threading.enumerate()) == 1


def test_mutated_requests_on_a_stream_get_a_status_and_no_more(server: ExpertServer) -> None:
    """Streams answer each request, or end; the expert answers as before."""
    chance = random.Random(3)
    good = wire.encode(wire.Request("a", wire.pack([X], "raw"), seconds=LONG))
    kinds = {
        "",
        "WireError",
        "LookupError",
        "ValueError",
        "TypeError",
        "RemoteExpertError",
        "TimeoutError",
        "QueueFull",
    }
    with connect(server.address) as there, grpc.insecure_channel(server.address) as channel:
        (a,) = there.backends("a")
        (before,) = a.forward_pool.submit_task(X).result()
        exchange = channel.stream_stream(f"/{wire.SERVICE}/Exchange")
        for _ in range(rounds(30, 1000)):
            bad = [mutated(good, chance) for _ in range(10)]
            replies = [wire.decode(one, wire.Reply) for one in exchange(iter(bad), timeout=LONG)]
            assert 1 <= len(replies) <= len(bad)
            assert {one.kind for one in replies} <= kinds
        assert server.bytes_in_flight == 0
        assert torch.equal(a.forward_pool.submit_task(X).result()[0], before)
