"""benchmarks/products.py leaves a figure for every kind of weights, number of rows and level of instructions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_line_is_measured(tmp_path):
    arguments = ["--rows", "2", "40", "--isas", "baseline", "--rounds", "1", "--weights", "int8|in, out"]
    command = [sys.executable, "-m", "benchmarks.products", *arguments, "--output", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    records = json.loads((tmp_path / "products.json").read_text())["records"]
    levels = {("bf16 (in, out)", rows): {"baseline", "torch.mm"} for rows in (2, 40)}
    levels |= {("int8", rows): {"baseline"} for rows in (2, 40)}
    assert {(one["kind"], one["rows"]): set(one["seconds"]) for one in records} == levels
    assert all(spread["median"] > 0 for one in records for spread in one["seconds"].values())
    text = (tmp_path / "products.md").read_text()
    assert text.count("| 2 | ") == text.count("| 40 | ") == 2
    assert text.count(" GB/s |") == 3  # the lines of 2 rows
