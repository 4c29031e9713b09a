"""Tests that examples/pipeline_torchrun.py has equal losses in one process and in several."""

import pytest
from torchrun import torchrun

SMALL = ["--steps", "3", "--width", "16", "--context", "16"]


def run(processes, *options):
    return torchrun("pipeline_torchrun.py", processes, *SMALL, *options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [*(pytest.param(number, (), marks=pytest.mark.exhaustive) for number in (2, 4)), (4, ("--replicas", "2"))],
)
def test_losses_over_processes_are_those_of_one(processes, options):
    status, text = run(processes, *options)
    assert status == 0, text
    assert "yes  losses differ by at most" in text
    assert text.count("\nstep ") == 3


@pytest.mark.slow
def test_a_number_of_processes_that_does_not_fit_is_refused():
    status, text = run(2, "--replicas", "2")
    assert status != 0
    assert "2 processes are no 2 pipelines of two stages or more" in text
