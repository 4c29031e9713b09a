"""Tests that pipelines in the example of a U-Net train like the plain loop, under every schedule."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pipeline_unet
import pytest
import torch
from common import difference
from pipeline_unet import Down, Pictures, Pipelined, Run, Up, unet

from pymoe.pipe import Pipe
from pymoe.pipe.schedules import names
from pymoe.pipe.skip import verify_skippables

SMALL = "--width 2 --levels 2 --size 16 --rows 7 --micro-batches 3 --steps 3 --exact-steps 2 --profile 0 --stages 2 3"
OPTIONS = Namespace(
    width=2, levels=2, size=16, rows=7, micro_batches=3, learning_rate=0.01, profile=0.0, checkpoint="never", seed=0
)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", names())
def test_pipelines_train_as_the_plain_loop_does(schedule, checkpoint):
    options = Namespace(**vars(OPTIONS) | {"schedule": schedule, "checkpoint": checkpoint})
    data = Pictures(16, 0)
    plain, pipelines = Run(options, torch.float64), [Pipelined(options, torch.float64, stages) for stages in (2, 4)]
    for _ in range(3):
        for run in (plain, *pipelines):
            run.step(data)
    found = difference(plain, pipelines)
    assert found["loss"] <= 1e-12
    assert found["parameter"] <= 1e-10
    assert [run.batches_counted for run in (plain, *pipelines)] == [{9}, {3}, {3}]


def test_another_loss_would_be_noticed(monkeypatch):
    options = Namespace(**vars(OPTIONS) | {"schedule": "1f1b"})
    data = Pictures(16, 0)
    plain, pipelined = Run(options, torch.float64), Pipelined(options, torch.float64, 2)
    pipelined.optimizer.param_groups[0]["lr"] *= 1.001
    for _ in range(2):
        plain.step(data), pipelined.step(data)
    assert difference(plain, [pipelined])["loss"] > 1e-9


def test_every_level_has_a_skip_of_its_own():
    model = unet(4, 3)
    verify_skippables(model)
    downs = [layer for layer in model if isinstance(layer, Down)]
    ups = [layer for layer in model if isinstance(layer, Up)]
    assert [down.stashable() for down in downs] == [up.poppable() for up in reversed(ups)]
    assert len({str(down.stashable()) for down in downs}) == 3
    assert model(torch.zeros(2, 1, 24, 16)).shape == (2, 1, 24, 16)


def test_pictures_are_repeated_by_their_step_and_hold_strokes():
    data = Pictures(32, 0)
    pictures, strokes = data.draw(3, 5)
    assert pictures.shape == strokes.shape == (5, 1, 32, 32)
    again, same = Pictures(32, 0).draw(3, 5)
    assert torch.equal(pictures, again)
    assert torch.equal(strokes, same)
    assert not torch.equal(pictures, data.draw(4, 5)[0])
    assert not torch.equal(pictures, Pictures(32, 1).draw(3, 5)[0])
    assert set(strokes.unique().tolist()) == {0.0, 1.0}
    assert (strokes.flatten(1).mean(1) > 0.02).all()
    assert pictures[strokes == 1].mean() > pictures[strokes == 0].mean() + 0.3


def test_digits_are_held_back():
    data = Pictures(16, 0)
    kept = {tuple(image.flatten().tolist()) for image in data.held_back}
    assert len(data.held_back) == 360
    assert not kept & {tuple(image.flatten().tolist()) for image in data.train}


def test_the_example_writes_a_record_and_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pipeline_unet, "FALL", 2.0)  # after three steps the loss has not fallen
    status = pipeline_unet.main([*SMALL.split(), "--out", str(tmp_path), "--schedule", "zero-bubble"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert len(re.findall(r"^yes  float(?:32|64): losses differ", out, re.MULTILINE)) == 2
    assert out.count("zero-bubble, as run") == out.count("zero-bubble, planned") == 2
    assert "3 stages, cut by time: in0a .. " in out
    found = json.loads((tmp_path / "record.json").read_text())
    assert all(found["checks"].values())
    assert len(found["checks"]) == 3 + 3 + 2 * 2
    assert found["runs"]["plain loop"]["batches_counted"] == [9]
    assert found["runs"]["3 stages"]["batches_counted"] == [3]
    assert sum(found["runs"]["3 stages"]["balance"]) == 15
    assert all(size > 0 for size in found["runs"]["2 stages"]["activation_bytes"]["peak"])
    for name in ("strokes.png", "2_stages.png", "3_stages.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    assert str(tmp_path) not in (tmp_path / "record.json").read_text()


def test_a_run_that_learns_nothing_says_so(tmp_path, capsys):
    arguments = [*SMALL.split(), "--learning-rate", "0", "--out", str(tmp_path)]
    assert pipeline_unet.main(arguments) == 1
    assert "NO   plain loop: the loss fell" in capsys.readouterr().out


def test_options_that_cannot_be_are_refused(capsys):
    for wrong, why in [
        ("--size 20", "--size must be a multiple of 8 for 3 levels"),
        ("--rows 7", "--rows must be at least --micro-batches, 8, got 7"),
        ("--stages 2 22", "--stages must be at most 21"),
        ("--schedule none", "invalid choice"),
    ]:
        with pytest.raises(SystemExit):
            pipeline_unet.main(wrong.split())
        assert why in capsys.readouterr().err


def test_parameters_are_the_same_under_every_schedule_to_the_last_bit():
    found = []
    for schedule in names():
        options = Namespace(**vars(OPTIONS) | {"schedule": schedule})
        torch.set_num_threads(1)
        torch.manual_seed(0)
        run = Pipelined(options, torch.float32, 1)
        run.pipe = Pipe(run.model, 3, "except_last", deferred_batch_norm=True, balance=[4, 4, 4, 3])
        for _ in range(2):
            run.step(Pictures(16, 0))
        found.append([parameter.detach() for parameter in run.model.parameters()])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
