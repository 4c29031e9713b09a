"""Tests of the output and the files of examples/serve_experts.py, and of its checks if nothing was learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import serve_experts
from serve_experts import main

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "--seconds",
    "300",
    "--rows",
    "96",
    "--askers",
    "3",
    "--coroutines",
    "3",
    "--width",
    "32",
    "--pause",
    "0",
    "--no-monitor",
)


def run(folder: Path, *flags: str) -> tuple[int, dict]:
    status = main([*SMALL, "--plain", "--out", str(folder), *flags])
    return status, json.loads((folder / "record.json").read_text())


def test_the_experts_learn_while_they_are_asked(tmp_path, capsys):
    status, found = run(tmp_path, "--steps", "60", "--learning-rate", "1e-2", "--expert-learning-rate", "1e-2")
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert all(found["checks"].values())
    assert printed.count("yes  ") == len(found["checks"]) == 6
    assert found["steps"] == 60
    assert found["training_loss"]["last"] < 0.9 * found["training_loss"]["first"]
    assert set(found["pools"]) == {f"expert{i}_{way}" for i in range(4) for way in ("forward", "backward")}
    for i in range(4):
        assert found["pools"][f"expert{i}_backward"]["completed"] == 60
        assert found["pools"][f"expert{i}_forward"]["completed"] == 60 + found["questions"]
    assert (tmp_path / "serve_experts.png").stat().st_size > 10_000
    assert str(tmp_path) not in (tmp_path / "record.json").read_text()


def test_a_run_that_learns_nothing_says_so(tmp_path, capsys):
    status, found = run(tmp_path, "--steps", "30", "--learning-rate", "0", "--expert-learning-rate", "0")
    printed = capsys.readouterr().out
    assert status == 1
    assert "NO   the training loss fell" in printed
    assert "NO   the experts learned" in printed
    assert found["unseen_loss_at_the_end"]["with the experts as they are"] == pytest.approx(
        found["unseen_loss_at_the_end"]["with the experts as they were"]
    )


def test_an_error_of_a_client_ends_in_an_error_of_the_run(tmp_path, monkeypatch):
    def fails(self, seed):
        raise LookupError("broken client")

    monkeypatch.setattr(serve_experts.Load, "ask", fails)
    with pytest.raises(LookupError, match="broken client"):
        run(tmp_path, "--steps", "2")


@pytest.mark.slow
def test_from_the_command_line_with_the_live_view(tmp_path):
    found = subprocess.run(
        [sys.executable, str(EXAMPLES / "serve_experts.py"), *SMALL, "--steps", "25", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False, env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert "expert0_forward" in found.stdout, found.stderr
    assert "rows/batch" in found.stdout
    assert "no request was lost" in found.stdout


def test_a_text_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["--text", str(tmp_path / "no.txt"), "--out", str(tmp_path)]) == 2
    assert "no.txt" in capsys.readouterr().err


def test_curves_are_thinned_by_time():
    curve = serve_experts.thinned([(0.001 * i, float(i)) for i in range(10_000)])
    assert len(curve["loss"]) == len(curve["seconds"]) <= serve_experts.POINTS + 1
    assert curve["seconds"] == sorted(curve["seconds"])
    assert sum(curve["loss"]) / len(curve["loss"]) == pytest.approx(4999.5, rel=0.02)
    assert serve_experts.thinned([]) == {"seconds": [], "loss": []}
