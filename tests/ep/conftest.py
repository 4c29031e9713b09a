"""Four ranks for the tests of expert parallelism; groups of fewer are made of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import rank_groups


@pytest.fixture(scope="session")
def ranks():
    """Four processes in one group, and subgroups of the first one, two and three (``rank_setup.groups``)."""
    started = rank_groups.Ranks(4)
    yield started
    started.close()
