"""Nested structures: the documented order of leaves; packing undoes flattening."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest

from pymoe.runtime import nested_compare, nested_flatten, nested_map, nested_pack

Pair = namedtuple("Pair", ["left", "right"])
Other = namedtuple("Other", ["left", "right"])


def random_structure(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.choice(["leaf", "none", "list", "tuple", "dict", "pair"]) if depth else "leaf"
    if kind == "leaf":
        return rng.randrange(1000)
    if kind == "none":
        return None
    items = [random_structure(rng, depth - 1) for _ in range(2 if kind == "pair" else rng.randrange(4))]
    if kind == "dict":
        keys = rng.sample("abcdefgh", len(items))
        return dict(zip(keys, items, strict=True))
    return {"list": list, "tuple": tuple, "pair": Pair._make}[kind](items)


def test_the_order_of_leaves() -> None:
    structure = {"b": (1, [2, None]), "a": Pair(3, {"z": 4, "y": 5}), "c": "text"}
    assert nested_flatten(structure) == [3, 5, 4, 1, 2, None, "text"]
    assert nested_flatten(7) == [7]
    assert nested_flatten(None) == [None]
    assert nested_flatten([]) == []
    assert nested_flatten(({}, (), [])) == []


def test_equal_dicts_flatten_alike_whatever_order_they_were_built_in() -> None:
    assert nested_flatten({"x": 1, "y": 2}) == nested_flatten({"y": 2, "x": 1}) == [1, 2]
    mixed = {1: "one", "a": "letter", (2,): "tuple", None: "nothing"}
    backwards = dict(reversed(mixed.items()))
    assert nested_flatten(mixed) == nested_flatten(backwards)
    assert nested_pack(nested_flatten(mixed), backwards) == mixed


def test_packing_undoes_flattening() -> None:
    rng = random.Random(0)
    sizes = set()
    for _ in range(500):
        structure = random_structure(rng)
        flat = nested_flatten(structure)
        sizes.add(len(flat))
        packed = nested_pack(flat, structure)
        assert packed == structure
        assert nested_compare(packed, structure)
        assert nested_flatten(nested_pack(range(len(flat)), structure)) == list(range(len(flat)))
    assert len(sizes) > 10


def test_packing_keeps_types_and_the_order_of_keys() -> None:
    packed = nested_pack([1, 2, 3, 4], {"b": Pair(0, 0), "a": OrderedDict(d=0, c=0)})
    assert packed == {"a": {"c": 1, "d": 2}, "b": Pair(3, 4)}
    assert list(packed) == ["b", "a"]
    assert isinstance(packed["a"], OrderedDict)
    assert list(packed["a"]) == ["d", "c"]
    assert isinstance(packed["b"], Pair)
    assert nested_pack(iter([1]), defaultdict(list, a=0)) == {"a": 1}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_packing_a_wrong_number_of_leaves(count: int) -> None:
    with pytest.raises(ValueError, match=f"the structure has 2 leaves, got {count}"):
        nested_pack(range(count), (None, [None]))


def test_compare() -> None:
    alike = [
        (1, "a"),
        (None, 1),
        ((1, [2]), ("x", [None])),
        ({"a": 1, "b": 2}, {"b": 0, "a": 0}),
        ({"a": 1}, OrderedDict(a=2)),
        (Pair(1, 2), Pair(3, 4)),
    ]
    different = [
        (1, (1,)),
        (None, ()),
        ((1,), [1]),
        ((1, 2), (1,)),
        ((1, 2), Pair(1, 2)),
        (Other(1, 2), Pair(1, 2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": (1,)}, {"a": 1}),
    ]
    assert all(nested_compare(*pair) and nested_compare(*pair[::-1]) for pair in alike)
    assert not any(nested_compare(*pair) or nested_compare(*pair[::-1]) for pair in different)


def test_map() -> None:
    assert nested_map(lambda x: x and -x, {"a": (1, None), "b": [2]}) == {"a": (-1, None), "b": [-2]}
    added = nested_map(lambda *leaves: sum(leaves), {"a": 1, "b": (2,)}, {"b": (20,), "a": 10}, {"a": 100, "b": (200,)})
    assert added == {"a": 111, "b": (222,)}
    with pytest.raises(ValueError, match="differ in structure"):
        nested_map(lambda x, y: x, (1, 2), (1,))
