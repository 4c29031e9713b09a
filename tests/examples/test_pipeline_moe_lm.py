"""Tests that the pipeline in the example of a language model trains like the plain loop, under every schedule."""

import json
import re

import pipeline_moe_lm
import pytest
import torch
from byte_lm import Config
from common import Batches
from pipeline_moe_lm import Pipelined, Plain, balance, difference, layers

from pymoe.nn import set_aux_loss_scale
from pymoe.pipe.schedules import names

CONFIG = Config(
    width=16, heads=2, ffn_size=16, num_experts=4, context=16, batch_size=4, steps=3, warmup=1, bias_update_rate=0.001
)
DATA = torch.randint(256, (2000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


@pytest.fixture
def batches():
    return Batches(DATA, CONFIG.context, CONFIG.batch_size, CONFIG.seed)


@pytest.mark.parametrize("schedule", names())
@pytest.mark.parametrize("stages", [2, 3])
def test_the_pipeline_trains_as_the_plain_loop_does(batches, schedule, stages):
    plain = Plain(CONFIG, 4, torch.float64)
    pipelined = Pipelined(CONFIG, 4, torch.float64, stages, schedule)
    for _ in range(3):
        plain.step(batches)
        pipelined.step(batches)
    found = difference(plain, pipelined)
    assert found.loss <= 1e-12
    assert found.parameter <= 1e-10  # AdamW divides by roots of small numbers, which amplifies rounding
    assert found.expert_bias == 0
    assert any(bias.abs().max() > 0 for bias in pipeline_moe_lm.expert_biases(plain.model))


def test_auxiliary_losses_of_another_weight_would_be_noticed(batches, monkeypatch):
    monkeypatch.setattr(pipeline_moe_lm, "set_aux_loss_scale", lambda model, scale: set_aux_loss_scale(model, 1.0))
    plain, pipelined = Plain(CONFIG, 4, torch.float64), Pipelined(CONFIG, 4, torch.float64, 2, "1f1b")
    for _ in range(2):
        plain.step(batches)
        pipelined.step(batches)
    assert difference(plain, pipelined).loss > 1e-9


def test_head_and_embedding_share_their_weight_across_the_stages():
    model = layers(CONFIG)
    assert model[0].weight is model[-1].weight
    assert len(model) == CONFIG.layers + 2
    assert (balance(6, 2), balance(6, 4), balance(6, 6)) == ([3, 3], [2, 2, 1, 1], [1] * 6)


def test_the_example_shows_equal_losses_and_writes_a_record_and_a_picture(tmp_path, capsys):
    arguments = "--width 16 --context 16 --steps 4 --exact-steps 2 --micro-batches 3 --schedule zero-bubble"
    assert pipeline_moe_lm.main([*arguments.split(), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"^NO", out, re.MULTILINE)
    assert len(re.findall(r"^yes  float(?:32|64): losses differ", out, re.MULTILINE)) == 2
    assert "worker 1" in out
    record = json.loads((tmp_path / "record.json").read_text())
    assert all(record["checks"].values())
    assert len(record["runs"]["float32 pipeline"]["loss"]) == 4
    assert (tmp_path / "last_step.png").stat().st_size > 1000


def test_options_that_cannot_be_are_refused(capsys):
    for wrong in ("--stages 7", "--width 12", "--micro-batches 0", "--schedule none"):
        with pytest.raises(SystemExit):
            pipeline_moe_lm.main(wrong.split())
    assert "--stages must be at most 6" in capsys.readouterr().err
