"""A run leaves out what is for longer runs, and keeps cases that represent a grid."""

import itertools
from types import SimpleNamespace

import limits
import pytest
import selection


class Item:
    """As much of a pytest item as the selection looks at."""

    def __init__(self, name, params=(), fixtures=(), **markers):
        self.nodeid = f"tests/test_x.py::{name}{[*dict(params).values()] if params else ''}"
        self.callspec = SimpleNamespace(params=dict(params))
        self.fixturenames = fixtures
        self.markers = {key: SimpleNamespace(args=value) for key, value in markers.items()}

    def get_closest_marker(self, name):
        return self.markers.get(name)


def grid(count, *sizes, **others):
    names = "abc"[: len(sizes)]
    values = itertools.product(*(range(size) for size in sizes))
    return [Item("test_grid", tuple(zip(names, one, strict=True)), thinned=(count,), **others) for one in values]


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    monkeypatch.setattr(limits, "EXHAUSTIVE", False)


@pytest.mark.parametrize(("count", "sizes"), [(12, (4, 3, 5)), (5, (5, 5)), (7, (2, 50))])
def test_every_value_of_a_parameter_has_a_case(count, sizes):
    items = grid(count, *sizes)
    kept = selection.chosen(items, quick=False)
    assert count <= len(kept) < 2 * count
    assert kept == [item for item in items if item in kept]
    for name, size in zip("abc", sizes, strict=False):
        if size <= count:
            assert {item.callspec.params[name] for item in kept} == set(range(size))


def test_a_grid_that_is_small_enough_is_whole():
    items = grid(12, 4, 3)
    assert selection.chosen(items, quick=False) == items


def test_exhaustive_runs_everything_and_others_no_exhaustive_case(monkeypatch):
    items = [*grid(2, 9), Item("test_long", exhaustive=()), Item("test_slow", slow=())]
    assert len(selection.chosen(items, quick=False)) == 2 + 1
    monkeypatch.setattr(limits, "EXHAUSTIVE", True)
    assert selection.chosen(items, quick=False) == items


def test_a_quick_run_has_one_case_of_each_test_that_is_not_slow():
    items = [*grid(5, 9), Item("test_slow", slow=()), Item("test_built", fixtures=("sanitized",)), Item("test_other")]
    assert selection.chosen(items, quick=True) == [items[0], items[-1]]
