"""Provides ranks for tests of pipes on several processes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import rank_groups


@pytest.fixture(scope="session")
def ranks():
    """Provide ``ranks(world)``, which starts that many processes in one group."""
    started = {}

    def ranks_of(world):
        return started.setdefault(world, rank_groups.Ranks(world))

    yield ranks_of
    for some in started.values():
        some.close()
