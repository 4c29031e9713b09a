"""examples/pipeline_torchrun.py, small: over processes the losses are those of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--steps", "3", "--width", "16", "--context", "16"]


def torchrun(processes, *options):
    """Run the example; its exit status and what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(EXAMPLES / "pipeline_torchrun.py"), *SMALL, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [*(pytest.param(number, (), marks=pytest.mark.exhaustive) for number in (2, 4)), (4, ("--replicas", "2"))],
)
def test_losses_over_processes_are_those_of_one(processes, options):
    status, text = torchrun(processes, *options)
    assert status == 0, text
    assert "yes  losses differ by at most" in text
    assert text.count("\nstep ") == 3


@pytest.mark.slow
def test_a_number_of_processes_that_does_not_fit_is_refused():
    status, text = torchrun(2, "--replicas", "2")
    assert status != 0
    assert "2 processes are no 2 pipelines of two stages or more" in text
