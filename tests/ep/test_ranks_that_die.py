"""A rank that is killed ends the calls of the others with an error, wherever it was, long before any timeout."""

import random
import signal
import time

import pytest
from deaths import RANKS, VICTIM, train
from rank_processes import ranks


def are_told(ends):
    """Check that all but the victim were told by the layer."""
    assert set(ends) == set(range(RANKS)) - {VICTIM}
    for what, value in ends.values():
        assert what == "told", value
        layer, text = value
        assert text.startswith(f"MoE {layer!r}: ")
        assert "did not arrive: a rank of the expert-parallel group has died, has left, or took longer than" in text


@pytest.mark.thinned(usual=2)
@pytest.mark.parametrize("place", ["gate", "experts", "after the experts", "backward", "between two steps"])
def test_a_rank_that_dies_inside_a_layer_or_while_experts_move_ends_the_others(place):
    with ranks(train, RANKS, place=place) as group:
        are_told(group.ends(RANKS - 1))


@pytest.mark.slow
@pytest.mark.thinned(deep=2)
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_is_killed_at_any_time_ends_the_others(seed):
    with ranks(train, RANKS) as group:
        group.wait_for("step", RANKS)
        time.sleep(random.Random(seed).uniform(0, 0.05))
        group.signal(VICTIM, signal.SIGKILL)
        are_told(group.ends(RANKS - 1))
