"""Tests that all contenders of benchmarks/moe_layer.py compute the same layer, and that one that does not is called
WRONG.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def moe_layer(monkeypatch):
    """Return the module, imported from the source tree."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import moe_layer

    return moe_layer


@pytest.fixture
def tiny(moe_layer):
    """Measure a tiny shape."""

    def measured(dtype=torch.float32):
        shape = moe_layer.Shape("tiny", 32, 16, 24, 4, 2)
        rates = moe_layer.Rates(1.0, {torch.float32: 2.0, torch.bfloat16: 1.0})
        return moe_layer.scenario(shape, dtype, rates, moe_layer.Effort(0.0, (1, 1), 60.0), moe_layer.WallTimer())

    return measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everyone_computes_the_same(tiny, dtype):
    result = tiny(dtype)
    verdicts = {row["name"]: row["verdict"] for row in result["rows"]}
    assert verdicts.pop("torch.mm, dense") == verdicts.pop("dense nn.Sequential") == "-"
    assert set(verdicts.values()) == {"close"}
    assert {"pymoe native", "pymoe reference"} <= set(verdicts)
    everyone = {*verdicts, *(one["name"] for one in result["absent"])}
    assert everyone == {
        "pymoe native",
        "pymoe reference",
        "torch alone",
        "transformers eager",
        "transformers grouped_mm",
        "transformers batched_mm",
        "transformers sonicmoe",
        "torchtitan",
    }


def test_a_wrong_contender_is_called_wrong(moe_layer, tiny, monkeypatch):
    right = moe_layer.contenders

    def lie(step):
        def wrong():
            output, *rest = step()
            return (output * 1.01, *rest)

        return wrong

    def with_a_liar(task):
        for one in right(task):
            yield dataclasses.replace(one, name="liar", step=lie(one.step)) if one.name == "pymoe reference" else one

    monkeypatch.setattr(moe_layer, "contenders", with_a_liar)
    verdicts = {row["name"]: row["verdict"] for row in tiny()["rows"]}
    assert verdicts["liar"] == "WRONG"
    assert verdicts["pymoe native"] == "close"


def test_a_missing_peer_is_named_with_the_reason(moe_layer, tiny, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    absent = {one["name"]: one["reason"] for one in tiny()["absent"]}
    assert "pip install" in absent["transformers eager"]


def test_a_run_that_is_ended_keeps_what_it_has(moe_layer, tiny, monkeypatch, tmp_path):
    scenarios = iter([tiny()])
    monkeypatch.setattr(moe_layer, "scenario", lambda *_: next(scenarios))  # the second one raises
    monkeypatch.setattr("sys.argv", ["moe_layer", "--quick", "--output", str(tmp_path)])
    with pytest.raises(StopIteration):
        moe_layer.main()
    assert [one["name"] for one in json.loads((tmp_path / "moe_layer.json").read_text())["scenarios"]] == ["tiny"]
    assert "**tiny: " in (tmp_path / "moe_layer.md").read_text()


def test_a_skewed_load_falls_with_the_rank_of_the_expert(moe_layer):
    shape = moe_layer.SkewedShape("skewed", 512, 32, 16, 4, 1)
    x, _ = moe_layer.inputs_of(shape, torch.float32, moe_layer.CPU)
    layer = moe_layer.layer_of(shape, torch.float32, moe_layer.CPU)
    moe_layer.skew(layer, x)
    layer(x)
    load = layer.stats.load.tolist()
    assert load == sorted(load, reverse=True)
    assert load[0] > 1.5 * load[1]
    assert str(shape).endswith("K1 skewed")
