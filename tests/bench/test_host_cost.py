"""benchmarks/host_cost.py leaves a figure for every operator and way, and for the layer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_line_is_measured(tmp_path):
    arguments = ["-m", "benchmarks.host_cost", "--budget", "0.01", "--output", str(tmp_path)]
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
    result = json.loads((tmp_path / "host_cost.json").read_text())
    ways = {}
    for one in result["microseconds"]:
        assert one["median"] > 0
        ways.setdefault(one["call"], []).append(one["way"])
    all_three = ["raw", "Python", "recorded"]
    for name in ("gate_topk", "dispatch", "grouped_linear", "expert_activation", "combine", "router_losses"):
        assert ways[name] == all_three
    assert ways["build_routing"] == ways["gather_batch of 64"] == ["raw", "Python"]
    for tokens in (1, 4, 16):
        assert ways[f"MoE, T {tokens}"] == ["native calls", "no gradients", "recorded", "forward + backward"]
    text = (tmp_path / "host_cost.md").read_text()
    assert "| torch.add |" in text
    assert "| MoE, T 1 |" in text
