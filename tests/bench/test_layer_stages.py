"""Tests that the stages of a block together compute the same as one call, and that tables show each stage's share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

pytest.importorskip("transformers")

from benchmarks import layer_stages
from benchmarks.layers.blocks import TINY, built


@pytest.mark.parametrize("name", list(TINY))
def test_stages_compute_what_one_call_does(name):
    one = built(TINY[name], torch.float32)
    x = torch.randn(7, one.block.hidden)
    with torch.no_grad():
        index, weights = one.choice(x)
        calls = layer_stages.stages_of(one, x, index, weights)
        assert set(calls) == {*layer_stages.STAGES, "one call"}
        found = {name: call() for name, call in calls.items()}
    torch.testing.assert_close(found["combine"], found["one call"], rtol=0, atol=0)
    assert found["first product"].shape == (index.numel(), 2 * one.block.ffn)
    assert found["activation"].shape == (index.numel(), one.block.ffn)


def test_tables_show_shares_and_rates():
    seconds = dict.fromkeys([*layer_stages.STAGES, "one call", "read once", "dense mm"], 0.1)
    seconds |= {"first product": 0.4, "second product": 0.2, "one call": 0.8}
    case = {"block": "a block", "dtype": "bf16", "tokens": 2048, "rows": 12.5, "flops": 6e9, "dense_flops": 1e9}
    case["seconds"] = {name: {"low": one, "median": one, "high": one} for name, one in seconds.items()}
    (row,) = layer_stages.table([case]).rows
    assert row[:7] == ("a block", "bf16", "2,048", "12.5", "800 ms", "10", "10")
    assert row[7:] == ("60%", "20%", "10%", "10%", "12%", "12%")


def test_a_run_writes_its_table(tmp_path, monkeypatch):
    options = ["--blocks", "tiny-olmoe", "--tokens", "8", "--budget", "0", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["layer_stages", *options, "--output", str(tmp_path)])
    monkeypatch.setattr(layer_stages, "pin", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert layer_stages.main() == 0
    assert "| tiny OLMoE-1B-7B | bf16 | 8 | 2 |" in (tmp_path / "layer_stages.md").read_text()
