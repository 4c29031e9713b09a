"""Tests of interleaved rounds and their statistics, with a clock that only the candidates advance."""

from __future__ import annotations

import pytest

from pymoe.bench.timing import LONGEST_SPAN, MOST_CALLS, Quartiles, Timing, WallTimer, calls_per_value, measure


class Clock:
    """A clock that only candidates advance, and a record of the candidates that did."""

    def __init__(self):
        self.time = 0.0
        self.log = []

    def __call__(self):
        return self.time

    def candidate(self, name, *durations):
        """Return a call that takes each of ``durations`` in turn, and the last one from then on."""
        left = list(durations)

        def call():
            self.time += left.pop(0) if len(left) > 1 else left[0]
            self.log.append(name)

        return call


def test_every_round_runs_every_candidate_and_starts_with_another():
    clock = Clock()
    candidates = {name: clock.candidate(name, 1.0) for name in "abc"}
    measure(candidates, budget=0, rounds=(4, 4), timer=WallTimer(clock))
    warm_up, rounds = clock.log[:6], clock.log[6:]
    assert warm_up == list("aabbcc")
    assert "".join(rounds) == "abcbcacababc"


def test_warm_up_calls_are_not_counted():
    clock = Clock()
    seen = measure({"a": clock.candidate("a", 100.0, 1.0)}, budget=0, rounds=(3, 3), timer=WallTimer(clock))
    assert seen["a"].seconds == (1.0, 1.0, 1.0)


def test_candidates_that_were_called_already_are_not_warmed_up():
    clock = Clock()
    found = measure({"a": clock.candidate("a", 1.0)}, budget=0, rounds=(3, 3), timer=WallTimer(clock), first={"a": 1.0})
    assert clock.log == list("aaa")
    assert found["a"].calls == 1


def test_a_disturbance_that_lasts_a_round_leaves_the_ratio_alone():
    clock = Clock()
    weather = [1.0, 1.0, 9.0, 1.0, 2.0]
    fast = clock.candidate("fast", 1.0, 1.0, *weather)
    slow = clock.candidate("slow", 4.0, 4.0, *(4 * one for one in weather))
    seen = measure({"fast": fast, "slow": slow}, budget=0, rounds=(5, 5), timer=WallTimer(clock))
    assert seen["fast"].seconds == tuple(weather)
    assert seen["slow"].over(seen["fast"]) == Quartiles(4.0, 4.0, 4.0)


def test_rounds_end_with_the_budget_and_within_the_bounds():
    def rounds_of(budget, bounds):
        clock = Clock()
        seen = measure({"a": clock.candidate("a", 1.0)}, budget=budget, rounds=bounds, timer=WallTimer(clock))
        return len(seen["a"].seconds)

    assert rounds_of(10.0, (3, 100)) == 10
    assert rounds_of(0.0, (3, 100)) == 3
    assert rounds_of(1000.0, (3, 20)) == 20


def test_fast_candidates_are_called_in_a_row_and_reported_per_call():
    clock = Clock()
    candidates = {"slow": clock.candidate("slow", 40e-3), "fast": clock.candidate("fast", 1e-3)}
    seen = measure(candidates, budget=0, rounds=(2, 2), timer=WallTimer(clock))
    assert (seen["slow"].calls, seen["fast"].calls) == (1, 10)
    assert seen["fast"].seconds == pytest.approx((1e-3, 1e-3))
    assert clock.log.count("fast") == 2 + 2 * 10


def test_calls_in_a_row_are_bounded():
    assert calls_per_value({"never": 0.0}) == {"never": MOST_CALLS}
    assert calls_per_value({"hours": 7200.0, "short": LONGEST_SPAN / 2}) == {"hours": 1, "short": 2}


def test_quartiles():
    assert Quartiles.of([5.0]) == Quartiles(5.0, 5.0, 5.0)
    assert Quartiles.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Quartiles(2.0, 3.0, 4.0)
    assert Timing((4.0, 1.0, 3.0, 2.0, 5.0), 1).spread.median == Timing((4.0, 1.0, 3.0, 2.0, 5.0), 1).median
    assert Quartiles(1.0, 2.0, 4.0).scaled(0.5) == Quartiles(0.5, 1.0, 2.0)


@pytest.mark.parametrize(("candidates", "rounds"), [({}, (1, 1)), ({"a": int}, (0, 1)), ({"a": int}, (3, 2))])
def test_senseless_calls_are_refused(candidates, rounds):
    with pytest.raises(ValueError, match="measure"):
        measure(candidates, rounds=rounds)


def test_garbage_collection_is_on_again_after_an_exception():
    import gc

    calls = []

    def fails_in_the_first_round():
        calls.append(gc.isenabled())
        if len(calls) == 3:
            raise RuntimeError("planned")

    with pytest.raises(RuntimeError, match="planned"):
        measure({"a": fails_in_the_first_round}, rounds=(1, 1), timer=WallTimer(Clock()))
    assert calls == [True, True, False]
    assert gc.isenabled()
