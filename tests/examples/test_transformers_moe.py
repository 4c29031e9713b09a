"""Tests that examples/transformers_moe.py trains after the switch, generates, and detects losses that differ."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = ("--hidden", "32", "--ffn", "24", "--experts", "4", "--top-k", "2", "--layers", "2")
SMALL = (*SIZES, "--steps", "3", "--prompt", "8", "--new", "8", "--rounds", "1")


def test_it_trains_on_and_generates(capsys):
    from transformers_moe import main

    assert main(list(SMALL)) == 0
    out = capsys.readouterr().out
    assert out.count("yes  ") == 3
    assert len(re.findall(r"^ +\d +\d\.\d{5} +\d\.\d{5}$", out, re.MULTILINE)) == 3
    for dtype in ("fp32", "bf16"):
        assert re.search(rf"^ +{dtype} +[\d.]+ +[\d.]+ +[\d.]+ +\d+% +[\d.]+x$", out, re.MULTILINE)
    for kind in ("int8", "int4"):
        assert re.search(rf"^ +{kind} +- +- +[\d.]+ +\d+% +[\d.]+x \(in bf16\)$", out, re.MULTILINE)


def test_losses_that_differ_are_noticed(monkeypatch, capsys):
    import transformers_moe

    train = transformers_moe.train

    def off(model, *rest):
        losses = train(model, *rest)
        return [loss + 0.01 for loss in losses] if model.config._experts_implementation == "pymoe" else losses

    monkeypatch.setattr(transformers_moe, "train", off)
    assert transformers_moe.main(list(SMALL)) == 1
    assert "NO   with pymoe the losses are those with eager" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-k", "5"), "--top-k must be at most --experts (4), got 5"),
        (("--heads", "5"), "--hidden must be a multiple"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message, capsys):
    from transformers_moe import main

    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, *options])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_from_the_command_line():
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, str(EXAMPLES / "transformers_moe.py"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
