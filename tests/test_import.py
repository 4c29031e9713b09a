"""What ``import pymoe`` costs: next to nothing over ``import torch``, no thread, and no further package."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import pymoe

# CPU seconds, not elapsed ones: what else runs on the machine does not count.
LIMIT_SECONDS = 0.15

MEASURE = """
import json, os, sys, time
import torch, numpy
before, threads, start = set(sys.modules), len(os.listdir("/proc/self/task")), time.process_time()
import pymoe
seconds = time.process_time() - start
print(json.dumps({
    "seconds": seconds,
    "threads": len(os.listdir("/proc/self/task")) - threads,
    "packages": sorted({name.split(".")[0] for name in set(sys.modules) - before}),
}))
"""


@pytest.fixture(scope="module")
def measured():
    """What five imports said."""
    command = [sys.executable, "-c", MEASURE]
    root = Path(pymoe.__file__).parents[1]
    runs = (subprocess.run(command, cwd=root, capture_output=True, text=True, check=True) for _ in range(5))
    return [json.loads(run.stdout) for run in runs]


def test_import_is_cheap(measured):
    seconds = [one["seconds"] for one in measured]
    print(f"import pymoe after torch: {statistics.median(seconds) * 1000:.0f} ms of CPU time (median of {seconds})")
    assert statistics.median(seconds) <= LIMIT_SECONDS


def test_import_starts_no_thread(measured):
    assert {one["threads"] for one in measured} == {0}


def test_import_loads_torch_and_numpy_alone(measured):
    """Neither rich, matplotlib, transformers nor anything else that only benchmarks and examples need."""
    packages = set(measured[0]["packages"])
    assert packages - set(sys.stdlib_module_names) <= {"pymoe", "torch"}  # parts of torch that nobody had asked for


def test_packages_that_need_more_are_there_by_their_names():
    """``pymoe.remote`` was an AttributeError until somebody had imported it."""
    words = "import pymoe; pymoe.remote.connect, pymoe.integrations; assert 'remote' not in pymoe.__all__"
    subprocess.run([sys.executable, "-c", words], cwd=Path(pymoe.__file__).parents[1], check=True)
