"""Put the folder of the examples on the path, as running one of these scripts does."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(autouse=True, scope="package")
def thread_count() -> Iterator[None]:
    """Restore the process's thread count, which runs of the examples set."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
