"""Tests that examples/expert_parallel_lm.py has equal losses in one process and in several, also after a resume and
with moved and cloned experts.
"""

import pytest
from torchrun import torchrun

SMALL = ["--steps", "3", "--width", "16", "--context", "16"]


def run(processes, *options):
    return torchrun("expert_parallel_lm.py", processes, *SMALL, *options)


@pytest.mark.slow
def test_losses_are_those_of_one_process_and_go_on_on_fewer(tmp_path):
    for processes, *options in (
        (4, "--ep", "2", "--kind", "fsdp", "--move", "1", "--save", str(tmp_path)),
        (2, "--resume", str(tmp_path), "--move", "2", "--clones", "1"),
    ):
        status, text = run(processes, *options)
        assert status == 0, text
        assert "yes  losses differ by at most" in text
        assert text.count("\nstep ") == 3
    assert "\nstep   4 " in text


@pytest.mark.slow
def test_a_number_of_processes_that_does_not_fit_is_refused():
    status, text = run(2, "--ep", "3")
    assert status != 0
    assert "2 processes are no groups of 3" in text
