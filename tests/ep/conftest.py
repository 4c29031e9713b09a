"""Start four ranks for the tests of expert parallelism; smaller groups are subgroups of these."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import rank_groups


@pytest.fixture(scope="session")
def ranks():
    """Start four processes in one group, with subgroups of the first one, two and three (``rank_setup.groups``)."""
    started = rank_groups.Ranks(4)
    yield started
    started.close()
