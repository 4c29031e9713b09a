"""Kernels run on as many threads as torch is given.

The tests count the threads on which the ranges of parallel loops ran, and measure no time.
"""

import re

import pytest


@pytest.mark.only_on("cpu")
def test_every_kernel_uses_all_threads(run_sanitized):
    result = run_sanitized("threads")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[:6000]
    seen = re.findall(r"^(\w+ (?:forward|backward)): (\d+) of (\d+)$", result.stdout, re.MULTILINE)
    assert len(seen) >= 26
    assert not [line for line in seen if line[1] != line[2]]
