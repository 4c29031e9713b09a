"""Which tests a run has, and how cases represent a test.

| level | tests |
|---|---|
| quick | one case of every test that is not slow |
| usual | of every test that is not slow the cases that represent it: those of its ``thinned`` marker, or all |
| deep | what the usual run leaves out: slow tests, and further cases of thinned ones |
| exhaustive | all, those that are marked ``exhaustive`` included |

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
    """Return some ``count`` cases of one test, drawn so that every value of a parameter has one.

    That does not hold for parameters with more than ``count`` values, such as seeds.
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
