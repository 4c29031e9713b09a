"""Tests that ``import pymoe`` loads operators and layers, starts no thread, and loads no further package."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import pymoe
from pymoe._torch_versions import warn_of_newer_torch

MEASURE = """
import json, os, sys
import torch, numpy
before, threads = set(sys.modules), len(os.listdir("/proc/self/task"))
import pymoe
print(json.dumps({
    "threads": len(os.listdir("/proc/self/task")) - threads,
    "packages": sorted({name.split(".")[0] for name in set(sys.modules) - before}),
    "own": sorted({name.split(".")[1] for name in set(sys.modules) - before if name.startswith("pymoe.")}),
}))
"""


@pytest.fixture(scope="module")
def measured():
    """Return the report of a process that imports pymoe."""
    command = [sys.executable, "-c", MEASURE]
    run = subprocess.run(command, cwd=Path(pymoe.__file__).parents[1], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_import_loads_operators_and_layers_alone(measured):
    """All other parts of pymoe are loaded at their first use."""
    assert {name for name in measured["own"] if not name.startswith("_")} == {"nn", "ops", "reference"}


def test_import_starts_no_thread(measured):
    assert measured["threads"] == 0


def test_import_loads_torch_and_numpy_alone(measured):
    """The import loads none of the packages that only benchmarks and examples need, such as rich or matplotlib."""
    packages = {name for name in measured["packages"] if not name.startswith("_sysconfigdata")}  # Python's own, too
    # triton is loaded if torch's FLOP counter is imported, and CUDA builds of torch install triton.
    assert packages - set(sys.stdlib_module_names) <= {"pymoe", "torch", "triton"}


@pytest.mark.parametrize(
    ("version", "warns"),
    [("2.11.0", 0), ("2.15.1+cu132", 0), ("2.16.0", 1), ("2.16.0a0+git1234567", 1), ("2.16a0", 1), ("3.0.0", 1)],
)
def test_a_torch_newer_than_any_that_was_tested_is_warned_of(version, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_newer_torch(version)
    assert len(caught) == warns
    assert all(f"this is torch {version}" in str(one.message) for one in caught)


def test_import_under_a_newer_torch_warns_once():
    code = """
import warnings, torch
torch.__version__ = "2.16.0a0+git1234567"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pymoe, pymoe.pipe, pymoe.nn
print(*[one.message for one in caught if "pymoe was tested with torch up to" in str(one.message)], sep="\\n")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(pymoe.__file__).parents[1], capture_output=True, text=True, check=True)
    (said,) = done.stdout.splitlines()
    assert "this is torch 2.16.0a0+git1234567" in said


def test_packages_that_need_more_are_there_by_their_names():
    """``pymoe.remote`` raised an AttributeError until it had been imported explicitly."""
    words = "import pymoe; pymoe.remote.connect, pymoe.integrations; assert 'remote' not in pymoe.__all__"
    subprocess.run([sys.executable, "-c", words], cwd=Path(pymoe.__file__).parents[1], check=True)


STAR = """
from torch import nn
import torch
from pymoe import *
import pymoe
assert nn is torch.nn
assert (MoE, Pipe, pipeline) == (pymoe.nn.MoE, pymoe.pipe.Pipe, pymoe.pipe.pipeline)
assert not {"ops", "reference", "runtime", "parallel", "mixture", "pipe", "ep"} & set(globals())
"""


def test_a_star_import_leaves_torchs_nn_alone():
    """``from pymoe import *`` replaced the ``nn`` of ``from torch import nn`` by ``pymoe.nn``, which has no Linear."""
    subprocess.run([sys.executable, "-c", STAR], cwd=Path(pymoe.__file__).parents[1], check=True)


@pytest.mark.parametrize("package", ["nn", "ops", "reference", "runtime", "parallel", "mixture", "pipe", "ep"])
def test_packages_are_attributes_and_are_listed(package):
    assert getattr(pymoe, package).__name__ == f"pymoe.{package}"
    assert package in dir(pymoe)
    with pytest.raises(AttributeError, match=f"did you mean '{package}'"):
        getattr(pymoe, f"{package}s")
