"""Tests of the verdicts and the order of turns that all benchmarks share."""

import math

import pytest
import torch

from benchmarks.common.comparison import from_turn, relative_error, verdict
from benchmarks.common.targets import checked_target

ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("found", "expected", "word"),
    [
        (ONE, ONE, "exact"),
        (torch.zeros(3), torch.zeros(3), "exact"),
        (ONE * 1.001, ONE, "close"),
        (torch.tensor([0.0, 1.0, 1e-30]), torch.tensor([0.0, 1.0, 0.0]), "close"),
        (ONE * 1.1, ONE, "WRONG"),
        (ONE, torch.zeros(3), "WRONG"),
        (ONE * math.nan, ONE, "WRONG"),
    ],
)
def test_verdicts(found, expected, word):
    """A difference whose square underflows to 0 still counts; results that cannot be compared are wrong."""
    assert verdict(relative_error(found, expected), 0.01) == word


def test_every_round_begins_with_another():
    assert [from_turn("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert from_turn([], 1) == []


@pytest.mark.parametrize(
    ("relation", "median", "met"), [(">=", 3.0, True), (">=", 2.9, False), ("<=", 3.0, True), ("<=", 3.1, False)]
)
def test_a_target_is_met_up_to_its_limit(relation, median, met):
    assert checked_target("x", relation, 3.0, {"low": 0.0, "median": median, "high": 9.0})["met"] is met
    assert checked_target("x", relation, 3.0, None)["met"] is None
