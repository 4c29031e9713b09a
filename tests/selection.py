"""Selects the tests of a run, and the cases that represent a test.

| level | tests |
|---|---|
| quick | one case of every test that is not slow |
| usual | every test that is not slow: as many cases as its ``thinned`` marker says, or all |
| deep | everything that the usual run leaves out: slow tests, and further cases of thinned tests |
| exhaustive | all tests, including those marked ``exhaustive`` |

conftest.py explains the markers.
"""

import random
from collections import Counter

LEVELS = ("quick", "usual", "deep", "exhaustive")
BUILDING = {"sanitized", "watched"}
"""Fixtures that compile a library first."""


def chosen(items, level):
    """Return the tests of a level, in their order."""
    if level == "exhaustive":
        return items
    tests = {}
    for item in items:
        if not item.get_closest_marker("exhaustive"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = set()
    for cases in tests.values():
        marker = cases[0].get_closest_marker("thinned")
        counts = marker.kwargs if marker else {}
        deep = representatives(cases, counts.get("deep", len(cases)))
        usual = [] if is_slow(cases[0]) else representatives(deep, counts.get("usual", len(deep)))
        kept.update(usual[:1] if level == "quick" else usual if level == "usual" else set(deep).difference(usual))
    return [item for item in items if item in kept]


def is_slow(item):
    return item.get_closest_marker("slow") or BUILDING.intersection(item.fixturenames)


def representatives(items, count):
    """Return about ``count`` cases of one test, chosen so that every value of every parameter occurs.

    For parameters with more than ``count`` values, such as seeds, not every value occurs.
    """
    if len(items) <= count:
        return items
    values = {item: {(name, repr(value)) for name, value in item.callspec.params.items()} for item in items}
    names = Counter(name for name, _ in set().union(*values.values()))
    drawn = random.Random(0).sample(items, len(items))
    seen, needed, others = set(), [], []
    for item in drawn:
        own = {(name, value) for name, value in values[item] if names[name] <= count}
        (others if own <= seen else needed).append(item)
        seen |= own
    kept = {*needed, *others[: max(0, count - len(needed))]}
    return [item for item in items if item in kept]
