"""Tests how run_ptx.py uses its options, and the lists of launches that the processes leave."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from run_ptx import ON_CUDA, narrowed, never_launched


@pytest.mark.parametrize("spelt", [["-k", "gate or combine"], ["-k=gate or combine"], ["-kgate or combine"]])
def test_words_are_recognised_however_they_are_spelt(spelt):
    """With ``-k=`` the words used to be passed on together with a second -k. pytest used the second one, and so all
    tests ran.
    """
    options, some = narrowed(["-n", "2", *spelt, "--level=exhaustive"])
    assert options == ["-k", f"(gate or combine) and {ON_CUDA}", "-n", "2", "--level=exhaustive"]
    assert some


def test_without_words_all_that_concerns_cuda_runs():
    assert narrowed(["--durations=10", "-n", "2"]) == (["-k", ON_CUDA, "--durations=10", "-n", "2"], False)


def test_a_kernel_that_no_process_launched_is_missing(tmp_path):
    (tmp_path / "1.txt").write_text("0 gate_kernel\n3 combine_kernel\n0 place_kernel\n")
    (tmp_path / "2.txt").write_text("1 gate_kernel\n0 combine_kernel\n0 place_kernel\n")
    assert never_launched(tmp_path) == ["place_kernel"]


def test_no_list_at_all_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="no process has left"):
        never_launched(tmp_path)
