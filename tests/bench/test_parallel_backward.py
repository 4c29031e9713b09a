"""Tests that the benchmark of parallel backward passes runs, detects wrong gradients, and reports its targets."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import parallel_backward
from benchmarks.parallel.calls import KINDS, PYMOE, SYSTEMS
from benchmarks.parallel.report import PASSES, judged


def test_a_quick_run_measures_every_way_and_writes_its_files(tmp_path, monkeypatch):
    arguments = ["parallel_backward", "--quick", "--kinds", "tiny", "--rounds", "2", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    threads = torch.get_num_threads()
    try:
        assert parallel_backward.main() == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads((tmp_path / "parallel_backward.json").read_text())
    assert [(one["calls"], one["system"]) for one in result["records"]] == [
        (calls, system.name) for calls in (1, 8) for system in SYSTEMS
    ]
    assert {one["verdict"] for one in result["records"]} <= {"exact", "close"}
    measured = {one["what"].split(":")[0]: one["met"] is not None for one in result["targets"]}
    assert measured == {f"8 {kind} calls, {one}": kind == "tiny" for kind in ("sleep", "tiny") for one in PASSES}
    text = (tmp_path / "parallel_backward.md").read_text()
    assert text.startswith("Made by `python -m benchmarks.parallel_backward --quick --kinds tiny --rounds 2` on ")


def test_wrong_gradients_are_noticed():
    kind = next(kind for kind in KINDS if kind.name == "tiny")
    loop = SYSTEMS[0]
    expected = parallel_backward.results(kind, 2, loop)
    assert parallel_backward.judge(kind, 2, loop, expected) == ("exact", 0.0)
    expected[-1] = expected[-1] * 1.01
    assert parallel_backward.judge(kind, 2, loop, expected)[0] == "WRONG"


@pytest.mark.parametrize(("ratio", "met"), [(1.09, True), (1.11, False)])
def test_a_target_is_met_up_to_its_limit(ratio, met):
    spread = {"low": 1.0, "median": ratio, "high": 2.0}
    record = {"kind": "sleep", "calls": 8, "system": PYMOE, "forward": spread, "backward": spread}
    verdicts = judged({"settings": {"quick": True}, "ratios": [record], "overheads": []})
    assert [one["met"] for one in verdicts] == [met, met, None, None]
