"""Uses one thread for the benchmark's tests, whose shapes are tiny, and which assert no times."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Run torch on one thread, and restore the thread count afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
