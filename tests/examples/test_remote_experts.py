"""Tests that the example of experts on two servers runs, learns, and continues without one of the servers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import LONG

pytest.importorskip("grpc", reason="pymoe.remote needs grpcio (requirements-dev.txt)")

EXAMPLE = Path(__file__).parents[2] / "examples" / "remote_experts.py"


@pytest.mark.slow
def test_a_mixture_learns_while_a_server_goes_and_comes_back():
    command = [sys.executable, str(EXAMPLE), "--steps", "120", "--wait", str(LONG)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LONG)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert losses[-1] < 0.8 * losses[0]
    assert re.search(
        r"killed.*reachable: ada, bob$.*is back.*reachable: ada, bob, cleo, dan$", done.stdout, re.S | re.M
    )
    counts = re.findall(r"(\w+): (\d+) of (\d+) requests", done.stdout)
    assert {name for name, *_ in counts} == {"ada", "bob", "cleo", "dan"}
    assert all(0 < int(answered) <= int(asked) for _, answered, asked in counts)
