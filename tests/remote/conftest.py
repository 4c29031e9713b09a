"""Fixtures for servers; makes the helper modules of this folder importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("grpc", reason="pymoe.remote needs grpcio (requirements-dev.txt)")

from certificates import Certificates, make_certificates
from server_processes import ServerProcesses


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make certificates of an authority, a server and a client, and of a stranger."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def starter() -> Iterator[ServerProcesses]:
    with ServerProcesses() as made:
        yield made


@pytest.fixture
def processes(starter: ServerProcesses) -> Iterator[ServerProcesses]:
    """Provide a function that starts servers in separate processes, which end with the test."""
    yield starter
    starter.kill_all()
