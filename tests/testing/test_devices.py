"""Tests of operators and layers reach every device: proved on a device that computes on the CPU and says otherwise."""

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from devices import CPU, DEVICES, TorchOn, moved
from limits import rounds
from pretended import pretended
from specs import all_specs, samples_of
from specs.comparison import assert_same_bits

from pymoe.bench.calls import generator, tensors_in

TESTS = Path(__file__).parents[1]
OTHER = DEVICES["pretended"]


def run_tests(*arguments):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)


def collected(*arguments):
    options = ("--collect-only", "-q", "-o", "addopts=--import-mode=importlib", "--level=exhaustive")
    lines = run_tests(*options, *arguments).stdout.splitlines()
    return [line for line in lines if "::" in line]


@pytest.mark.slow
def test_names_of_tests_by_device():
    files = [f"tests/{name}.py" for name in ("ops/test_routing_semantics", "ops/test_parallel", "nn/test_cuda_graph")]
    cpu, cuda = collected(*files, "--device", "cpu"), collected(*files, "--device", "cuda")
    both = collected(*files, "--device", "cpu", "--device", "cuda")
    assert not [name for name in cpu if "cpu" in name or "cuda[" in name], "on the CPU alone tests keep their names"
    assert all("[cuda" in name for name in cuda)
    assert len(both) == len(cpu) + len(cuda)
    only = ("test_parallel", "test_cuda_graph")
    for names, (wanted, unwanted) in ((cpu, only), (cuda, only[::-1])):
        assert any(wanted in name for name in names)
        assert not any(unwanted in name for name in names)
    semantics = [sum("test_routing_semantics" in name for name in names) for names in (cpu, cuda)]
    assert 0.8 * semantics[0] < semantics[1] < semantics[0], "all but what says that it concerns the CPU"


@pytest.mark.slow
def test_tests_pass_on_another_device():
    """Tensors on another device could not be combined with the test's tensors."""
    result = run_tests(
        "--device", "pretended", "tests/ops/test_gate_topk_semantics.py", "tests/ops/test_routing_semantics.py",
        "tests/nn/test_moe_losses.py", "tests/ops/test_errors.py", "-m", "not slow",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-5000:]
    assert " passed" in result.stdout


def test_a_tensor_left_on_the_cpu_is_found(tmp_path):
    torch_there = TorchOn(OTHER)
    with pretended():
        value = torch_there.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            value + torch.ones(3)
        assert (value + 1).device == OTHER
        assert (value + torch_there.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.slow
def test_samples_move_with_their_layout():
    count, stride = 0, rounds(4, 1)
    with pretended():
        for spec in all_specs():
            for sample in islice(samples_of(spec, spec.dtypes[0]), None, None, stride):
                there = moved(sample, OTHER)
                for old, new in zip(tensors_in((sample.args, sample.kwargs)), tensors_in((there.args, there.kwargs)),
                                    strict=True):  # fmt: skip
                    assert new.device == OTHER
                    assert new.requires_grad == old.requires_grad
                    assert old.numel() == 0 or new.stride() == old.stride()
                    assert_same_bits(new.to(CPU), old)
                    count += 1
                assert moved(sample, CPU) is sample
    assert count > 1000 / stride
    gather = next(spec for spec in all_specs() if spec.name == "gather_batch")
    first = next(sample for sample in samples_of(gather, torch.float32) if sample.name == "one_tensor_twice")
    with pretended():
        a, _, b = moved(first, OTHER).args[0]
    assert a is b


def test_gradient_leaves_stay_leaves():
    with pretended():
        for spec in all_specs():
            for sample in spec.gradient_samples(generator()) if spec.gradient_samples else ():
                leaves = [value for value in tensors_in((moved(sample, OTHER).args,)) if value.requires_grad]
                assert leaves
                assert all(value.is_leaf for value in leaves)
