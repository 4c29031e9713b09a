"""benchmarks/layer_overhead.py leaves a figure for every candidate, mode and number of tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_line_is_measured(tmp_path):
    arguments = ["-m", "benchmarks.layer_overhead", "--budget", "0.01", "--output", str(tmp_path)]
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
    result = json.loads((tmp_path / "layer_overhead.json").read_text())
    seen = {(one["mode"], one["tokens"], one["name"]) for one in result["microseconds"]}
    parts = {"native calls", "experts", "router", "losses"}
    for tokens in (1, 16):
        of_inference, of_training = (
            {name for m, t, name in seen if (m, t) == (mode, tokens)} for mode in ("inference", "training")
        )
        assert of_inference == of_training | parts
        assert "MoE" in of_training
    assert all(one["median"] > 0 for one in result["microseconds"])
    assert "| MoE |" in (tmp_path / "layer_overhead.md").read_text()
