"""verify_skippables and skip_routes: find where skips begin and end."""

from __future__ import annotations

import pytest
from torch import nn

from pymoe.pipe.skip import Namespace, SkipRoute, skip_routes, skippable, verify_skippables


def layer(stash: str = "", pop: str = "") -> nn.Module:
    """Return a module that stashes and pops names of one letter."""
    return skippable(stash=list(stash), pop=list(pop))(type("Layer", (nn.Module,), {}))()


def faults(*layers: nn.Module) -> list[str]:
    try:
        verify_skippables(nn.Sequential(*layers))
    except TypeError as error:
        first, empty, *rest = str(error).split("\n")
        assert first.startswith("one or more pairs of stash and pop do not match: ")
        assert not empty
        assert all(line.startswith("* ") for line in rest)
        return [line[2:] for line in rest]
    return []


def test_pairs_match():
    assert faults() == []
    assert faults(nn.Linear(1, 1)) == []
    assert faults(layer("ab"), layer(pop="a"), nn.Identity(), layer(pop="b")) == []


def test_a_stash_may_have_several_pops():
    assert faults(layer("a"), layer(pop="a"), layer(pop="a")) == []


def test_a_module_may_pass_a_skip_on_under_another_name():
    assert faults(layer("a"), layer("b", "a"), layer(pop="b")) == []


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([layer("a")], ["no module declared 'a' as poppable but stashed, by '0'"]),
        ([layer(pop="a")], ["'0' declared 'a' as poppable but it was not stashed"]),
        (
            [layer(pop="a"), layer("a")],
            ["'0' declared 'a' as poppable but it was not stashed"],
        ),
        (
            [layer("a"), layer("a"), layer(pop="a")],
            ["'1' redeclared 'a' as stashable but not isolated by namespace"],
        ),
        (
            [layer("ab"), layer(pop="cd")],
            [
                "'1' declared 'c' as poppable but it was not stashed",
                "'1' declared 'd' as poppable but it was not stashed",
                "no module declared 'a' as poppable but stashed, by '0'",
                "no module declared 'b' as poppable but stashed, by '0'",
            ],
        ),
    ],
)
def test_every_fault_is_named(layers: list[nn.Module], expected: list[str]):
    assert faults(*layers) == expected


def test_namespaces_are_pairs_of_their_own():
    one, two = Namespace(), Namespace()
    pairs = [layer("a").isolate(one), layer("a").isolate(two), layer(pop="a").isolate(two), layer(pop="a").isolate(one)]
    assert faults(*pairs) == []
    assert faults(*pairs, layer(pop="a")) == ["'4' declared 'a' as poppable but it was not stashed"]


def test_nested_modules_count():
    inner = nn.Sequential(layer("a"), nn.Identity())
    assert faults(inner, nn.ModuleList([layer(pop="a")])) == []
    assert faults(nn.Sequential(nn.Sequential(layer(pop="a")))) == [
        "'0.0.0' declared 'a' as poppable but it was not stashed"
    ]


def test_a_module_that_is_there_twice_stashes_twice():
    shared = layer("a")
    assert faults(shared, shared, layer(pop="a")) == ["'1' redeclared 'a' as stashable but not isolated by namespace"]


def test_routes_go_from_the_stash_to_every_pop():
    ns = Namespace()
    parts = [
        nn.Sequential(layer("a"), layer("b")),
        nn.Identity(),
        nn.Sequential(layer(pop="a"), layer("a", "b").isolate(ns, only=["a"])),
        nn.Sequential(layer(pop="a").isolate(ns), layer(pop="a"), layer(pop="a")),
    ]
    verify_skippables(nn.Sequential(*parts))
    assert skip_routes(parts) == [
        SkipRoute((None, "a"), 0, (2, 3, 3)),
        SkipRoute((None, "b"), 0, (2,)),
        SkipRoute((ns, "a"), 2, (3,)),
    ]
    assert skip_routes([nn.Sequential(*parts)]) == [
        SkipRoute((None, "a"), 0, (0, 0, 0)),
        SkipRoute((None, "b"), 0, (0,)),
        SkipRoute((ns, "a"), 0, (0,)),
    ]
    assert skip_routes([]) == []
