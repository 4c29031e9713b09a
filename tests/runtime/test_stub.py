"""The committed stub of the native runtime is what pybind11-stubgen writes for the module that is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pymoe


def test_the_stub_is_current(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "write_stub.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "_runtime.pyi").read_text()
    committed = (Path(pymoe.__file__).parent / "_runtime.pyi").read_text()
    assert "class WorkerPool" in written
    assert written == committed, "pymoe/_runtime.pyi is out of date: run `make format`"
