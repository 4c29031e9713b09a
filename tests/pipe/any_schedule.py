"""Hypothesis strategies for schedules and times."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from limits import rounds

from pymoe.pipe.schedules import build, names, options


def examples(number):
    """Decorate a property test to run ``number`` examples, the same in every run; ten times as many with
    --level=exhaustive.
    """
    return settings(max_examples=rounds(number, 10 * number), deadline=None, derandomize=True, database=None)


@st.composite
def schedules(draw, most_stages=7, most_micro_batches=13):
    """Draw a schedule of any builder: also with fewer micro-batches than stages, uneven groups, and any option."""
    name = draw(st.sampled_from(names()))
    chosen = {}
    if "virtual_stages" in options(name):
        chosen["virtual_stages"] = draw(st.integers(1, 4))
    if "live_limit" in options(name):
        chosen["live_limit"] = draw(st.none() | st.integers(1, most_stages + 1))
    stages = draw(st.integers(1, most_stages))
    micro_batches = draw(st.integers(1, most_micro_batches))
    return build(name, stages, micro_batches, **chosen)


def times(schedule, seed):
    """Return a time for every action: integers from 0 to 9, so that sums are exact."""
    chance = random.Random(seed)
    durations = {action: chance.randint(0, 9) for order in schedule.orders for action in order}
    return durations.__getitem__
