"""Tests that the benchmark of experts on two ranks measures every system, checks the results, and writes its files."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import expert_parallel
from benchmarks.expert.slow_wire import best
from benchmarks.expert.torch_peer import TorchExpertParallel
from benchmarks.expert.work import SYSTEMS, Cell, verdicts


@pytest.mark.slow
def test_a_quick_run_measures_every_system_and_writes_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["expert_parallel", "--quick", "--output", str(tmp_path)])
    assert expert_parallel.main() == 0
    result = json.loads((tmp_path / "expert_parallel.json").read_text())
    (cell,) = result["cells"]
    assert list(cell["times"]) == list(SYSTEMS)
    assert {name for name, verdict in cell["verdicts"].items() if verdict == "exact"} >= {
        name for name in SYSTEMS if name.startswith("pymoe")
    }
    assert [one["chunks"] for one in result["wire"]] == [1, 2, 4]
    assert "pymoe, EP 2, 4 chunks" in capsys.readouterr().out
    assert (tmp_path / "expert_parallel.md").read_text().startswith("Made by `python -m benchmarks.expert_parallel")


@pytest.mark.parametrize("products", ["torch", "pymoe"])
def test_the_peer_computes_what_the_layer_does(products, tmp_path):
    cell = Cell(20, 8, 6, 4, 2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        layer = cell.layer()
        torch.testing.assert_close(
            TorchExpertParallel(layer, dist.group.WORLD, products)(cell.rows()), layer(cell.rows())
        )
    finally:
        dist.destroy_process_group()


def test_wrong_results_are_noticed():
    right = torch.ones(3, 2), torch.ones(3, 2)
    results = {
        "pymoe, EP 1": right,
        "pymoe, EP 2": right,
        "off": (right[0], right[1] * 1.01),
        "near": (right[0] + 1e-7,) * 2,
    }
    assert verdicts(0, results) == {"pymoe, EP 1": "exact", "pymoe, EP 2": "exact", "off": "WRONG", "near": "close"}


def test_the_best_time_of_an_order_of_chunks():
    assert [best(4.0, 4.0, chunks) for chunks in (1, 2, 4)] == [12.0, 8.0, 8.0]
    assert best(4.0, 0.0, 1) == 8.0
