"""An address that cannot be served raises a clear error when the server is created or started."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from experts import WIDTH, mlp
from limits import LONG

from pymoe.remote import ExpertServer, connect
from pymoe.remote import server as server_module
from pymoe.remote.security import addresses_of, check_address, held_for_binding, why_not_free

X = torch.randn(2, WIDTH)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:-5", "127.0.0.1:99998", "127.0.0.1:65536", ":7000",
     "::1:7000", "", "http://127.0.0.1:7000", "unix:", "unix:/tmp/" + "x" * 103, "unix:/tmp/" + "ü" * 52, "dns:///experts.example",
     "ipv4:127.0.0.1:7000,127.0.0.1"],
)  # fmt: skip
def test_an_address_that_is_none_is_named(address: str) -> None:
    """Port numbers were changed: gRPC took port 99998 for 34462, -5 for 65531, and a missing port for 443."""
    for use in (lambda: ExpertServer(mlp("a"), address), lambda: connect(address, timeout=1)):
        with pytest.raises(ValueError, match=r"expected (HOST:PORT|unix:PATH)"):
            use()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:0", "localhost:65535", "[::1]:7000", "unix:here", "unix:///tmp/x", "unix-abstract:x",
     "dns:///experts.example:1", "ipv4:127.0.0.1:7000,127.0.0.1:7001", "ipv6:[::1]:7000", "xds:///experts"],
)  # fmt: skip
def test_what_grpc_resolves_is_an_address(address: str) -> None:
    check_address("test", address)


def test_a_client_needs_a_port() -> None:
    with pytest.raises(ValueError, match="a port from 1 to 65535"):
        connect("127.0.0.1:0")


def test_a_server_does_not_take_the_socket_of_one_that_lives(tmp_path: Path) -> None:
    """The second server took the socket, and once the first had ended, neither could be reached."""
    address = f"unix:{tmp_path}/socket"
    with ExpertServer(mlp("first"), address):
        for _ in range(2):
            with pytest.raises(OSError, match=r"cannot listen at unix:.*: another server does"):
                ExpertServer(mlp("second"), address).start()
        with connect(address, timeout=LONG) as there:
            (first,) = there.backends()
            first.forward_pool(X)
    with ExpertServer(mlp("second"), address), connect(address, timeout=LONG) as there:
        assert list(there.info().experts) == ["second"]


def test_the_socket_of_a_server_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.is_socket()
    with ExpertServer(mlp("a"), f"unix:{path}") as server, connect(server.address, timeout=LONG) as there:
        there.backends()[0].forward_pool(X)


def test_of_two_servers_that_start_at_a_time_one_looks_after_the_other(tmp_path: Path) -> None:
    address, held = f"unix:{tmp_path}/socket", threading.Event()
    failed = []

    def start() -> None:
        held.set()
        try:
            ExpertServer(mlp("second"), address).start()
        except OSError as error:
            failed.append(error)

    second = threading.Thread(target=start)
    with socket.socket(socket.AF_UNIX) as first:
        with held_for_binding(address):
            second.start()
            assert held.wait(LONG)
            time.sleep(0.1)  # by now it would have looked
            first.bind(f"{tmp_path}/socket")
            first.listen()
            assert not failed
        second.join(LONG)
    assert [str(error) for error in failed] == [f"cannot listen at {address}: another server does"]


@pytest.mark.parametrize("kind", ["no folder", "a file as folder", "a file"])
def test_a_path_on_which_there_can_be_no_socket(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("mine")
    path = {"no folder": "nowhere/s", "a file as folder": "file/s", "a file": "file"}[kind]
    with pytest.raises(OSError, match="cannot listen at unix:"):
        ExpertServer(mlp("a"), f"unix:{tmp_path}/{path}").start()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_name_that_nobody_knows_is_said_to_be_one() -> None:
    assert "name" in why_not_free("none.invalid:0").lower()  # in the words of the system's library


def test_a_port_that_is_in_use_is_said_to_be() -> None:
    said = r"cannot listen at .*: Address already in use; port 0 takes any free one"
    with ExpertServer(mlp("a")) as server, pytest.raises(OSError, match=said):
        ExpertServer(mlp("b"), server.address).start()


@pytest.mark.parametrize("taken", ["127.0.0.1", "::1"])
def test_a_server_at_a_name_has_its_port_at_every_address_of_the_name(taken: str) -> None:
    """Where 127.0.0.1 had another program at the port, a server at localhost listened at ::1 alone. Clients of
    localhost then talked to the other program, which may have been a server with an expert of the same name.
    """
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    try:
        other = socket.create_server((taken, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {taken}")
    with other:
        port = other.getsockname()[1]
        server = ExpertServer(mlp("a"), f"localhost:{port}")
        with pytest.raises(OSError, match=f"^cannot listen at localhost:{port}: Address already in use"):
            server.start()


@pytest.mark.parametrize("failures", [1, 3, server_module.PORT_TRIES])
def test_a_free_port_is_one_at_every_address(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """Port 0 of localhost gave the port that was free at the first address, whoever had it at the second."""
    real, asked = addresses_of, []

    def taken_at_first(address: str) -> list[str]:
        asked.append(address)
        return ["127.0.0.1:0", "127.0.0.1:0"] if len(asked) <= failures else real(address)

    monkeypatch.setattr(server_module, "addresses_of", taken_at_first)
    server = ExpertServer(mlp("a"), "localhost:0")
    if failures == server_module.PORT_TRIES:
        with pytest.raises(OSError, match=r"^cannot listen at localhost:0: Address already in use"):
            server.start()
        return
    with server:
        assert len(asked) == failures + 1
        port = int(server.address.removeprefix("localhost:"))
        for one in real("localhost:0"):
            socket.create_connection((one.rpartition(":")[0].strip("[]"), port), timeout=LONG).close()


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "[::1]:7", "unix:/tmp/x", "unix:7", "unix-abstract:x", "none.invalid:7"]
)
def test_only_names_are_resolved(address: str) -> None:
    assert addresses_of(address) == [address]


def in_child(use: object) -> str:
    """Return the error that ``use()`` raises in a fork; "hangs" if it does not end in time."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            use()  # type: ignore[operator]
            os.write(write, b"nothing")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        found = said.read()
    os.waitpid(child, 0)
    return found


def test_a_fork_of_a_process_that_serves_says_that_it_cannot_serve() -> None:
    """The child waited for threads of gRPC that only the parent has."""
    backend = mlp("a")
    with ExpertServer(backend) as server, connect(server.address, timeout=LONG) as there:
        (a,) = there.backends()
        a.forward_pool(X)
        for use in (ExpertServer(mlp("b")).start, server.drain):
            assert "RuntimeError: ExpertServer: gRPC cannot serve in a fork" in in_child(use)
            a.forward_pool(X)  # the parent's server still works
