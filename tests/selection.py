"""Which tests a run leaves to longer ones, by the markers that conftest.py explains."""

import random
from collections import Counter

import limits

BUILDING = {"sanitized", "watched"}
"""Fixtures that compile a library first."""


def chosen(items, *, quick):
    """Return the tests that are not left to longer runs."""
    if limits.EXHAUSTIVE:
        return items
    usual = [item for item in items if not item.get_closest_marker("exhaustive")]
    if quick:
        usual = [i for i in usual if not (i.get_closest_marker("slow") or BUILDING.intersection(i.fixturenames))]
    cases = {}
    for item in usual:
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    found = []
    for own in cases.values():
        marker = own[0].get_closest_marker("thinned")
        found += own[:1] if quick else representatives(own, marker.args[0]) if marker else own
    return found


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
