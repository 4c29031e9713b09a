"""Tests that pipelines captured from a model of the transformers library train like the model, as the example shows."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pipeline_traced
import pytest
import torch
from common import Batches, difference
from pipeline_traced import ARCHITECTURES, CUTS, Pipelined, Run, new_model, same_outputs, same_weights

from pymoe.pipe.schedules import names

OPTIONS = Namespace(
    architecture="llama",
    cut="parameters",
    schedule="1f1b",
    checkpoint="never",
    width=32,
    layers=4,
    context=12,
    rows=7,
    micro_batches=3,
    learning_rate=3e-3,
    seed=0,
)
DATA = torch.randint(256, (2000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def asked(**options):
    return Namespace(**vars(OPTIONS) | options)


@pytest.fixture
def batches():
    return Batches(DATA, OPTIONS.context, OPTIONS.rows, OPTIONS.seed)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "cut"), [("llama", "parameters"), ("gpt2", "flops"), ("qwen3", "time")])
def test_pipelines_train_as_the_model_does(batches, architecture, cut):
    options = asked(architecture=architecture, cut=cut)
    plain, pipelined = Run(options, torch.float64), Pipelined(options, torch.float64, 3)
    assert len(pipelined.parameters_of_stages) == 3
    assert all(size > 0 for size in pipelined.parameters_of_stages)
    for schedule in names():
        pipelined.options = asked(architecture=architecture, cut=cut, schedule=schedule)
        plain.step(batches)
        pipelined.step(batches)
    found = difference(plain, [pipelined])
    assert found["loss"] <= 1e-12
    assert found["parameter"] <= 1e-10
    assert same_weights(pipelined)
    assert same_outputs(pipelined) <= 1e-12


def test_another_learning_rate_would_be_noticed(batches):
    plain, pipelined = Run(OPTIONS, torch.float64), Pipelined(OPTIONS, torch.float64, 2)
    pipelined.optimizer.param_groups[0]["lr"] *= 1.001
    for _ in range(2):
        plain.step(batches)
        pipelined.step(batches)
    assert difference(plain, [pipelined])["loss"] > 1e-9


def test_every_architecture_and_cut_is_tried():
    assert set(ARCHITECTURES) == {"llama", "gpt2", "qwen3"}
    assert set(CUTS) == {"parameters", "flops", "time"}
    for architecture in ARCHITECTURES:
        made = new_model(architecture, 32, 2, 12)
        assert made.get_output_embeddings().weight is made.get_input_embeddings().weight


@pytest.mark.slow
def test_the_example_writes_a_record_and_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pipeline_traced, "FALL", 2.0)  # after three steps the loss has not fallen
    arguments = (
        "--width 32 --layers 3 --context 12 --rows 7 --micro-batches 3 --steps 3 --exact-steps 2 --stages 2 3 "
        "--schedule zero-bubble"
    )
    status = pipeline_traced.main([*arguments.split(), "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert status == 0, out
    assert len(re.findall(r"^yes  float(?:32|64): losses differ", out, re.MULTILINE)) == 2
    assert out.count("zero-bubble, as run") == out.count("zero-bubble, planned") == 2
    assert "3 stages, cut by parameters; captured in" in out
    found = json.loads((tmp_path / "record.json").read_text())
    assert all(found["checks"].values())
    assert len(found["checks"]) == 3 + 3 + 2 * 2
    assert len(found["runs"]["3 stages"]["parameters_of_stages"]) == 3
    assert len(found["runs"]["2 stages"]["busy_seconds_of_stages"]) == 2
    for name in ("losses.png", "2_stages.png", "3_stages.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    assert str(tmp_path) not in (tmp_path / "record.json").read_text()


def test_options_that_cannot_be_are_refused(capsys):
    for wrong, why in [
        ("--width 48", "--width must be a multiple of 32, got 48"),
        ("--rows 7", "--rows must be at least 2 for each of 8 micro-batches, got 7"),
        ("--stages 1", "--stages"),
        ("--architecture none", "invalid choice"),
    ]:
        with pytest.raises(SystemExit):
            pipeline_traced.main(wrong.split())
        assert why in capsys.readouterr().err
    assert pipeline_traced.main(["--text", "/nowhere"]) == 2
