"""Tests that CUDA kernels touch no memory outside their tensors, whatever the arguments of a raw operator.

The operators run the CUDA kernels on CPU tensors, on the emulator, under AddressSanitizer and UBSan.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import library


@pytest.fixture(scope="module")
def emulated(sanitized):
    path = library.build(sanitize=True)
    return lambda *phases: sanitized.run(*phases, library=path)


def calls_made(result, phase):
    """Return the number of calls that ``phase`` printed; fail if the process failed."""
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[:6000]
    line = next(line for line in result.stdout.splitlines() if line.startswith(f"{phase}: "))
    return int(line.split()[1])


def test_sanitizers_find_nothing_in_hostile_calls(emulated):
    assert calls_made(emulated("hostile"), "hostile") >= 500


def test_sanitizers_find_nothing_in_ordinary_calls(emulated):
    assert calls_made(emulated("few_samples"), "few_samples") >= 150
