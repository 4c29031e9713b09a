"""Tests that a run leaves out the tests of longer runs, and keeps representative cases of a grid."""

import itertools
from types import SimpleNamespace

import pytest
import selection


class Item:
    """A stand-in with the parts of a pytest item that the selection reads."""

    def __init__(self, name, params=(), fixtures=(), **markers):
        self.nodeid = f"tests/test_x.py::{name}{[*dict(params).values()] if params else ''}"
        self.callspec = SimpleNamespace(params=dict(params))
        self.fixturenames = fixtures
        self.markers = {key: SimpleNamespace(kwargs=value) for key, value in markers.items()}

    def get_closest_marker(self, name):
        return self.markers.get(name)


def grid(*sizes, **markers):
    names = "abc"[: len(sizes)]
    values = itertools.product(*(range(size) for size in sizes))
    return [Item("test_grid", tuple(zip(names, one, strict=True)), **markers) for one in values]


@pytest.mark.parametrize(("count", "sizes"), [(12, (4, 3, 5)), (5, (5, 5)), (7, (2, 50))])
def test_every_value_of_a_parameter_has_a_case(count, sizes):
    items = grid(*sizes, thinned={"usual": count})
    kept = selection.chosen(items, "usual")
    assert count <= len(kept) < 2 * count
    assert kept == [item for item in items if item in kept]
    for name, size in zip("abc", sizes, strict=False):
        if size <= count:
            assert {item.callspec.params[name] for item in kept} == set(range(size))


def test_a_grid_that_is_small_enough_is_whole():
    items = grid(4, 3, thinned={"usual": 12})
    assert selection.chosen(items, "usual") == items
    assert selection.chosen(items, "deep") == []


def test_the_usual_and_the_deep_run_share_no_test_and_leave_out_exhaustive_cases_alone():
    items = [
        *grid(9, 9, thinned={"usual": 9, "deep": 30}),
        *(Item("test_long", exhaustive={}), Item("test_slow", slow={}), Item("test_built", fixtures=("sanitized",))),
        Item("test_other"),
    ]
    usual, deep = (selection.chosen(items, level) for level in ("usual", "deep"))
    assert not set(usual) & set(deep)
    assert 30 <= len([item for item in {*usual, *deep} if item.callspec.params]) < 60
    assert {item.nodeid for item in {*usual, *deep} if not item.callspec.params} == {
        f"tests/test_x.py::{name}" for name in ("test_slow", "test_built", "test_other")
    }
    assert items[-1] in usual
    assert selection.chosen(items, "exhaustive") == items


def test_all_cases_of_a_grid_that_is_not_thinned_further_run_in_the_two():
    items = grid(9, 9, thinned={"usual": 9})
    assert {*selection.chosen(items, "usual"), *selection.chosen(items, "deep")} == set(items)


def test_a_quick_run_has_one_case_of_each_test_that_is_not_slow():
    items = [*grid(9, thinned={"usual": 5}), Item("test_slow", slow={}), Item("test_built", fixtures=("sanitized",))]
    items.append(Item("test_other"))
    quick = selection.chosen(items, "quick")
    assert [item.nodeid.split("[")[0] for item in quick] == [
        "tests/test_x.py::test_grid",
        "tests/test_x.py::test_other",
    ]
