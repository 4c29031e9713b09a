"""Tests of a checkpoint that is larger than memory: few bytes are in memory, the saved model gives equal results, and
the limit is enforced.
"""

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from limits import LONG

pytest.importorskip("transformers")

from safetensors.torch import load_file

from benchmarks import large_checkpoint
from benchmarks.layers.checkpoints import LIMIT_STATUS, write_checkpoint
from benchmarks.models.configurations import MODELS
from pymoe._common.types import packed_shape

pytestmark = pytest.mark.only_on("cpu")
ROOT = Path(__file__).parents[2]
SLACK = 48 << 20
"""Allowance in bytes for memory other than weights: stacks and arenas of threads, a forward, Python objects."""
LAYERS, HIDDEN, FFN, EXPERTS = 8, 512, 384, 48
SIZES = f"hidden_size={HIDDEN},moe_intermediate_size={FFN},num_experts={EXPERTS}"

ALLOCATE = """
import sys, time
import torch
from benchmarks.layers.checkpoints import AnonymousMemory, anonymous
with AnonymousMemory(anonymous() + (64 << 20)) as memory:
    kept = []
    for _ in range(int(sys.argv[1])):
        kept.append(torch.ones(1 << 20))
        time.sleep(0.01)
"""


def run(folder, *arguments):
    options = ["--model", "tiny-qwen3", "--layers", str(LAYERS), "--sizes", SIZES, "--shard", "0.05", "--tokens", "4"]
    options += ["--folder", str(folder / "models"), "--output", str(folder), "--discard", *arguments]
    # glibc keeps freed blocks of up to 32 MiB, and the blocks of published models are larger.
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.large_checkpoint", *options]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LONG, check=False)


@pytest.mark.slow
def test_it_is_loaded_in_little_memory_and_again_with_the_same_results(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "large_checkpoint.json").read_text())
    first, *again = result["steps"]
    layer = 3 * EXPERTS * FFN * HIDDEN * 2
    shapes = [(2 * FFN, HIDDEN), (HIDDEN, FFN)]
    packed = LAYERS * sum(prod(packed_shape(4, *shape, EXPERTS)) for shape in shapes)
    # gate_up_proj is two thirds of a layer; transformers holds its halves and the concatenation at the same time.
    bound = packed + layer * 4 // 3 + SLACK
    assert bound < 0.8 * result["settings"]["checkpoint_bytes"]
    assert first["packed"] == packed
    assert packed <= first["loading peak"] <= first["peak"] <= bound
    assert [one["step"] for one in again] == [large_checkpoint.COLD, large_checkpoint.WARM]
    for one in again:
        assert one["verdict"] == "exact"
        assert one["same tokens"]
        assert one["packed"] == packed
        assert one["peak"] <= SLACK, "the saved model is mapped"
        assert 0 < one["load"] <= one["first forward"] <= one["from the start"]
    assert (tmp_path / "large_checkpoint.md").read_text().count("| exact | the same |") == 3
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.slow
def test_a_process_with_more_memory_than_the_limit_is_ended(tmp_path):
    done = run(tmp_path, "--limit", "0.1")
    assert done.returncode == 1
    assert f"exit status {LIMIT_STATUS}" in done.stderr
    assert "bytes of anonymous memory, of at most" in done.stderr
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize(("megabytes", "status"), [(8, 0), (400, LIMIT_STATUS)])
def test_the_limit_is_for_anonymous_memory(megabytes, status):
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE, str(megabytes // 4)], cwd=ROOT, capture_output=True, timeout=LONG, check=False
    )
    assert done.returncode == status, done.stderr


def test_files_are_cut_within_layers_and_hold_every_tensor_once(tmp_path):
    shard = 60_000
    total = write_checkpoint(tmp_path / "whole", MODELS["tiny-qwen3"].build(2), shard)
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "whole").glob("*.safetensors")}
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    assert total == index["metadata"]["total_size"]
    for tensors in files.values():
        assert sum(tensor.nbytes for tensor in tensors.values()) <= shard or len(tensors) == 1
        assert all(tensor.float().abs().max() < 6 for tensor in tensors.values()), "finite and small"
    parts = {file for name, file in index["weight_map"].items() if name.startswith("model.layers.0.mlp.experts.")}
    assert len(parts) > 1


def test_rows_of_a_large_matrix_differ(tmp_path):
    """Numbers are drawn once and read again; equal rows would be equal logits."""
    from benchmarks.layers import checkpoints

    rows = checkpoints._random("lm_head.weight", (3 * checkpoints.POOL // 512, 512), torch.Generator().manual_seed(0))
    assert len(rows[:, :4].unique(dim=0)) == len(rows)


def test_files_that_are_still_mapped_are_not_removed(tmp_path):
    """Removed files would still take space on the disk."""
    folder = tmp_path / "whole"
    folder.mkdir()
    model = torch.nn.Linear(64, 64, bias=False)
    with open(folder / "weights", "wb") as file:
        file.write(bytes(4 * 64 * 64))
    mapped = torch.from_file(str(folder / "weights"), shared=True, size=64 * 64)
    model.weight.data = mapped.view(64, 64)
    with pytest.raises(RuntimeError, match="expected no file to be mapped any more"):
        large_checkpoint.discard(folder, model)
    assert (folder / "weights").exists()
    model.weight.data = mapped.view(64, 64)
    del mapped
    large_checkpoint.discard(folder, model)
    assert not folder.exists()
    assert torch.equal(model.weight, torch.zeros(64, 64))
