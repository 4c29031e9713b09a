"""Tests that quantising a checkpoint's experts needs the memory of the result and of about one layer's experts.

This is a scaled-down version of loading a checkpoint of 57 GB on a machine with 24 GB. Every way of loading runs in its
own process, which counts anonymous memory. Loading the whole model before quantising it shows that the counter would
detect a larger need.
"""

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import integer_files
import pytest
from limits import LONG
from transformers import Qwen3MoeConfig

from benchmarks.layers.checkpoints import WAYS, write_gpt_oss, write_qwen3_moe
from pymoe._common.types import packed_shape

pytestmark = pytest.mark.only_on("cpu")
ROOT = Path(__file__).parents[3]

SLACK = 16 << 20
"""Allowance in bytes for memory other than weights: stacks and arenas of threads, a forward, Python objects."""

LOAD = """
import json, sys
from pathlib import Path
import torch
from benchmarks.layers.checkpoints import load
torch.set_num_threads(1)
torch.rand(64, 64) @ torch.rand(64, 64)
import transformers, pymoe.integrations.transformers
format = "int" if sys.argv[-1].isdecimal() else sys.argv.pop()
print(json.dumps(load(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]), format=format)[1]))
"""

WIDEN = """
import json, sys
import torch
from benchmarks.layers.checkpoints import AnonymousMemory
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, Mxfp4Config
import pymoe.integrations.transformers
with AnonymousMemory() as memory:
    options = {"quantization_config": Mxfp4Config(dequantize=True), "experts_implementation": "pymoe"}
    AutoModelForCausalLM.from_pretrained(sys.argv[1], **options)
print(json.dumps({"peak": memory.peak}))
"""

CONVERT = """
import json, sys
from pathlib import Path
import torch
from benchmarks.layers.checkpoints import AnonymousMemory
torch.set_num_threads(1)
import transformers, pymoe.integrations.transformers
from pymoe.quantize import main
with AnonymousMemory() as memory:
    status = main([sys.argv[1], sys.argv[2], "--bits", *sys.argv[3:]])
print(json.dumps({"status": status, "peak": memory.peak}))
"""


