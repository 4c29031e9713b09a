"""Nested structures and schemas as JSON."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pymoe.remote.wire import from_tree, read_schema, to_tree, write_schema
from pymoe.runtime import BatchTensorProto

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.integers() | st.text(), inner),
    max_leaves=20,
)


def refuse(leaf: Any, where: str = "") -> Any:
    raise TypeError(type(leaf).__name__)


@settings(deadline=None, derandomize=True, database=None)
@given(TREES)
def test_a_structure_comes_back_as_it_was(structure: Any) -> None:
    assert from_tree(json.loads(json.dumps(to_tree(structure, refuse))), refuse) == structure


def test_types_are_kept_and_leaves_are_the_caller_s() -> None:
    structure = {0: (1, [2.5, True]), "betas": (0.9, math.inf), "x": torch.ones(2), None: None}
    tree = json.loads(json.dumps(to_tree(structure, lambda leaf, where: leaf.tolist())))
    back = from_tree(tree, lambda leaf: ("tensor", leaf))
    assert back == {0: (1, [2.5, True]), "betas": (0.9, math.inf), "x": ("tensor", [1.0, 1.0]), None: None}
    assert type(back[0][1][1]) is bool


@pytest.mark.parametrize("structure", [namedtuple("Pair", "a b")(1, 2), {(1, 2): 3}, {1: object()}])
def test_what_json_cannot_tell_is_refused(structure: Any) -> None:
    with pytest.raises(TypeError):
        to_tree(structure, refuse)


@pytest.mark.parametrize(
    "tree", [[1], {"list": 1}, {"list": [], "tuple": []}, {"set": []}, {"dict": [[1]]}, {"dict": [[[1], 2]]}, {}]
)
def test_what_is_no_tree_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match=r"pymoe\.remote"):
        from_tree(tree, refuse)


def test_a_tree_that_is_too_deep_is_refused() -> None:
    tree: Any = 1
    for _ in range(100):
        tree = {"list": [tree]}
    with pytest.raises(ValueError, match="tagged"):
        from_tree(tree, refuse)


def test_a_schema_comes_back_without_what_concerns_one_machine() -> None:
    proto = BatchTensorProto(3, 4, dtype=torch.bfloat16, device="cpu", requires_grad=True)
    schema = ((proto, [BatchTensorProto(dtype=torch.int64), 2]), {"mask": {"a": BatchTensorProto(0, dtype=torch.bool)}})
    back = read_schema(json.loads(json.dumps(write_schema("e", schema))))
    plain = BatchTensorProto(3, 4, dtype=torch.bfloat16)
    assert back == (
        (plain, [BatchTensorProto(dtype=torch.int64), 2]),
        {"mask": {"a": BatchTensorProto(0, dtype=torch.bool)}},
    )


def test_a_constant_that_other_machines_could_not_have_is_named() -> None:
    with pytest.raises(TypeError, match="schema of 'e' holds a device"):
        write_schema("e", [torch.device("cpu")])


@pytest.mark.parametrize(
    "leaf", [1, ["f32"], ["f33", [1]], ["f32", [-1]], ["f32", [1] * 8], ["f32", ["x"]], [["f32"], [1]], ["f32", [True]]]
)
def test_what_is_no_prototype_is_refused(leaf: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        read_schema({"leaf": leaf})
