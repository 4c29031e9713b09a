"""Tests of the output and the files of examples/train_mixture.py, and of its checks if nothing was learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--rows", "32", "--width", "16", "--timeout", "60", "--slow", "30", "--plain")
LEARNS = ("--learning-rate", "1e-2", "--expert-learning-rate", "1e-2")


def run(folder: Path, *flags: str) -> tuple[int, dict]:
    from train_mixture import main

    status = main([*SMALL, "--out", str(folder), *flags])
    return status, json.loads((folder / "record.json").read_text())


def test_training_goes_on_beside_a_dead_and_a_slow_expert(tmp_path, capsys):
    status, found = run(tmp_path, "--steps", "40", "--patience", "0.002", *LEARNS)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert all(found["checks"].values())
    assert printed.count("yes  ") == len(found["checks"]) == 8
    assert len(found["faulty"]["curves"]["loss"]) == 40
    healthy = found["healthy"]["experts"]
    assert all(one["forward"]["failed"] == 0 for one in healthy.values())
    assert found["faulty"]["updates"]["expert0"] > 20
    assert (tmp_path / "train_mixture.png").stat().st_size > 10_000
    assert str(tmp_path) not in (tmp_path / "record.json").read_text()


def test_a_run_that_learns_nothing_says_so(tmp_path, capsys):
    status, found = run(tmp_path, "--steps", "6", "--learning-rate", "0", "--expert-learning-rate", "0")
    assert status == 1
    assert "NO   healthy: the loss fell" in capsys.readouterr().out
    assert not all(found["checks"].values())


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    found = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_mixture.py"), *SMALL, *LEARNS, "--steps", "12", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False, env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert "nothing was lost or left" in found.stdout, found.stderr


def test_without_scikit_learn_the_package_is_named(monkeypatch):
    import common

    with pytest.raises(SystemExit, match=r"needs no_such_module: python -m pip install scikit-learn"):
        common.require(("no_such_module",), install=("scikit-learn",))
