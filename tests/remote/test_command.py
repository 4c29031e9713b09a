"""``python -m pymoe.remote`` and other views of a server: output, exit statuses, signals, and metrics."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import pytest
import torch
from certificates import Certificates
from experts import WIDTH, Held, mlp, of
from limits import LONG
from server_processes import ServerProcesses

from pymoe.remote import ExpertServer, connect
from pymoe.remote.cli import main

X = torch.randn(4, WIDTH)


def test_serve_says_what_it_does_and_sigterm_drains(processes: ServerProcesses, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    server = processes.start(tmp_path / "said", "experts:two", "--checkpoints", str(saved))
    with connect(server.address, timeout=LONG) as there:
        (a, _) = there.backends()
        a.backward_pool(X, X)
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    lines = server.said().splitlines()
    assert lines[0] == "making the experts of experts:two"
    assert lines[1] == "2 made: a, b"
    assert any(line.startswith("serving at 127.0.0.1:") for line in lines)
    assert "served 0 forward and 1 backward requests" in lines[-1]
    again = processes.start(tmp_path / "said again", "experts:two", "--checkpoints", str(saved))
    assert main(["info", again.address]) == 0
    assert "a: restored after 1 updates" in again.said()


def test_info_and_drain(processes: ServerProcesses, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = processes.start(tmp_path / "said", "experts:two", "--workers", "3", "--grace", "2")
    assert main(["info", server.address]) == 0
    said = capsys.readouterr().out
    assert f"{server.address}: serving for" in said
    assert "a: 0 updates; takes ((BatchTensorProto(8, dtype=torch.float32),), {})" in said
    assert main(["info", "--json", server.address]) == 0
    assert list(json.loads(capsys.readouterr().out)["experts"]) == ["a", "b"]
    assert main(["drain", server.address, "--timeout", str(LONG)]) == 0
    said = capsys.readouterr().out
    assert f"{server.address} has ended" in said
    assert server.wait() == 0
    assert main(["info", server.address]) == 1
    assert "ServerLost" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["drain", "SIGTERM"])
def test_commands_fail_that_could_not_save_and_name_the_experts(
    processes: ServerProcesses, tmp_path: Path, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both commands ended with status 0, although the expert's updates were lost."""
    server = processes.start(tmp_path / "said", "experts:unsavable", "--checkpoints", str(tmp_path / "saved"))
    with connect(server.address, timeout=LONG) as there:
        there.backends()[0].backward_pool(X, X)
    if by == "drain":
        assert main(["drain", server.address, "--timeout", str(LONG)]) == 1
        said = capsys.readouterr()
        assert "not saved: 'e' cannot be saved in" in said.err
        assert f"{server.address} has ended" in said.out
    else:
        server.send(signal.SIGTERM)
    assert server.wait() == 1
    assert "not saved: 'e' cannot be saved in" in server.said()
    assert "Traceback" not in server.said()


def test_a_server_with_tls_and_a_token_is_reached_by_files(
    processes: ServerProcesses, tmp_path: Path, certificates: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("correct-horse\n")
    server = processes.start(
        tmp_path / "said", "experts:two", "--listen", "localhost:0", "--token-file", str(token),
        "--tls-cert", certificates.file("server.crt"), "--tls-key", certificates.file("server.key"),
    )  # fmt: skip
    ca = ["--tls-ca", certificates.file("ca.crt")]
    assert main(["info", server.address, *ca, "--token-file", str(token)]) == 0
    assert main(["info", server.address, *ca]) == 1
    assert "a token is needed" in capsys.readouterr().err
    assert main(["top", server.address, *ca, "--token-file", str(token), "--once", "--interval", "0.1"]) == 0
    assert "a_keyed_backward" in capsys.readouterr().out
    assert main(["top", server.address, *ca, "--once"]) == 1
    assert "a token is needed" in capsys.readouterr().err
    assert main(["info", server.address]) == 1
    assert "does the server use TLS? (tls=TLS(ca=), --tls-ca)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:make"], "ModuleNotFoundError"),
        (["experts:no_such_function"], "there is no function 'no_such_function' in experts"),
        (["experts"], "expected MODULE:FUNCTION, got 'experts'"),
        (["experts:two", "--listen", "127.0.0.1"], "expected HOST:PORT with a port from 0 to 65535"),
        (
            ["experts:two", "--checkpoints", "/proc/nowhere"],
            "'a' cannot be saved in /proc/nowhere/expert-a: FileNotFound",
        ),
        (["experts:broken"], "RuntimeError: no experts today"),
        (["experts:WIDTH"], "there is no function 'WIDTH'"),
        (["experts:two", "--listen", "0.0.0.0:0"], "expected tls="),
        (["experts:two", "--token-file", "/no/such/file"], "No such file"),
        (["experts:two", "--metrics-port", "99999"], "OverflowError"),
        (["experts:two", "--checkpoints", "/proc/nowhere", "--save-every", "-1"], "save_every must be a number"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 1
    said, error = capsys.readouterr()
    assert ("making the experts" in said) == ("made:" in said or "broken" in arguments[0])
    assert message in error
    assert "Traceback" not in error


def test_a_second_signal_does_not_hurt(processes: ServerProcesses, tmp_path: Path) -> None:
    server = processes.start(tmp_path / "said", "experts:two")
    assert server.address
    for _ in range(3):
        server.send(signal.SIGINT)
    assert server.wait() == 0


def test_a_server_runs_in_the_main_thread_alone() -> None:
    failed = []

    def run() -> None:
        try:
            ExpertServer(mlp("a")).run()
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONG)
    assert failed


def test_top_shows_a_server_as_it_shows_a_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    held = Held(opened=True)
    with ExpertServer(of(held, "held")) as server:
        with connect(server.address) as there:
            for _ in range(3):
                there.backends()[0].forward_pool(X)
        assert main(["top", server.address, "--once", "--interval", "0.05"]) == 0
        shown = capsys.readouterr().out
        assert "held_forward" in shown
        assert f"{server.address} (process" in shown
        for seconds in ("0", "inf", "soon"):  # raised OverflowError, or named a private function
            with pytest.raises(SystemExit):
                main(["top", server.address, "--interval", seconds])
            assert f"expected a positive number of seconds, got {seconds!r}" in capsys.readouterr().err
    assert main(["top", server.address, "--once"]) == 1
    assert server.address in capsys.readouterr().err


def test_a_view_survives_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    from pymoe.remote.cli import WatchedServer

    with ExpertServer(mlp("a")) as server:
        watched = WatchedServer(server.address)
        server.experts["a"].forward_pool.submit_task(X).result()
        (first,) = watched.read()
        server.experts["a"].forward_pool.submit_task(X).result()
        (second,) = watched.read()
        assert [pool.name for pool in first.pools] == ["a_forward", "a_backward", "a_keyed_backward"]
        assert second.pools[0].completed == 1, "the numbers since the look before"
    assert watched.read() == []
    watched.close()
