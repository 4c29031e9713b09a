"""Makes the helper modules of this folder importable."""

import sys
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).parents[1] / "runtime", Path(__file__).parent):
    sys.path.insert(0, str(folder))


@pytest.fixture
def doubles():
    """Use float64 as the default dtype, and seed random numbers."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
