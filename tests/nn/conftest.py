"""What the tests of this folder share."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # their helper modules


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The layers here are tiny: a second thread would only wait. tests/ops compares numbers of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
