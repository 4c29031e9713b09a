"""Tests of the blocks of "How to ..." that are not Python: certificates and commands."""

import shlex
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from docs_pages import ROOT, blocks

pytest.importorskip("grpc")
pytest.importorskip("msgspec")

import pymoe
import pymoe.remote
from pymoe.remote import cli

SERVED = "python -m pymoe.remote "


def texts(language: str) -> list[str]:
    page = (ROOT / "docs/tutorials/how_to.md").read_text()
    return [block.text.replace("\\\n", " ") for block in blocks(page) if block.language == language]


def commands() -> list[list[str]]:
    """Return the arguments of every command of ``pymoe.remote`` on the page."""
    lines = [line for text in texts("sh") for line in text.splitlines() if SERVED in line]
    return [shlex.split(line.split(SERVED)[1]) for line in lines]


def test_the_commands_of_servers_have_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Namespace] = []
    for name in ("serve", "info"):
        monkeypatch.setattr(cli, name, lambda options: given.append(options) or 0)
    assert [cli.main(words) for words in commands()] == [0] * 2
    (options,) = (options for options in given if options.command == "serve")
    assert options.listen == "0.0.0.0:7000"
    assert all((options.checkpoints, options.token_file, options.tls_cert, options.tls_key))


def test_the_certificate_serves_and_is_trusted(tmp_path: Path) -> None:
    (certificate,) = [text for text in texts("sh") if "subjectAltName" in text]
    assert certificate.count("experts.example") == 2
    (token,) = [text.splitlines()[0] for text in texts("sh") if "rand -hex" in text]
    for command in (certificate.replace("experts.example", "localhost"), token):
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True)
    given = (tmp_path / "token").read_text().strip()
    tls = pymoe.remote.TLS(cert=tmp_path / "server.crt", key=tmp_path / "server.key")
    backend = pymoe.ExpertBackend("expert", torch.nn.Linear(4, 4), args_schema=[pymoe.BatchTensorProto(4)])
    trust = pymoe.remote.TLS(ca=tmp_path / "server.crt")
    with pymoe.remote.ExpertServer(backend, "0.0.0.0:0", tls=tls, token=given) as server:
        address = "localhost:" + server.address.rpartition(":")[2]
        with pymoe.remote.connect(address, tls=trust, token=given) as there:
            assert list(there.info().experts) == ["expert"]
        with pytest.raises(PermissionError):
            pymoe.remote.connect(address, tls=trust, token="another")