def run(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    # glibc keeps freed blocks of up to 32 MiB, and the blocks of published models are larger.
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_loading_takes_what_stays_and_about_a_layer(tmp_path):
    measure(tmp_path, layers=8, hidden=256, ffn=256, experts=32, vocabulary=512)


@pytest.mark.slow
def test_so_it_does_from_half_a_gigabyte(tmp_path):
    measure(tmp_path, layers=8, hidden=512, ffn=384, experts=48, vocabulary=512)


def measure(tmp_path, **sizes):
    whole = write_qwen3_moe(tmp_path / "whole", **sizes)
    layer = 3 * sizes["experts"] * sizes["ffn"] * sizes["hidden"] * 2
    shapes = [(2 * sizes["ffn"], sizes["hidden"]), (sizes["hidden"], sizes["ffn"])]
    packed = sizes["layers"] * sum(prod(packed_shape(4, *shape, sizes["experts"])) for shape in shapes)
    # gate_up_proj is two thirds of a layer; transformers holds its halves and the concatenation at the same time.
    bound = packed + layer * 4 // 3 + SLACK
    assert bound < whole
    while_read = run(LOAD, WAYS[1], tmp_path / "whole", 4)
    assert while_read["packed"] == packed
    assert packed <= while_read["peak"] <= bound
    after = run(LOAD, WAYS[0], tmp_path / "whole", 4)
    assert after["peak"] > bound, "the counter sees the whole model"
    converted = run(CONVERT, tmp_path / "whole", tmp_path / "packed", 4)
    assert converted["status"] == 0
    assert converted["peak"] <= layer * 4 // 3 + SLACK, "packed weights are in files"
    again = run(LOAD, WAYS[2], tmp_path / "packed", 4)
    assert again["packed"] == packed
    assert again["peak"] <= SLACK, "the saved model is mapped"


@pytest.mark.slow
def test_dense_layers_take_what_stays_too(tmp_path):
    """The head is the largest tensor; in bfloat16 it is four times as large as the allowance."""
    sizes = {"layers": 4, "hidden": 512, "ffn": 64, "experts": 8, "vocabulary": 65536}
    write_qwen3_moe(tmp_path / "whole", **sizes)
    experts = sizes["layers"] * 3 * sizes["experts"] * sizes["ffn"] * sizes["hidden"] * 5 // 8
    attention = sizes["layers"] * (2 * 512 * 512 + 2 * 128 * 512)
    packed = experts + attention + sizes["vocabulary"] * sizes["hidden"]
    head = sizes["vocabulary"] * sizes["hidden"] * 2
    assert head == 4 * SLACK
    while_read = run(LOAD, WAYS[1], tmp_path / "whole", 4, 8)
    assert packed <= while_read["packed"] <= 1.01 * packed  # a scale for each output row
    assert packed <= while_read["peak"] <= while_read["packed"] + SLACK
    after = run(LOAD, WAYS[0], tmp_path / "whole", 4, 8)
    assert after["packed"] == while_read["packed"]
    converted = run(CONVERT, tmp_path / "whole", tmp_path / "packed", 4, "--linear-bits", 8)
    assert converted["status"] == 0
    assert converted["peak"] <= head // 2 + SLACK, "packed weights are in files, except for one at a time"
    again = run(LOAD, WAYS[2], tmp_path / "packed", 4)
    assert again["packed"] == while_read["packed"]
    assert again["peak"] <= SLACK, "the saved model is mapped"


@pytest.mark.slow
def test_dense_layers_of_awq_are_never_widened(tmp_path):
    """Dense networks are nearly all of this model; the floating point numbers of one weight are its unit."""
    outputs, inputs, layers = 4096, 1024, 5
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=inputs,
        intermediate_size=outputs,
        moe_intermediate_size=128,
        num_hidden_layers=layers + 1,
        mlp_only_layers=list(range(layers)),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        dtype="bfloat16",
    )
    published, _ = integer_files.write(tmp_path, config, "awq", 4, 128)
    weight = outputs * inputs
    while_read = run(LOAD, WAYS[1], published, 4, "affine")
    assert 3 * layers * weight * 9 // 16 < while_read["packed"] < 1.1 * 3 * layers * weight * 9 // 16
    bound = while_read["packed"] + 4 * weight + SLACK
    assert bound < 3 * layers * 2 * weight, "of all of them in bfloat16"
    assert while_read["packed"] <= while_read["peak"] <= bound
    converted = run(CONVERT, published, tmp_path / "packed", 4, "--format", "affine")
    assert converted["status"] == 0
    assert converted["peak"] <= 4 * weight + SLACK, "packed weights are in files"
    again = run(LOAD, WAYS[2], tmp_path / "packed", 4)
    assert again["packed"] == while_read["packed"]
    assert again["peak"] <= SLACK, "the saved model is mapped"


def mxfp4(tmp_path, **sizes):
    """Load files in MXFP4: the peak is what stays and a part of one layer's packed experts."""
    published = write_gpt_oss(tmp_path / "published", vocabulary=512, **sizes)
    layer = 3 * sizes["experts"] * sizes["ffn"] * sizes["hidden"] * 17 // 32
    packed = sizes["layers"] * layer
    assert packed < published < 1.15 * packed
    while_read = run(LOAD, WAYS[1], tmp_path / "published", 4, "mxfp")
    assert while_read["packed"] == packed
    assert packed <= while_read["peak"] <= packed + layer // 4 + SLACK
    return layer, packed


@pytest.mark.slow
def test_files_in_mxfp4_are_never_widened(tmp_path):
    layer, packed = mxfp4(tmp_path, layers=12, hidden=512, ffn=512, experts=32)
    widened = run(WIDEN, tmp_path / "published")
    assert widened["peak"] > 2 * (packed + layer + SLACK), "the counter sees widened weights"
    converted = run(CONVERT, tmp_path / "published", tmp_path / "packed", 4, "--format", "mxfp")
    assert converted["status"] == 0
    assert converted["peak"] <= layer + SLACK, "packed weights are in files"
    again = run(LOAD, WAYS[2], tmp_path / "packed", 4)
    assert again["packed"] == packed
    assert again["peak"] <= SLACK, "the saved model is mapped"


@pytest.mark.slow
def test_a_layer_of_gpt_oss_20b_takes_its_files_bytes_and_little_more(tmp_path):
    layer, _ = mxfp4(tmp_path, layers=1, hidden=2880, ffn=2880, experts=32)
    assert layer == 423_014_400
