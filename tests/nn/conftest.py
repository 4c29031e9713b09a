"""Fixtures shared by the tests of this folder."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helper modules of these tests


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Use one thread: the layers here are tiny, and a second thread would only wait. tests/ops compares thread
    counts.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
